"""A host forks a process, is killed, and starts again under its name, as by a service manager."""

import contextlib
import ctypes
import os
import signal

import pytest

import coxswain
import processes
import workers


def host(attach, folder, raw):
    """In another process: a group, and a process that is forked from it. raw: as an exact copy, of
    which the C library does not know."""
    group = coxswain.Group(
        workers.echo, 1, name=f"forked-{os.getppid()}", attach=attach, crash_dir=folder
    )
    with group:
        if raw:
            clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
            pid = ctypes.CDLL(None).syscall(clone, int(signal.SIGCHLD), 0, 0, 0, 0)
        else:
            pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        processes.say(pid)
        processes.listen()


@contextlib.contextmanager
def killed_host(attach, folder, raw=False):
    """Yields the pid of what it has forked."""
    folder.mkdir(exist_ok=True)
    with processes.Other(host, attach, str(folder), raw) as other:
        pid = other.hear()
        try:
            other.kill()
            yield pid
        finally:
            os.kill(pid, signal.SIGKILL)


def start(attach, folder):
    folder.mkdir(exist_ok=True)
    name = f"forked-{os.getpid()}"
    with coxswain.Group(workers.echo, 1, name=name, attach=attach, crash_dir=folder) as group:
        assert group.call(b"hello", timeout=30) == [b"hello"]


@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_the_name_is_free_though_a_forked_process_lives(tmp_path, attach):
    with killed_host(attach, tmp_path):
        start(attach, tmp_path)


def test_the_name_is_free_though_a_copy_has_the_socket(tmp_path):
    with killed_host("named", tmp_path / "one", raw=True):
        start("named", tmp_path / "other")
