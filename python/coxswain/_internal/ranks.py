"""Collective operations of ranks, without the coordinator."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .. import _native
from .arguments import Buffer, buffer_of, deadline_of
from .errors import (
    Busy,
    Closed,
    Error,
    Invalid,
    Process,
    RankDied,
    StateError,
    TooLarge,
    error_of,
    new_error,
    text_of,
)

if TYPE_CHECKING:
    from .worker import Worker

ffi, lib = _native.ffi, _native.lib


_BUSY = "a thread of this process is in an operation of the rank group already"

# The rank group of each worker's last init, which ends when the next one is joined.
_of_workers: weakref.WeakKeyDictionary[Worker, RankGroup] = weakref.WeakKeyDictionary()


def _error(code: int, text: str) -> Error:
    """The exception, with the rank and the process that the library's text names first."""
    error = error_of(code, text)
    named = re.search(r"\brank (\d+)(?: \(pid (\d+)\))?", text)
    if named:
        error.rank = int(named[1])
        if isinstance(error, RankDied) and named[2]:
            error.pid = int(named[2])
    return error


def _memory_of(what: str, data: Any, writable: bool) -> tuple[Any, int]:
    """The address and size in bytes of a contiguous buffer, or of a torch tensor, in place."""
    if hasattr(data, "data_ptr"):  # torch: a tensor is no buffer
        if data.device.type != "cpu":
            raise Invalid(f"{what} is a tensor on {data.device}; copy it to the CPU")
        if not data.is_contiguous():
            raise Invalid(f"{what} is a tensor that is not contiguous")
        return ffi.cast("uint8_t *", data.data_ptr()), data.numel() * data.element_size()
    memory = buffer_of(data, what, writable)
    return memory, len(memory)


