#!/usr/bin/python3
"""Checks what trace.sh has made.

Usage: trace_check.py TRACE PROCESS...   the trace has these processes; each step that all of them ran
                                         was executed by each between its submit and its handler
       trace_check.py --usage STATUS     status --json: processor time and memory of each rank are
                                         those of its process
"""

import json
import os
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
from harness import check  # pylint: disable=wrong-import-position
from perfetto import Trace  # pylint: disable=wrong-import-position

# What a clock may be off: the shortest way of a frame, and more on a busy machine.
OFF_NS = 20_000_000
STEPS_MIN = 5


def executed(trace, process):
    """{name of the step: its execution}."""
    found = {}
    for made in trace.slices:
        if made["process"] == process and made["thread"] == "execute" and made["end"]:
            if made["name"].startswith("MODEL_INFER "):
                inner = [one for one in trace.named("execute", process) if one["end"] and
                         made["begin"] <= one["begin"] and one["end"] <= made["end"]]
                check(len(inner) == 1, f"{process}: {made['name']} was executed {len(inner)} times")
                found[made["name"]] = inner[0]
    return found


def steps(trace, thread):
    return {made["name"]: made for made in trace.slices
            if made["process"].startswith("coordinator") and made["thread"] == "execute: " + thread}


def in_order(path, processes):
    trace = Trace(path)
    names = [name for _, name in trace.processes.values()]
    for process in processes:
        check(process in names, f"no process '{process}', but {names}")
    submits, handlers = steps(trace, "submit"), steps(trace, "handler")
    ranks = {process: executed(trace, process) for process in processes}
    common = set(submits) & set(handlers)
    for process in processes:
        common &= set(ranks[process])
    check(len(common) >= STEPS_MIN, f"only {len(common)} steps that all have run")
    outside = -OFF_NS
    for name in common:
        for process in processes:
            made = ranks[process][name]
            check(made["end"] > made["begin"], f"{process}: {name} took no time")
            early = submits[name]["begin"] - made["begin"]
            late = made["end"] - handlers[name]["begin"]
            check(early <= OFF_NS, f"{process}: {name} began {early} ns before its submit")
            check(late <= OFF_NS, f"{process}: {name} ended {late} ns after it was gathered")
            outside = max(outside, early, late)
    print(f"{len(common)} steps of {len(processes)} ranks are in order, by {-outside / 1e3:.0f} us at least")


def usage(path):
    with open(path, encoding="utf-8") as file:
        ranks = json.load(file)["ranks"]
    check(len(ranks) == 4, f"{len(ranks)} ranks")
    check(all(rank["cpu_s"] and rank["resident_bytes"] for rank in ranks), "of some ranks nothing is known")
    page = os.sysconf("SC_PAGE_SIZE")
    for rank in ranks:
        with open(f"/proc/{rank['pid']}/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1]) * page
        cpu_s = time.clock_gettime(~rank["pid"] << 3 | 2)  # as clock_getcpuclockid(3)
        check(resident / 2 < rank["resident_bytes"] < resident * 2,
              f"rank {rank['rank']}: {rank['resident_bytes']} bytes are resident, /proc has {resident}")
        check(cpu_s / 2 <= rank["cpu_s"] <= cpu_s,
              f"rank {rank['rank']}: {rank['cpu_s']} s of processor time, and by its clock {cpu_s}")


if sys.argv[1] == "--usage":
    usage(sys.argv[2])
else:
    in_order(sys.argv[1], sys.argv[2:])
