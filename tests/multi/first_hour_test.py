#!/usr/bin/python3
"""What a newcomer and an operator meet in their first hour with the commands: names, stalls, health, where groups are found.

Usage: first_hour_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from groups import Group  # pylint: disable=wrong-import-position
from harness import (MODEL, TIMEOUT, check, expect, finish, fresh_name, names_with,  # pylint: disable=wrong-import-position
                     program, run, socket_files, start, test, wait_until)

harness.begin(harness.parser(__doc__))


class Lines:
    """Standard error of a process, line by line; nothing is lost, as of communicate()."""

    def __init__(self, stream):
        self.stream = stream
        self.seen = ""

    def until(self, *parts):
        """The next line with all parts. A line that never comes ends the test by CTest's timeout."""
        while True:
            line = self.stream.readline()
            check(line, "the end before a line with %s; before that: %s" % (parts, self.seen))
            self.seen += line
            if all(part in line for part in parts):
                return line


# ---- names ----


@test
def a_name_that_does_not_run_says_how_to_start_it():
    name = fresh_name("nobody")
    for more in ([], ["--join"]):
        result = expect(run(["generate", "--name", name, *more, "27+58="]), 2, "no group '%s' is alive" % name,
                        "coxswain run --name %s" % name, "--start")
        check(result.out == "", "it ran", result)
    check(not names_with(name) and not socket_files(), "something was started")
    result = expect(run(["generate", "--start", "--name", name, "--model", MODEL, "27+58="]), 0, "1 prompt on 2 ranks:")
    check(result.out == "27+58=85\n", "wrong text", result)
    expect(run(["generate", "--start", "1+1="]), 2, "--start needs the --name")
    expect(run(["generate", "--start", "--join", "--name", name, "1+1="]), 2, "leave out --start")


@test
def a_refusal_names_only_the_option_that_was_given():
    with Group(1) as group:
        for option, value in (("--worker", "x"), ("--start-timeout", "9"), ("--keep-names", None), ("--nested", None),
                              ("--no-shared-weights", None), ("--restart-max", "3"), ("--response-size", "execute=8M")):
            given = [option] + ([value] if value else [])
            if option == "--restart-max":
                given += ["--on-death", "restart"]
            result = expect(run(["generate", "--name", group.name, *given, "1+1="]), 2, "leave out %s," % option)
            named = set(re.findall(r"--[a-z-]+", result.err)) - {option, "--name", "--help"}
            check(not named, "it names %s too" % named, result)
        # A time limit is for clients, too.
        check(expect(run(["generate", "--name", group.name, "--timeout", "60", "1+1="]), 0).out == "1+1=2\n", "no")
        group.stop()


# ---- workers of one's own ----


@test
def the_example_workers_run_as_their_comments_say():
    """examples/worker.c under run, as README has it, and examples/execute.c under generate."""
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(program("example_worker"), os.path.join(folder, "worker"))
        os.symlink(program("example_execute"), os.path.join(folder, "execute"))
        group = start(["run", "-n", "2", "--", "./worker"], cwd=folder)
        lines = [group.stdout.readline().split()[0] for _ in range(4)]
        check(lines == ["name", "socket", "rank", "rank"], "other lines: %s" % lines)
        group.terminate()
        expect(finish(group), 0, "the group ends")
        for ranks in ("1", "3"):
            result = run(["generate", "-n", ranks, "--no-shared-weights", "--worker", "./execute", "--model", MODEL,
                          "--max-tokens", "4", "1234", "8"], cwd=folder)
            expect(result, 0, "rank 0 of %s: a real one would load its part of %s" % (ranks, MODEL))
            check(result.out == "12345678\n89012\n", "another text", result)


# ---- stalls ----


@test
def run_prints_a_pause_a_stop_and_a_death_and_their_ends():
    with Group(2, ("--on-death", "wait")) as group:
        lines = Lines(group.process.stderr)
        expect(run(["recover", "pause", "--name", group.name]), 0)
        lines.until("the group is paused", "coxswain recover start")
        expect(run(["recover", "start", "--name", group.name]), 0)
        lines.until("goes on after a pause of ")
        os.kill(group.pids[1], signal.SIGSTOP)
        lines.until("rank 1 (pid %d) is stopped by signal 19" % group.pids[1], "kill -CONT %d" % group.pids[1])
        os.kill(group.pids[1], signal.SIGCONT)
        lines.until("rank 1 (pid %d) continues" % group.pids[1])
        os.kill(group.pids[0], signal.SIGKILL)
        lines.until("rank 0 (pid %d) was killed by signal 9" % group.pids[0], "coxswain recover restart --rank 0")
        expect(run(["recover", "restart", "--name", group.name]), 0)
        lines.until("rank 0 (pid %d)" % group.pids[0], "replaced by process")
        expect(group.stop(), 0)
        rest = group.process.communicate(timeout=TIMEOUT)[1]
        check("paused" not in rest and "stopped by signal" not in rest, "more than happened: " + rest)
    with Group(1, ("--on-death", "restart", "--quiet")) as group:
        os.kill(group.pids[0], signal.SIGKILL)
        wait_until(lambda: group.status()["restarts"] == 1 and group.status()["healthy"], "a new rank")
        expect(group.stop(), 0)
        check(finish(group.process).err == "", "it is not quiet")


