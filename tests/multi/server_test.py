#!/usr/bin/python3
"""examples/server.c, a coordinator of a user's own, as the commands see it.

Usage: server_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import os
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from harness import (MODEL, check, expect, finish, fresh_name, names_with, program, run, start,  # pylint: disable=wrong-import-position
                     status_of, test)

harness.begin(harness.parser(__doc__))
TOGETHER = "together 500500\n"


class Server:
    """The example, with workers of examples/worker.c."""

    def __init__(self, worker="example_worker"):
        self.name = fresh_name("own")
        self.process = start([self.name, program(worker)], command="example_server")

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def line(self):
        return self.process.stdout.readline()

    def await_line(self, text):
        while True:
            line = self.line()
            check(line, "the server ended before it said %r: %s" % (text, self.process.stderr.read()
                                                                   if not line else ""))
            if line == text:
                return


@test
def test_m13_commands_work_on_a_coordinator_of_ones_own():
    with Server() as server:
        server.await_line(TOGETHER)
        status = status_of(server.name)
        check(status["rank_count"] == 4 and status["pid"] == server.process.pid, "wrong: %s" % status)
        check([rank["liveness"] for rank in status["ranks"]] == ["alive"] * 4, "wrong: %s" % status)
        check(server.name in expect(run(["status", "--name", server.name]), 0).out, "no text")
        expect(run(["generate", "--name", server.name, "--model", MODEL, "1+1="]), 1,
               "the program that serves it takes none")
        expect(run(["lora", "list", "--name", server.name]), 1, "this group has no LoRA adapters")
        expect(run(["stop", "--name", server.name]), 0)
        result = finish(server.process)
        check(result.status == 0, "the server failed", result)
        check(not names_with(server.name), "left in /dev/shm: %s" % names_with(server.name))


@test
def test_m13_a_coordinator_of_ones_own_replaces_a_dead_rank():
    with Server() as server:
        server.await_line(TOGETHER)
        ranks = status_of(server.name)["ranks"]
        os.kill(ranks[2]["pid"], signal.SIGKILL)
        # The next request ends with the death, or comes after the replacement.
        harness.wait_until(lambda: status_of(server.name)["restarts"] == 1, "no restart")
        server.await_line(TOGETHER)
        now = status_of(server.name)
        check(now["deaths"] == 1, "wrong: %s" % now)
        check([rank["pid"] for rank in now["ranks"] if rank["pid"] in [r["pid"] for r in ranks]] ==
              [ranks[rank]["pid"] for rank in (0, 1, 3)], "wrong: %s" % now)
        expect(run(["recover", "restart", "--name", server.name, "--rank", "0", "--kill"]), 0)
        server.await_line(TOGETHER)
        check(status_of(server.name)["ranks"][0]["pid"] != ranks[0]["pid"], "rank 0 was not replaced")
        expect(run(["stop", "--name", server.name]), 0)
        check(finish(server.process).status == 0, "the server failed")


@test
def test_m13_a_coordinator_of_ones_own_that_cannot_start_says_why():
    with Server(worker="no_such_worker") as server:
        result = finish(server.process)
        check(result.status == 1 and "no_such_worker" in result.err, "no reason", result)


if __name__ == "__main__":
    sys.exit(harness.main())
