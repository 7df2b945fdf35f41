#!/usr/bin/python3
"""Kills any subset of a group at any instant, again and again: nothing is left, and no start trips over leftovers.

Usage: chaos.py BIN_DIR SOURCE_DIR [--kills N] [--seed S] [--attach named|sealed] [TEST...]
"""

import collections
import os
import random
import re
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from harness import (MODEL, Failure, Process, all_gone, bytes_of, check, descendants, socket_files,
                     kill_all, names, names_of, test, wait_until)

parser = harness.parser(__doc__, seed=True)
parser.add_argument("--kills", type=int, default=200)
parser.add_argument("--attach", choices=("named", "sealed"), default="named")
options = harness.begin(parser, adopt=True)
dice = random.Random(options.seed)
SEALED = options.attach == "sealed"  # then nothing has a name, but the socket of the group

COXSWAIN = harness.program("coxswain")
SCRIPTED = harness.program("scripted_worker")
PREFIX = "coxchaos.%d." % os.getpid()
SAME = PREFIX + "same"
# A group of eight by default, and a little for pages that are half used.
GROUP_BYTES_MAX = (16 << 20) + (1 << 20)

WORKERS = {
    "reference": ["--model", MODEL],
    "scripted": ["--", SCRIPTED],
    "wrapped": ["--", "sh", "-c", SCRIPTED + ' "$@"; true', "sh"],
    "never": ["--", "sh", "-c", "echo started >&2; exec sleep 1000"],
}


def run_of(name, ranks, workers, *more):
    return [COXSWAIN, "run", "-n", str(ranks), "--name", name, "--attach", options.attach, *more, *WORKERS[workers]]


def start(name, ranks, workers, *more, **env):
    return Process(run_of(name, ranks, workers, *more), **env)


def clean(*arguments):
    return Process([COXSWAIN, "clean", *arguments])


def finish(process, *expected):
    process.finish(*expected).close()


def await_lines(process, number, text, count):
    def said():
        if process.text(number).count(text) >= count:
            return True
        check(not process.ended, "it ended before it said '%s'" % text)
        return False
    wait_until(said, "it said '%s'" % text)


def objects_of(name):
    """The very objects behind the names, not others of the same name."""
    found = {}
    for one in names_of(name):
        try:
            found[one] = os.stat(os.path.join(harness.SHM, one)).st_ino
        except FileNotFoundError:
            pass
    return found


def check_left(name, may_be_left):
    left = names_of(name)
    check((may_be_left and not SEALED) or not left, "left in /dev/shm: %s" % left)
    # Made first and removed last: without it neither clean nor the next start would know of the others.
    check(not left or name + "_control" in left, "left without a control region: %s" % left)
    check(bytes_of(name) <= GROUP_BYTES_MAX, "left in /dev/shm: %d bytes" % bytes_of(name))
    return left


def check_sockets(before, *allowed):
    """What is there was there before, or is allowed; there is one new socket at most."""
    left = socket_files()
    check(set(left) <= set(before) | set(allowed), "sockets: %s, before: %s" % (left, before))
    check(len(set(left) - set(before)) <= 1, "sockets: %s, before: %s" % (left, before))
    return len(left)


def instant():
    """From before the program is executed to long after the start."""
    return dice.choice((0, dice.uniform(0, 0.01), dice.uniform(0, 0.05), dice.uniform(0, 0.15), dice.uniform(0, 0.6)))


def one_round(number, count):
    name = SAME if dice.random() < 0.5 else PREFIX + str(number)
    ranks, workers = dice.choice((1, 2, 4, 8)), dice.choice(("reference", "scripted", "wrapped"))
    keeps = not SEALED and dice.random() < 0.25
    before, names_before = socket_files(), objects_of(name)
    process = start(name, ranks, workers, **(harness.KEEP_NAMES if keeps else {}))
    until = time.monotonic() + instant()
    time.sleep(max(0, until - time.monotonic() - 0.0005))
    while time.monotonic() < until:
        pass
    complete = process.out.startswith("name ")
    others = descendants(process.pid)
    whom = dice.choice(("coordinator", "workers", "some", "all"))
    victims = dice.sample(others, dice.randint(1, len(others))) if others and whom in ("workers", "some") else []
    if whom == "all":
        victims = list(others)
    if whom != "workers":
        victims.append(process.pid)
    dice.shuffle(victims)
    killed = kill_all(victims)
    count["kills"] += killed
    count["rounds, " + ("complete" if complete else "starting")] += 1

    if not victims:
        process.kill(signal.SIGTERM)
    status = process.wait()
    if not victims:
        check(status in (0, 128 + signal.SIGTERM, -signal.SIGTERM), "told to end: status %d" % status)
    elif status == -signal.SIGKILL:
        check(whom != "workers", "the coordinator was killed, but not by us")
        count["coordinators"] += 1
    else:
        # Also when its turn came when it had ended of the death of a worker.
        check(victims != [process.pid], "not killed")
        check(status == 3, "a worker was killed: status %d, expected 3" % status)
        check(re.search(r"rank \d+ \(pid \d+", process.err), "a worker was killed, and no rank is named")
        count["deaths told"] += 1
    check(all_gone(), "processes are left")
    # A process that was complete, or ended by itself, had a control socket, and has removed what others left there.
    had_socket = complete or status in (0, 3)
    own = [name + ".sock", "starting.new"] if status == -signal.SIGKILL else []
    count["sockets left"] += check_sockets([] if had_socket else before, *own)
    # Told to end before it asked for signals, or while it loaded the model, a command has not looked at what others left.
    untouched = status in (-signal.SIGTERM, 128 + signal.SIGTERM) and objects_of(name) == names_before
    may_be_left = status == -signal.SIGKILL and (keeps or not complete) or untouched
    left = check_left(name, may_be_left)
    count["groups with names left"] += bool(left)
    process.close()
    if left and name != SAME:
        if dice.random() < 0.5:
            finish(clean(name), 0)
            count["cleaned"] += 1
        else:
            undisturbed(name)
            count["started over leftovers"] += 1
        check(not names_of(name), "left in /dev/shm: %s" % names_of(name))
        check(not socket_files(), "sockets: %s" % socket_files())
    elif name == SAME:
        count["started over leftovers"] += bool(left)  # by the next round of this name
    return killed


