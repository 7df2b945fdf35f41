#!/usr/bin/python3
"""Reference forward pass of a Llama checkpoint in float64 numpy.

    reference_llama.py logits DIR 1,5,6,7 [--adapter ADAPTER_DIR]
    reference_llama.py random DIR --hidden 32 --layers 2 --heads 8 --kv-heads 4 \\
        --ffn 64 --vocab 16 --dtype bf16 --seed 3
    reference_llama.py adapter ADAPTER_DIR --model DIR --rank 4 --modules q_proj,v_proj --seed 3

`logits` prints one line of logits per position.  `random` writes a checkpoint
with random weights, config.json and model.safetensors, without a tokenizer.
`adapter` writes a random LoRA adapter for a checkpoint, in the naming of PEFT;
`logits --adapter` adds scale * B A to the weights before anything is computed.
"""

import argparse
import json
import struct
from pathlib import Path

import numpy as np

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def decode(raw, dtype):
    if dtype == "BF16":
        # A bfloat16 is the upper half of a float32.
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[dtype])


def encode(values, dtype):
    if dtype == "BF16":
        bits = values.astype(np.float32).view(np.uint32)
        # Adding the lowest kept bit makes ties round to even.
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def load_tensors(path):
    raw = Path(path).read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    weights = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        values = decode(raw[begin:end], entry["dtype"]).astype(np.float64)
        weights[name] = values.reshape(entry["shape"])
    return weights


def load_model(path):
    """Return the config and the weights of a checkpoint, the weights as float64."""
    path = Path(path)
    config = json.loads((path / "config.json").read_text())
    return config, load_tensors(path / "model.safetensors")


def apply_adapter(weights, path):
    """Add a LoRA adapter to the weights."""
    path = Path(path)
    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_tensors(path / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        b = tensors[name.replace(".lora_A.", ".lora_B.")]
        plain = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        weights[plain] = weights[plain] + config["lora_alpha"] / config["r"] * (b @ a)


def write_tensors(path, tensors, dtype):
    header, blobs, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, values in tensors.items():
        blobs.append(encode(values, dtype.upper()))
        end = offset + len(blobs[-1])
        header[name] = {"dtype": dtype.upper(), "shape": values.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def write_random_adapter(path, model, rank, alpha, modules, seed, dtype, scale=1.0):
    """Write a LoRA adapter for the attention projections of a checkpoint; scale 0: one that changes nothing."""
    config = json.loads((Path(model) / "config.json").read_text())
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    dim = config.get("head_dim") or hidden // heads
    width, kv = heads * dim, config.get("num_key_value_heads", heads) * dim
    shapes = {"q_proj": (width, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, width)}
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for module in modules:
            out, into = shapes[module]
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_"
            tensors[prefix + "A.weight"] = rng.standard_normal((rank, into)) / np.sqrt(into)
            tensors[prefix + "B.weight"] = scale * rng.standard_normal((out, rank)) / np.sqrt(rank)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), "bias": "none"}) + "\n")
    write_tensors(path / "adapter_model.safetensors", tensors, dtype)


