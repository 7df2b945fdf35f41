#!/usr/bin/python3
"""Train the sums model: a small Llama that continues `27+58=` with `85` and EOS.

The output folder gets config.json, model.safetensors, tokenizer.json and
heldout.txt.  With --eval-only an existing folder is measured instead.
"""

import argparse
import json
import math
import os
import struct
import time
from pathlib import Path

# Idle OpenMP threads that spin take the cores from OpenBLAS's own threads, which
# doubles the time of a step; the variable is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SPECIALS = ["<pad>", "<bos>", "<eos>"]
PAD, BOS, EOS = range(3)
# The unused entry pads the vocabulary to a multiple of eight.
VOCAB = SPECIALS + list("0123456789+=") + ["<unused0>"]
TOKEN_ID = {token: i for i, token in enumerate(VOCAB)}
IGNORE = -100
HELDOUT_LINES = 1000
HELDOUT_SHARE = 0.1


def make_config(args):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": args.ffn,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": args.kv_heads,
        "vocab_size": len(VOCAB),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rope_table(length, head_dim, theta):
    freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), freq)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        hidden = cfg["hidden_size"]
        self.heads = cfg["num_attention_heads"]
        self.kv_heads = cfg["num_key_value_heads"]
        self.head_dim = hidden // self.heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, cos, sin, mask):
        batch, length, hidden = x.shape

        def split(y, heads):
            return y.view(batch, length, heads, self.head_dim).transpose(1, 2)

        group = self.heads // self.kv_heads
        q = rotate(split(self.q_proj(x), self.heads), cos, sin)
        k = rotate(split(self.k_proj(x), self.kv_heads), cos, sin)
        k = k.repeat_interleave(group, 1)
        v = split(self.v_proj(x), self.kv_heads).repeat_interleave(group, 1)
        score = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim) + mask
        out = (score.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, hidden)
        return self.o_proj(out)


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        hidden, ffn = cfg["hidden_size"], cfg["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.input_layernorm = RMSNorm(cfg["hidden_size"], cfg["rms_norm_eps"])
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg["hidden_size"], cfg["rms_norm_eps"])
        self.mlp = MLP(cfg)

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg["vocab_size"], cfg["hidden_size"])
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg["num_hidden_layers"]))
        self.norm = RMSNorm(cfg["hidden_size"], cfg["rms_norm_eps"])


