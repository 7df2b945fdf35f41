#!/usr/bin/python3
"""What the shipped model's steps spend in the channel and in the rank group, and tokens a second.

usage: share.py [--quick] [--json FILE]

Runs `coxswain generate`, which lies beside this script, interleaved over numbers of ranks and with --async-scheduling on
and off; every figure is the median over runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

BIN = os.path.dirname(os.path.abspath(__file__))
MODEL = "@PROJECT_SOURCE_DIR@/models/sums"
# So many prompts at a time: enough steps for a median, and rows enough for a step that is not all overhead.
SEQUENCES = 16


def prompts(count):
    with open(os.path.join(MODEL, "heldout.txt"), encoding="ascii") as file:
        return "".join(line.split("=")[0] + "=\n" for line in file.read().split("\n")[:count])


def generate(ranks, mode, text):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        result = subprocess.run(
            [os.path.join(BIN, "coxswain"), "generate", "--model", MODEL, "-n", str(ranks), "--async-scheduling", mode,
             "--sequences", str(SEQUENCES), "--quiet", "--stats-json", file.name],
            input=text, stdout=subprocess.DEVNULL, text=True)
        if result.returncode:
            sys.exit(f"share.py: generate of {ranks} ranks has failed with {result.returncode}")
        return json.load(file)


def figures(stats):
    """Those of one run; None where no rank reported."""
    step, channel = stats["step_us"]["p50"], stats["channel_us"]["p50"]
    return {"tokens_per_second": stats["tokens_per_second"], "step_p50_us": step, "channel_p50_us": channel,
            "channel_p50_share": channel / step, "channel_share": stats["channel_share"],
            "group_share": stats["group_share"], "group_wait_share": stats["group_wait_share"]}


def median(values):
    return None if None in values else statistics.median(values)


def text_of(value, scale, width):
    return "-".rjust(width) if value is None else f"{value * scale:{width}.1f}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    cells = [(ranks, mode) for ranks in ((1, 4) if options.quick else (1, 2, 4, 8)) for mode in ("off", "on")]
    text = prompts(24 if options.quick else 400)
    runs = {cell: [] for cell in cells}
    for run in range(1 if options.quick else 3):
        for cell in cells:
            print(f"generate, run {run + 1}: {cell[0]} ranks, async {cell[1]}", file=sys.stderr)
            runs[cell].append(figures(generate(*cell, text)))

    print("Shares of the time of steps, all of them; channel p50: the median step's part by the median step\n"
          f"{'ranks':>5}  {'async':5}  {'tokens/s':>9} {'step p50 us':>12} {'channel p50 us':>15} {'channel p50 %':>14} "
          f"{'channel %':>10} {'group %':>8} {'waiting %':>10}")
    rows = []
    for ranks, mode in cells:
        row = {name: median([one[name] for one in runs[ranks, mode]]) for name in runs[ranks, mode][0]}
        rows.append({"ranks": ranks, "async": mode, **row, "runs": runs[ranks, mode]})
        print(f"{ranks:5}  {mode:5}  " + " ".join((
            text_of(row["tokens_per_second"], 1, 9), text_of(row["step_p50_us"], 1, 12),
            text_of(row["channel_p50_us"], 1, 15), text_of(row["channel_p50_share"], 100, 14),
            text_of(row["channel_share"], 100, 10), text_of(row["group_share"], 100, 8),
            text_of(row["group_wait_share"], 100, 10))))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"prompts": text.count("\n"), "sequences": SEQUENCES, "rows": rows}, file)


main()
