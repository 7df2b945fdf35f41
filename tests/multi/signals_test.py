#!/usr/bin/python3
"""A second signal, and a third, while a group is stopped or started: nothing is waited for any more, and nothing is left
of names, sockets and processes. Requirements P7 and M15.

Usage: signals_test.py [--seed S] [--rounds N] BIN_DIR SOURCE_DIR [TEST...]
"""

import functools
import os
import random
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
import rights  # pylint: disable=wrong-import-position
from harness import (LEGACY_WORKER, MODEL, Failure, Process, all_gone, check, descendants, socket_files,
                     kill_all, names_of, test, wait_until)

parser = harness.parser(__doc__, seed=True)
parser.add_argument("--rounds", type=int, default=6, help="of each test with each kind of group")
options = harness.begin(parser, adopt=True)
dice = random.Random(options.seed)

COXSWAIN = harness.program("coxswain")
SCRIPTED = harness.program("scripted_worker")
PREFIX = "coxsignals.%d." % os.getpid()
ENDINGS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
RANKS = 2

# What a group can be: options of run, and what its workers are.
KINDS = {
    "keep-names": ["--model", MODEL],
    "keep-names wrapped": ["--", "sh", "-c", "trap '' TERM; " + SCRIPTED + ' "$@"; true', "sh"],
    "sealed": ["--attach", "sealed", "--model", MODEL],
    "legacy": ["--legacy-workers", "--init", "model_id=/w", "--", "/usr/bin/python3", LEGACY_WORKER],
    "legacy deaf": ["--legacy-workers", "--init", "model_id=/w", "--", "sh", "-c",
                    "trap '' TERM; exec /usr/bin/python3 " + LEGACY_WORKER + ' "$@"', "sh"],
}
if not rights.legacy_fits():
    KINDS = {kind: more for kind, more in KINDS.items() if not kind.startswith("legacy")}


def start(kind):
    name = PREFIX + kind.replace(" ", "-")
    return Process([COXSWAIN, "run", "-n", str(RANKS), "--name", name, *KINDS[kind]],
                   **(harness.KEEP_NAMES if kind.startswith("keep-names") else {}))


def await_ready(process):
    def is_ready():
        if len(process.out.splitlines()) >= 2 + RANKS:
            return True
        check(not process.ended, "the group is not ready: " + process.describe())
        return False
    wait_until(is_ready, "the group is ready")


def await_nothing(process, kind):
    status = process.wait()
    check(status in [0, *(-number for number in ENDINGS), *(128 + number for number in ENDINGS)],
          "status %s: %s" % (status, process.describe()))
    left = names_of(PREFIX + kind.replace(" ", "-"))
    check(not left, "%d names are left: %s" % (len(left), left[:3]))
    check(not socket_files(), "a socket is left: %s" % socket_files())
    check(all_gone(), "processes are left")
    process.close()
    return status


def for_each_kind(function):
    @functools.wraps(function)
    def all_kinds():
        counters = {}
        for kind in KINDS:
            for round_number in range(options.rounds):
                try:
                    status = function(kind, round_number)
                except Failure as failure:
                    raise Failure("%s, round %d: %s" % (kind, round_number, failure)) from None
                counters["status %d" % status] = counters.get("status %d" % status, 0) + 1
        return counters
    return test(all_kinds)


@for_each_kind
def test_p7_m15_a_second_signal_during_a_stop_leaves_nothing(kind, round_number):
    """The workers do not end: they are stopped, and the stop waits for them in vain."""
    process = start(kind)
    await_ready(process)
    below = descendants(process.pid)
    kill_all(below, signal.SIGSTOP)
    process.kill(dice.choice(ENDINGS))
    # What is not stopped for good ends before the second.
    delay = (0, 0.0005, 0.01, 0.1, 0.5, 2.5)[round_number % 6]
    time.sleep(dice.uniform(delay / 2, delay))
    process.kill(dice.choice(ENDINGS))
    time.sleep(dice.choice((0, dice.uniform(0, 0.002), dice.uniform(0, 0.05))))
    process.kill(dice.choice(ENDINGS))
    return await_nothing(process, kind)


@for_each_kind
def test_p7_m15_a_second_signal_at_any_instant_leaves_nothing(kind, _):
    """Of the start, of the life, of an orderly stop."""
    process = start(kind)
    time.sleep(dice.choice((dice.uniform(0, 0.02), dice.uniform(0, 0.1), dice.uniform(0, 0.6))))
    for _ in range(3):
        process.kill(dice.choice(ENDINGS))
        time.sleep(dice.choice((0, dice.uniform(0, 0.002), dice.uniform(0, 0.05))))
    return await_nothing(process, kind)


if __name__ == "__main__":
    sys.exit(harness.main())
