"""Draws tokens from logits as the reference worker does (coxswain-worker, engine/compute/sample.c).

A draw depends only on logits, tokens so far, sampling, seed and position. There is no generator
state, so every rank draws the same token, and so does a sequence that is computed again.
"""

# torch may be missing, and declares no types for some of its functions.
# mypy: disable-error-code="import-not-found,no-untyped-call,no-any-return"
from __future__ import annotations

from collections.abc import Sequence

import torch

from ._internal.errors import Invalid

_WORD = (1 << 32) - 1


def uniform(seed: int, position: int) -> float:
    """Draw number `position` of a seed, in [0, 1): 53 bits of Philox4x32-10.

    >>> uniform(0, 0)
    0.8805201978886142
    """
    a, b, c, d = position & _WORD, position >> 32, 0, 0
    low, high = seed & _WORD, seed >> 32
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ low, q & _WORD, (p >> 32) ^ d ^ high, p & _WORD
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    return ((b << 32 | a) >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor,
    history: Sequence[int],
    *,
    seed: int = 0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
) -> tuple[int, float]:
    """The token that follows history, and its logprob under the softmax of the logits as they are.

    logits: float32, one per token, on the CPU. temperature 0: the highest. top_k 0, top_p 1: off.
    In a tie the lower token wins. Raises Invalid for a logit that is not finite.

    >>> sample(torch.tensor([0.0, 1.0, 0.5]), [1, 2])[0]
    1
    """
    if not bool(logits.isfinite().all()):
        raise Invalid("a logit is not finite; the weights or the KV cache do not fit this model")
    scores = logits
    if repetition_penalty != 1:
        seen = torch.tensor(sorted(set(history)), dtype=torch.long)
        own = scores[seen]
        own = torch.where(own > 0, own / repetition_penalty, own * repetition_penalty)
        scores = scores.index_put((seen,), own)
    token = int(scores.argmax())
    if temperature > 0:
        weights = ((scores.double() - scores[token].double()) / temperature).exp()
        token = _draw(scores, weights, top_k, top_p, uniform(seed, len(history)))
    return token, float(logits.double().log_softmax(0)[token])


def _draw(scores: torch.Tensor, weights: torch.Tensor, top_k: int, top_p: float, at: float) -> int:
    """Draws by weight, among top_k tokens, and those of them that have top_p of the weight."""
    order, sums = torch.arange(len(scores)), weights.cumsum(0)
    if top_k or top_p < 1:
        order = scores.sort(descending=True, stable=True).indices
        whole = sums[-1]
        if 0 < top_k < len(order):
            order = order[:top_k]
            whole = weights[order].cumsum(0)[-1]
        sums = weights[order].cumsum(0)
        sums = sums[: 1 + int((sums[:-1] < top_p * whole).sum())]
    above = int((sums <= at * sums[-1]).sum())
    # Rounding may leave no sum above the target: then the last token that has any weight.
    return int(order[min(above, int(weights[order[: len(sums)]].nonzero()[-1]))])
