"""What goes wrong, as exceptions that carry data.

Every exception of this package is an `Error`, with the library's status as `code` and its text as
the message. One class stands for each status of `enum cox_status`; `RankDied`, `RankError` and
`TimedOut` say which rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NoReturn
from collections.abc import Sequence

from . import foreign as _foreign
from .. import _native

_foreign.check(_native.__file__)
ffi, lib = _native.ffi, _native.lib


class Error(Exception):
    """Something failed. `code`: a status of the library, or a negative errno; 0: of Python's side.
    `rank`: whose failure it is; -1: no rank's."""

    code: int = 0
    rank: int = -1


class TimedOut(Error, TimeoutError):
    """The deadline passed. `late`: the ranks that owe their reply, and what each does."""

    late: Sequence[LateRank] = ()


class PeerDead(Error):
    """The process on the other side died."""


class RankDied(PeerDead):
    """A rank died, or left the group.

    `rank`; `pid` of its process; `signal` that killed it, 0: none; `exit_status`, -1: unknown or
    killed; `last_lines` of its output, newest last.
    """

    pid: int = 0
    signal: int = 0
    exit_status: int = -1
    last_lines: Sequence[str] = ()
    # the request was not sent: the rank was dead already
    _was_refused: bool = False


class RankError(Error):
    """A rank replied with an error of its own: `rank`. The message has the rank's traceback."""


class Stale(Error):
    """Built on a state that the other side does not have."""


class Closed(Error):
    """Stopped, or being stopped."""


class Full(Error):
    """As many requests as the group is deep are in flight: `await group.room()`, or take
    results."""


class Late(Error):
    """A rank still owes the reply to a request that has ended: `await group.room()` waits for
    it."""


class VersionMismatch(Error):
    """The other side speaks another version or geometry."""


class Corrupt(Error):
    """Invalid bytes from another process."""


class Denied(Error, PermissionError):
    """An object with another owner, mode, size or type; or the kernel does not allow it."""


class TooLarge(Error):
    """Does not fit its destination."""


class NoSpace(Error):
    """No memory to reserve."""


class Taken(Error):
    """The name belongs to a live group, or the rank to a process."""


class Aborted(Error):
    """Cancelled before it ran."""


class Deadlock(Error):
    """A blocking call where it would wait for itself."""


class Busy(Error):
    """Already started, or in use by another thread."""


class Invalid(Error, ValueError):
    """An argument outside what is allowed."""


class NotFound(Error, LookupError):
    """A file, name or command that does not exist."""


class ExecFailed(Error):
    """The program of a worker could not be executed."""


class Diverged(Error):
    """Ranks that must agree do not."""


class StateError(Error):
    """Not legal in the present state; also after a fork, and where a view outlives its request."""


class Empty(Error):
    """Nothing there."""


class Unsupported(Error):
    """The other side has no such operation."""


@dataclass(frozen=True)
class LateRank:
    """A rank that had not replied when its request ended."""

    rank: int
    #: its process
    pid: int
    #: it has taken the request
    taken: bool
    #: seconds since its last sign of life on the channel
    silent: float
    #: "alive", "dead", "left" or "absent"
    liveness: str
    #: by a signal or a debugger
    stopped: bool


CLASSES: dict[int, type[Error]] = {
    lib.COX_TIMEOUT: TimedOut,
    lib.COX_PEER_DEAD: RankDied,
    lib.COX_STALE: Stale,
    lib.COX_CLOSED: Closed,
    lib.COX_FULL: Full,
    lib.COX_LATE: Late,
    lib.COX_VERSION: VersionMismatch,
    lib.COX_CORRUPT: Corrupt,
    lib.COX_DENIED: Denied,
    lib.COX_TOO_LARGE: TooLarge,
    lib.COX_NO_SPACE: NoSpace,
    lib.COX_TAKEN: Taken,
    lib.COX_ABORTED: Aborted,
    lib.COX_REJECTED: RankError,
    lib.COX_DEADLOCK: Deadlock,
    lib.COX_BUSY: Busy,
    lib.COX_INVALID: Invalid,
    lib.COX_NOT_FOUND: NotFound,
    lib.COX_EXEC_FAILED: ExecFailed,
    lib.COX_DIVERGED: Diverged,
    lib.COX_STATE: StateError,
    lib.COX_EMPTY: Empty,
    lib.COX_UNSUPPORTED: Unsupported,
}


def text_of(chars: Any) -> str:
    """A string of C; NULL: ""."""
    return ffi.string(chars).decode("utf-8", "replace") if chars else ""


def bytes_of(text: str) -> bytes:
    """A text for the library. File names may have surrogates in it, of which UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace")


def error_of(code: int, text: str) -> Error:
    """The exception of a status."""
    error = CLASSES.get(code, Error)(text or text_of(lib.cox_status_text(code)))
    error.code = code
    return error


def code_of(error: BaseException | str) -> int:
    """The status of an exception, or of a text: what other processes are told."""
    if isinstance(error, PeerDead):
        return int(lib.COX_PEER_DEAD)
    if isinstance(error, Error) and error.code:
        return error.code
    found = (code for code, class_ in CLASSES.items() if type(error) is class_)
    return next(found, int(lib.COX_REJECTED))


def new_error() -> Any:
    """A struct cox_error, for one call."""
    return ffi.new("struct cox_error *")


def fail(code: int, err: Any) -> NoReturn:
    """Raises what a call of the library returned."""
    raise error_of(code, text_of(err.text))


def check(code: int, err: Any) -> None:
    """Raises unless the call returned 0."""
    if code:
        fail(code, err)


class Process:
    """The process that made an object of the library. A fork's child must not use it: the parent's
    threads and ranks are not the child's."""

    #: Forks that have led to this process. Beside each request a comparison, not a system call.
    forks_now = 0

    def __init__(self, what: str) -> None:
        self.what = what
        self.pid = os.getpid()
        self.forks = self.forks_now

    def is_this(self) -> bool:
        return self.forks_now == self.forks

    def check(self) -> None:
        """Raises in the child of a fork."""
        if self.forks_now != self.forks:
            error = StateError(
                f"this {self.what} is of process {self.pid}; a child that was forked from it "
                "cannot use it: start processes with subprocess, or multiprocessing's 'spawn'"
            )
            error.code = lib.COX_STATE
            raise error


def _forked() -> None:
    Process.forks_now += 1


os.register_at_fork(after_in_child=_forked)
