#!/usr/bin/python3
"""Compares the logits of the C model to those of the numpy reference.

usage: check_logits.py PRINT_LOGITS REFERENCE_LLAMA MODEL_DIR

PRINT_LOGITS is the program of print_logits.c, REFERENCE_LLAMA is tests/lib/reference_llama.py and
MODEL_DIR the shipped model. Random models of other sizes and dtypes are written to a temporary
folder. Fails when at any position the largest difference is above 1e-4 of the largest logit, or
when prefill and decode do not print the same digits. Exit status 77 (skip) without numpy.
"""

import os
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position

TOLERANCE = 1e-4

# name, arguments of `reference_llama.py random`, tokens
RANDOM_MODELS = [
    ("f32", "--hidden 64 --layers 2 --heads 8 --kv-heads 8 --ffn 176 --vocab 61 --dtype f32", 24),
    (
        "f16, grouped heads",
        "--hidden 128 --layers 3 --heads 16 --kv-heads 4 --ffn 352 --vocab 200 --dtype f16",
        40,
    ),
    (
        "bf16, one KV head",
        "--hidden 96 --layers 2 --heads 8 --kv-heads 1 --ffn 256 --vocab 1000 --dtype bf16",
        17,
    ),
    (
        "bf16, tied",
        "--hidden 256 --layers 2 --heads 8 --kv-heads 2 --ffn 688 --vocab 333 --dtype bf16 --tie",
        33,
    ),
    (
        "rope_theta",
        "--hidden 192 --layers 4 --heads 24 --kv-heads 6 --ffn 512 --vocab 97 --rope-theta 500000",
        60,
    ),
    (
        "9 heads over 3, llama3",
        "--hidden 72 --layers 2 --heads 9 --kv-heads 3 --ffn 100 --vocab 97 --rope-theta 500 --llama3 8,1,4,16",
        50,
    ),
    (
        "15 heads over 5, llama3, tied",
        "--hidden 120 --layers 2 --heads 15 --kv-heads 5 --ffn 333 --vocab 61 --tie --dtype bf16 --llama3 2.5,0.5,8,40",
        40,
    ),
]


# arguments of `reference_llama.py adapter`, for each random model
ADAPTERS = [
    "--rank 4",
    "--rank 13 --modules q_proj,o_proj --alpha 5 --dtype bf16",
    "--rank 8 --modules k_proj,v_proj --dtype f16",
    "--rank 64 --alpha 32",
    "--rank 1 --modules o_proj",
    "--rank 4",
    "--rank 6 --modules k_proj,o_proj",
]


def read_logits(command):
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with {result.returncode}: {result.stderr}")
    return result.stdout, [[float(x) for x in line.split()] for line in result.stdout.splitlines()]


def largest_difference(ours, theirs):
    """Of all positions: max |a - b| / max |b|."""
    if [len(row) for row in ours] != [len(row) for row in theirs]:
        sys.exit("the numbers of positions or logits differ")
    return max(
        max(abs(a - b) for a, b in zip(row, reference)) / max(abs(b) for b in reference)
        for row, reference in zip(ours, theirs)
    )


def check(name, program, reference, directory, ids, adapter=None):
    tokens = ",".join(str(i) for i in ids)
    ours, theirs = ([adapter], ["--adapter", adapter]) if adapter else ([], [])
    prefill_text, prefill = read_logits([program, directory, tokens, "prefill", *ours])
    decode_text, _ = read_logits([program, directory, tokens, "decode", *ours])
    _, expected = read_logits([sys.executable, reference, "logits", directory, tokens, *theirs])
    difference = largest_difference(prefill, expected)
    same = prefill_text == decode_text
    print(f"{name}: {len(ids)} positions, largest relative difference {difference:.3g}, "
          f"prefill and decode {'equal' if same else 'DIFFER'}")
    return len(prefill) == len(ids) and same and difference <= TOLERANCE


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    program, reference, model = sys.argv[1:]
    try:
        import numpy  # noqa: F401: only whether it is there
    except ImportError:
        harness.skip("no numpy for " + sys.executable)

    generator = random.Random(1)
    ids = [1] + [generator.randrange(3, 16) for _ in range(40)]
    good = check("sums", program, reference, model, ids)
    for seed, (name, arguments, length) in enumerate(RANDOM_MODELS):
        words = arguments.split()
        vocab = int(words[words.index("--vocab") + 1])
        ids = [generator.randrange(vocab) for _ in range(length)]
        with tempfile.TemporaryDirectory(prefix="coxswain_model_") as directory:
            command = [sys.executable, reference, "random", directory, "--seed", str(seed), *words]
            subprocess.run(command, check=True)
            good &= check(name, program, reference, directory, ids)
            adapter = directory + "/adapter"
            words = ADAPTERS[seed].split()
            command = [sys.executable, reference, "adapter", adapter, "--model", directory, "--seed", str(seed), *words]
            subprocess.run(command, check=True)
            good &= check(f"{name}, adapter {ADAPTERS[seed]}", program, reference, directory, ids, adapter)
    if not good:
        sys.exit(f"FAILED: allowed is a relative difference of {TOLERANCE:g}, and none between "
                 "prefill and decode")


harness.script(main)