def write_random_model(path, config, seed, dtype):
    """Write a checkpoint with random weights; dtype is f32, f16 or bf16.

    config takes Hugging Face LlamaConfig names and is completed with defaults.
    """
    heads = config["num_attention_heads"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": DTYPES[dtype],
        **config,
    }
    hidden, ffn, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    kv_size = config["num_key_value_heads"] * (hidden // heads)
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "self_attn.q_proj.weight"] = (hidden, hidden)
        shapes[layer + "self_attn.k_proj.weight"] = (kv_size, hidden)
        shapes[layer + "self_attn.v_proj.weight"] = (kv_size, hidden)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes[layer + "mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[layer + "mlp.up_proj.weight"] = (ffn, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)

    rng, tensors = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        if len(shape) == 1:
            values = 1 + 0.1 * values
        elif name != "model.embed_tokens.weight":
            # This scale keeps activations near one, so that no part of the model fades.
            values /= np.sqrt(shape[1])
        tensors[name] = values
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tensors(path / "model.safetensors", tensors, dtype)


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def frequencies(config, half):
    """Radians a position of each pair; of Llama 3.1 the low ones are divided by a factor, those between in part."""
    found = config.get("rope_theta", 10000.0) ** (-np.arange(half) / half)
    scaling = config.get("rope_scaling")
    if not scaling:
        return found
    turns = scaling["original_max_position_embeddings"] * found / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return found * (kept + (1 - kept) / scaling["factor"])


def rope(x, config):
    """Rotate x of shape [T, heads, head_dim] by position, pairing i with i + head_dim / 2."""
    half = x.shape[-1] // 2
    angle = np.outer(np.arange(len(x)), frequencies(config, half))[:, None, :]
    low, high = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def attention(x, weights, prefix, config):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    length = len(x)

    def project(name, count):
        return (x @ weights[f"{prefix}{name}_proj.weight"].T).reshape(length, count, -1)

    q, k, v = project("q", heads), project("k", kv_heads), project("v", kv_heads)
    q, k = rope(q, config), rope(k, config)
    out = np.empty_like(q)
    for head in range(heads):
        shared = head * kv_heads // heads
        score = q[:, head] @ k[:, shared].T / np.sqrt(q.shape[-1])
        score[np.triu_indices(length, 1)] = -np.inf
        weight = np.exp(score - score.max(-1, keepdims=True))
        out[:, head] = weight / weight.sum(-1, keepdims=True) @ v[:, shared]
    return out.reshape(length, -1) @ weights[prefix + "o_proj.weight"].T


def mlp(x, weights, prefix):
    gate = x @ weights[prefix + "gate_proj.weight"].T
    up = x @ weights[prefix + "up_proj.weight"].T
    return gate / (1 + np.exp(-gate)) * up @ weights[prefix + "down_proj.weight"].T


def forward(config, weights, ids):
    """Return the logits [T, vocab] of every position of ids."""
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = rms_norm(x, weights[layer + "input_layernorm.weight"], eps)
        x = x + attention(h, weights, layer + "self_attn.", config)
        h = rms_norm(x, weights[layer + "post_attention_layernorm.weight"], eps)
        x = x + mlp(h, weights, layer + "mlp.")
    tied = config.get("tie_word_embeddings", False)
    head = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    return rms_norm(x, weights["model.norm.weight"], eps) @ head.T


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    logits = commands.add_parser("logits")
    logits.add_argument("dir")
    logits.add_argument("ids", help="token ids, separated by commas")
    logits.add_argument("--adapter", help="folder of a LoRA adapter")
    adapter = commands.add_parser("adapter")
    adapter.add_argument("dir")
    adapter.add_argument("--model", required=True)
    adapter.add_argument("--rank", type=int, required=True)
    adapter.add_argument("--alpha", type=float, default=16)
    adapter.add_argument("--modules", default="q_proj,k_proj,v_proj,o_proj")
    adapter.add_argument("--scale", type=float, default=1, help="of B; 0: the adapter changes nothing")
    adapter.add_argument("--dtype", choices=DTYPES, default="f32")
    adapter.add_argument("--seed", type=int, default=0)
    random = commands.add_parser("random")
    random.add_argument("dir")
    for name in ("hidden", "layers", "heads", "kv-heads", "ffn", "vocab"):
        random.add_argument(f"--{name}", type=int, required=True)
    random.add_argument("--rope-theta", type=float, default=10000.0)
    random.add_argument("--llama3", metavar="FACTOR,LOW,HIGH,POSITIONS", help="rope_scaling of Llama 3.1")
    random.add_argument("--max-positions", type=int, default=64)
    random.add_argument("--tie", action="store_true", help="tie lm_head to the embedding")
    random.add_argument("--dtype", choices=DTYPES, default="f32")
    random.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    if args.command == "logits":
        config, weights = load_model(args.dir)
        if args.adapter:
            apply_adapter(weights, args.adapter)
        for row in forward(config, weights, [int(i) for i in args.ids.split(",")]):
            print(" ".join(f"{value:.9g}" for value in row))
    elif args.command == "adapter":
        write_random_adapter(args.dir, args.model, args.rank, args.alpha, args.modules.split(","), args.seed,
                             args.dtype, args.scale)
    else:
        config = {
            "hidden_size": args.hidden,
            "num_hidden_layers": args.layers,
            "num_attention_heads": args.heads,
            "num_key_value_heads": args.kv_heads,
            "intermediate_size": args.ffn,
            "vocab_size": args.vocab,
            "rope_theta": args.rope_theta,
            "max_position_embeddings": args.max_positions,
            "tie_word_embeddings": args.tie,
        }
        if args.llama3:
            factor, low, high, positions = args.llama3.split(",")
            config["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": float(factor),
                "low_freq_factor": float(low),
                "high_freq_factor": float(high),
                "original_max_position_embeddings": int(positions),
            }
        write_random_model(args.dir, config, args.seed, args.dtype)


if __name__ == "__main__":
    main()
