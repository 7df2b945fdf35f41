"""Makes models that vLLM's CPU attention takes: its heads have 32 dimensions or more.

widen(source, target) turns models/sums, with heads of 16, into an equal model with heads of 32.
Nothing is approximated but the scale of q, a factor of sqrt(2) in float32. A head is rotated in
pairs (i, i + half), at the frequency theta^(-i / half). The frequency i of 16 dimensions is the
frequency 2 i of 32, so row i of a head of q and k goes to row 2 i and row i + 8 to row 2 i + 16;
the rows between are zero and add nothing to q k. v and the columns of o_proj move likewise.
Attention divides by sqrt(head size), which q makes up for.

random_llama(target) makes a small model of random weights with the same tokenizer, and
random_lora(target) a LoRA adapter for it.

Usage: widen.py SOURCE TARGET
"""

import json
import math
import os
import sys

import torch
from safetensors.torch import load_file, save_file

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unused0>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 64,
}
WIDE = 32


def spread(matrix, heads, narrow):
    """Moves the rows of each head to their places among WIDE."""
    half, stride = narrow // 2, WIDE // narrow
    wide = matrix.new_zeros(heads, WIDE, matrix.shape[1])
    head = matrix.reshape(heads, narrow, -1)
    wide[:, 0 : WIDE // 2 : stride] = head[:, :half]
    wide[:, WIDE // 2 :: stride] = head[:, half:]
    return wide.reshape(heads * WIDE, -1)


def write_tokenizer(source, target):
    with open(os.path.join(source, "tokenizer.json")) as file:
        tokenizer = json.load(file)
    tokenizer["model"]["unk_token"] = "<unused0>"
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [
            {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}},
    }
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
    ):
        with open(os.path.join(target, name), "w") as file:
            json.dump(content, file, indent=1)


def write_model(target, config, weights):
    with open(os.path.join(target, "config.json"), "w") as file:
        json.dump(config, file, indent=1)
    save_file(
        {name: value.contiguous() for name, value in weights.items()},
        os.path.join(target, "model.safetensors"),
        {"format": "pt"},
    )


def widen(source, target):
    """Writes an equal model with heads of 32, and its tokenizer, to target."""
    with open(os.path.join(source, "config.json")) as file:
        config = json.load(file)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    narrow = config["hidden_size"] // heads
    weights = load_file(os.path.join(source, "model.safetensors"))
    for name, value in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = spread(value, heads, narrow) * math.sqrt(WIDE / narrow)
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = spread(value, kv_heads, narrow)
        elif name.endswith("o_proj.weight"):
            weights[name] = spread(value.T, heads, narrow).T
    config["head_dim"] = WIDE
    write_model(target, config, weights)
    write_tokenizer(source, target)


def random_llama(source, target, seed=0, layers=3, hidden=128, heads=4, kv_heads=2, vocabulary=16):
    """Writes a model of random weights, with the tokenizer of source, to target."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns):
        return torch.randn(rows, columns, generator=generator) * (1.5 / math.sqrt(columns))

    weights = {
        "model.embed_tokens.weight": torch.randn(vocabulary, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(vocabulary, hidden),
    }
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (heads * WIDE, hidden),
            "self_attn.k_proj": (kv_heads * WIDE, hidden),
            "self_attn.v_proj": (kv_heads * WIDE, hidden),
            "self_attn.o_proj": (hidden, heads * WIDE),
            "mlp.gate_proj": (2 * hidden, hidden),
            "mlp.up_proj": (2 * hidden, hidden),
            "mlp.down_proj": (hidden, 2 * hidden),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": WIDE,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    write_model(target, config, weights)
    write_tokenizer(source, target)


def random_lora(target, seed=1, layers=3, hidden=128, heads=4, kv_heads=2, rank=8):
    """Writes a LoRA adapter of random weights for random_llama to target."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q_proj": heads * WIDE, "k_proj": kv_heads * WIDE, "v_proj": kv_heads * WIDE}
    weights = {}
    for layer in range(layers):
        for name, rows in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) / 8
            weights[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) / 8
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(shapes),
    }
    with open(os.path.join(target, "adapter_config.json"), "w") as file:
        json.dump(config, file, indent=1)
    save_file(weights, os.path.join(target, "adapter_model.safetensors"), {"format": "pt"})


if __name__ == "__main__":
    os.makedirs(sys.argv[2], exist_ok=True)
    widen(sys.argv[1], sys.argv[2])
