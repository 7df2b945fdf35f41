#!/usr/bin/python3
"""Lets coxswain generate work while its processes are stopped, killed and told to end: what it prints is right.

Usage: generate_chaos.py BIN_DIR SOURCE_DIR [--minutes M] [--seed S]
"""

import collections
import json
import os
import random
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from harness import (MODEL, Failure, Process, all_gone, check, children, socket_files, kill_all, names_of,
                     temporary, test)

parser = harness.parser(__doc__, seed=True)
parser.add_argument("--minutes", type=float, default=0.3)
options = harness.begin(parser, adopt=True)
dice = random.Random(options.seed)

COXSWAIN = harness.program("coxswain")
WORKER_DIED = 3
# Longer than this is too slow to be waited for, in a sanitized build or on a busy machine.
STEP_SECONDS_MAX = 3.0
# Between looks at a command that is disturbed.
LOOK_SECONDS = 0.001

expected = {}  # prompt to what is said about it
# A step has so long; then it is run again, and fails for good when its rank is silent for as long once more. Some pauses
# are longer than the one and shorter than the two together. Set by learn.
step_seconds = 1.0
pauses = [(0, 0.05), (0, 0.3)]
seconds = {}  # ranks and number of prompts to how long the last run took


def file_of(prompts):
    return temporary("".join(prompt + "\n" for prompt in prompts))


def start(path, ranks, *more):
    return Process([COXSWAIN, "generate", "-n", str(ranks), "--model", MODEL, "--json", "--file", path, *more])


def learn():
    """From an undisturbed run."""
    prompts = harness.sums()[0]
    process = start(file_of(prompts), 1).finish(0)
    for prompt, line in zip(prompts, process.out.splitlines()):
        expected[prompt] = json.loads(line)
    check(len(expected) == len(set(prompts)), "the undisturbed run is not complete")
    check(all(said["prompt"] == prompt and said["finish"] == "stop" for prompt, said in expected.items()),
          "the undisturbed run is odd")
    process.close()
    global step_seconds
    begin = time.monotonic()
    start(file_of(prompts[:50]), 8).finish(0).close()
    # Several steps; none of them takes half as long as all together.
    step_seconds = max(step_seconds, (time.monotonic() - begin) / 2)
    if step_seconds <= STEP_SECONDS_MAX:
        pauses.append((step_seconds, 1.2 * step_seconds))
    return prompts


def check_text(process, prompts, complete, cut):
    """Lines in order, each one right; cut: the last one may end anywhere."""
    lines = process.out.split("\n")
    last = lines.pop()
    check(not last or cut, "the last line has no end: '%s'" % last)
    check(len(lines) <= len(prompts), "%d lines for %d prompts" % (len(lines), len(prompts)))
    done = 0
    for prompt, line in zip(prompts, lines):
        said = json.loads(line)
        if said["finish"] == "error" and not complete:
            check(said["prompt"] == prompt, "line %d is about another prompt: %s" % (done + 1, line))
            part = expected[prompt]["tokens"][:len(said["tokens"])]
            check(said["tokens"] == part, "line %d has wrong tokens: %s" % (done + 1, line))
            continue
        check(said == expected[prompt], "line %d: '%s', expected %s" % (done + 1, line, expected[prompt]))
        done += 1
    check(not complete or done == len(prompts), "%d of %d prompts are answered" % (done, len(prompts)))
    return done


def pause(process, until):
    """False: it has ended."""
    while time.monotonic() < until:
        harness.reap()
        if process.ended:
            return False
        time.sleep(LOOK_SECONDS)
    harness.reap()
    return not process.ended


def stop_and_continue(process, usual, count):
    """One after the other: what is silent together is late together."""
    for _ in range(dice.randint(1, 3)):
        if not pause(process, time.monotonic() + dice.choice((dice.uniform(0, 0.1), dice.uniform(0, usual)))):
            return
        pids = children(process.pid)
        if dice.random() < 0.2:
            pids = [process.pid]
        if not pids:
            continue
        pid = dice.choice(pids)
        if kill_all([pid], signal.SIGSTOP):
            count["stops"] += 1
            time.sleep(dice.uniform(*dice.choice(pauses)))
            kill_all([pid], signal.SIGCONT)