def undisturbed(name):
    process = start(name, 2, "scripted")
    await_lines(process, 0, "name ", 1)
    process.kill(signal.SIGTERM)
    finish(process, 0)


@test
def test_p7_b4_nothing_is_left_whichever_process_is_killed_whenever():
    count = collections.Counter()
    number = 0
    while count["kills"] < options.kills:
        number += 1
        try:
            one_round(number, count)
        except Failure as failure:
            raise Failure("round %d: %s" % (number, failure)) from None
        if number % 10 == 0:
            undisturbed(SAME)
    finish(clean(SAME), 0)
    check(not names(PREFIX), "left in the end: %s" % names(PREFIX))
    check(not socket_files(), "sockets in the end: %s" % socket_files())
    return count


def leave_names(name, ranks):
    """A group that has all its names, and all its processes are dead."""
    process = start(name, ranks, "never")
    await_lines(process, 1, "started", ranks)
    kill_all([process.pid] + descendants(process.pid))
    process.wait()
    check(all_gone(), "processes are left")
    process.close()


@test
def test_p7_b53_restarts_do_not_fill_dev_shm():
    name = PREFIX + "restart"
    sizes = []
    for _ in range(15):
        leave_names(name, 4)
        sizes.append((len(check_left(name, True)), bytes_of(name)))
        check(socket_files() == [name + ".sock"], "sockets: %s" % socket_files())
    check((sizes[0][0] > 0) != SEALED and len(set(sizes)) == 1, "names and bytes after each restart: %s" % sizes)
    finish(clean(name), 0)
    check(not names_of(name), "left in /dev/shm: %s" % names_of(name))
    check(not socket_files(), "sockets: %s" % socket_files())


@test
def test_p7_b54_cleaners_and_starters_at_once():
    count = collections.Counter()
    bystander = start(PREFIX + "bystander", 2, "scripted", "--attach", "named", **harness.KEEP_NAMES)
    await_lines(bystander, 0, "name ", 1)
    kept = names_of(PREFIX + "bystander")
    name = PREFIX + "race"
    for _ in range(10):
        orphan = start(name, 3, "never")
        await_lines(orphan, 1, "started", 3)
        victims = [orphan.pid] + descendants(orphan.pid)
        kill_all(victims)
        for pid in victims:
            while os.path.exists("/proc/%d" % pid) and harness.reap():
                time.sleep(0.001)
        orphan.close()
        kinds = ["clean"] * 3 + ["start"] * 2 + ["killed"] * 2
        dice.shuffle(kinds)
        racers = []
        for kind in kinds:
            if kind == "start":
                process = Process(run_of(name, 2, "scripted"))
            else:
                process = Process([COXSWAIN, "clean", name, PREFIX + "bystander"])
            racers.append((kind, process))
        time.sleep(dice.uniform(0, 0.004))
        for kind, process in racers:
            if kind == "killed":
                process.kill(signal.SIGKILL)
        for kind, process in racers:
            if kind == "clean":
                finish(process, 1)  # since the bystander lives
            elif kind == "killed":
                finish(process, 1, -signal.SIGKILL)
        starters = [process for kind, process in racers if kind == "start"]
        # One has the name, or both had it one after the other; the other one got an error.
        wait_until(lambda s=starters: all(one.out.startswith("name ") or one.ended for one in s),
                   "each start gets somewhere")
        running = [process for process in starters if process.out.startswith("name ")]
        check(running, "nobody could start")
        count["starts"] += len(running)
        for process in starters:
            if process in running:
                process.kill(signal.SIGTERM)
                finish(process, 0)
            else:
                check(re.search("taken|removed by another", process.err), "refused for another reason")
                finish(process, 1)
        check(names_of(PREFIX + "bystander") == kept, "names of a live group are gone")
        check(not names_of(name) or name + "_control" in names_of(name), "left: %s" % names_of(name))
        cleaner = clean(name)
        finish(cleaner, 0)
        check(not names_of(name), "left in /dev/shm: %s" % names_of(name))
        check(socket_files() == [PREFIX + "bystander.sock"], "sockets: %s" % socket_files())
    check(len(descendants(bystander.pid)) == 2, "workers of a bystander are gone")
    bystander.kill(signal.SIGTERM)
    finish(bystander, 0)
    for group in (name, PREFIX + "bystander"):
        check(not names_of(group), "left in the end: %s" % names_of(group))
    return count


if __name__ == "__main__":
    sys.exit(harness.main())
