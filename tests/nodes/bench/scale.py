#!/usr/bin/python3
"""A group of many nodes, each in a namespace with a rank that computes nothing: what a step costs, where the lead's time
goes, what it needs of memory, and how soon the end of a node is noticed.

Called by run.sh, which makes the network. A round measures every number of nodes, Coxswain right after bare NATS with the
same requests; rows are medians over the rounds. Steps back to back end with a node that is stopped: its silence is
noticed. Steps of one each 10 ms end with a node that is killed: the server says so.

The nodes of one machine need more of its processors than their lead, which so is never full. Steps back to back are
therefore measured once more with a lead that may use so little of one core that it is the first to be full. How much of
its share it has used says whether it was; what the second share adds to the first, what a whole core would.
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
# Of one core, for a lead that is to be full; and the period in which it may use it up. It was full if it has used so much.
SHARES = (0.04, 0.08)
PERIOD_US = 50000
FULL = 0.95
BEGIN, END = "<!-- make bench-scale -->\n", "<!-- end of bench-scale -->\n"


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
    parser.add_argument("--ms", default=700, type=int,
                        help="of a cell; paced ones take twice as long (%(default)s)")
    parser.add_argument("--json", type=pathlib.Path, help="also writes the rows to this file")
    parser.add_argument("--page", type=pathlib.Path, help="also writes the table into this page of the documentation")
    chosen = parser.parse_args()
    if not all(1 <= count <= NODES_MAX for count in chosen.nodes):
        parser.error("--nodes: from 1 to %d" % NODES_MAX)
    return chosen


class Group:
    """A control group whose processes get a share of one core, of version 1 or 2. Raises OSError: there are none here."""

    def __init__(self, share):
        top = pathlib.Path("/sys/fs/cgroup")
        first = top / "cpu"
        self.path = (first if first.exists() else top) / ("coxswain-bench-%d" % os.getpid())
        quota = round(share * PERIOD_US)
        if not first.exists():
            (top / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
        self.path.mkdir()
        try:
            if first.exists():
                (self.path / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="ascii")
                (self.path / "cpu.cfs_quota_us").write_text(str(quota), encoding="ascii")
            else:
                (self.path / "cpu.max").write_text("%d %d" % (quota, PERIOD_US), encoding="ascii")
        except OSError:
            self.path.rmdir()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.path.rmdir()


def machine():
    """As machine.c describes it, for docs/bench.md."""
    told = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "kernel": platform.release(),
            "machine": platform.machine(), "processors": os.cpu_count(), "load_begin": os.getloadavg()}
    git = subprocess.run(["git", "-C", pathlib.Path(__file__).parent, "rev-parse", "HEAD"], capture_output=True,
                         text=True, check=False)
    if git.returncode == 0:
        told["commit"] = git.stdout.strip()
    return told


def measure_full(network, subject, count, share):
    """The line of a lead that gets a share of one core, and how much of that it has used."""
    with Group(share) as group:
        line = network.measure(subject, "full", count, "--join", group.path / "cgroup.procs")
    line["lead_share"] = share
    line["lead_busy"] = line["steps_s"] * line["lead_us"] / 1e6 / share
    return line


def measure_all(network):
    """Lists of lines by (kind, mode, nodes, share of the lead), one a round; None where a cell failed."""
    chosen, found = network.chosen, {}
    subjects = {subject.name: subject for subject in run.SUBJECTS}

    def take(key, measure, *arguments):
        try:
            line = measure(*arguments)
        except (RuntimeError, OSError) as error:
            line = None
            print("%s, %s, %d nodes, share %s: %s" % (*key, error), file=sys.stderr)
        found.setdefault(key, []).append(line)

    for _ in range(chosen.rounds):
        for count in chosen.nodes:
            for mode, death in DEATHS.items():
                for kind, name in KINDS.items():
                    words = ["--die", death] if kind == "coxswain" else []
                    words += ["--idle-ms", chosen.ms] if kind == "coxswain" and mode == "full" else []
                    take((kind, mode, count, None), network.measure, subjects[name], mode, count, *words)
            for share in SHARES:
                take(("coxswain", "saturated", count, share), measure_full, network, subjects[KINDS["coxswain"]],
                     count, share)
    return found


def row_of(kind, mode, count, share, lines):
    lines = [line for line in lines if line]
    names = [name for name, value in lines[0].items() if isinstance(value, float | int)] if lines else []
    figures = {name: statistics.median(line[name] for line in lines) for name in names}
    return {"section": "nodes", "kind": kind, "mode": mode, "placement": "free", **figures, "ranks": count,
            **({} if lines else {"lead_share": share, "missing": "failed"})}


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


def steps_of_core(few, more):
    """Steps a second of a lead that has a whole core, by the rows of both shares. Raises KeyError: it was not full."""
    few_share, more_share = SHARES
    if min(few["lead_busy"], more["lead_busy"]) < FULL:
        raise KeyError("lead_busy")
    return more["steps_s"] + (more["steps_s"] - few["steps_s"]) * (1 - more_share) / (more_share - few_share)


def page_table(rows):
    found = {(row["kind"], row["mode"], row["ranks"], row.get("lead_share")): row for row in rows}
    counts = sorted({row["ranks"] for row in rows})

    def line(what, value):
        cells = []
        for count in counts:
            try:
                cells.append(value(lambda *key, share=None, count=count: found[(*key, count, share)]))
            except (KeyError, TypeError):  # it was not measured
                cells.append("-")
        return "| %s | %s |\n" % (what, " | ".join(cells))

    def plain(kind, mode, name, unit=1, digits=0):
        return lambda row: "{:,.{}f}".format(row(kind, mode)[name] / unit, digits)

    def full(share):
        def cell(row):
            return "{:,.0f} ({:.0f} %)".format(row("coxswain", "saturated", share=share)["steps_s"],
                                             100 * row("coxswain", "saturated", share=share)["lead_busy"])
        return cell

    def core(row):
        return "{:,.0f}".format(steps_of_core(*(row("coxswain", "saturated", share=share) for share in SHARES)))

    text = "| back to back | K = %s |\n%s\n" % (" | ".join(map(str, counts)), "|---" * (len(counts) + 1) + "|")
    text += line("a step, p50, us", plain("coxswain", "full", "p50_us"))
    text += line("bare NATS", plain("nats", "full", "p50_us"))
    text += line("CPU time of a step, us: lead", plain("coxswain", "full", "lead_us"))
    text += line("the same, bare NATS", plain("nats", "full", "lead_us"))
    text += line("server", plain("coxswain", "full", "server_us"))
    text += line("all agents and ranks", plain("coxswain", "full", "nodes_us"))
    text += line("CPU time of the idle lead, ms/s", plain("coxswain", "full", "idle_lead_us_s", 1000, 1))
    for share in SHARES:
        text += line("steps/s of a lead that has %g %% of a core, and how much of that it used" % (share * 100),
                     full(share))
    text += line("by these two, steps/s of one that has a core", core)
    text += line("memory of the lead (PSS), MiB", plain("coxswain", "full", "lead_kib", 1024, 1))
    text += line("a stopped node: the step fails after, ms", plain("coxswain", "full", "dead_ms"))
    text += line("a killed agent, one step per 10 ms, ms", plain("coxswain", "paced", "dead_ms"))
    return text


def write_page(path, rows):
    """Between the two comments of the page."""
    page = path.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    path.write_text(before + BEGIN + "\n" + page_table(rows) + "\n" + END + rest.split(END)[1], encoding="utf-8")


def print_saturated(rows):
    """Of a whole core: beats cost the same each second, so it is what more of a core brings that counts."""
    found = {(row["ranks"], row["lead_share"]): row for row in rows if "missing" not in row}
    print("\na lead that is full: steps/s with %s of a core (of which it has used), and by these with a whole one" % (
        " and ".join("%g %%" % (share * 100) for share in SHARES)))
    for count in sorted({count for count, _ in found}):
        few, more = (found.get((count, share)) for share in SHARES)
        if not few or not more:
            continue
        try:
            steps = steps_of_core(few, more)
            whole = "%8.0f, %.0f nodes x steps/s" % (steps, steps * count)
        except KeyError:
            whole = "something else was full"
        print("%3d nodes %8.0f (%.0f %%) %8.0f (%.0f %%) %s" % (
            count, few["steps_s"], few["lead_busy"] * 100, more["steps_s"], more["lead_busy"] * 100, whole))


def main():
    chosen = options()
    told = machine()
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as keys:
        found = measure_all(run.Network(chosen, pathlib.Path(keys), NODES_MAX))
    told["load_end"] = os.getloadavg()
    rows = [row_of(*key, lines) for key, lines in found.items()]
    print("%d bytes to K nodes, %d back from each; medians of %d rounds; times of a step" % (
        chosen.request, chosen.reply, chosen.rounds))
    print_rows([row for row in rows if row["mode"] != "saturated"])
    print_saturated([row for row in rows if row["mode"] == "saturated"])
    if all("missing" in row for row in rows):
        print("nothing was measured: the files stay as they are", file=sys.stderr)
        return 1
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": told, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if chosen.page:
        write_page(chosen.page, rows)
    # Where there are no control groups, no lead is full.
    return 1 if any("missing" in row for row in rows if row["mode"] != "saturated") else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
