"""The processes of an SGLang server: their deaths and their last lines.

A native thread (native/watch.c) polls a pidfd and a pipe of each, passes on what they write, and
writes a line for a death to the standard error: at once, whatever holds the GIL. The thread here
then acts on it. The wait status is read without reaping: that is multiprocessing's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any
from collections.abc import Callable

from .. import _native

ffi, lib = _native.ffi, _native.lib

#: how often the watcher is asked to look at other things, in seconds
INTERVAL = 1.0
_TEXT_SIZE = 2200


def _check(r: int) -> None:
    if r:
        raise OSError(-r, os.strerror(-r))


class Child:
    """A process of the server. Made by Watch.add."""

    def __init__(self, name: str, pid: int, rank: int | None, native: Any) -> None:
        self.name, self.pid, self.rank = name, pid, rank
        self._native = ffi.gc(native, lib.coxpy_child_unref)
        #: its death is no news
        self.expected = False

    def expect(self) -> None:
        self.expected = True
        lib.coxpy_child_expect(self._native)

    def end(self) -> tuple[int, int] | None:
        """How it has ended: (signal, exit code), (-1, -1) if another wait has reaped it first;
        None: it lives."""
        number, code = ffi.new("int *"), ffi.new("int *")
        if lib.coxpy_child_end(self._native, number, code):
            return number[0], code[0]
        return None

    def death(self, details: bool = True) -> str:
        """How it has died. details: with its pid and last lines."""
        text = ffi.new("char[]", _TEXT_SIZE)
        size = lib.coxpy_child_text(self._native, details, text, _TEXT_SIZE)
        return str(ffi.buffer(text, size)[:].decode("utf-8", "replace"))

    def stopped(self) -> bool:
        """By a signal or a debugger."""
        with contextlib.suppress(OSError), open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def kill(self) -> None:
        """Ends it; that is no news."""
        self.expect()
        lib.coxpy_child_kill(self._native)


class Watch(threading.Thread):
    """Tells of deaths. Its native thread writes the lines, and runs from the first."""

    def __init__(
        self,
        on_death: Callable[[Child], object],
        on_look: Callable[[], object],
        out_fd: int = 2,
    ) -> None:
        """Both are called on this thread. on_look: after lines, and each INTERVAL. Raises
        OSError."""
        super().__init__(name="coxswain-sglang-watch", daemon=True)
        self._on_death, self._on_look = on_death, on_look
        # a signal handler may call quiet
        self._mutex = threading.RLock()
        self._children: list[Child] = []
        self._over = False
        native = ffi.new("struct coxpy_watch **")
        _check(lib.coxpy_watch_new(out_fd, native))
        self._native = native[0]

    def add(self, name: str, pid: int, rank: int | None, error_fd: int = -1) -> Child:
        """error_fd: the read end of a pipe, which is now the child's."""
        native = ffi.new("struct coxpy_child **")
        with self._mutex:
            _check(lib.coxpy_watch_add(self._native, name.encode(), pid, error_fd, native))
            child = Child(name, pid, rank, native[0])
            self._children.append(child)
        return child

    def forget(self, child: Child) -> None:
        """Of a process that was reaped."""
        with self._mutex:
            if child in self._children and self._native:
                self._children.remove(child)
                lib.coxpy_watch_forget(self._native, child._native)

    def quiet(self) -> None:
        """No death is news any more."""
        with self._mutex:
            if self._native:
                lib.coxpy_watch_quiet(self._native)

    def wake(self) -> None:
        """Has on_look called."""
        with self._mutex:
            if self._native:
                lib.coxpy_watch_wake(self._native)

    def stop(self) -> None:
        """Ends the threads."""
        self._over = True
        self.wake()

    def run(self) -> None:
        while not self._over:
            deadline = time.monotonic_ns() + int(INTERVAL * 1e9)
            found = lib.coxpy_watch_next(self._native, deadline)
            if found != ffi.NULL:
                with self._mutex:
                    ended = [child for child in self._children if child._native == found]
                for child in ended:
                    self._call(self._on_death, child)
            self._call(self._on_look)
        with self._mutex:
            native, self._native = self._native, None
            self._children.clear()
        lib.coxpy_watch_free(native)

    def _call(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception:  # pylint: disable=broad-exception-caught
            sys.excepthook(*sys.exc_info())
