#!/usr/bin/python3
"""Instructions of the hot path against the recorded ones: hot_path.py PROGRAM COMPILER RECORD [--renew | --recorder]

Runs PROGRAM (hot_path.c) for each kind of attach with the coordinator and the last rank under callgrind, and computes how
many instructions one round takes, without the kernel:
  submit   the call that submits a request
  gather   from the handler's return to its next entry, with all answers there at the first look
  serve    one request in one rank, from the reading of its frame to its answer, with what is recorded of it
Waits are in none of them, so the numbers do not depend on who runs when.

RECORD has the counts by compiler, C library and protobuf-c, all of whose code is among the counted. Exits with 1 when a count is
more than 10 % above the recorded one, and with 77 where nothing was recorded for what is here or callgrind is missing. Counts that
are 10 % below are told, so that the record be renewed: --renew, which `sh tools/compile test counts_renew` calls.

--recorder: a round of 8 ranks with flight recorders against one without; exits with 1 when they take more of it than
RECORDER_LIMIT allows."""
import collections
import ctypes
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position

ROUNDS = 64  # as in hot_path.c
LIMIT = 0.10
# Of a round, without the kernel. An opaque request of 64 bytes is the shortest way there is.
RECORDER_LIMIT = 0.03
RANK_COUNT = 8  # as in hot_path.c
CLOCK_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
# The parts of a process's output, each written at a mark; the second and fourth are what is between two.
PARTS = {"opaque": 2, "step": 4}
SUBMIT = {"opaque": "cox_executor_submit_opaque", "step": "cox_executor_submit"}
SERVE = ["cox_request_read", "cox_channel_thread_open", "cox_channel_thread_answer"]
TAKE = "cox_channel_thread_record_take"  # which a compiler may inline
# Where the last rank to reply wakes for all: which rank that is depends on scheduling.
RING = {"named": [], "sealed": ["futexes_reply"]}
# Of hot_path.c itself: with all that they call, and without.
WAIT = "hot_path_await"
OWN = {"path_completed", "path_next", "submit_opaque", "submit_step", "count_round", "hot_path_mark"}
OWN_CALLBACKS = {"worker_opaque", "worker_execute", "count_round", "hot_path_mark"}


class Part:
    """One part of callgrind's output: by function its own instructions, and those of its calls that have returned."""

    def __init__(self, path):
        self.own, self.inclusive, self.calls = (collections.Counter() for _ in range(3))
        names, function, called, count = {}, None, None, None
        for line in path.read_text().splitlines():
            if line.startswith(("fn=", "cfn=")):
                number, name = re.match(r"c?fn=\((\d+)\)(?: (.*))?", line).groups()
                if name:  # written once; a suffix tells of a copy that the compiler has made
                    names[number] = re.sub(r"('\d+|\.(constprop|isra|part|cold)(\.\d+)?)+$", "", name)
                if line[0] == "f":
                    function = names[number]
                else:
                    called = names[number]
            elif line.startswith("calls="):
                count = int(line[6:].split()[0])
            elif re.match(r"[-+*\d]", line):
                instructions = int(line.split()[1])
                if count is None:
                    self.own[function] += instructions
                else:
                    self.calls[called] += count
                    self.inclusive[called] += instructions
                    count = None
        faults = [name for name in self.own if name and name.startswith("cox_fault_")]
        if faults:
            raise SystemExit(f"{path.name}: {faults[0]} is called: a source with fault points is missing in counts_tests.cmake")

    def round_of(self, functions, less):
        for name in functions:
            if self.calls[name] != ROUNDS:
                raise SystemExit(f"{name} was called {self.calls[name]} times, not {ROUNDS}")
        return (sum(self.inclusive[name] for name in functions) - sum(self.own[name] for name in less)) / ROUNDS


