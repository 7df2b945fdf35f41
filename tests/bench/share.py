#!/usr/bin/python3
"""What the shipped model's steps spend in the channel and in the rank group, and tokens a second.

usage: share.py [--ranks LIST] [--prompts N] [--runs N] [--json FILE]

Runs `coxswain generate`, which lies beside this script, interleaved over numbers of ranks; every figure is the median
over runs.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys

BIN = os.path.dirname(os.path.abspath(__file__))
MODEL = "@PROJECT_SOURCE_DIR@/models/sums"
# So many prompts at a time: enough steps for a median, and rows enough for a step that is not all overhead.
SEQUENCES = 16


def prompts(count):
    with open(os.path.join(MODEL, "heldout.txt"), encoding="ascii") as file:
        return "".join(line.split("=")[0] + "=\n" for line in file.read().split("\n")[:count])


def generate(ranks, text):
    """The figures of one run, from its summary; None where no rank reported."""
    result = subprocess.run(
        [os.path.join(BIN, "coxswain"), "generate", "--model", MODEL, "-n", str(ranks), "--sequences", str(SEQUENCES)],
        input=text, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(f"share.py: generate of {ranks} ranks has failed with {result.returncode}: {result.stderr}")

    def figure(pattern, scale=1):
        told = re.search(pattern, result.stderr)
        return float(told[1]) * scale if told else None
    step, channel = figure(r"steps: p50 (\S+) us"), figure(r"channel time per step: p50 (\S+) us")
    return {"tokens_per_second": figure(r", (\d+) tokens/s"), "step_p50_us": step, "channel_p50_us": channel,
            "channel_p50_share": channel and channel / step,
            "channel_share": figure(r"of the time of steps: channel (\S+) %", 0.01),
            "group_share": figure(r", rank group (\S+) %", 0.01),
            "group_wait_share": figure(r"\((\S+) % waiting for other ranks", 0.01)}


def median(values):
    return None if None in values else statistics.median(values)


def text_of(value, scale, width):
    return "-".rjust(width) if value is None else f"{value * scale:{width}.1f}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=lambda text: [int(ranks) for ranks in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    text = prompts(options.prompts)
    runs = {ranks: [] for ranks in options.ranks}
    for run in range(options.runs):
        for ranks in options.ranks:
            print(f"generate, run {run + 1}: {ranks} ranks", file=sys.stderr)
            runs[ranks].append(generate(ranks, text))

    print("Shares of the time of steps, all of them; channel p50: the median step's part by the median step\n"
          f"{'ranks':>5}  {'tokens/s':>9} {'step p50 us':>12} {'channel p50 us':>15} {'channel p50 %':>14} "
          f"{'channel %':>10} {'group %':>8} {'waiting %':>10}")
    rows = []
    for ranks in options.ranks:
        row = {name: median([one[name] for one in runs[ranks]]) for name in runs[ranks][0]}
        # The only mode that generate has; earlier measurements have rows without the overlap of steps, too.
        rows.append({"ranks": ranks, "async": "on", **row, "runs": runs[ranks]})
        print(f"{ranks:5}  " + " ".join((
            text_of(row["tokens_per_second"], 1, 9), text_of(row["step_p50_us"], 1, 12),
            text_of(row["channel_p50_us"], 1, 15), text_of(row["channel_p50_share"], 100, 14),
            text_of(row["channel_share"], 100, 10), text_of(row["group_share"], 100, 8),
            text_of(row["group_wait_share"], 100, 10))))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"prompts": text.count("\n"), "sequences": SEQUENCES, "rows": rows}, file)


main()
