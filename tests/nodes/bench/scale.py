#!/usr/bin/python3
"""A group of many nodes, each in a namespace with a rank that computes nothing: what a step costs, where the lead's time
goes, what it needs of memory, and how soon the end of a node is noticed.

Called by run.sh, which makes the network. A round measures every number of nodes, Coxswain right after bare NATS with the
same requests; rows are medians over the rounds. Steps back to back end with a node that is stopped: its silence is
noticed. Steps of one each 10 ms end with a node that is killed: the server says so.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile

import run

NODES_MAX = 32
KINDS = {"coxswain": "coxswain-collect", "nats": "nats"}
DEATHS = {"full": "stop", "paced": "kill"}


def options():
    parser = argparse.ArgumentParser(prog="run.sh scale", description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="of the programs")
    parser.add_argument("--network", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--subnet", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=run.numbers, default=[1, 2, 4, 8, 16, 32], metavar="LIST",
                        help="numbers of nodes, up to %d (1,2,4,8,16,32)" % NODES_MAX)
    parser.add_argument("--request", default=1280, type=int, help="bytes to all nodes (%(default)s)")
    parser.add_argument("--reply", default=1024, type=int, help="bytes back from each (%(default)s)")
    parser.add_argument("--rounds", default=3, type=int, help="(%(default)s)")
    parser.add_argument("--ms", default=1000, type=int,
                        help="of a cell; paced ones take twice as long (%(default)s)")
    parser.add_argument("--json", type=pathlib.Path, help="also writes the rows to this file")
    chosen = parser.parse_args()
    if not all(1 <= count <= NODES_MAX for count in chosen.nodes):
        parser.error("--nodes: from 1 to %d" % NODES_MAX)
    return chosen


def machine():
    """As machine.c describes it, for docs/bench.md."""
    told = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "kernel": platform.release(),
            "machine": platform.machine(), "processors": os.cpu_count(), "load_begin": os.getloadavg()}
    git = subprocess.run(["git", "-C", pathlib.Path(__file__).parent, "rev-parse", "HEAD"], capture_output=True,
                         text=True, check=False)
    if git.returncode == 0:
        told["commit"] = git.stdout.strip()
    return told


def measure_all(network):
    """Lists of lines by (kind, mode, nodes), one a round; None where a cell failed."""
    chosen, found = network.chosen, {}
    subjects = {subject.name: subject for subject in run.SUBJECTS}
    for _ in range(chosen.rounds):
        for count in chosen.nodes:
            for mode, death in DEATHS.items():
                for kind, name in KINDS.items():
                    words = ["--idle-ms", chosen.ms, "--die", death] if kind == "coxswain" else []
                    try:
                        line = network.measure(subjects[name], mode, count, *words)
                    except RuntimeError as error:
                        line = None
                        print("%s, %d nodes, %s: %s" % (kind, count, mode, error), file=sys.stderr)
                    found.setdefault((kind, mode, count), []).append(line)
    return found


def row_of(kind, mode, count, lines):
    lines = [line for line in lines if line]
    names = [name for name, value in lines[0].items() if isinstance(value, float | int)] if lines else []
    figures = {name: statistics.median(line[name] for line in lines) for name in names}
    return {"section": "nodes", "kind": kind, "mode": mode, "placement": "free", **figures, "ranks": count,
            **({} if lines else {"missing": "failed"})}


def print_rows(rows):
    print("%-9s %-6s %5s %10s %10s %8s %9s %9s %10s %9s %9s %8s" % (
        "", "mode", "nodes", "p50 us", "p99 us", "steps/s", "lead us", "nodes us", "server us", "idle us/s", "lead MiB",
        "dead ms"))
    for row in rows:
        print("%-9s %-6s %5d " % (row["kind"], row["mode"], row["ranks"]) + " ".join(
            ("%" + str(width) + "s") % ("-" if name not in row else "%.*f" % (digits, row[name] / unit))
            for name, width, digits, unit in (
                ("p50_us", 10, 0, 1), ("p99_us", 10, 0, 1), ("steps_s", 8, 0, 1), ("lead_us", 9, 0, 1),
                ("nodes_us", 9, 0, 1), ("server_us", 10, 0, 1), ("idle_lead_us_s", 9, 0, 1), ("lead_kib", 9, 1, 1024),
                ("dead_ms", 8, 1, 1))))


def main():
    chosen = options()
    told = machine()
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as keys:
        found = measure_all(run.Network(chosen, pathlib.Path(keys), NODES_MAX))
    told["load_end"] = os.getloadavg()
    rows = [row_of(*key, lines) for key, lines in found.items()]
    print("%d bytes to K nodes, %d back from each; medians of %d rounds; times of a step" % (
        chosen.request, chosen.reply, chosen.rounds))
    print_rows(rows)
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": told, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if any("missing" in row for row in rows) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
