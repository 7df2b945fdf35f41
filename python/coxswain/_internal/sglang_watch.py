"""The thread of an SGLang server that watches its processes: their deaths and their last lines.

A pidfd and a pipe for each process, so a death is known at once. The wait status is read without
reaping: that is multiprocessing's.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import sys
import threading
from typing import Any
from collections.abc import Callable

from .output import Output

_LINES, _LINE_SIZE = 6, 300
_CHUNK = 1 << 15
#: how often the watcher is asked to look at other things, in seconds
INTERVAL = 1.0


class Child:
    """A process of the server."""

    def __init__(self, name: str, pid: int, rank: int | None, error_fd: int = -1) -> None:
        """error_fd: the read end of a pipe, which is now this object's."""
        self.name, self.pid, self.rank = name, pid, rank
        self.error_fd = error_fd
        #: its death is no news
        self.expected = False
        self.pidfd = os.pidfd_open(pid)
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES)
        self._begun = b""

    def add(self, data: bytes) -> None:
        *lines, self._begun = (self._begun + data)[-_CHUNK:].split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace").rpartition("\r")[2].strip()
            if text:
                self._lines.append(text[:_LINE_SIZE])

    def last_lines(self) -> str:
        return "\n".join(self._lines)

    def end(self) -> tuple[int, int] | None:
        """How it has ended: (signal, exit code); None: it lives, or was reaped."""
        if self.pidfd < 0:
            return None
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                if found.si_code == os.CLD_EXITED:
                    return 0, found.si_status
                return found.si_status, 0
        return None

    def death(self, end: tuple[int, int] | None, private: bool = True) -> str:
        """How it has died. private: with its pid and last lines."""
        who = f"{self.name} (pid {self.pid})" if private else self.name
        if end is None:
            return f"{who} has ended"
        number, code = end
        if number:
            text = f"{who} was killed by signal {number} ({signal.strsignal(number)})"
        else:
            text = f"{who} exited with status {code}"
        lines = self.last_lines()
        return f"{text}; its last lines: {lines}" if private and lines else text

    def stopped(self) -> bool:
        """By a signal or a debugger."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.pidfd)
        if self.error_fd >= 0:
            os.close(self.error_fd)
        self.pidfd = self.error_fd = -1


class Watch(threading.Thread):
    """Passes the children's lines on to the standard error, and tells of deaths."""

    def __init__(
        self,
        on_death: Callable[[Child, tuple[int, int] | None], object],
        on_look: Callable[[], object],
    ) -> None:
        """Both are called on this thread. on_look: after lines, and each INTERVAL."""
        super().__init__(name="coxswain-sglang-watch", daemon=True)
        self._on_death, self._on_look = on_death, on_look
        self._output = Output()
        self._mutex = threading.Lock()
        # by what is polled
        self._children: dict[int, Child] = {}
        self._open: list[Child] = []
        self._gone: collections.deque[Child] = collections.deque()
        self._over = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def add(self, child: Child) -> None:
        with self._mutex:
            self._open.append(child)
            self._children[child.pidfd] = child
            if child.error_fd >= 0:
                self._children[child.error_fd] = child
        self.wake()

    def forget(self, child: Child) -> None:
        """Of a process that was reaped; closes what belongs to it."""
        with self._mutex:
            self._children.pop(child.pidfd, None)
            self._children.pop(child.error_fd, None)
        self.wake()
        self._gone.append(child)

    def wake(self) -> None:
        """Has on_look called."""
        with self._mutex:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Ends the thread, which closes what belongs to the children."""
        self._over = True
        self.wake()

    def run(self) -> None:
        while not self._over:
            while self._gone:  # not while this thread polls their fds
                self._close(self._gone.popleft())
            self._turn()
        for child in list(self._open):
            self._close(child)
        with self._mutex:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _close(self, child: Child) -> None:
        with self._mutex:
            if child in self._open:
                self._open.remove(child)
                child.close()

    def _turn(self) -> None:
        with self._mutex:
            children = dict(self._children)
        poll = select.poll()
        for fd in (self._wake_fd, *children):
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(INTERVAL * 1000)]
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        found = [(fd, child) for fd in ready if (child := children.get(fd))]
        for fd, child in found:
            if fd == child.error_fd:
                self._read(child)
        for fd, child in found:
            if fd == child.pidfd:
                self._reap(child)
        self._call(self._on_look)

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception:  # pylint: disable=broad-exception-caught
            sys.excepthook(*sys.exc_info())

    def _read(self, child: Child) -> bool:
        """Takes what a child has written. Returns whether there may be more."""
        try:
            data = os.read(child.error_fd, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            with self._mutex:
                self._children.pop(child.error_fd, None)
            return False
        child.add(data)
        self._output.pass_on(2, data)
        return True

    def _reap(self, child: Child) -> None:
        with self._mutex:
            known = self._children.pop(child.pidfd, None) is not None
        if not known:
            return
        while child.error_fd in self._children and self._read(child):
            pass
        with self._mutex:
            self._children.pop(child.error_fd, None)
        self._call(self._on_death, child, child.end())
