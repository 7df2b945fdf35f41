#!/usr/bin/python3
"""How a running group ends: by stop, while it is stuck, and while it waits for workers started by hand.

Usage: control_end_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import json
import os
import re
import signal
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from groups import STATUS, STOP, Group, Stranger  # pylint: disable=wrong-import-position
# pylint: disable-next=wrong-import-position
from harness import (MODEL, TIMEOUT, check, environment, expect, finish, generate, names_with, run,
                     start, stop_process, sums, temporary, test, wait_until)

harness.begin(harness.parser(__doc__))
RUNTIME = os.environ["XDG_RUNTIME_DIR"]


# ---- stop ----


@test
def test_m15_stop_ends_a_group_whose_workers_are_all_stuck():
    with Group(2) as group:
        for rank in range(2):
            group.stopped(rank)
        expect(group.stop(), 0)
        group.left_nothing()
        expect(finish(group.process), 0, "the group ends")


@test
def test_m15_status_answers_while_a_stuck_group_ends_and_stop_again_is_no_harm():
    with Group(2) as group:
        group.stopped(0)
        with Stranger(group.socket_path) as stranger, Stranger(group.socket_path) as other:
            stranger.send(STOP)
            check(stranger.reply()[0] == 3, "not done")

            def stopping():
                other.send(STATUS)
                return dict(other.reply()[1]).get(8) == 1
            wait_until(stopping, "a group that stops")
            expect(group.stop(), 0)
            check(stranger.ended(), "the connection outlives the group")
        group.left_nothing()
        check(group.process.wait(timeout=TIMEOUT) == 0, "the second stop killed it")


@test
def test_stop_gives_up_at_its_deadline():
    with Group(1) as group:
        stop_process(group.process.pid)
        told = "process %d, the coordinator, is stopped by a signal" % group.process.pid
        expect(group.stop("--timeout", "0.3"), 3, told)
        expect(run(["status", "--name", group.name, "--timeout", "0.3"]), 1, told)
        group.process.send_signal(signal.SIGCONT)
        expect(group.stop(), 0)
        group.left_nothing()


@test
def test_a_generate_can_be_asked_and_stopped_and_takes_no_prompts():
    prompts, _ = sums(100)
    process = start(["generate", "-n", "2", "--model", MODEL, "--max-tokens", "1", "--sequences", "1"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    name = harness.own_name(process)
    # It cannot end before the check: its output is not read, and the pipe is full long before.
    text = "\n".join(prompts * 200) + "\n"
    feeder = subprocess.Popen(["cat", temporary(text)], stdout=process.stdin)
    process.stdin.close()
    process.stdin = None
    feeder.wait(timeout=TIMEOUT)
    wait_until(lambda: run(["status", "--name", name]).status == 0, "a control socket")
    status = json.loads(expect(run(["status", "--name", name, "--json"]), 0).out)
    check(status["serving"] is None and "coxswain generate" in status["refusal"], "wrong: %s" % status)
    wait_until(lambda: json.loads(run(["status", "--name", name, "--json"]).out)["channels"][0]["completed"] > 5, "steps")
    expect(run(["generate", "--name", name, "--model", MODEL, "1+1="]), 1, "accepts no prompts", "coxswain generate")
    asked = start(["stop", "--name", name])
    result = finish(process)
    check(result.status == 143, "not as by SIGTERM", result)
    expect(finish(asked), 0)


# ---- workers that are started by hand ----


class External:
    """A group that waits for its workers."""

    def __init__(self, ranks, *arguments):
        self.ranks = ranks
        self.workers = []
        self.process = start(["run", "--worker", "none", "-n", str(ranks), "--model", MODEL, *arguments])

    def __enter__(self):
        line = self.process.stderr.readline()
        match = re.fullmatch(r"coxswain: waiting for (\d+) workers?: coxswain-worker --socket (\S+)\n", line)
        check(match and int(match[1]) == self.ranks, "it does not say how workers come: " + line)
        self.name = match[2]
        self.socket_path = os.path.join(RUNTIME, "coxswain", self.name + ".sock")
        check(os.path.exists(self.socket_path), "the control socket does not stand yet")
        return self

    def __exit__(self, *unused):
        for process in [self.process] + self.workers:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def worker(self, *arguments):
        """As a person types what the line shows."""
        process = start(["--socket", self.name, *arguments], command="coxswain-worker")
        self.workers.append(process)
        return process

    def logged_on(self, worker):
        """It was let in: it has the group's memory."""
        def mapped():
            check(worker.poll() is None, "the worker has ended")
            with open("/proc/%d/maps" % worker.pid, encoding="ascii") as file:
                return re.search("/dev/shm/|/memfd:", file.read())
        wait_until(mapped, "a worker that was let in")

    def misses(self, ranks):
        """Every client gets these."""
        wait_until(lambda: "not here yet: ranks %s (of %d)\n" % (ranks, self.ranks) in expect(run(
            ["status", "--name", self.name]), 1, "waits for its workers").err, "ranks %s missing" % ranks)

    def left_nothing(self):
        for worker in self.workers:
            try:
                worker.wait(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                check(False, "a worker lives on, in " + harness.sleeps_in(worker.pid))
        check(not os.path.exists(self.socket_path), "the control socket is left")
        check(not names_with(self.name), "left in /dev/shm: %s" % names_with(self.name))


@test
def test_workers_started_by_hand_come_in_any_order_and_serve():
    prompts, _ = sums(20)
    text = "\n".join(prompts) + "\n"
    own = expect(generate("-n", "4", text=text), 0)
    for more in ([], ["--attach", "sealed"], ["--name", harness.fresh_name("hand")]):
        with External(4, *more) as group:
            expect(run(["status", "--name", group.name]), 1, "waits for its workers", "coxswain-worker --socket")
            expect(run(["generate", "--name", group.name, "1+1="]), 1, "waits for its workers",
                   "coxswain-worker --socket %s" % group.name, "not here yet: ranks 0-3 (of 4)")
            # The last rank first; a worker without a rank gets the lowest free one.
            by_rank = {3: group.worker("--local_rank", "3")}
            group.logged_on(by_rank[3])
            group.misses("0-2")
            taken = group.worker("--local_rank", "3")
            err = taken.communicate(timeout=TIMEOUT)[1]
            check(taken.returncode == 1 and "rank 3 of the group '%s' is process %d already" % (
                group.name, by_rank[3].pid) in err, "rank 3 came twice: " + err)
            by_rank[1] = group.worker("--local_rank", "1", "--local_world_size", "4")
            group.logged_on(by_rank[1])
            group.misses("0,2")
            for rank in (0, 2):
                by_rank[rank] = group.worker()
                group.logged_on(by_rank[rank])
            lines = [group.process.stdout.readline().split() for _ in range(6)]
            check(lines[0] == ["name", group.name] and lines[1] == ["socket", group.socket_path], "wrong: %s" % lines)
            check(lines[2:] == [["rank", str(rank), "pid", str(by_rank[rank].pid)] for rank in range(4)], "wrong: %s" % lines)
            one_more = group.worker()
            err = one_more.communicate(timeout=TIMEOUT)[1]
            text_of_it = "coxswain-worker: the coordinator refuses: all 4 ranks of the group '%s' are there" % group.name
            check(one_more.returncode == 1 and err.startswith(text_of_it), "one too many came in: " + err)
            result = expect(run(["generate", "--name", group.name], text=text), 0, "4 ranks")
            check(result.out == own.out, "another text", result)
            expect(run(["stop", "--name", group.name]), 0)
            expect(finish(group.process), 0)
            group.left_nothing()
            check([by_rank[rank].returncode for rank in range(4)] == [0] * 4, "workers do not end in order")


@test
def test_p2_a_worker_that_dies_before_the_others_came_is_named():
    for more in ([], ["--attach", "sealed"]):
        with External(2, *more) as group:
            other, dying = group.worker("--local_rank", "0"), group.worker("--local_rank", "1")
            group.logged_on(dying)
            dying.kill()
            # The other one may be quick enough to make the group complete: then the group has lost a rank.
            expect(finish(group.process), 3, "rank 1", "pid %d" % dying.pid)
            check(other.wait(timeout=TIMEOUT) is not None, "the other one lives on")
            group.left_nothing()
        with External(2, *more) as group:
            dying = group.worker()
            group.logged_on(dying)
            dying.kill()
            expect(finish(group.process), 3, "rank 0", "pid %d" % dying.pid, "before the group was complete")
            group.left_nothing()


@test
def test_a_worker_started_by_hand_ends_at_its_terminal():
    def by_hand(group, interrupt=signal.SIG_DFL):
        worker = start(["--socket", group.name], command="coxswain-worker", stdout=None,
                       preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt))
        group.workers.append(worker)
        group.logged_on(worker)
        return worker

    def has_a_say(worker):
        """It has come as far as to say what SIGINT does, which it does last."""
        with open("/proc/%d/status" % worker.pid, encoding="ascii") as file:
            sets = re.findall(r"^Sig(?:Cgt|Ign):\s+([0-9a-f]+)", file.read(), re.M)
        return any(int(one, 16) & 1 << signal.SIGINT - 1 for one in sets)

    for more in ([], ["--attach", "sealed"]):
        for number in (signal.SIGINT, signal.SIGTERM):
            with External(2, *more) as group:
                worker = by_hand(group)
                wait_until(lambda: has_a_say(worker), "a worker that waits")
                worker.send_signal(number)
                err = worker.communicate(timeout=TIMEOUT)[1]
                check((worker.returncode, err) == (0, ""), "status %d: %s" % (worker.returncode, err))
                expect(finish(group.process), 3, "rank 0 (pid %d) is dead" % worker.pid)
                group.left_nothing()
        # In a shell's background it is ignored, as it was at the start.
        with External(1, *more) as group:
            worker = by_hand(group, signal.SIG_IGN)
            group.process.stdout.readline()
            worker.send_signal(signal.SIGINT)
            check(expect(run(["generate", "--name", group.name, "27+58="]), 0).out == "27+58=85\n", "it has ended")
            expect(run(["stop", "--name", group.name]), 0)
            group.left_nothing()


