#!/usr/bin/python3
"""Writes the files that the examples of the documentation use: samples.py FOLDER

    FOLDER/prompts.txt  200 sums, one a line, for `coxswain generate --file`
    FOLDER/adapter      a LoRA adapter for models/sums, as PEFT writes one, for `coxswain lora load`
    FOLDER/weights      models/sums with other weights of the same shapes, for `coxswain reload`

The adapter and the weights are made of random numbers with a fixed seed: they change the replies,
and are good for nothing else. Needs no packages. Existing files are written over.
"""

import array
import json
import os
import random
import shutil
import struct
import sys

MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "models", "sums")
PROMPT_COUNT = 200
LORA_RANK = 8


def write_prompts(path):
    draw = random.Random(1)
    with open(path, "w", encoding="ascii") as file:
        for _ in range(PROMPT_COUNT):
            file.write("%d+%d=\n" % (draw.randrange(1000), draw.randrange(1000)))


def write_tensors(path, tensors):
    """A safetensors file of F32 tensors: name -> (shape, numbers)."""
    header, size = {}, 0
    for name, (shape, numbers) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape,
                        "data_offsets": [size, size + 4 * len(numbers)]}
        size += 4 * len(numbers)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, numbers in tensors.values():
            file.write(struct.pack("<%df" % len(numbers), *numbers))


def write_adapter(folder):
    with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * dim, "v_proj": config["num_key_value_heads"] * dim}
    draw, tensors = random.Random(5), {}
    for layer in range(config["num_hidden_layers"]):
        for module, output in outputs.items():
            for side, shape, scale in (("A", (LORA_RANK, hidden), hidden ** -0.5),
                                       ("B", (output, LORA_RANK), LORA_RANK ** -0.5)):
                name = ("base_model.model.model.layers.%d.self_attn.%s.lora_%s.weight"
                        % (layer, module, side))
                tensors[name] = (shape, [draw.gauss(0, 1) * scale
                                         for _ in range(shape[0] * shape[1])])
    os.makedirs(folder, exist_ok=True)
    write_tensors(os.path.join(folder, "adapter_model.safetensors"), tensors)
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="ascii") as file:
        json.dump({"peft_type": "LORA", "r": LORA_RANK, "lora_alpha": LORA_RANK,
                   "target_modules": sorted(outputs)}, file)


def write_weights(folder):
    os.makedirs(folder, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(os.path.join(MODEL, name), folder)
    with open(os.path.join(MODEL, "model.safetensors"), "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header = file.read(size)
        numbers = array.array("f", file.read())
    draw = random.Random(3)
    for i, number in enumerate(numbers):
        numbers[i] = number * draw.gauss(1, 0.7)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + numbers.tobytes())


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    write_prompts(os.path.join(folder, "prompts.txt"))
    write_adapter(os.path.join(folder, "adapter"))
    write_weights(os.path.join(folder, "weights"))
    print("%s: prompts.txt, adapter, weights" % folder)


if __name__ == "__main__":
    main()
