"""Objects of the library that are freed once, and memory that views keep."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from .. import _native
from .errors import Busy, Closed, PeerDead, Process, StateError, check, new_error, text_of

ffi, lib = _native.ffi, _native.lib

Self = TypeVar("Self", bound="Owned")


def _references_of_one() -> int:
    alone = object()
    return sys.getrefcount(alone)


#: What sys.getrefcount says of an object to which one local variable refers: 2, and 1 since CPython
#: 3.14, where a call borrows it.
ALONE = _references_of_one()


def check_peer(code: int, err: Any) -> None:
    """As check, for calls whose other side is no rank."""
    if code == lib.COX_PEER_DEAD:
        error = PeerDead(text_of(err.text) or text_of(lib.cox_status_text(code)))
        error.code = code
        raise error
    check(code, err)


class Owned:
    """A native object. It is freed by close, or with the last reference from Python, and not before
    what uses it is closed."""

    #: False: one thread at a time, and another one gets Busy instead of waiting for it
    _threads_wait = True

    def _own(self, what: str, native: Any, free: Callable[[Any], object], *used: Owned) -> None:
        """free(native) is called once. used: what native needs, which stays open meanwhile."""
        token = object()
        users: set[object] = set()

        # Does not refer to self: no reference cycle, so that it runs at once.
        def destroy(pointer: Any) -> None:
            if not users:  # else a reference cycle is freed in no order
                free(pointer)
            for owned in used:
                owned._users.discard(token)

        self._what = what
        self._process = Process(what)
        self._users = users
        self._lock = threading.RLock()
        self._native = ffi.gc(native, destroy)
        for owned in used:
            owned._users.add(token)

    def _use(self) -> Any:
        """The native object. With self._lock, if another thread may close it meanwhile."""
        self._process.check()
        if self._native is None:
            raise Closed(f"this {self._what} is closed")
        return self._native

    def _hold(self) -> None:
        self._process.check()
        if not self._lock.acquire(blocking=self._threads_wait):
            raise Busy(f"another thread uses this {self._what}")

    def _call(self, function: Any, *arguments: Any) -> None:
        """function(native, *arguments, err); raises what it returns."""
        err = new_error()
        self._hold()
        try:
            r = function(self._use(), *arguments, err)
        finally:
            self._lock.release()
        check_peer(r, err)

    def close(self) -> None:
        """Frees it. Idempotent. Raises StateError while something uses it."""
        self._hold()
        try:
            if self._native is None:
                return
            kept = self._kept()
            if kept:
                raise StateError(f"this {self._what} is in use: {kept}")
            native, self._native = self._native, None
            ffi.release(native)
        finally:
            self._lock.release()

    def _kept(self) -> str:
        """Why it cannot be closed."""
        return f"close what was made with it first, {len(self._users)} left" if self._users else ""

    def __enter__(self: Self) -> Self:
        self._use()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except StateError:
            # The traceback of an exception keeps views: the last one frees the memory.
            if error is None:
                raise


class Mapped(Owned):
    """Memory that this process has mapped, as long as it is open or a view of it exists."""

    _size: int
    _writable: bool
    _buffer: weakref.ref[Any] | None = None

    @property
    def size(self) -> int:
        """In bytes."""
        return self._size

    @property
    def memory(self) -> memoryview:
        """The bytes in place: `numpy.asarray(x.memory)`, `torch.frombuffer(x.memory, dtype=...)`.
        Such views keep the memory, and close raises StateError while one exists."""
        with self._lock:
            native = self._use()
            buffer = self._buffer() if self._buffer else None
            if buffer is None:
                buffer = ffi.buffer(native, self._size)  # keeps native
                self._buffer = weakref.ref(buffer)
        view = memoryview(buffer).cast("B")
        return view if self._writable else view.toreadonly()

    def _kept(self) -> str:
        if self._buffer and self._buffer() is not None:
            return "a view of its memory exists; delete the view first, or copy it"
        return super()._kept()