@test
def test_waiting_for_workers_ends_at_a_stop():
    for more in ([], ["--attach", "sealed"]):
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (None, 143)):
            for come in range(2):
                with External(2, *more) as group:
                    for _ in range(come):
                        group.logged_on(group.worker())
                    if number:
                        group.process.send_signal(number)
                    else:
                        result = expect(run(["stop", "--name", group.name]), 0)
                        check(result.err == "coxswain: the group '%s' has ended\n" % group.name, "not said", result)
                    expect(finish(group.process), status, "ended by signal %d" % (status - 128))
                    group.left_nothing()


@test
def test_a24_b2_a_stopped_coordinator_is_reported_and_a_paused_group_waited_for():
    path = temporary("27+58=\n" * 50000)
    soon = environment(COXSWAIN_TEST_WATCH_MS="500")  # in a build without tests it is 10 s
    with Group(1) as group, Group(1) as paused:
        expect(run(["recover", "pause", "--name", paused.name]), 0)
        waiting = start(["generate", "--name", paused.name, "27+58="], env=soon)
        wait_until(lambda: paused.status()["serving"]["clients"] == 1, "a client that waits")
        client = start(["generate", "--name", group.name, "--file", path], env=soon)
        check(client.stdout.readline() == "27+58=85\n", "no text")
        group.process.send_signal(signal.SIGSTOP)
        try:
            result = expect(finish(client), 3, "does not reply: it is stopped, or stuck")
            check(set(result.out.splitlines()) <= {"27+58=85"}, "another text", result)
        finally:
            group.process.send_signal(signal.SIGCONT)
        # That took several checks; the other group, which replies, was not suspected.
        check(waiting.poll() is None, "it did not wait")
        expect(run(["recover", "start", "--name", paused.name]), 0)
        check(expect(finish(waiting), 0).out == "27+58=85\n", "another text")
        expect(paused.stop(), 0)
        expect(group.stop(), 0)


