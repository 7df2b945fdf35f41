"""What every test of the package has: nothing may be left behind."""

import gc
import os
import pathlib
import threading
import time

import pytest


SKIPPED = 77  # for CTest


def pytest_sessionfinish(session, exitstatus):
    """A file that skips all its tests, for want of torch, is skipped, not failed."""
    skipped = session.config.pluginmanager.get_plugin("terminalreporter").stats.get("skipped")
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and skipped:
        session.exitstatus = SKIPPED


def open_fds():
    """The open fds of this process, by what they are; without pytest's own."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[int(fd)] = os.readlink("/proc/self/fd/" + fd)
        except OSError:
            pass  # that of the listing
    return found


def children():
    found = set()
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            found.update((task / "children").read_text().split())
        except OSError:
            pass  # a thread that has ended
    return found


def shared_memory():
    """Names in /dev/shm that are this process's."""
    return {name for name in os.listdir("/dev/shm") if str(os.getpid()) in name}


def state():
    return {
        "fds": set(open_fds().items()),
        "children": children(),
        "names": shared_memory(),
        "threads": {thread.name for thread in threading.enumerate()},
    }


def left(before, after):
    return {what: after[what] - before[what] for what in before if after[what] - before[what]}


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Fails a test that leaves an fd, a child, a thread or a name in /dev/shm."""
    gc.collect()
    before = state()
    yield
    gc.collect()
    rest = left(before, state())
    deadline = time.monotonic() + 5
    while rest and time.monotonic() < deadline:
        threading.Event().wait(0.01)  # a thread that has returned may still be listed
        rest = left(before, state())
    assert not rest, f"left behind: {rest}"


@pytest.fixture(scope="session")
def coxswain_command():
    """The path of the command `coxswain`, of the same build."""
    return os.path.join(os.environ["COX_BIN_DIR"], "coxswain")