class RankGroup:
    """This rank in a group of ranks that operate together: barrier, all-gather of values and fds.

    ::

        with coxswain.RankGroup.join("tp", rank, 4) as ranks:
            ranks.barrier()
            parts = ranks.gather(b"...")

    `rank`, `rank_count`: of this process; in a subgroup its place among the members, and their
    number. `value_size`: bytes of the largest value.

    Every rank calls the same operations in the same order; one returns when all ranks have arrived.
    timeout: seconds, None: no limit. Operations raise TimedOut; RankDied with the rank and its pid,
    after which a new group must be formed; Aborted; Corrupt; and Busy where another thread waits in
    one. After a failure this rank is out of step until the next `align`, and operations of the
    other ranks raise Aborted. Ctrl-C ends a wait of the main thread within 50 ms; that is such a
    failure.
    """

    rank: int
    rank_count: int
    value_size: int

    def __init__(self) -> None:
        raise TypeError("use RankGroup.join, InitRequest.join or RankGroup.subgroup")

    def _set_up(
        self, native: Any, value_size: int, raised: list[BaseException], parent: RankGroup | None
    ) -> None:
        self._process = Process("rank group")
        self._native = native
        self._parent = parent
        self._subgroups: list[RankGroup] = []
        #: what a signal handler raised while the main thread waited (native/ranks.c)
        self._raised = raised
        self._err = new_error()
        #: held by the thread that operates
        self._operating = threading.Lock()
        #: held while `abort` uses the group, and while `leave` frees it
        self._freeing = threading.RLock()
        info = lib.cox_group_get_info(native)
        self.rank, self.rank_count = int(info.rank), int(info.rank_count)
        self.value_size = value_size

    @classmethod
    def join(
        cls,
        name: str | None = None,
        rank: int | None = None,
        rank_count: int | None = None,
        *,
        value_size: int = 4096,
        incarnation: int = 0,
        timeout: float | None = 60.0,
    ) -> RankGroup:
        """Joins the group of this name on this machine, and waits for the other ranks.

        name, rank, rank_count: None: those of the group of `coxswain.Group` that this process is a
        rank of. value_size: bytes of the largest value, 4096 at least. incarnation: distinguishes
        groups of one name. Raises Taken, TimedOut and RankDied, which name ranks; Invalid: the
        ranks differ in an argument.
        """
        if name is None or rank is None or rank_count is None:
            from .worker import _this_worker  # pylint: disable=import-outside-toplevel

            worker = _this_worker()
            name = f"{worker.group_name}_ranks" if name is None else name
            rank = worker.rank if rank is None else rank
            rank_count = worker.rank_count if rank_count is None else rank_count
        options = ffi.new("struct cox_group_options *", {"fd": -1})
        options.rank, options.rank_count = rank, rank_count
        options.incarnation = incarnation
        return cls._join(options, name, value_size, timeout)

    @classmethod
    def _of_init(
        cls, worker: Worker, request: Any, value_size: int, timeout: float | None
    ) -> RankGroup:
        """Joins the ranks of an init, after it has left the rank group of the init before."""
        former = _of_workers.pop(worker, None)
        if former is not None:
            former.leave()
        options = ffi.new("struct cox_group_options *", request.group[0])
        # A legacy coordinator has no memory for it: then a name of the group's.
        name = f"{worker.group_name}_init"
        if value_size <= lib.COX_GROUP_VALUE_SIZE_MIN or (options.fd < 0 and not options.sealed):
            group = cls._join(options, name, value_size, timeout)
        else:
            group = cls._join_larger(cls._join(options, name, 0, timeout), value_size, timeout)
        _of_workers[worker] = group
        return group

    @classmethod
    def _join_larger(cls, former: RankGroup, value_size: int, timeout: float | None) -> RankGroup:
        """The memory of an init has room for the smallest values. Rank 0 makes larger memory, whose
        fd all ranks get in the group that they have. Every rank can write all of it."""
        with former:
            memory, first = -1, former.rank == 0
            try:
                if first:
                    memory = os.memfd_create("rank group", os.MFD_CLOEXEC)
                    os.fchmod(memory, 0o600)
                    os.ftruncate(memory, lib.cox_group_memory_size(former.rank_count, value_size))
                    former.broadcast_fd(0, memory, timeout=timeout)
                else:
                    memory = former.broadcast_fd(0, timeout=timeout)
                options = ffi.new("struct cox_group_options *", {"fd": memory})
                options.rank, options.rank_count = former.rank, former.rank_count
                return cls._join(options, "", value_size, timeout)
            finally:
                if memory >= 0:
                    os.close(memory)

    @classmethod
    def _join(cls, options: Any, name: str, value_size: int, timeout: float | None) -> RankGroup:
        raised: list[BaseException] = []
        options.size = ffi.sizeof("struct cox_group_options")
        options.value_size = value_size
        options.deadline_ns = deadline_of(timeout)
        options.cancelled = ffi.addressof(lib, "coxpy_interrupted")
        options.context = ffi.cast("void *", id(raised))
        memory = -1
        try:
            if options.sealed:
                pass
            elif options.rank_count == 1 and options.rank == 0:
                memory = os.memfd_create("rank group", os.MFD_CLOEXEC)
                os.fchmod(memory, 0o600)
                os.ftruncate(memory, lib.cox_group_memory_size(1, value_size))
                options.fd, options.fd_offset = memory, 0
            elif options.fd < 0:
                own_name = ffi.new("char[]", name.encode())
                options.name = own_name
            err = new_error()
            found = ffi.new("struct cox_group **")
            r = lib.cox_group_join(options, found, err)
        finally:
            if memory >= 0:
                os.close(memory)
        if raised:
            if not r:
                lib.cox_group_leave(found[0])
            raise raised.pop()
        if r:
            raise _error(r, text_of(err.text))
        group = cls.__new__(cls)
        group._set_up(
            ffi.gc(found[0], lib.cox_group_leave),
            value_size or lib.COX_GROUP_VALUE_SIZE_MIN,
            raised,
            None,
        )
        return group

    # ---- life ----

    def leave(self) -> None:
        """Leaves the group: for ranks that have not left, this rank is dead then. Idempotent.
        Raises Busy while another thread waits in an operation."""
        self._process.check()
        if self._parent is not None:
            raise StateError("a subgroup ends with its group")
        with self._holding(*self._subgroups), self._freeing:
            native, self._native = self._native, None
            for group in self._subgroups:
                group._native = None
            if native is not None:
                ffi.release(native)

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._parent is None:
            self.leave()

    def abort(self) -> None:
        """Ends the operations of this epoch with Aborted, on all ranks. Any thread."""
        self._process.check()
        with (self._parent or self)._freeing:
            lib.cox_group_abort(self._joined())

    def align(self, epoch: int) -> None:
        """Starts this epoch, 1 or more, on this rank, which is in step again with ranks of the same
        one. Does not wait. Operations of earlier epochs end with Aborted on all ranks, the last one
        too where a rank has not yet seen its end. Raises Invalid: not later than the present."""
        self._process.check()
        with self._holding(*self._subgroups):
            if lib.cox_group_align(self._joined(), epoch):
                raise Invalid(
                    f"epoch {epoch} is not later than the present one, or this is a subgroup"
                )

    def blame(self, rank: int) -> None:
        """Says whose values made this rank fail, before `abort`: errors of other ranks then name
        it."""
        self._process.check()
        with self._holding():
            lib.cox_group_blame(self._joined(), rank)

    def subgroup(self, name: str, ranks: Iterable[int]) -> RankGroup:
        """A part of the group with operations of its own; this rank is one of ranks. Every member
        calls it with the same arguments. It does not wait, and ends with the group. 8 at most. A
        member's rank is its place among the members; errors name ranks of the group."""
        members = ffi.new("struct cox_rank_set *")
        for rank in ranks:
            if not 0 <= rank < lib.COX_RANK_COUNT_MAX:
                raise Invalid(f"subgroup {name!r}: there is no rank {rank}")
            members.words[rank // 64] |= 1 << (rank % 64)
        found = ffi.new("struct cox_group **")
        self._wait(lib.cox_group_subgroup, name.encode(), members, found)
        for group in self._subgroups:
            if group._native == found[0]:
                return group
        group = RankGroup.__new__(RankGroup)
        group._set_up(found[0], self.value_size, self._raised, self)
        self._subgroups.append(group)
        return group

    # ---- operations ----

    def barrier(self, timeout: float | None = 60.0) -> None:
        """Waits until every rank has called it. What a rank wrote to shared memory before, all see
        after."""
        self._wait(lib.cox_group_barrier, deadline_of(timeout))

    def gather(self, data: Buffer, timeout: float | None = 60.0) -> list[bytes]:
        """Gives data, bytes-like, and returns that of every rank, in order. All have one size in
        bytes, 1 to value_size; raises Invalid on every rank if they differ, and TooLarge."""
        value, size = self._value(data)
        values = ffi.new("uint8_t[]", size * self.rank_count)
        self._wait(lib.cox_group_gather, value, size, values, deadline_of(timeout))
        return [bytes(ffi.buffer(values + i * size, size)) for i in range(self.rank_count)]

    def gather_into(self, data: Buffer, out: Buffer, timeout: float | None = 60.0) -> None:
        """As gather, into `out`: a writable buffer, numpy array or CPU tensor of rank_count times
        the bytes of data. data may be this rank's part of `out`. If it raises, `out` may be written
        in part."""
        value, size = self._value(data)
        values, values_size = _memory_of("out", out, True)
        if values_size != size * self.rank_count:
            raise Invalid(
                f"out has {values_size} bytes; {self.rank_count} ranks give {size} bytes "
                f"each, {size * self.rank_count} together"
            )
        self._wait(lib.cox_group_gather, value, size, values, deadline_of(timeout))

    def gather_fds(self, fd: int, keep: bool = True, timeout: float | None = 60.0) -> list[int]:
        """Gives an open fd, and returns a duplicate of every other rank's, in order; its own entry
        is -1. The caller closes them. keep False: fd is closed if the call succeeds."""
        fds = ffi.new("int[]", self.rank_count)
        self._wait(lib.cox_group_gather_fds, fd, self._mode(keep), fds, deadline_of(timeout))
        return list(fds)

    def broadcast_fd(
        self, source: int, fd: int | None = None, keep: bool = True, timeout: float | None = 60.0
    ) -> int:
        """Passes the source's fd to every rank: the source gives it and gets -1, the others get a
        duplicate, which the caller closes. keep False: fd is closed if the call succeeds."""
        if not 0 <= source < self.rank_count:
            raise Invalid(f"source is {source}; it may be 0 to {self.rank_count - 1}")
        given = -1 if fd is None else fd
        if (source == self.rank) != (given >= 0):
            raise Invalid(f"rank {source} is the source, and only it gives an fd")
        found = ffi.new("int *", -1)
        self._wait(
            lib.cox_group_broadcast_fd, source, given, self._mode(keep), found, deadline_of(timeout)
        )
        return int(found[0])

    # ---- helpers ----

    @staticmethod
    def _mode(keep: bool) -> int:
        return int(lib.COX_GROUP_FD_KEEP if keep else lib.COX_GROUP_FD_CONSUME)

    def _value(self, data: Buffer) -> tuple[Any, int]:
        value, size = _memory_of("data", data, False)
        if size > self.value_size:
            raise TooLarge(
                f"data has {size} bytes; a value of this group has at most "
                f"{self.value_size}: join with a larger value_size"
            )
        if not size:
            raise Invalid("data has no bytes; a value has 1 at least")
        return value, size

    def _joined(self) -> Any:
        if self._native is None:
            raise Closed("this rank has left the rank group")
        return self._native

    @contextlib.contextmanager
    def _holding(self, *others: RankGroup) -> Iterator[None]:
        """Only this thread operates in the group, and in others."""
        with contextlib.ExitStack() as held:
            for group in (self, *others):
                if not group._operating.acquire(blocking=False):
                    raise Busy(_BUSY)
                held.callback(group._operating.release)
            yield

    def _wait(self, call: Any, *arguments: Any) -> None:
        self._process.check()
        if not self._operating.acquire(blocking=False):
            raise Busy(_BUSY)
        try:
            self._err.code = 0  # else the library keeps the first error
            r = call(self._joined(), *arguments, self._err)
            if self._raised and threading.current_thread() is threading.main_thread():
                raise self._raised.pop()
            if r:
                raise _error(r, text_of(self._err.text))
        finally:
            self._operating.release()