@test
def test_clients_hear_of_a_group_that_ends():
    with Group(2) as group:
        path = temporary("1 5 10 13 8 11 14\n" * 50000)
        for end, status, part in ((lambda: os.kill(group.pids[1], signal.SIGKILL), 3, "Killed"),):
            client = start(["generate", "--name", group.name, "--tokens", "--json", "--file", path],
                           stdout=open(os.path.join(RUNTIME, "out"), "w", encoding="ascii"))
            wait_until(lambda: os.path.getsize(os.path.join(RUNTIME, "out")) > 0, "a line")
            end()
            _, err = client.communicate(timeout=TIMEOUT)
            check(client.returncode == status and part in err, "status %d: %s" % (client.returncode, err))
            with open(os.path.join(RUNTIME, "out"), encoding="ascii") as file:
                lines = [json.loads(line) for line in file]
            check(len(lines) == 50000 and lines[-1]["finish"] == "error", "not every prompt is told of")
            check(all(part in line["error"] for line in lines if line["finish"] == "error"), "an error without words: %s" % lines[-1])
        expect(finish(group.process), 3)
    with Group(2) as group:
        client = start(["generate", "--name", group.name, "--tokens", "--file", path], stdout=subprocess.PIPE)
        client.stdout.readline()
        expect(group.stop(), 0)
        result = finish(client)
        told = ("(coxswain stop)", "is ending", "has ended")
        check(result.status == 1 and any(part in result.err for part in told), "not told", result)
    with Group(2) as group:
        client = start(["generate", "--name", group.name, "--tokens", "--file", path], stdout=subprocess.PIPE)
        client.stdout.readline()
        group.process.kill()
        group.process.wait()
        expect(finish(client), 1, "has ended")


if __name__ == "__main__":
    sys.exit(harness.main())
