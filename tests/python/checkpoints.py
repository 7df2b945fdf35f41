"""Random Llama checkpoints as Hugging Face writes them, made without numpy and torch."""

import json
import random
import struct

# Every token is a possible one, and none ends a text.
BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def float32(number):
    """The nearest number of that size."""
    return struct.unpack("f", struct.pack("f", number))[0]


def pack(dtype, numbers):
    if dtype == "BF16":  # the upper half of a float
        floats = struct.pack(f"<{len(numbers)}f", *numbers)
        return b"".join(floats[i + 2 : i + 4] for i in range(0, len(floats), 4))
    return struct.pack(f"<{len(numbers)}{'e' if dtype == 'F16' else 'f'}", *numbers)


def shapes_of(config):
    hidden, columns, heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    dim = config.get("head_dim") or hidden // heads
    width, kv = heads * dim, config["num_key_value_heads"] * dim
    yield "model.embed_tokens", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (width, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, width),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (columns, hidden),
            "mlp.up_proj": (columns, hidden),
            "mlp.down_proj": (hidden, columns),
        }.items():
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head", (config["vocab_size"], hidden)


def write_file(path, tensors):
    header, data = {}, []
    end = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(raw)]}
        end += len(raw)
        data.append(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def write(folder, seed, dtypes=("F32",), files=1, **changes):
    """A folder with such a checkpoint. dtypes: of the tensors, in turn. files: with an index if
    more than 1."""
    config = {**BASE, **changes}
    noise, tensors = random.Random(seed), {}
    for i, (name, shape) in enumerate(shapes_of(config)):
        # Sharp attention, so that positions matter.
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        scale = {"q_proj": 2.0, "k_proj": 2.0, "embed_tokens": shape[-1] ** 0.5}.get(
            name.rpartition(".")[2], 1.5
        )
        numbers = [
            1 + noise.gauss(0, 0.1) if len(shape) == 1 else noise.gauss(0, scale) * shape[1] ** -0.5
            for _ in range(count)
        ]
        dtype = dtypes[i % len(dtypes)]
        tensors[name + ".weight"] = (dtype, list(shape), pack(dtype, numbers))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    of_tensor = {tensor: names[i % files] for i, tensor in enumerate(tensors)}
    for name in names:
        write_file(
            folder / name,
            {tensor: tensors[tensor] for tensor in tensors if of_tensor[tensor] == name},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": of_tensor})
    )
    return folder