def one_run(prompts_all, count):
    prompts = dice.choices(prompts_all, k=dice.choice((1, 50, 500, 2000)))
    ranks = dice.choice((1, 2, 4, 8))
    more = ["--timeout", "%.3f" % step_seconds if step_seconds <= STEP_SECONDS_MAX else "60"]
    more += dice.choice(([], ["--sequences", "1"], ["--sequences", "7"])) if len(prompts) <= 50 else []
    size = (ranks, len(prompts))
    before = socket_files()
    begin = time.monotonic()
    path = file_of(prompts)
    process = start(path, ranks, *more)
    name = harness.own_name(process)
    what = dice.choice(("nothing", "pauses", "pauses", "worker killed", "worker killed",
                        "command killed", "command killed", "signal"))
    alive = True
    if what == "pauses":
        stop_and_continue(process, seconds.get(size, 1), count)
    elif what != "nothing":
        usual = seconds.get(size, 1)
        alive = pause(process, begin + dice.choice((0, dice.uniform(0, 0.1), dice.uniform(0, usual),
                                                    dice.uniform(0, usual))))
    victim = None
    number = dice.choice((signal.SIGINT, signal.SIGTERM))
    if what == "worker killed" and alive:
        victim = dice.choice(children(process.pid) or [None])
        if victim is not None and not kill_all([victim]):
            victim = None
    elif what == "command killed" and alive:
        alive = process.kill(signal.SIGKILL)
    elif what == "signal" and alive:
        alive = process.kill(number)
    status = process.wait()
    os.unlink(path)
    if status == 0 and what != "pauses":
        seconds[size] = time.monotonic() - begin
    count["runs"] += 1
    count[what] += 1

    killed = what == "command killed" and alive and status == -signal.SIGKILL
    right = {0}
    if what == "worker killed" and victim is not None:
        right = {0, WORKER_DIED}
    elif what == "signal" and alive:
        right = {0, 128 + number, -number}
    elif killed:
        right = {-signal.SIGKILL}
    check(status in right, "%s: status %d, expected %s" % (what, status, sorted(right)))
    # Of the signal itself it dies before it has asked for signals, and when it is through with everything.
    over = status == 0 or status == -number and process.out != ""
    done = check_text(process, prompts, over, killed)
    count["prompts"] += done
    count["status %d" % status] += 1
    if status == WORKER_DIED:
        check("(pid %d) was killed by signal 9 (Killed)" % victim in process.err, "who died, and how, is not told")
        check("rank " in process.err, "the rank is not told")
    if status == 0 and "steps were run again" in process.err:
        count["runs with steps again"] += 1
    check(all_gone(), "processes are left")
    left = names_of(name)
    check(not left or killed, "left in /dev/shm: %s" % left)
    sockets = socket_files()
    # A process that gave a reply, or ended by itself, had a control socket, and has removed what others left there.
    before = [] if done or status in (0, WORKER_DIED) else before
    own = [name + ".sock", "starting.new"] if killed else []
    check(set(sockets) <= set(before) | set(own), "sockets: %s, before: %s" % (sockets, before))
    check(len(set(sockets) - set(before)) <= 1, "sockets: %s, before: %s" % (sockets, before))
    check(not left or name + "_control" in left, "left without a control region: %s" % left)
    check(not (left and done), "left in /dev/shm although it was on its way: %s" % left)
    if left:
        count["names left"] += 1
        Process([COXSWAIN, "clean", name]).finish(0).close()
    process.close()


@test
def test_p2_p4_p7_generate_is_right_or_says_what_died():
    count = collections.Counter()
    prompts = learn()
    end = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end:
        try:
            one_run(prompts, count)
        except Failure as failure:
            raise Failure("run %d: %s" % (count["runs"] + 1, failure)) from None
    start(file_of(prompts[:1]), 1).finish(0).close()  # removes the socket of one that was killed last
    check(not socket_files(), "sockets in the end: %s" % socket_files())
    return count


if __name__ == "__main__":
    sys.exit(harness.main())