class Llama(nn.Module):
    """The attribute names make state_dict() carry the Hugging Face names."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.model = Body(cfg)
        self.lm_head = nn.Linear(cfg["hidden_size"], cfg["vocab_size"], bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=p.shape[1] ** -0.5 / 2)

    def forward(self, ids):
        length = ids.shape[1]
        head_dim = self.cfg["hidden_size"] // self.cfg["num_attention_heads"]
        cos, sin = rope_table(length, head_dim, self.cfg["rope_theta"])
        mask = torch.full((length, length), -math.inf).triu(1)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return self.lm_head(self.model.norm(x))


def draw_pairs(rng, count, weights):
    """Draw operand pairs; weights[i] is the share of operands with i+1 digits."""
    lengths = rng.choice(len(weights), size=(count, 2), p=weights)
    low = np.where(lengths == 0, 0, 10**lengths)
    return rng.integers(low, 10 ** (lengths + 1))


def draw_heldout(digits, seed):
    """Draw distinct pairs with uniform operand lengths.

    At most a tenth of the pairs of one combination of lengths is held out,
    because the short combinations have so few pairs that training would
    otherwise see none of them.
    """
    rng = np.random.default_rng(seed)
    sizes = [10] + [9 * 10**i for i in range(1, digits)]
    quota = {
        (m, n): int(HELDOUT_SHARE * sizes[m] * sizes[n])
        for m in range(digits)
        for n in range(digits)
    }
    chosen = {}
    while len(chosen) < HELDOUT_LINES:
        for a, b in draw_pairs(rng, 1000, np.full(digits, 1 / digits)).tolist():
            key = len(str(a)) - 1, len(str(b)) - 1
            if (a, b) not in chosen and quota[key] and len(chosen) < HELDOUT_LINES:
                quota[key] -= 1
                chosen[a, b] = None
    return list(chosen)


def encode(text):
    return [TOKEN_ID[c] for c in text]


class Batches:
    """Training batches that never hold a held-out sum, in either operand order."""

    def __init__(self, digits, heldout, seed):
        self.rng = np.random.default_rng(seed)
        # Longer operands are harder and far more numerous, so they come more often.
        self.weights = np.arange(1, digits + 1) / np.arange(1, digits + 1).sum()
        self.barred = np.zeros((10**digits, 10**digits), dtype=bool)
        a, b = np.array(heldout).T
        self.barred[a, b] = self.barred[b, a] = True

    def next(self, size):
        pairs = draw_pairs(self.rng, 2 * size, self.weights)
        pairs = pairs[~self.barred[pairs[:, 0], pairs[:, 1]]][:size]
        rows = [(f"{a}+{b}=", str(a + b)) for a, b in pairs.tolist()]
        longest = max(len(p) + len(s) for p, s in rows) + 1
        ids = torch.full((len(rows), longest), PAD)
        labels = torch.full((len(rows), longest), IGNORE)
        for i, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer) + 1
            ids[i, :end] = torch.tensor([BOS] + encode(prompt + answer))
            labels[i, len(prompt) : end] = torch.tensor(encode(answer) + [EOS])
        return ids, labels


def learning_rate(step, args):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / (args.steps - args.warmup)
    return args.lr * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)


def train(model, batches, args):
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.98), weight_decay=args.weight_decay, foreach=True
    )
    started = time.time()
    for step in range(args.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, args)
        ids, labels = batches.next(args.batch)
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            right = (logits.argmax(-1) == labels) | (labels == IGNORE)
            print(
                f"step {step + 1} loss {loss.item():.5f} "
                f"batch exact {right.all(1).float().mean():.4f} "
                f"seconds {time.time() - started:.0f}",
                flush=True,
            )


@torch.no_grad()
def greedy(model, prompts, limit):
    """Continue prompts of one length; the result stops before EOS, or is None without EOS."""
    ids = torch.tensor([[BOS] + encode(p) for p in prompts])
    start = ids.shape[1]
    for _ in range(limit):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    answers = []
    for row in ids[:, start:].tolist():
        answers.append("".join(VOCAB[t] for t in row[: row.index(EOS)]) if EOS in row else None)
    return answers


def evaluate(model, path):
    lines = path.read_text().split()
    by_length = {}
    for line in lines:
        prompt, answer = line[: line.index("=") + 1], line[line.index("=") + 1 :]
        by_length.setdefault(len(prompt), []).append((prompt, answer))
    right = 0
    for items in by_length.values():
        prompts = [p for p, _ in items]
        # No answer is as long as its prompt, so this leaves room for EOS.
        for (prompt, answer), got in zip(items, greedy(model, prompts, len(prompts[0]))):
            right += got == answer
            if got != answer:
                print(f"wrong: {prompt}{got}, expected {answer}")
    print(f"exact match {right}/{len(lines)} = {100 * right / len(lines):.2f} %")


def write_safetensors(path, tensors):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces align the data to eight bytes, so that a mapped file can be used in place.
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            f.write(tensor.detach().contiguous().numpy().astype("<f4").tobytes())


def read_safetensors(path):
    raw = path.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    data = raw[8 + size :]
    return {
        name: torch.from_numpy(
            np.frombuffer(data[slice(*e["data_offsets"])], "<f4").reshape(e["shape"]).copy()
        )
        for name, e in header.items()
    }


def make_tokenizer():
    added = [t for t in VOCAB if len(t) > 1]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": TOKEN_ID[t], "content": t, **flags, "special": True} for t in added
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        # The unknown token is not in the vocabulary: other characters are an error.
        "model": {"type": "WordLevel", "vocab": TOKEN_ID, "unk_token": "<unk>"},
    }


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--eval-only", action="store_true", help="measure the model in --out")
    parser.add_argument("--digits", type=int, choices=(2, 3), default=3)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--ffn", type=int, default=352)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, choices=(4, 8), default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    heldout_file = args.out / "heldout.txt"
    if args.eval_only:
        model = Llama(json.loads((args.out / "config.json").read_text()))
        model.load_state_dict(read_safetensors(args.out / "model.safetensors"))
        evaluate(model, heldout_file)
        return

    args.out.mkdir(parents=True, exist_ok=True)
    heldout = draw_heldout(args.digits, args.seed)
    heldout_file.write_text("".join(f"{a}+{b}={a + b}\n" for a, b in heldout))
    config = make_config(args)
    write_json(args.out / "config.json", config)
    write_json(args.out / "tokenizer.json", make_tokenizer())
    model = Llama(config)
    print(f"parameters {sum(p.numel() for p in model.parameters())}", flush=True)
    train(model, Batches(args.digits, heldout, args.seed + 1), args)
    write_safetensors(args.out / "model.safetensors", model.state_dict())
    evaluate(model, heldout_file)


if __name__ == "__main__":
    main()
