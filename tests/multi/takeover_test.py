#!/usr/bin/python3
"""A coordinator is killed and another one started under the same name: it has the name, its predecessor's workers leave,
clients are told and can come again, and nothing is left behind. Requirements A23, A24 and P7.

Usage: takeover_test.py BIN_DIR SOURCE_DIR [--seed S] [--takeovers N] [TEST...]
"""

import functools
import json
import os
import random
import re
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
import rights  # pylint: disable=wrong-import-position
from harness import (LEGACY_WORKER, MODEL, Failure, Process, all_gone, check, children, descendants, socket_files,
                     kill_all, names_of, prompts_file, sums, test, wait_until)

parser = harness.parser(__doc__, seed=True)
parser.add_argument("--takeovers", type=int, default=25,
                    help="of one name of a group of Python workers, in a row")
options = harness.begin(parser, adopt=True)
dice = random.Random(options.seed)

COXSWAIN = harness.program("coxswain")
WORKER = harness.program("coxswain-worker")
SCRIPTED = harness.program("scripted_worker")
PREFIX = "coxover.%d." % os.getpid()
KILLED = -signal.SIGKILL
ORPHAN = 70  # how a worker that was started by hand ends with its coordinator


def command(*arguments, **env):
    return Process([COXSWAIN, *arguments], **env)


def close(*processes):
    for process in processes:
        process.close()


def gone(pids):
    """None of them is there any more, zombies included."""
    wait_until(lambda: not any(os.path.exists("/proc/%d" % pid) for pid in pids),
               "%s are gone" % pids)


class Group:
    """One life of a group. hand: its workers are started by hand, as processes of this script."""

    def __init__(self, name, ranks=2, arguments=(), workers=("--model", MODEL), hand=False, **env):
        self.name, self.ranks, self.hands = name, ranks, []
        self.process = command("run", "-n", str(ranks), "--name", name, *arguments, *(["--worker", "none"] if hand else []),
                               *workers, **env)
        if hand:
            wait_until(lambda: "waiting for" in self.process.err or self.process.ended,
                       "it waits for workers")
            self.hands = [self.worker() for _ in range(ranks)]

    def worker(self):
        return Process([WORKER, "--socket", self.name])

    def ready(self):
        def all_lines():
            check(not self.process.ended, "the group ended: " + self.process.describe())
            return len(self.process.out.splitlines()) == 2 + self.ranks
        wait_until(all_lines, "the group is ready")
        lines = [line.split() for line in self.process.out.splitlines()]
        check(lines[0] == ["name", self.name] and lines[1][0] == "socket", "odd lines: %s" % lines)
        self.pids = [int(line[3]) for line in lines[2:]]
        self.below = self.pids if self.hands else descendants(self.process.pid)
        return self

    def kill(self):
        """At once: the next start meets workers that are still dying."""
        check(self.process.kill(signal.SIGKILL), "it has ended by itself: " + self.process.describe())
        return self

    def left(self):
        """The coordinator was killed: its workers leave by themselves."""
        self.process.finish(KILLED)
        gone(self.below)
        for hand in self.hands:
            hand.finish(ORPHAN)
        close(self.process, *self.hands)

    def status(self):
        process = command("status", "--name", self.name, "--json").finish(0, 4)
        answer = json.loads(process.out)
        close(process)
        return answer

    def serves(self):
        """It is this group that answers, and it does what it is for."""
        answer = self.status()
        check(answer["pid"] == self.process.pid, "another coordinator answers: %s" % answer)
        check([rank["pid"] for rank in answer["ranks"]] == self.pids, "other workers: %s" % answer)
        check(socket_files() == [self.name + ".sock"], "sockets: %s" % socket_files())
        if answer["serving"]:
            answer = generate_on(self.name, "27+58=")
            check(answer.out == "27+58=85\n", "another text")
            answer.close()

    def stop(self):
        close(command("stop", "--name", self.name).finish(0))
        self.process.finish(0)
        for hand in self.hands:
            hand.finish(0)
        close(self.process, *self.hands)
        nothing_left(self.name)


def nothing_left(name):
    check(all_gone(), "processes are left")
    check(not names_of(name), "left in /dev/shm: %s" % names_of(name))
    check(not socket_files(), "sockets: %s" % socket_files())


def generate_on(name, *arguments, expected=(0,)):
    return command("generate", "--name", name, *arguments).finish(*expected)


# What a group can be, as arguments of Group.
KINDS = {
    "named": {},
    "sealed": {"arguments": ("--attach", "sealed")},
    "keep-names": harness.KEEP_NAMES,
    "external": {"hand": True},
    "external sealed": {"arguments": ("--attach", "sealed"), "hand": True},
    "wrapped": {"workers": ("--", "sh", "-c", SCRIPTED + ' "$@"; true', "sh")},
    "legacy": {"arguments": ("--legacy-workers", "--init", "model_id=/w"),
               "workers": ("--", "/usr/bin/python3", LEGACY_WORKER)},
}
if not rights.legacy_fits():
    KINDS = {kind: more for kind, more in KINDS.items() if not kind.startswith("legacy")}


