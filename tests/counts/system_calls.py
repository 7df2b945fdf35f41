#!/usr/bin/python3
"""System calls of the hot path, by strace: system_calls.py PROGRAM

Runs PROGRAM (hot_path.c) with two ranks for each kind of attach, and looks at all that its processes ask of the kernel between
the first and the last of the counted rounds, each from submit to handler: nothing in every round but to yield while a waiter
spins, to sleep and to wake, and no more of the last two than the protocol needs. Exit status 77 where processes may not be traced."""
import collections
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position

ROUNDS = 64  # as in hot_path.c
RANKS = 2
MARKS_PER_PART = 2
# A waiter checks again this often, and sends rewakes to sleeping ranks: COX_SLICE_NS in coordinator/collector/collector.h.
SLICE_S = 0.05
# Of a rank that has been silent for a slice, the coordinator reads in /proc whether its process is ending.
OF_A_SLICE = ("openat", "read", "close")
# So often a call may be seen that is none of a round's: what the start of a group leaves to threads that get to it late.
STRAY = ROUNDS // 8
# In one round, at most. Named: each rank is woken for the request, and wakes with its reply; a woken thread has slept. Sealed: one
# wake for all ranks, and one by the last of them; between the word and the wake a thread may fall asleep on the new
# word, and sleeps twice.
LIMITS = {
    "named": {"wake": 2 * RANKS, "wait": 2 * RANKS},
    "sealed": {"wake": 2, "wait": 2 * (RANKS + 1)},
}
LINE = re.compile(r"(\d+) +(\d+\.\d+) (\w+)\((.*)")


def kind_of(name, arguments):
    """wake and wait: of words that processes share; all other calls have their names."""
    operation = re.search(r"\bFUTEX_(WAIT|WAKE)(_BITSET)?(_PRIVATE)?\b", arguments)
    if name != "futex" or not operation:
        return name
    return "futex of one process" if operation[3] else operation[1].lower()


def trace(program, attach):
    """All calls in the order of their beginning: thread, time, name, arguments."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "calls")
        run = subprocess.run(["strace", "-f", "-qq", "-ttt", "-o", path, program, attach, str(RANKS)], timeout=50)
        if run.returncode:
            raise SystemExit(f"{program} {attach} {RANKS} ended with {run.returncode}")
        matches = (LINE.match(line) for line in path.read_text().splitlines())
        return [(m[1], float(m[2]), m[3], m[4]) for m in matches if m]


def settled(calls):
    """Without what a thread does before it has slept once: a rank answers on one channel while it still starts the others."""
    asleep = set()
    for call in calls:
        if call[0] in asleep or call[2] == "getppid":
            yield call
        elif re.match(r"futex\(.*FUTEX_WAIT|poll\(.*, -1\b", f"{call[2]}({call[3]}"):
            asleep.add(call[0])


def parts(calls):
    """Of opaque requests and of steps: the calls between two marks, and the seconds. And whether the clock is among them
    because it takes a call here."""
    marks = collections.defaultdict(list)
    for i, call in enumerate(calls):
        if call[2] == "getppid":
            marks[call[0]].append(i)
    thread, places = max(marks.items(), key=lambda item: len(item[1]))
    if len(places) != 2 * MARKS_PER_PART * 2:
        raise SystemExit(f"{len(places)} marks of thread {thread}, not {2 * MARKS_PER_PART * 2}")
    clock = any(call[0] == thread and call[2] == "clock_gettime" for call in calls[places[0]:places[1]])
    between = [(places[1], places[2]), (places[5], places[6])]
    return clock, [(calls[first + 1:last], calls[last][1] - calls[first][1]) for first, last in between]


def main():
    program, failed = sys.argv[1], False
    try:
        subprocess.run(["strace", "-f", "-qq", "-o", "/dev/null", "true"], check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        harness.skip(f"no process may be traced here: {e}")
    for attach, limits in LIMITS.items():
        clock, counted = parts(list(settled(trace(program, attach))))
        for what, (calls, seconds) in zip(("opaque", "step"), counted):
            counts = collections.Counter(kind_of(name, arguments) for _, _, name, arguments in calls
                                         if not (clock and name == "clock_gettime"))
            # How many yields a waiter needs depends on scheduling.
            counts.pop("sched_yield", None)
            late = 4 * RANKS * int(seconds / SLICE_S + 1)
            for kind, limit in limits.items():
                count = counts.pop(kind, 0)
                print(f"{attach} {what} {kind:4} {count / ROUNDS:5.2f} a round, at most {limit}")
                failed |= count > limit * ROUNDS + late
            for call, count in counts.items():
                print(f"{attach} {what} {call} {count} times")
                failed |= count > STRAY + (late if call in OF_A_SLICE else 0)
    return 1 if failed else 0


if __name__ == "__main__":
    harness.script(main)