def count(program, attach, **more):
    with tempfile.TemporaryDirectory() as folder:
        def callgrind(side):
            return ["valgrind", "--tool=callgrind", "-q", "--dump-before=hot_path_mark", f"--callgrind-out-file={folder}/{side}"]
        environment = dict(os.environ, **more, HOT_PATH_COUNT=" ".join(callgrind("worker")))
        run = subprocess.run(callgrind("coordinator") + [program, attach], env=environment,
                             stderr=subprocess.PIPE, text=True)  # valgrind tells of system calls that it does not know
        if run.returncode:
            raise SystemExit(f"{program} {attach} under callgrind ended with {run.returncode}\n{run.stderr}")
        counts = {}
        for kind, part in PARTS.items():
            coordinator = Part(pathlib.Path(folder, f"coordinator.{part}"))
            worker = Part(pathlib.Path(folder, f"worker.{part}"))
            submit = coordinator.round_of([SUBMIT[kind]], [])
            gather = (sum(coordinator.own.values()) - coordinator.inclusive[WAIT]) / ROUNDS - submit
            gather -= sum(coordinator.own[name] for name in OWN) / ROUNDS
            counts[f"{attach} {kind} submit"] = round(submit)
            counts[f"{attach} {kind} gather"] = round(gather)
            serve = worker.round_of(SERVE + [TAKE] * (worker.calls[TAKE] > 0), OWN_CALLBACKS) - worker.round_of(RING[attach], [])
            counts[f"{attach} {kind} serve"] = round(serve)
        return counts


def recorder_budget(program):
    """The share of a round that the recorders of 8 ranks and the coordinator take."""
    if pathlib.Path(CLOCK_SOURCE).read_text() != "tsc\n":
        harness.skip("the kernel's clock is not the processor's counter: each time is a clock read")
    above = False
    for attach in ("named", "sealed"):
        without = count(program, attach, HOT_PATH_NO_RECORDER="1")
        recorded = count(program, attach)
        for kind in PARTS:
            rounds = [counts[f"{attach} {kind} submit"] + counts[f"{attach} {kind} gather"] +
                      RANK_COUNT * counts[f"{attach} {kind} serve"] for counts in (without, recorded)]
            share = rounds[1] / rounds[0] - 1
            above = above or share > RECORDER_LIMIT
            print(f"{attach} {kind:7} a round of {RANK_COUNT} ranks: {rounds[0]} without recorders, {rounds[1]} with: {share:+.1%}")
    return 1 if above else 0


def environment_name(compiler):
    protobuf = ctypes.CDLL("libprotobuf-c.so.1").protobuf_c_version
    protobuf.restype = ctypes.c_char_p
    return f"{compiler} {platform.machine()} {'-'.join(platform.libc_ver())} protobuf-c-{protobuf().decode()}"


def main():
    program, compiler, record_path, renew = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), "--renew" in sys.argv[4:]
    try:
        subprocess.run(["valgrind", "--tool=callgrind", "-q", "--callgrind-out-file=/dev/null", "true"], check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        harness.skip(f"callgrind does not run here: {e}")
    if "--recorder" in sys.argv[4:]:
        return recorder_budget(program)
    name = environment_name(compiler)
    record = json.loads(record_path.read_text())
    if name not in record and not renew:
        harness.skip(f"nothing is recorded for {name}, only for {', '.join(record)}")
    counts = count(program, "named") | count(program, "sealed")
    if renew:
        record[name] = counts
        record_path.write_text(json.dumps(record, indent=4) + "\n")
    above, below = [], []
    for what, recorded in record[name].items():
        share = counts[what] / recorded - 1
        print(f"{what:20} {counts[what]:8} recorded {recorded:8} {share:+7.1%}")
        if share > LIMIT:
            above.append(what)
        if share < -LIMIT:
            below.append(what)
    if above:
        print(f"over {LIMIT:.0%} more instructions than recorded: {', '.join(above)}. If that is meant: sh tools/compile test counts_renew")
    elif below:
        print(f"over {LIMIT:.0%} fewer instructions than recorded: {', '.join(below)}. Renew the record: sh tools/compile test counts_renew")
    return 1 if above else 0


if __name__ == "__main__":
    harness.script(main)