def for_each_kind(function):
    @functools.wraps(function)
    def all_kinds():
        for kind, more in KINDS.items():
            try:
                function(PREFIX + kind.replace(" ", "-"), more)
            except Failure as failure:
                raise Failure("%s: %s" % (kind, failure)) from None
    return test(all_kinds)


@for_each_kind
def test_a23_p7_the_next_coordinator_has_the_name_and_the_old_workers_leave(name, more):
    group = Group(name, **more).ready()
    for _ in range(3):
        group.serves()
        old = group.kill()
        group = Group(name, **more)
        old.left()
        group.ready()
        check(not set(group.pids) & set(old.pids), "an old worker is in the new group")
    group.serves()
    group.stop()


@for_each_kind
def test_a23_p7_killed_while_its_workers_are_stopped(name, more):
    """All of them are stopped; the kernel ends those that the coordinator forked, the others continue to leave."""
    old = Group(name, **more).ready()
    for pid in old.below:
        os.kill(pid, signal.SIGSTOP)
    old.kill()
    old.process.finish(KILLED)
    group = Group(name, **more).ready()
    group.serves()
    kill_all(old.below, signal.SIGCONT)
    old.left()
    group.serves()
    group.stop()


@for_each_kind
def test_p7_killed_at_any_instant_of_its_start(name, more):
    """Each start meets what the one before has left; the last one is let be."""
    old = []
    for _ in range(6):
        group = Group(name, **more)
        time.sleep(dice.choice((0, dice.uniform(0, 0.02), dice.uniform(0, 0.1), dice.uniform(0, 0.4))))
        check(group.process.kill(signal.SIGKILL), "it has ended by itself: " + group.process.describe())
        old.append(group)
    group = Group(name, **more)
    for one in old:
        one.process.finish(KILLED)
        # One that attached in vain, at the control socket of a dead group, gets the reason.
        for hand in one.hands:
            hand.finish(ORPHAN, 1)
        close(one.process, *one.hands)
    group.ready()
    group.serves()
    # Not those below them: Python may start a resource tracker for a rank at any time.
    check(sorted(group.pids) == sorted(children(group.process.pid) or group.pids), "odd workers")
    group.stop()


@test
def test_a23_m7_trackers_of_dead_python_workers_remove_nothing_of_the_next_group():
    """Python's resource trackers unlink the regions of a killed group when the next one under the name has its own."""
    if not rights.legacy_fits():
        return None
    name = PREFIX + "trackers"
    workers = ("--", "/usr/bin/python3", LEGACY_WORKER)
    group = Group(name, arguments=("--legacy-workers", "--init", "model_id=/w"), workers=workers)
    counters = {"ready when killed": 0}
    for _ in range(options.takeovers):
        if dice.random() < 0.75:
            group.ready()
            counters["ready when killed"] += 1
            time.sleep(dice.uniform(0, 0.05))
        else:
            time.sleep(dice.uniform(0, 0.5))
        old = group.kill()
        group = Group(name, arguments=("--legacy-workers", "--init", "model_id=/w"), workers=workers)
        old.process.finish(KILLED)
        close(old.process)
    group.ready()
    group.serves()
    group.stop()
    return counters


@test
def test_b20_p2_killed_at_each_step_of_letting_workers_in():
    """A wait for the hello reply, or for the others, can be ended only by the connection."""
    if not harness.program_has("coxswain", b"control_socket.accepted"):
        harness.skip("this build has no fault points")
    for attach in "named", "sealed":
        more = {"arguments": ("--attach", attach)}
        for step in "socket.sent", "control_socket.accepted":
            for count in 1, 2:
                name = "%sstruck-%s" % (PREFIX, attach)
                # Of the coordinator alone: workers know nothing of it.
                group = Group(name, hand=True, COXSWAIN_FAULT="%s:kill:coordinator:%d" % (step, count), **more)
                group.process.finish(KILLED)
                for hand in group.hands:
                    hand.finish(ORPHAN, 1)
                close(group.process, *group.hands)
        group = Group(name, hand=True, **more).ready()
        group.serves()
        group.stop()


@for_each_kind
def test_a23_one_name_one_coordinator(name, more):
    group = Group(name, **more).ready()
    before = names_of(name)
    arguments = [word for word in group.process.arguments[1:]]
    for stopped in (False, True):
        if stopped:
            group.process.kill(signal.SIGSTOP)  # it does nothing, and has the name all the same
        second = command(*arguments).finish(1)
        check(re.search(r"the name '%s' is taken.* process %d\b" % (name, group.process.pid), second.err),
              "not told why: " + second.err)
        close(second)
    group.process.kill(signal.SIGCONT)
    check(names_of(name) == before, "names: %s, before: %s" % (names_of(name), before))
    group.serves()
    group.stop()