@test
def a_client_says_what_it_waits_for_and_has_a_timeout():
    with Group(2) as group:
        expect(run(["recover", "pause", "--name", group.name]), 0)
        client = start(["generate", "--name", group.name, "27+58="])
        lines = Lines(client.stderr)
        lines.until("waiting for the group '%s': it is paused" % group.name, "coxswain recover start")
        result = expect(run(["generate", "--name", group.name, "--timeout", "1.5", "1+1="]), 3,
                        "has not replied for 1.5 s: it is paused")
        check(result.out == "", "it has text", result)
        expect(run(["recover", "start", "--name", group.name]), 0)
        check(client.communicate(timeout=TIMEOUT)[0] == "27+58=85\n" and client.returncode == 0, "another text")
        group.stopped(1)
        client = start(["generate", "--name", group.name, "27+58="])
        lines = Lines(client.stderr)
        lines.until("rank 1 (pid %d) is stopped by a signal (kill -CONT %d)" % (group.pids[1], group.pids[1]))
        os.kill(group.pids[1], signal.SIGCONT)
        check(client.communicate(timeout=TIMEOUT)[0] == "27+58=85\n" and client.returncode == 0, "another text")
        expect(group.stop(), 0)


# ---- health ----


def health(name, *arguments):
    result = run(["status", "--name", name, *arguments])
    line = re.search(r"^degraded: (.*)$", result.out, re.M)
    return result.status, line.group(1) if line else None


@test
def status_has_the_health_of_a_group_as_its_exit_status():
    name = fresh_name("none")
    expect(run(["status", "--name", name]), 1, "no group '%s' is alive" % name)
    expect(run(["status", "--name", name, "--wait", "0.3"]), 1, "no group '%s' is alive" % name)
    expect(run(["status", "--odd"]), 2)
    with Group(2, ("--on-death", "wait")) as group:
        check(health(group.name) == (0, None), "not healthy")
        told = group.status()
        check(told["healthy"] is True and told["degraded"] is None, "another object: %s" % told)
        expect(run(["recover", "pause", "--name", group.name]), 0)
        check(health(group.name) == (4, "it is paused (coxswain recover start)"), "not paused")
        told = json.loads(expect(run(["status", "--name", group.name, "--json"]), 4).out)
        check(told["ok"] is True and told["healthy"] is False and "paused" in told["degraded"], "another object: %s" % told)
        expect(run(["recover", "start", "--name", group.name]), 0)
        group.stopped(1)
        status, text = health(group.name)
        check(status == 4 and "rank 1 (pid %d) is stopped" % group.pids[1] in text, "not stopped: %s" % text)
        # Waits until it is healthy again, or in vain.
        check(health(group.name, "--wait", "0.3")[0] == 4, "healthy")
        waiting = start(["status", "--name", group.name, "--wait", "60"])
        os.kill(group.pids[1], signal.SIGCONT)
        expect(finish(waiting), 0)
        os.kill(group.pids[0], signal.SIGKILL)
        wait_until(lambda: health(group.name)[0] == 4, "a death")
        text = health(group.name)[1]
        check("rank 0 (pid %d) was killed by signal 9" % group.pids[0] in text and "recover restart --rank 0" in text,
              "another text: %s" % text)
        expect(run(["recover", "restart", "--name", group.name]), 0)
        expect(run(["status", "--name", group.name, "--wait", "60"]), 0)
        expect(group.stop(), 0)


@test
def status_waits_for_a_group_that_is_not_there_yet_and_for_one_whose_workers_are_absent():
    name = fresh_name("later")
    waiting = start(["status", "--name", name, "--wait", "100"])
    group = start(["run", "-n", "1", "--external", "--name", name, "--model", MODEL])
    worker = None
    try:
        Lines(group.stderr).until("waiting for 1 worker")
        expect(run(["status", "--name", name]), 1, "waits for its workers")
        check(waiting.poll() is None, "it did not wait")
        worker = start(["--socket", name], command="coxswain-worker", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        expect(finish(waiting), 0)
        expect(run(["stop", "--name", name]), 0)
        expect(finish(group), 0)
        worker.wait(timeout=TIMEOUT)
    finally:
        for process in (waiting, group, worker):
            if process and process.poll() is None:
                process.kill()
                process.communicate()


@test
def status_watches_until_the_group_is_gone():
    with Group(1) as group:
        watch = start(["status", "--name", group.name, "--watch"])
        lines = Lines(watch.stdout)
        for _ in range(2):
            lines.until("group %s " % group.name)
        expect(group.stop(), 0)
        watch.stdout.read()
        check(watch.wait(timeout=TIMEOUT) == 1, "it ended with %s" % watch.returncode)
        check("\033" not in lines.seen, "control characters outside of a terminal")


if __name__ == "__main__":
    sys.exit(harness.main())
