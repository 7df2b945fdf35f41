#!/usr/bin/env python3
"""A rank that computes a Llama checkpoint with PyTorch, divided among the ranks of its group::

    coxswain generate -n 2 --no-shared-weights --worker "python3 -m coxswain.torch_worker" "27+58="
    coxswain run -n 2 --name mine --no-shared-weights --worker "python3 -m coxswain.torch_worker" --model DIR

It is short so that you can copy it, and put your own model in the place of `Model`. The group does the rest:
`Batch` says what to compute, `RankGroup` adds up the parts of the ranks, and a rank that dies is replaced.
DIR is a folder of Hugging Face: config.json, tokenizer.json, and *.safetensors in F32, F16 or BF16.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from types import SimpleNamespace
from typing import Any

try:
    import safetensors
    import torch
    import torch.nn.functional as F
except ImportError as missing:
    sys.exit(f"coxswain.torch_worker: {missing}. Install torch and safetensors for {sys.executable}.")

import coxswain

# The values of keys of config.json that this file computes. With others the model is another one.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",), "hidden_act": ("silu", "swish", None), "attention_bias": (False, None),
    "mlp_bias": (False, None), "sliding_window": (None,), "quantization_config": (False, None),
    "is_encoder_decoder": (False, None), "attention_chunk_size": (None,), "num_kv_shared_layers": (None,),
    "per_layer_config": (None,), "partial_rotary_factor": (1, None)}
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LLAMA3_KEYS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_VALUE_SIZE = 4 << 20  # bytes of a gather; longer tensors go in pieces


# ---- the checkpoint ----

def read_config(folder: pathlib.Path) -> SimpleNamespace:
    """The sizes in config.json. Raises coxswain.Invalid, with the key, for what is not computed here."""
    path = folder / "config.json"
    if not path.exists():
        raise coxswain.NotFound(f"{path} does not exist: --model is the folder of a Hugging Face checkpoint")
    found = json.loads(path.read_text(encoding="utf-8"))

    def expect(key: str, value: Any, allowed: tuple[Any, ...]) -> None:
        if value not in allowed:
            raise coxswain.Invalid(f"{path}: {key} is {value!r}; this worker computes only models with "
                                   + " or ".join(map(repr, allowed)))
    for key, allowed in _SUPPORTED.items():
        expect(key, found.get(key), allowed)
    for layer_type in found.get("layer_types") or ():
        expect("layer_types", layer_type, ("full_attention",))
    rope = found.get("rope_scaling") or found.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    expect("rope_type", rope_type, ("default", "llama3"))
    for key in rope.keys() - _ROPE_KEYS - (_LLAMA3_KEYS if rope_type == "llama3" else set()):
        expect(key, rope[key], (None,))
    expect("partial_rotary_factor", rope.get("partial_rotary_factor"), (1, None))
    heads, positions = found["num_attention_heads"], found.get("max_position_embeddings") or 2048
    head_dim = found.get("head_dim") or found["hidden_size"] // heads
    theta = rope.get("rope_theta", found.get("rope_theta", 10000.0))
    frequencies = (1.0 / theta ** (torch.arange(0, head_dim, 2).double() / head_dim)).float()
    if rope_type == "llama3":
        original = found.get("original_max_position_embeddings",
                             rope.get("original_max_position_embeddings", positions))
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        waves = 2 * torch.pi * (1.0 / frequencies)
        smooth = (original / waves - low) / (high - low)
        between = (1 - smooth) * frequencies / factor + smooth * frequencies
        frequencies = torch.where(waves > original / low, frequencies / factor,
                                  torch.where(waves < original / high, frequencies, between))
    return SimpleNamespace(
        hidden=found["hidden_size"], feed_forward=found["intermediate_size"], heads=heads, head_dim=head_dim,
        layers=found["num_hidden_layers"], kv_heads=found.get("num_key_value_heads") or heads,
        vocabulary=found["vocab_size"], positions=positions, frequencies=frequencies,
        eps=found.get("rms_norm_eps") or 1e-6, tied=bool(found.get("tie_word_embeddings")))


class Checkpoint:
    """The tensors of a folder; a rank reads only its own part of each."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        files, index = ["model.safetensors"], folder / "model.safetensors.index.json"
        if not (folder / files[0]).exists():
            if not index.exists():
                raise coxswain.NotFound(f"{folder} contains neither {files[0]} nor {index.name}")
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        self.tensors: dict[str, Any] = {}
        for file in files:
            opened: Any = safetensors.safe_open(folder / file, framework="pt")
            self.tensors.update((name, opened.get_slice(name)) for name in opened.keys())
        self.unused = {name for name in self.tensors if not name.endswith("rotary_emb.inv_freq")}

    def read(self, name: str, *shape: int, rows: slice = slice(None),
             columns: slice = slice(None)) -> torch.Tensor:
        """These rows and columns of a tensor that has this shape."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise coxswain.Invalid(f"{self.folder}: there is no tensor {name}")
        if tensor.get_shape() != list(shape) or tensor.get_dtype() not in ("F32", "F16", "BF16"):
            raise coxswain.Invalid(f"{self.folder}: {name} is {tensor.get_dtype()} {tensor.get_shape()}, "
                                   f"expected F32, F16 or BF16 {list(shape)}")
        self.unused.discard(name)
        part: torch.Tensor = tensor[rows, columns] if len(shape) == 2 else tensor[rows]
        return part


# ---- the model ----

class Model:
    """A rank's part: some heads, some columns of the feed-forward, and the output of some tokens."""

    def __init__(self, folder: pathlib.Path, rank: int, rank_count: int, device: torch.device,
                 dtype: torch.dtype) -> None:
        self.config = config = read_config(folder)
        self.device, self.dtype, self.rank_count = device, dtype, rank_count
        if not rank_count <= config.heads:
            raise coxswain.Invalid(f"{rank_count} ranks cannot divide {config.heads} attention heads: use "
                                   f"{config.heads} ranks at most")
        dim, hidden, width, first_kv, last_kv = (config.head_dim, config.hidden, config.feed_forward, 0, 0)

        def own(size: int) -> slice:
            return slice(size * rank // rank_count, size * (rank + 1) // rank_count)
        heads, columns, group = own(config.heads), own(width), config.heads // config.kv_heads
        # A KV head that serves heads of two ranks is on both.
        first_kv, last_kv = heads.start // group, (heads.stop - 1) // group
        self.kv_heads = last_kv - first_kv + 1
        self.kv_head_of = torch.tensor([head // group - first_kv for head in range(config.heads)[heads]],
                                       device=device)
        q_rows = slice(heads.start * dim, heads.stop * dim)
        kv_rows = slice(first_kv * dim, (last_kv + 1) * dim)
        q_size, kv_size = config.heads * dim, config.kv_heads * dim
        checkpoint = Checkpoint(folder)

        def read(name: str, *shape: int, **part: slice) -> torch.Tensor:
            return checkpoint.read(name, *shape, **part).to(device, dtype)
        self.layers = []
        for i in range(config.layers):
            at = f"model.layers.{i}."
            self.layers.append(SimpleNamespace(
                norm=read(at + "input_layernorm.weight", hidden),
                query=read(at + "self_attn.q_proj.weight", q_size, hidden, rows=q_rows),
                key=read(at + "self_attn.k_proj.weight", kv_size, hidden, rows=kv_rows),
                value=read(at + "self_attn.v_proj.weight", kv_size, hidden, rows=kv_rows),
                output=read(at + "self_attn.o_proj.weight", hidden, q_size, columns=q_rows),
                feed_forward_norm=read(at + "post_attention_layernorm.weight", hidden),
                gate=read(at + "mlp.gate_proj.weight", width, hidden, rows=columns),
                up=read(at + "mlp.up_proj.weight", width, hidden, rows=columns),
                down=read(at + "mlp.down_proj.weight", hidden, width, columns=columns)))
        self.norm = read("model.norm.weight", hidden)
        self.embedding = read("model.embed_tokens.weight", config.vocabulary, hidden)
        # The ranks give equally many logits: the last one's are padded.
        count = -(-config.vocabulary // rank_count)
        tokens = slice(min(rank * count, config.vocabulary), min((rank + 1) * count, config.vocabulary))
        head = self.embedding[tokens] if config.tied else read("lm_head.weight", config.vocabulary, hidden,
                                                               rows=tokens)
        self.head = F.pad(head, (0, 0, 0, count - len(head)))
        unused = checkpoint.unused - ({"lm_head.weight"} if config.tied else set())
        if unused:
            raise coxswain.Invalid(f"{folder}: this worker does not compute with {min(unused)}")
        self.frequencies = config.frequencies.to(device)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary positions: turns pairs of numbers of each head."""
        x, y = heads.float().chunk(2, -1)
        return torch.cat((x * cos - y * sin, y * cos + x * sin), -1).to(self.dtype)

    def forward(self, step: "Step", ranks: coxswain.RankGroup, cache: torch.Tensor) -> torch.Tensor:
        """The logits of the rows that emit; each rank gets all of them, and the same bits."""
        angles = (step.positions.float()[:, None] * self.frequencies)[:, None]
        cos, sin, dim, eps = angles.cos(), angles.sin(), self.config.head_dim, self.config.eps
        x = self.embedding[step.tokens]
        for layer, (keys, values) in zip(self.layers, cache):
            if step.batch.cancelled:
                raise coxswain.Aborted("the step was cancelled")
            y = F.rms_norm(x, x.shape[-1:], layer.norm, eps)
            query = self.rotate((y @ layer.query.T).unflatten(-1, (-1, dim)), cos, sin)
            keys[step.blocks, step.offsets] = self.rotate((y @ layer.key.T).unflatten(-1, (-1, dim)), cos, sin)
            values[step.blocks, step.offsets] = (y @ layer.value.T).unflatten(-1, (-1, dim))
            attended = torch.empty_like(query)
            for rows, blocks, offsets, mask in step.groups:
                attended[rows] = F.scaled_dot_product_attention(
                    query[rows].transpose(1, 2), keys[blocks, offsets][:, :, self.kv_head_of].transpose(1, 2),
                    values[blocks, offsets][:, :, self.kv_head_of].transpose(1, 2), mask).transpose(1, 2)
            x = x + self.add_up(attended.flatten(1) @ layer.output.T, ranks)
            y = F.rms_norm(x, x.shape[-1:], layer.feed_forward_norm, eps)
            x = x + self.add_up((F.silu(y @ layer.gate.T) * (y @ layer.up.T)) @ layer.down.T, ranks)
        last = F.rms_norm(x[step.emitting], x.shape[-1:], self.norm, eps)
        parts = self.gather((last @ self.head.T).float(), ranks) if len(last) else last[None]
        return parts.transpose(0, 1).flatten(1)[:, :self.config.vocabulary].cpu()

    def add_up(self, part: torch.Tensor, ranks: coxswain.RankGroup) -> torch.Tensor:
        """The sum of the ranks' parts, in order of rank: the same bits on every rank."""
        first, *others = self.gather(part.float(), ranks)
        return sum(others, first).to(self.dtype)

    def gather(self, part: torch.Tensor, ranks: coxswain.RankGroup) -> torch.Tensor:
        """The float32 tensors of all ranks: [rank, ...]."""
        if self.rank_count == 1:
            return part[None]
        own = part.cpu().reshape(-1)
        all_parts = torch.empty(self.rank_count, own.numel())
        for piece, into in zip(own.split(_VALUE_SIZE // 4), all_parts.split(_VALUE_SIZE // 4, 1)):
            gathered = torch.empty(into.shape)
            ranks.gather_into(piece, gathered)
            into.copy_(gathered)
        return all_parts.view(self.rank_count, *part.shape).to(self.device)


class Step:
    """A batch as tensors: what each token reads and writes in the KV cache."""

    def __init__(self, batch: coxswain.Batch, block_count: int, block_size: int, positions_max: int,
                 device: torch.device) -> None:
        def tensor(column: memoryview) -> torch.Tensor:
            return torch.frombuffer(column, dtype=torch.int32).long()  # a copy: the column ends with the step
        self.batch = batch
        starts, emits = tensor(batch.starts), batch.emits
        counts, positions = starts.diff(), tensor(batch.positions)
        table = tensor(batch.block_table()).view(batch.row_count, -1)
        self.ends = positions[starts[1:] - 1] + 1
        needed = -(-self.ends // block_size)
        used = torch.arange(table.shape[1]) < needed[:, None]
        if int(self.ends.max()) > positions_max or int(needed.max()) > table.shape[1] or bool(
                ((table < 0) | (table >= block_count))[used].any()):
            raise coxswain.Invalid(f"a row of the step does not fit {positions_max} positions, or its block table "
                                   f"does not fit {block_count} blocks of {block_size} positions")
        row = torch.repeat_interleave(torch.arange(batch.row_count), counts)
        self.tokens, self.positions = tensor(batch.tokens).to(device), positions.to(device)
        self.blocks = table[row, positions // block_size].to(device)
        self.offsets = (positions % block_size).to(device)
        self.emitting = [int(starts[i + 1]) - 1 for i in range(batch.row_count) if emits[i]]
        # Rows that compute equally many tokens are one call of attention. A row that ends before the longest one
        # reads its own last position again, and the mask hides it.
        self.groups = []
        for count in counts.unique().tolist():
            rows = (counts == count).nonzero()
            computed = starts[rows] + torch.arange(count)
            at = torch.arange(int(self.ends[rows].max()))
            mask = at <= positions[computed][:, None, :, None]
            at = torch.minimum(at, self.ends[rows] - 1)
            self.groups.append(tuple(part.to(device) for part in (
                computed, table[rows, at // block_size], at % block_size, mask)))


# ---- sampling, as in the reference worker (engine/compute/sample.c) ----

def uniform(seed: int, position: int) -> float:
    """Draw number `position` of a seed, in [0, 1): Philox4x32-10 of Salmon et al."""
    word = (1 << 32) - 1
    a, b, c, d, k0, k1 = position & word, position >> 32, 0, 0, seed & word, seed >> 32
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k0, q & word, (p >> 32) ^ d ^ k1, p & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return ((b << 32 | a) >> 11) * 2.0 ** -53


def sample(logits: torch.Tensor, history: list[int], seed: int, temperature: float, top_k: int, top_p: float,
           penalty: float) -> tuple[int, float]:
    """The token that follows history, and its logprob under the plain softmax. logits: float32, on the CPU."""
    if not bool(logits.isfinite().all()):
        raise coxswain.Invalid("a logit is not finite; the weights or the KV cache do not fit this model")
    logprobs, scores = logits.double().log_softmax(0), logits
    if penalty != 1:
        seen = torch.tensor(sorted(set(history)))
        own = scores[seen]
        scores = scores.index_put((seen,), torch.where(own > 0, own / penalty, own * penalty))
    if temperature == 0:
        token = int(scores.argmax())
        return token, float(logprobs[token])
    weights = ((scores.double() - scores.max().double()) / temperature).exp()
    order = torch.arange(len(scores))
    total = weights.cumsum(0)
    if top_k or top_p < 1:
        order = scores.sort(descending=True, stable=True).indices  # of equal ones the lower token first
        whole = float(total[-1])
        if 0 < top_k < len(order):
            order = order[:top_k]
        total = weights[order].cumsum(0)
        if 0 < top_k < len(scores):
            whole = float(total[-1])
        total = total[:1 + int((total[:-1] < top_p * whole).sum())]
    target = uniform(seed, len(history)) * float(total[-1])
    # Rounding may leave no sum above the target: then the last token that has any weight.
    index = min(int((total <= target).sum()), int((total < total[-1]).sum()))
    token = int(order[index])
    return token, float(logprobs[token])


# ---- the rank ----

class Engine:
    """What this rank serves: the handlers of `worker`."""

    def __init__(self, worker: coxswain.Worker, options: argparse.Namespace) -> None:
        self.worker, self.options = worker, options
        self.ranks: Any = None
        self.model: Any = None
        self.loaded: tuple[Any, ...] = ()

    def init(self, request: coxswain.InitRequest) -> coxswain.InitResult:
        """Joins the rank group first, so that no rank waits for one that cannot load."""
        options = self.options
        folder = request.get("model") or options.model
        block_count, block_size, swap_block_count = (
            int(request.get(key) or getattr(options, key))
            for key in ("block_count", "block_size", "swap_block_count"))
        if not folder:
            raise coxswain.Invalid("no model given: use --model DIR, or 'model' in the init request")
        if block_count < 1 or block_size < 1:
            raise coxswain.Invalid(f"the KV cache would have {block_count} blocks of {block_size} positions; expected "
                                   "1 or more of each: --block-count, --block-size")
        if not request.replayed:
            self.worker.resume()
        self.ranks = request.join(value_size=_VALUE_SIZE)
        wanted = (folder, block_count, block_size, swap_block_count)
        if not (request.replayed and wanted == self.loaded):
            self.loaded, self.model = (), None  # frees the old memory first
            device = torch.device("cpu")
            if torch.cuda.is_available():
                device = torch.device("cuda", self.worker.device % torch.cuda.device_count())
            self.model = Model(pathlib.Path(folder), self.worker.rank, self.worker.rank_count, device,
                               getattr(torch, options.dtype))
            shape = (self.model.kv_heads, self.model.config.head_dim)
            layers = self.model.config.layers
            self.cache = torch.zeros(layers, 2, block_count, block_size, *shape, dtype=self.model.dtype,
                                     device=device)
            self.swap = torch.zeros(layers, 2, swap_block_count, block_size, *shape, dtype=self.model.dtype)
            self.loaded = wanted
        return coxswain.InitResult(block_count, block_size, swap_block_count, self.model.config.positions)

    def execute(self, batch: coxswain.Batch) -> tuple[list[int], list[float]]:
        """Computes a step. The rank that fails ends the waits of the others."""
        if not self.loaded:
            raise coxswain.StateError("a step before a successful init")
        if batch.void_through >= batch.sequence:
            raise coxswain.Aborted("the step was cancelled before it began")
        self.ranks.align(batch.void_through + 1)  # in step again after a step that failed
        try:
            return self.compute(batch)
        except BaseException:
            self.ranks.abort()
            raise

    def compute(self, batch: coxswain.Batch) -> tuple[list[int], list[float]]:
        """Moves blocks, computes the rows, and draws tokens; -1 where a row does not emit."""
        if batch.weights_version > 1:
            raise coxswain.Unsupported("this worker computes only with the weights that it has loaded; start the group "
                                       "with --no-shared-weights")
        for pairs, source, target in ((batch.swap_out, self.cache, self.swap),
                                      (batch.swap_in, self.swap, self.cache),
                                      (batch.copies, self.cache, self.cache)):
            for i in range(len(pairs) and pairs.shape[0]):
                target[:, :, pairs[i, 1]] = source[:, :, pairs[i, 0]].to(target.device)
        tokens, logprobs = [-1] * batch.row_count, [0.0] * batch.row_count
        if not batch.row_count:
            return tokens, logprobs
        _, block_count, block_size, _ = self.loaded
        step = Step(batch, block_count, block_size, self.model.config.positions, self.model.device)
        logits = self.model.forward(step, self.ranks, self.cache)
        for row, own in zip((i for i in range(batch.row_count) if batch.emits[i]), logits):
            tokens[row], logprobs[row] = sample(
                own, batch.history(row), batch.seeds[row], batch.temperatures[row], batch.top_ks[row],
                batch.top_ps[row], batch.repetition_penalties[row])
        return tokens, logprobs

    def recover(self, command: str) -> None:
        """The blocks of the KV cache are the coordinator's: a reinit has nothing to forget here."""
        if command in ("pause", "pause_net"):
            self.worker.pause()
        elif command == "start":
            self.worker.resume()


def main() -> None:
    """Serves as the rank that the environment names, until the group ends."""
    parser = argparse.ArgumentParser(prog="coxswain.torch_worker", allow_abbrev=False,
                                     description="A rank that computes a Llama checkpoint with PyTorch.")
    parser.add_argument("--model", metavar="DIR", help="model folder; the init request may name another")
    parser.add_argument("--block-count", type=int, default=512, metavar="N", help="KV blocks (default 512)")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="positions per block (default 16)")
    parser.add_argument("--swap-block-count", type=int, default=64, metavar="N",
                        help="blocks of swap space (default 64)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
                        help="of weights and KV cache (default float32)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch (default 1)")
    parser.parse_known_args()  # --help, also where there is no group
    worker = coxswain.Worker()
    try:
        engine = Engine(worker, argparse.Namespace())
        worker.init(engine.init)
        worker.execute(engine.execute)
        worker.recover(engine.recover)
        worker.attach()
        engine.options = parser.parse_args()  # attach has removed the arguments of the group
        torch.set_num_threads(engine.options.threads)
        torch.set_grad_enabled(False)
        worker.serve()
    except coxswain.Error as error:
        sys.exit(f"coxswain.torch_worker: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