@functools.cache
def undisturbed(path):
    """The output of an undisturbed run; it is the same from every group."""
    process = command("generate", "--model", MODEL, "--file", path).finish(0)
    lines = process.out.splitlines()
    process.close()
    check(len(lines) == harness.read(path).count("\n"), "the undisturbed run is not complete")
    return lines


@for_each_kind
def test_a24_clients_get_the_reason_their_output_is_right_and_they_come_again(name, more):
    if "--" in more.get("workers", ()):
        return  # takes no prompts
    prompts = sums()[0] * 2
    path = prompts_file(len(prompts))
    group = Group(name, **more).ready()
    right = undisturbed(path)
    clients = [command("generate", "--name", name, "--file", path, *how)
               for how in ([], ["--json"], ["--quiet"])]
    wait_until(lambda: all("\n" in client.out for client in clients), "first lines")
    old = group.kill()
    group = Group(name, **more)
    for client, how in zip(clients, ("text", "json", "text")):
        client.finish(1)
        check("the group '%s' has ended, its coordinator is gone" % name in client.err and
              "run it again" in client.err, "not told: " + client.describe())
        lines = client.out.splitlines()
        if how == "json":
            said = [json.loads(line) for line in lines]
            check([one["prompt"] for one in said] == prompts, "not every prompt is told of")
            done = [one["finish"] == "stop" for one in said]
            check(any(done) and not all(done), "all or nothing")
            lines = [one["prompt"] + one["text"] for one in said if one["finish"] == "stop"]
        check(0 < len(lines) < len(right), "%d lines" % len(lines))
        rest = iter(right)
        check(all(line in rest for line in lines), "a line that is not right, or not in order")
        told = re.search(r"(\d+) of %d prompts were completed" % len(prompts), client.err)
        check(int(told[1]) >= len(lines), "%s answered, %d lines" % (told[1], len(lines)))
    old.left()
    group.ready()
    again = generate_on(name, "--file", prompts_file(200))
    check(again.out.splitlines() == right[:200], "another text from the next coordinator")
    close(again, *clients)
    group.stop()


@test
def test_a24_clients_come_and_go_through_many_coordinators():
    """What a client gets at any instant: the right text, or a status other than 0 and the reason."""
    name = PREFIX + "many"
    reasons = re.compile("no group '{0}' is alive|the group '{0}' has ended, its coordinator is gone|waits for its workers|"
                         "has not started yet|the group is still|is ending".format(re.escape(name)))
    count = {"answered": 0, "told": 0}
    clients, lives = [], 0
    group = Group(name)
    end = time.monotonic() + harness.PATIENCE
    while lives < 12 or min(count.values()) == 0:
        check(time.monotonic() < end, "not enough in time: %s" % count)
        if len(clients) < 2:
            clients.append(command("generate", "--name", name, "27+58=", "1+2="))
        harness.reap()
        for client in [client for client in clients if client.ended]:
            status = client.wait()
            if status == 0:
                check(client.out == "27+58=85\n1+2=3\n", "another text: " + client.describe())
                count["answered"] += 1
            else:
                check(status in (1, 2) and reasons.search(client.err), "no reason: " + client.describe())
                check(set(client.out.splitlines()) <= {"27+58=85", "1+2=3"}, "another text: " + client.describe())
                count["told"] += 1
            clients.remove(client)
            close(client)
        # On a busy machine no coordinator may live long enough to answer: after some, one does.
        if dice.random() < 0.05 and (lives < 6 or count["answered"] > 0):
            old = group.kill()
            old.process.finish(KILLED)
            lives += 1
            group = Group(name)
            close(old.process)
        time.sleep(0.005)
    for client in clients:
        client.finish(0, 1, 2)
    close(*clients)
    group.ready()
    group.serves()
    group.stop()
    return count


@test
def test_a24_in_the_gap_commands_say_that_there_is_no_group():
    name = PREFIX + "gap"
    group = Group(name).ready().kill()
    group.left()
    before = socket_files()
    for arguments in (["status"], ["stop"], ["status", "--json"], ["generate", "1+1="],
                      ["generate", "--json", "1+1="]):
        process = command(*arguments, "--name", name).finish(1 if arguments[0] == "status" else 2)
        check("no group '%s' is alive" % name in process.err, "not told: " + process.describe())
        if arguments == ["status", "--json"]:
            told = json.loads(process.out)
            check(told["ok"] is False and "no group" in told["error"], "another object: " + process.out)
        else:
            check(process.out == "", "it prints something: " + process.out)
        close(process)
    check(socket_files() == before == [name + ".sock"], "sockets: %s, before: %s" % (socket_files(), before))
    # A group that takes the name removes the dead one's socket.
    group = Group(name).ready()
    group.serves()
    group.stop()


if __name__ == "__main__":
    sys.exit(harness.main())
