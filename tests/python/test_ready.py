"""Ready means that the group can serve: /readyz, and the exit status of `coxswain status`."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time

import pytest

import coxswain
import workers

READY = (200, "ready\n")
# Of a request, in seconds: /readyz waits for a third of it.
LIMIT = 15.0


class Probe:
    """`coxswain metrics --serve` beside a group."""

    def __init__(self, command, name):
        self._command, self._name = command, name
        self._process = subprocess.Popen(
            [command, "metrics", "--name", name, "--serve", "0"],
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self._process.stderr.readline()
        self._port = int(line.rstrip().rsplit(":", 1)[1].split("/")[0])

    def get(self):
        """What a probe of Kubernetes gets."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/readyz")
            reply = connection.getresponse()
            return reply.status, reply.read().decode()

    def until(self, status):
        """Waits for a status; returns the text."""
        deadline = time.monotonic() + 30
        while (found := self.get())[0] != status:
            assert time.monotonic() < deadline, f"it stays {found}"
            time.sleep(0.01)
        return found[1]

    def status(self):
        """Exit status and output of `coxswain status`."""
        command = [self._command, "status", "--name", self._name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        return done.returncode, done.stdout

    def close(self):
        self._process.terminate()
        self._process.wait()
        self._process.stderr.close()


@pytest.fixture
def beside(coxswain_command):
    """Makes the probe of a group."""
    with contextlib.ExitStack() as stack:

        def make(group):
            return stack.enter_context(contextlib.closing(Probe(coxswain_command, group.name)))

        yield make


def test_a_group_that_was_never_asked_is_ready(beside):
    with coxswain.Group(workers.obey, 2) as group:
        assert beside(group).get() == READY


def test_a_rank_that_hangs_makes_it_not_ready_before_the_deadline(beside, tmp_path):
    """Alive and not stopped: only that nothing moves tells it."""
    with coxswain.Group(workers.hold, 3) as group:
        probe, end = beside(group), tmp_path / "end"
        future = group.submit(b"1 " + os.fsencode(end), timeout=LIMIT)
        assert probe.get() == READY
        text = probe.until(503)
        assert text == (
            f"rank 1 owes execute {future.sequence}, and no rank has moved for a third of the 15 s "
            "that it may take\n"
        )
        status, out = probe.status()
        assert status == 4 and f"degraded: {text}" in out
        end.touch()
        assert future.result() == [b"1"] * 3
        assert probe.get() == READY


def test_requests_that_move_are_healthy_however_old_the_oldest_is(beside, tmp_path):
    """Other ranks reply to other requests meanwhile: the group serves."""
    with coxswain.Group(workers.hold, 2) as group:
        probe, end = beside(group), tmp_path / "end"
        future = group.submit(b"1 " + os.fsencode(end), timeout=LIMIT, ranks=[1])
        for _ in range(group.depth - 1):
            assert group.call(b"1 x", ranks=[0], timeout=30) == [b"1"]
            until = time.monotonic() + LIMIT / 5
            while time.monotonic() < until:
                assert probe.get() == READY
        end.touch()
        future.result()


def test_a_request_without_a_deadline_may_take_as_long_as_it_likes(beside, tmp_path):
    with coxswain.Group(workers.hold, 1) as group:
        probe, end = beside(group), tmp_path / "end"
        future = group.submit(b"0 " + os.fsencode(end), timeout=None)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert probe.get() == READY
        end.touch()
        future.result()


def test_a_stopped_rank_is_named_and_it_is_ready_again_when_it_goes_on(beside):
    with coxswain.Group(workers.obey, 2) as group:
        probe, pid = beside(group), group.status().ranks[1].pid
        os.kill(pid, signal.SIGSTOP)
        future = group.submit(b"x", timeout=60)
        assert f"rank 1 (pid {pid}) is stopped by a signal" in probe.until(503)
        os.kill(pid, signal.SIGCONT)
        future.result()
        probe.until(200)


def test_a_group_that_is_idle_for_long_is_ready(beside):
    """The age of what ranks did last does not count without a request."""
    with coxswain.Group(workers.obey, 2) as group:
        probe = beside(group)
        group.call(b"x", timeout=0.3)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            assert probe.get() == READY


@pytest.mark.parametrize("other", [{}, {"incidents": 3}])
def test_the_program_says_why_it_is_not_ready(beside, other):
    """From the first moment at which the group can be asked."""
    group = coxswain.Group(workers.obey, 1)
    group.note = json.dumps({**other, "not_ready": "no step\nhas come back"})
    with group:
        probe = beside(group)
        assert probe.get() == (503, "no step\\nhas come back\n")
        status, out = probe.status()
        assert status == 4 and "\ndegraded: no step\\nhas come back\n" in out
        group.note = json.dumps(other)
        assert probe.get() == READY and probe.status()[0] == 0
        group.note = "not_ready: this is text"
        assert probe.get() == READY


def test_a_note_that_is_too_long_is_an_error_of_start():
    group = coxswain.Group(workers.obey, 1)
    group.note = "x" * 5000
    with pytest.raises(coxswain.TooLarge, match="the note has 5000 bytes"):
        group.start()
