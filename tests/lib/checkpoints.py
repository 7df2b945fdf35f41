"""Models and LoRA adapters that tests make: the shipped model with other numbers, adapters for it.

Models need numpy; adapters do not.
"""

import json
import os
import random
import shutil
import struct

import harness
from harness import MODEL


def folder():
    """Where all of them are."""
    path = os.path.join(harness.scratch, "checkpoints")
    os.makedirs(path, exist_ok=True)
    return path


def adapter(name, rank=4, seed=1, scale=0.4, modules=("q_proj", "k_proj", "v_proj", "o_proj"),
            **other):
    """A folder as PEFT writes it, for the shipped model; other: what is different in the model
    that it is for."""
    with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as file:
        config = {**json.load(file), **other}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    width, kv = heads * dim, config["num_key_value_heads"] * dim
    shapes = {"q_proj": (width, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden),
              "o_proj": (hidden, width)}
    noise, header, data = random.Random(seed), {}, b""
    for layer in range(config["num_hidden_layers"]):
        for module in modules:
            out, into = shapes[module]
            for side, shape, factor in (("A", (rank, into), into ** -0.5),
                                        ("B", (out, rank), scale * rank ** -0.5)):
                numbers = [noise.gauss(0, 1) * factor for _ in range(shape[0] * shape[1])]
                tensor = ("base_model.model.model.layers.%d.self_attn.%s.lora_%s.weight" %
                          (layer, module, side))
                end = len(data) + 4 * len(numbers)
                header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), end]}
                data += struct.pack("<%df" % len(numbers), *numbers)
    text = json.dumps(header).encode()
    path = os.path.join(folder(), name)
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump({"peft_type": "LORA", "r": rank, "lora_alpha": rank,
                   "target_modules": list(modules)}, file)
    with open(os.path.join(path, "adapter_model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    return path


def strong_adapter():
    """One that changes every token of most answers: a group that computes without it is seen."""
    return adapter("strong", 8, 5, 3.0)


def read_model():
    import numpy

    with open(os.path.join(MODEL, "model.safetensors"), "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header = file.read(size)
        data = numpy.frombuffer(file.read(), dtype="<f4").copy()
    return header, data


def write_model(name, header, data, config=None):
    path = os.path.join(folder(), name)
    os.mkdir(path)
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(os.path.join(MODEL, file), path)
    if config:
        with open(os.path.join(path, "config.json"), encoding="ascii") as file:
            values = json.load(file)
        values.update(config)
        with open(os.path.join(path, "config.json"), "w", encoding="ascii") as file:
            json.dump(values, file)
    with open(os.path.join(path, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + data.tobytes())
    return path


def other_model():
    """Every number different, which changes nearly all answers: any of them tells the two models
    apart."""
    import numpy

    header, data = read_model()
    noise = numpy.random.default_rng(3).normal(0, 0.7, data.shape)
    return write_model("other", header, (data * (1 + noise)).astype("<f4"))
