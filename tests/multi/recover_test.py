#!/usr/bin/python3
"""Recovery as users see it: ranks that die under prompts, recovery commands, what is refused.

Usage: recover_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
import rights  # pylint: disable=wrong-import-position
from groups import RESTART, Group  # pylint: disable=wrong-import-position
from harness import (LEGACY_WORKER, MODEL, TIMEOUT, Result, check, expect, finish, names_with,
                     program, prompts_file, run, start, status_of, temporary, test, undisturbed,
                     wait_until)

harness.begin(harness.parser(__doc__))
PROMPT_COUNT = 900  # whose output is more than a pipe of a page holds
PROMPTS = prompts_file(PROMPT_COUNT)
PIPE_SIZE = 4096


class Reader:
    """The output of a generate that writes into a small pipe: it stands still until it is read."""

    def __init__(self, process):
        self.process = process
        self.fd = process.stdout.fileno()
        fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        self.text = ""

    def await_full(self):
        """It waits inside a write, in the midst of its prompts."""
        def is_full():
            waiting = struct.unpack("i", fcntl.ioctl(self.fd, termios.FIONREAD, b"\0" * 4))[0]
            return waiting > PIPE_SIZE - 32
        wait_until(is_full, "a full pipe")
        check(self.process.poll() is None, "it has ended already")

    def take(self):
        more = os.read(self.fd, 512).decode()
        self.text += more
        return len(more)

    def rest(self):
        while self.take():
            pass
        _, err = self.process.communicate(timeout=TIMEOUT)
        return Result(self.process.returncode, self.text, err, self.process.pid)


def kill(name, rank, number=signal.SIGKILL):
    os.kill(status_of(name)["ranks"][rank]["pid"], number)


def recover(name, *words):
    return run(["recover", *words, "--name", name])


def ends_as(name, condition):
    wait_until(lambda: condition(status_of(name)), "the status")


def expected():
    return undisturbed("--model", MODEL, "--file", PROMPTS)


def check_partial(result):
    """What it has printed is right, in order; cancelled prompts have no line."""
    lines = iter(expected().splitlines())
    check(all(line in lines for line in result.out.splitlines()), "another text", result)


def over_killed_ranks(arguments, name, ranks):
    """Prompts of a group that loses a rank while they stand still, and others while they run."""
    process = start(["generate", "--name", name, "--file", PROMPTS, *arguments])
    reader = Reader(process)
    reader.await_full()
    for rank in (ranks - 1, 0, ranks // 2):
        incarnation = status_of(name)["ranks"][rank]["incarnation"]
        kill(name, rank)
        ends_as(name, lambda now, r=rank, g=incarnation: now["ranks"][r]["incarnation"] > g and not now["recovery"]["doing"]
                and now["ranks"][r]["liveness"] == "alive")
        for _ in range(3):
            reader.take()
    return reader.rest()


def dies_amid_prompts(group, rank):
    """A client whose prompts wait for this rank, which then dies. (Behind a full pipe a group may be done with all of
    them, if the test is late.)"""
    group.stopped(rank)
    client = start(["generate", "--name", group.name, "--file", PROMPTS])
    wait_until(lambda: group.status()["channels"][0]["in_flight"], "a step")
    kill(group.name, rank)
    return client


# ---- ranks that die ----


@test
def test_p8_prompts_of_clients_go_on_over_killed_ranks():
    for ranks in (1, 2, 4, 8):
        with Group(ranks, RESTART) as group:
            result = expect(over_killed_ranks([], group.name, ranks), 0)
            check(result.out == expected(), "another text on %d ranks" % ranks, result)
            check(group.status()["recovery"]["recent_deaths"] >= 3, "no deaths: %s" % group.status())
            expect(group.stop(), 0)
            expect(finish(group.process), 0, "replaced by process")


@test
def test_p8_sampled_tokens_are_the_same_over_a_killed_rank():
    sampled = ["--temperature", "2", "--seed", "5"]
    alone = expect(run(["generate", "-n", "2", "--model", MODEL, "--file", PROMPTS, *sampled]), 0)
    with Group(2, RESTART) as group:
        result = expect(over_killed_ranks(sampled, group.name, 2), 0)
        check(result.out == alone.out, "other tokens", result)
        expect(group.stop(), 0)


@test
def test_p8_all_ranks_are_started_again():
    with Group(2, ("--on-death", "restart-all")) as group:
        result = expect(over_killed_ranks([], group.name, 2), 0)
        check(result.out == expected(), "another text", result)
        expect(group.stop(), 0)
        expect(finish(group.process), 0, "was ended with the others: replaced by process")


@test
def test_p8_a_death_without_a_policy_ends_all_as_before():
    process = start(["generate", "-n", "2", "--model", MODEL, "--file", PROMPTS])
    reader = Reader(process)
    reader.await_full()
    kill(harness.own_name(process), 1)
    result = expect(reader.rest(), 3, "rank 1", "killed by signal 9")
    check("replaced" not in result.err, "it was replaced", result)
    check_partial(result)


@test
def test_a_crash_loop_ends_and_says_how_often_it_was_tried():
    worker = temporary("#!/bin/sh\nif [ \"$COXSWAIN_INCARNATION\" != 1 ]; then echo no device for me >&2; exit 7; fi\n"
                       "exec %s \"$@\"\n" % program("coxswain-worker"), 0o700)
    with Group(2, ("--worker", worker, "--on-death", "restart,3/60")) as group:
        client = dies_amid_prompts(group, 1)
        told = ("rank 1", "exited with status 7", "no device for me", "4 deaths within 60 s", "after 3 tries")
        expect(finish(group.process), 3, *told)
        check_partial(expect(finish(client), 3, *told))
    with Group(2, ("--worker", worker, "--on-death", "restart,2/60")) as group:
        kill(group.name, 0)
        expect(finish(group.process), 3, "3 deaths within 60 s", "rank 0", "exited with status 7", "the group ends")
        check(not names_with(group.name), "left in /dev/shm")


@test
def test_a_group_waits_for_the_order_to_replace_a_rank():
    with Group(4, ("--on-death", "wait")) as group:
        client = start(["generate", "--name", group.name, "--file", PROMPTS])
        reader = Reader(client)
        reader.await_full()
        kill(group.name, 2)
        ends_as(group.name, lambda now: "recover restart --rank 2" in (now["recovery"]["doing"] or ""))
        check(group.status()["recovery"]["on_death"] == "wait", "another policy")
        result = expect(recover(group.name, "restart", "--rank", "1"), 0)
        check("rank 1: ok: it lives" in result.out, "no such line", result)
        result = expect(recover(group.name, "restart"), 0)
        check("rank 2: ok: replaced by process" in result.out and result.out.count("\n") == 1, "other lines", result)
        now = group.status()
        check(now["recovery"]["doing"] is None and now["ranks"][2]["incarnation"] == 2, "not replaced: %s" % now)
        check([rank["pid"] for rank in now["ranks"] if rank["rank"] != 2] == group.pids[:2] + group.pids[3:],
              "others are new")
        result = expect(reader.rest(), 0)
        check(result.out == expected(), "another text", result)
        expect(group.stop(), 0)


@test
def test_a_group_that_waits_can_be_stopped():
    with Group(2, ("--on-death", "wait")) as group:
        client = dies_amid_prompts(group, 1)
        ends_as(group.name, lambda now: now["recovery"]["doing"])
        expect(group.stop(), 0)
        result = finish(client)
        check(result.status != 0, "it went on", result)
        check_partial(result)
        expect(finish(group.process), 0)


@test
def test_p8_a_hand_started_rank_is_waited_for():
    name = harness.fresh_name("hand")
    group = start(["run", "--worker", "none", "-n", "2", "--name", name, "--model", MODEL, *RESTART])
    workers = []

    def worker():
        workers.append(start(["--socket", name], command="coxswain-worker",
                             stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
    try:
        check("waiting for 2 workers" in group.stderr.readline(), "another line")
        worker()
        worker()
        for _ in range(4):
            group.stdout.readline()
        reader = Reader(start(["generate", "--name", name, "--file", PROMPTS]))
        reader.await_full()
        dead = status_of(name)["ranks"][1]["pid"]
        os.kill(dead, signal.SIGKILL)
        hint = "waiting for rank 1 to attach: coxswain-worker --socket %s" % name
        ends_as(name, lambda now: now["recovery"]["doing"] == hint)
        for words in (["pause"], ["restart"], ["restart", "--rank", "1"], ["restart", "--rank", "1", "--kill"]):
            expect(recover(name, *words, "--timeout", "0.1"), 3, "its turn did not come", hint)
        worker()
        ends_as(name, lambda now: not now["recovery"]["doing"])
        result = expect(reader.rest(), 0)
        check(result.out == expected(), "another text", result)
        check(status_of(name)["ranks"][1]["pid"] == workers[2].pid, "another process")
        # It ends also while it waits.
        os.kill(workers[2].pid, signal.SIGKILL)
        ends_as(name, lambda now: now["recovery"]["doing"] == hint)
        expect(run(["stop", "--name", name]), 0)
        expect(finish(group), 0, hint, "replaced by process %d (incarnation 2)" % workers[2].pid)
    finally:
        for process in [group, *workers]:
            if process.poll() is None:
                process.kill()
            process.communicate()


@test
def test_p8_legacy_groups_are_started_again_as_a_whole_and_say_so():
    if not rights.legacy_fits():
        skip("legacy workers")
    worker = temporary("#!/bin/sh\nexec /usr/bin/python3 %s \"$@\"\n" %
                       LEGACY_WORKER, 0o700)
    prompt = ["--quiet", "--tokens", "--max-tokens", "2", "1 5"]
    with Group(2, ("--legacy-workers", "--worker", worker, *RESTART)) as group:
        result = expect(group.generate(*prompt), 0)
        check(result.out == "1 5 6 7\n", "wrong tokens", result)
        kill(group.name, 1)
        result = expect(group.generate(*prompt), 0)
        check(result.out == "1 5 6 7\n", "wrong tokens", result)  # by workers that have not answered before
        check([rank["incarnation"] for rank in group.status()["ranks"]] == [2, 2], "not all: %s" % group.status())
        check(expect(recover(group.name, "restart", "--rank", "0", "--kill"), 0).out.startswith("rank 0: ok: replaced"),
              "another line")
        expect(group.stop(), 0)
        result = expect(finish(group.process), 0, "rank 0 was ended with the others: replaced by process")
        check(result.err.count("a death starts all of them again") == 1, "not said once", result)


# ---- commands ----


@test
def test_a26_prompts_stand_still_between_pause_and_start():
    for commands in (["pause", "start"], ["pause-net", "clear", "reinit", "clear", "start"], ["pause", "reinit", "start"]):
        with Group(2) as group:
            client = start(["generate", "--name", group.name, "--file", PROMPTS])
            reader = Reader(client)
            reader.await_full()
            for command in commands:
                result = expect(recover(group.name, command), 0)
                check(result.out == "rank 0: ok\nrank 1: ok\n", "other lines", result)
                if command != "clear":
                    result = expect(recover(group.name, command), 0)
                    check(result.out == "rank 0: ok: already\nrank 1: ok: already\n", "not idempotent", result)
                reader.take()
            check(group.status()["engine_state"] in ("NORMAL", "BUSY"), "another state")
            result = expect(reader.rest(), 0)
            check(result.out == expected(), "another text", result)
            check([rank["pid"] for rank in group.status()["ranks"]] == group.pids, "ranks were replaced")
            expect(group.stop(), 0)


@test
def test_a26_a_failed_pause_holds_prompts_back_until_start():
    with Group(2) as group:
        harness.stop_process(group.pids[1])
        expect(recover(group.name, "pause", "--timeout", "0.2"), 3, "rank 1")
        ends_as(group.name, lambda now: "some ranks are paused" in (now["recovery"]["doing"] or ""))
        os.kill(group.pids[1], signal.SIGCONT)
        client = start(["generate", "--name", group.name, "27+58="])
        ends_as(group.name, lambda now: now["serving"]["running"] == 1)
        result = expect(recover(group.name, "start"), 0)
        check(result.out == "rank 0: ok\nrank 1: ok\n", "other lines", result)
        result = expect(finish(client), 0)
        check(result.out == "27+58=85\n", "another text", result)
        expect(group.stop(), 0)


@test
def test_a26_a_paused_group_computes_nothing():
    with Group(2) as group:
        expect(recover(group.name, "pause"), 0)
        published = group.status()["channels"][0]["published"]
        client = start(["generate", "--name", group.name, "27+58="])
        ends_as(group.name, lambda now: now["serving"]["running"] == 1)
        check(group.status()["engine_state"] == "PAUSE", "another state")
        expect(recover(group.name, "reinit"), 0)
        check(group.status()["engine_state"] == "READY", "another state")
        check(group.status()["channels"][0]["published"] == published, "a step was published")
        expect(recover(group.name, "start"), 0)
        result = expect(finish(client), 0)
        check(result.out == "27+58=85\n", "another text", result)
        expect(group.stop(), 0)


@test
def test_p8_a_paused_group_whose_rank_dies_stays_paused():
    with Group(2, RESTART) as group:
        expect(recover(group.name, "pause"), 0)
        client = start(["generate", "--name", group.name, "27+58="])
        kill(group.name, 1)
        ends_as(group.name, lambda now: now["ranks"][1]["incarnation"] == 2 and now["ranks"][1]["liveness"] == "alive" and
                not now["recovery"]["doing"])
        check(group.status()["engine_state"] == "PAUSE", "another state: %s" % group.status()["engine_state"])
        expect(recover(group.name, "start"), 0)
        result = expect(finish(client), 0)
        check(result.out == "27+58=85\n", "another text", result)
        expect(group.stop(), 0)


@test
def test_a25_refused_transitions_say_what_is_legal():
    with Group(2) as group:
        for before, command, state, legal in (
                (None, "reinit", "NORMAL", "pause, pause-net, clear"),
                ("pause", "pause-net-net", None, None),
                ("reinit", "pause", "READY", "clear, start")):
            if before:
                expect(recover(group.name, before), 0)
            if not state:
                continue
            result = expect(recover(group.name, command), 1,
                            "%s is not legal in state %s: legal are %s" % (command, state, legal))
            check(result.out == "", "ranks were asked", result)
            answer = json.loads(expect(recover(group.name, command, "--json"), 1).out)
            check(answer["ok"] is False and legal in answer["error"] and answer["engine_state"] == state and
                  answer["ranks"] == [] and answer["command"] == command, "another answer: %s" % answer)
        answer = json.loads(expect(recover(group.name, "start", "--json"), 0).out)
        check(answer == {"command": "start", "ok": True, "error": None, "engine_state": "NORMAL", "ranks": [
            {"rank": rank, "result": 0, "device": rank, "text": None} for rank in (0, 1)]}, "another answer: %s" % answer)
        expect(group.stop(), 0)


@test
def test_wrong_words_of_recover():
    for words, part in ((["recover"], "say what"), (["recover", "halt"], "'halt' is no recovery command"),
                        (["recover", "pause", "coxrec.nobody"], "no group 'coxrec.nobody' is alive"),
                        (["recover", "pause", "coxrec.nobody", "start"], "'start' is not expected"),
                        (["recover", "pause", "--rank", "1"], "for restart"),
                        (["recover", "restart", "--kill"], "say which with --rank"),
                        (["recover", "restart", "--rank", "x"], "--rank is 'x'"),
                        (["recover", "pause", "--timeout", "0"], "--timeout"),
                        (["recover", "pause", "--odd"], "--odd"),
                        (["recover", "pause", "--name", "a", "--socket", "b"], "either a --name or a --socket"),
                        (["recover", "pause", "--name", "coxrec.nobody"], "no group 'coxrec.nobody' is alive"),
                        (["run", "--on-death", "never"], "expected fail, wait, restart or restart-all"),
                        (["run", "--on-death", "restart,0/60"], "the N of restart,N/SEC is '0': expected 1 to 1000000"),
                        (["run", "--on-death", "restart,/60"], "the N of restart,N/SEC is ''"),
                        (["run", "--on-death", "restart,3/"], "the SEC of restart,N/SEC is ''"),
                        (["run", "--on-death", "restart,3"], "restart,N/SEC"),
                        (["run", "--on-death", "wait,3/60"], "restart,N/SEC"),
                        (["run", "--on-death", "rest,3/60"], "expected fail, wait, restart or restart-all"),
                        (["run", "--on-death", "restart/3,60"], "expected fail, wait, restart or restart-all"),
                        (["run", "--on-death", "restart,3/-1"], "the SEC of restart,N/SEC is '-1'"),
                        (["layout", "--on-death", "restart"], "--on-death")):
        expect(run(words), 2, part)
    result = expect(run(["recover", "pause", "--json", "--name", "coxrec.nobody"]), 2)
    told = json.loads(result.out)
    check(not told["ok"] and "no group" in told["error"] and told["ranks"] == [], "another object", result)
    result = expect(run(["recover", "--help"]), 0)
    for word in ("pause", "pause-net", "clear", "reinit", "start", "restart"):
        check("\n  %s " % word in result.out, "no word of %s" % word, result)
    with Group(2) as group:
        expect(recover(group.name, "restart", "--rank", "2"), 2, "there is no rank 2: the group has 2")
        check(expect(recover(group.name, "restart"), 0).out == "no rank is dead\n", "another line")
        result = expect(run(["recover", "clear", "--socket", group.socket_path]), 0)
        expect(group.stop(), 0)


@test
def test_p8_a_living_rank_is_replaced_by_order_whatever_the_policy():
    for policy in ((), RESTART):
        with Group(2, policy) as group:
            client = start(["generate", "--name", group.name, "--file", PROMPTS])
            reader = Reader(client)
            reader.await_full()
            answer = json.loads(expect(recover(group.name, "restart", "--rank", "0", "--kill", "--json"), 0).out)
            check(answer["ok"] and "incarnation 2" in answer["ranks"][0]["text"], "another answer: %s" % answer)
            now = group.status()
            check(now["ranks"][0]["incarnation"] == 2 and now["ranks"][1]["pid"] == group.pids[1], "not so: %s" % now)
            check(now["recovery"]["recent_deaths"] == 0, "an ordered death counts: %s" % now["recovery"])
            result = expect(reader.rest(), 0)
            check(result.out == expected(), "another text", result)
            expect(group.stop(), 0)


@test
def test_m12_p8_a_rank_that_a_replacement_waits_for_is_killed_at_once_by_order():
    # A try has a minute; the order, which would otherwise come after it, has less.
    order = ("restart", "--kill", "--timeout", "45", "--rank")
    with Group(2, RESTART) as group:
        group.stopped(0)
        kill(group.name, 1)
        ends_as(group.name, lambda now: "initializing" in (now["recovery"]["doing"] or ""))
        expect(recover(group.name, *order, "0"), 0)
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "the group does not go on")
        # The new process itself stands still, before or after it is in the group.
        kill(group.name, 1)
        ends_as(group.name, lambda now: now["ranks"][1]["incarnation"] > 2 and now["ranks"][1]["pid"])
        try:
            kill(group.name, 1, signal.SIGSTOP)
        except ProcessLookupError:
            pass
        expect(recover(group.name, *order, "1"), 0)
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "the group does not go on")
        expect(group.stop(), 0)


@test
def test_a23_commands_answer_while_every_worker_is_stuck():
    with Group(2) as group:
        for rank in (0, 1):
            group.stopped(rank)
        slow = start(["recover", "pause", "--name", group.name, "--timeout", "1"])
        while slow.poll() is None:
            check(len(group.status()["ranks"]) == 2, "no status")
        result = expect(finish(slow), 3)
        check("rank 0: -1" in result.out and "rank 1: -1" in result.out, "no line per rank", result)
        for pid in group.pids:
            os.kill(pid, signal.SIGCONT)
        expect(recover(group.name, "pause"), 0)
        expect(recover(group.name, "start"), 0)
        result = expect(group.generate("--quiet", "27+58="), 0)
        check(result.out == "27+58=85\n", "another text", result)
        expect(group.stop(), 0)


@test
def test_a23_a_command_hears_that_the_group_stops():
    with Group(2) as group:
        for rank in (0, 1):
            group.stopped(rank)
        command = start(["recover", "pause", "--name", group.name])
        ends_as(group.name, lambda now: now["recovery"]["doing"] == "carrying out pause")
        expect(group.stop(), 0)
        expect(finish(command), 1)
        expect(finish(group.process), 0)


@test
def test_commands_wait_for_each_other():
    with Group(2) as group:
        many = [start(["recover", word, "--name", group.name]) for word in ("clear",) * 8]
        for process in many:
            expect(finish(process), 0)
        expect(group.stop(), 0)


if __name__ == "__main__":
    sys.exit(harness.main())
