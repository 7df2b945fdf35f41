"""Lines for streams that may be full: a terminal that is paused, a pipe that nobody reads."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import stat
import struct
import termios
import time
from typing import Any

_log = logging.getLogger("coxswain")

# How long the first line that finds no room waits for it, in seconds, and how often it looks.
_PATIENCE = 1.0
_INTERVAL = 0.01


def _has_room(stream: Any) -> bool:
    """Whether a line, and what its stream has buffered before it, is written without a wait.
    stream: a file, or a descriptor.

    A pipe counts as full from its half on: so much room is for the buffered text, and for what
    other threads and processes write meanwhile."""
    try:
        fd = stream if isinstance(stream, int) else stream.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        if not poll.poll(0):
            return False
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return True
        (waiting,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
        return int(waiting) <= fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) // 2
    except (AttributeError, OSError, ValueError):
        return True  # none of a file descriptor, or closed: the write says so


def _log_streams() -> list[Any]:
    """Where a message to logging's "coxswain" is written."""
    handlers: list[logging.Handler] = []
    logger: logging.Logger | None = _log
    while logger:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    if not handlers and logging.lastResort:
        handlers.append(logging.lastResort)
    return [handler.stream for handler in handlers if isinstance(handler, logging.StreamHandler)]


class Output:
    """Writes lines, and waits a second at most. Those that find no room are dropped and counted;
    from then on none waits for that stream, until it has room and the count is told.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._full: list[Any] = []

    def write(self, stream: Any, line: str) -> None:
        """Writes a line, whose newline is added, to a stream; None: nothing."""
        if stream and self._takes([stream]):
            stream.write(line + "\n")
            stream.flush()

    def pass_on(self, fd: int, data: bytes) -> None:
        """Writes bytes, at most half a pipe of them, to a descriptor."""
        if self._takes([fd]):
            with contextlib.suppress(OSError):
                os.write(fd, data)

    def log(self, level: int, message: str, *values: Any, **options: Any) -> None:
        """Passes a message to logging's "coxswain"."""
        if _log.isEnabledFor(level) and self._takes(_log_streams()):
            _log.log(level, message, *values, **options)

    def tell_dropped(self, last: bool = False) -> None:
        """Logs how many were dropped, once there is room again; last: none follow."""
        awaited = _log_streams() + ([] if last else self._full)
        if self.dropped and all(map(_has_room, awaited)):
            dropped, self.dropped = self.dropped, 0
            _log.warning(
                "%d lines of ranks and messages were dropped: on_line or logging is too slow, or "
                "standard output or error was not read in time",
                dropped,
            )

    def _takes(self, streams: list[Any]) -> bool:
        self.tell_dropped()
        known = [stream for stream in streams if stream in self._full]
        deadline = time.monotonic() + (0 if known else _PATIENCE)
        while full := [stream for stream in streams if not _has_room(stream)]:
            if time.monotonic() >= deadline:
                self._full += [stream for stream in full if stream not in known]
                self.dropped += 1
                return False
            time.sleep(_INTERVAL)
        self._full = [stream for stream in self._full if stream not in streams]
        return True
