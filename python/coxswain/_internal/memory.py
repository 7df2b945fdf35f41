"""Blocks of memory that processes share without copying, and queues of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

from .. import _native
from .arguments import Buffer, deadline_of
from .errors import Invalid, check, error_of, new_error
from .group import _slice
from .handles import Exporter, Handle, SocketPath, _bytes_as, _path
from .owned import Mapped, Owned, check_peer

ffi, lib = _native.ffi, _native.lib


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """What a pool has; exact while no process changes it."""

    #: blocks, and free ones; of a pool of slabs: slabs, and empty ones
    block_count: int
    free_count: int
    #: bytes of all blocks, and of used ones
    size: int
    used_size: int
    #: processes that have attached it; dead ones too, until a sweep
    owner_count: int
    #: references of all processes, and messages of queues
    reference_count: int
    pin_count: int
    #: blocks that were allocated and freed since the pool was created
    allocated: int
    freed: int
    #: references and messages of dead processes that were released
    swept: int


class Block(Mapped):
    """A reference to a block of a pool, which ends with close or with the last view of its memory.

    `bytes(block)`: 32 bytes that name the block, for `Pool.block` in another process. They are no
    reference: keep the block until the other process has one.
    """

    def __init__(self) -> None:
        raise TypeError("use Pool.allocate, Pool.block or Subscriber.take")

    def _set_up(self, pool: Any, ref: Any, size: int, writable: bool, owner: Owned) -> None:
        self._ref, self._size, self._writable = ref, size, writable
        pointer = ffi.cast("uint8_t *", lib.cox_pool_pointer(pool, ref))
        self._own("block", pointer, lambda _: lib.cox_pool_unref(pool, ref, ffi.NULL), owner)

    def release(self) -> None:
        """Ends the reference; the last one of all processes frees the block. Idempotent. Raises
        StateError while a view of its memory exists: memoryview, numpy array or tensor."""
        self.close()

    def __bytes__(self) -> bytes:
        return bytes(ffi.buffer(self._ref))


class Pool(Owned):
    """Memory in blocks that several processes share, with references per process, so that those of
    a process that dies are released (`sweep`). For processes that trust each other.

    ::

        with coxswain.Pool.create(block_size=1 << 20, block_count=64) as pool:
            with pool.allocate(4096) as block:
                block.memory[:5] = b"hello"

    Another process gets it with `open`, `attach`, or the messages of a queue. Any thread may use
    it.
    """

    _writable: bool

    def __init__(self) -> None:
        raise TypeError("use Pool.create, Pool.attach or Pool.open")

    @classmethod
    def _of(cls, native: Any, writable: bool) -> Pool:
        pool = cls.__new__(cls)
        pool._own("pool", native, lib.cox_pool_free)
        pool._writable = writable
        return pool

    @classmethod
    def create(
        cls,
        block_size: int,
        block_count: int = 0,
        *,
        slabs_size: int = 0,
        slab_size: int = 0,
        owner_count_max: int = 16,
        on_demand: bool = False,
    ) -> Pool:
        """A pool of block_count blocks of block_size bytes, a multiple of 64.

        Or with slabs_size bytes in slabs, of slab_size (0: 64 KiB) each, that are divided into
        blocks of any power of two from block_size on. owner_count_max: processes. on_demand: memory
        is allocated with its block. Raises Invalid and NoSpace.
        """
        options = ffi.new("struct cox_pool_options *")
        options.size = ffi.sizeof("struct cox_pool_options")
        options.strategy = lib.COX_POOL_SLAB if slabs_size else lib.COX_POOL_FIXED
        options.block_size, options.block_count = block_size, block_count
        options.slabs_size, options.slab_size = slabs_size, slab_size
        options.owner_count_max, options.on_demand = owner_count_max, on_demand
        found, err = ffi.new("struct cox_pool **"), new_error()
        check(lib.cox_pool_create(options, found, err), err)
        return cls._of(found[0], True)

    @staticmethod
    def _attaching(read_only: bool) -> Any:
        options = ffi.new("struct cox_pool_attach_options *")
        options.size = ffi.sizeof("struct cox_pool_attach_options")
        options.read_only = read_only
        return options

    @classmethod
    def attach(cls, fds: Sequence[int], read_only: bool = False) -> Pool:
        """The pool of another process, by duplicates of its `fds`, which stay the caller's. Raises
        Denied, Corrupt, VersionMismatch; Full: owner_count_max processes have it."""
        if len(fds) != 2:
            raise Invalid(f"a pool has two fds, not {len(fds)}")
        found, err = ffi.new("struct cox_pool **"), new_error()
        check(
            lib.cox_pool_attach(
                ffi.new("int[2]", list(fds)), cls._attaching(read_only), found, err
            ),
            err,
        )
        return cls._of(found[0], not read_only)

    @classmethod
    def open(
        cls,
        handle: Buffer,
        socket: SocketPath = None,
        timeout: float | None = 1.0,
        read_only: bool = False,
    ) -> Pool:
        """The pool of another process, by the 128 bytes of `export`. socket, timeout as for
        `Handle.open`; raises as it and `attach`."""
        native = _bytes_as("struct cox_pool_handle", "the handle of a pool", handle)
        found, err = ffi.new("struct cox_pool **"), new_error()
        check_peer(
            lib.cox_pool_open(
                native, _path(socket), deadline_of(timeout), cls._attaching(read_only), found, err
            ),
            err,
        )
        return cls._of(found[0], not read_only)

    @property
    def fds(self) -> tuple[int, int]:
        """The pool's own fds, open until close: to pass to another process."""
        found = ffi.new("int[2]")
        lib.cox_pool_fds(self._use(), found)
        return found[0], found[1]

    def export(self, exporter: Exporter, read_only: bool = False) -> bytes:
        """128 bytes with which another process opens it. read_only: it cannot write the blocks."""
        found = ffi.new("struct cox_pool_handle *")
        self._call(lib.cox_pool_export, exporter._use(), read_only, found)
        return bytes(ffi.buffer(found))

    def allocate(self, size: int) -> Block:
        """A block of size bytes or more, which are not cleared. Raises Full, TooLarge; NoSpace
        (on_demand); Denied: read-only."""
        ref = ffi.new("struct cox_block_ref *")
        self._call(lib.cox_pool_allocate, size, ref)
        return self._block(ref)

    def block(self, ref: Buffer) -> Block:
        """A reference to the block that `bytes(block)` of another process names. Raises Stale: it
        was freed; NotFound: of another pool; Invalid."""
        own = _bytes_as("struct cox_block_ref", "the name of a block", ref)
        self._call(lib.cox_pool_ref, own)
        return self._block(own)

    def _block(self, ref: Any) -> Block:
        block = Block.__new__(Block)
        block._set_up(self._use(), ref, int(ref.size), self._writable, self)
        return block

    def sweep(self) -> int:
        """Releases the references of dead processes, and returns how many. `allocate` does so when
        it finds no free block."""
        with self._lock:
            return int(lib.cox_pool_sweep(self._use()))

    def stats(self) -> PoolStats:
        """Blocks, references, and what was swept."""
        found = ffi.new("struct cox_pool_stats *")
        with self._lock:
            lib.cox_pool_read_stats(self._use(), found)
        return PoolStats(
            *(int(getattr(found, field.name)) for field in dataclasses.fields(PoolStats))
        )


class Queue(Owned):
    """Messages that are references to blocks: each is taken by every subscriber, without a copy.
    Past `depth` newer ones a message ends, taken or not. For processes that trust each other.
    """

    def __init__(self) -> None:
        raise TypeError("use Queue.create, Queue.attach or Queue.open")

    @classmethod
    def _of(cls, native: Any) -> Queue:
        queue = cls.__new__(cls)
        queue._own("queue", native, lib.cox_queue_free)
        return queue

    @classmethod
    def create(
        cls, depth: int = 16, *, publisher_count_max: int = 8, subscriber_count_max: int = 64
    ) -> Queue:
        """A queue that keeps depth messages, a power of two. Raises Invalid and NoSpace."""
        options = ffi.new("struct cox_queue_options *")
        options.size = ffi.sizeof("struct cox_queue_options")
        options.depth = depth
        options.publisher_count_max = publisher_count_max
        options.subscriber_count_max = subscriber_count_max
        found, err = ffi.new("struct cox_queue **"), new_error()
        check(lib.cox_queue_create(options, found, err), err)
        return cls._of(found[0])

    @classmethod
    def attach(cls, fd: int) -> Queue:
        """The queue of another process, by a duplicate of its `fd`, which stays the caller's."""
        found, err = ffi.new("struct cox_queue **"), new_error()
        check(lib.cox_queue_attach(fd, ffi.NULL, found, err), err)
        return cls._of(found[0])

    @classmethod
    def open(cls, handle: Handle, socket: SocketPath = None, timeout: float | None = 1.0) -> Queue:
        """The queue of another process, by the handle of `export`; as `Handle.open`."""
        found, err = ffi.new("struct cox_queue **"), new_error()
        check_peer(
            lib.cox_queue_open(
                handle._handle, _path(socket), deadline_of(timeout), ffi.NULL, found, err
            ),
            err,
        )
        return cls._of(found[0])

    @property
    def fd(self) -> int:
        """The queue's own fd, open until close: to pass to another process."""
        return int(lib.cox_queue_fd(self._use()))

    def export(self, exporter: Exporter) -> Handle:
        """A handle with which another process opens it."""
        found = ffi.new("struct cox_handle *")
        self._call(lib.cox_queue_export, exporter._use(), found)
        return Handle(ffi.buffer(found))

    def sweep(self) -> int:
        """Removes publishers and subscribers of dead processes, and returns how many."""
        with self._lock:
            return int(lib.cox_queue_sweep(self._use()))


class Publisher(Owned):
    """Publishes blocks of a pool. One thread at a time.

    exporter: so that subscribers can open the pool; None: they give it as one of their `pools`.
    read_only: those that open it cannot write. Raises Full.
    """

    _threads_wait = False

    def __init__(
        self,
        queue: Queue,
        pool: Pool,
        exporter: Exporter | None = None,
        read_only: bool = False,
        socket: SocketPath = None,
    ) -> None:
        path = _path(socket)
        options = ffi.new("struct cox_publisher_options *", {"socket_path": path})
        options.size = ffi.sizeof("struct cox_publisher_options")
        options.pool, options.read_only = pool._use(), read_only
        used: list[Owned] = [queue, pool]
        if exporter is not None:
            options.exporter = exporter._use()
            used.append(exporter)
        found = ffi.new("struct cox_publisher **")
        queue._call(lib.cox_publisher_new, options, found)
        self._own("publisher", found[0], lib.cox_publisher_free, *used)
        self._keeps = path

    def publish(self, block: Block, length: int | None = None, user_data: int = 0) -> int:
        """Publishes length bytes of the block, None: all, for all present subscribers; returns the
        message's number, from 1. Does not wait. The caller keeps its reference. user_data: an
        integer of 64 bits."""
        block._use()
        number = ffi.new("uint64_t *")
        self._call(
            lib.cox_publisher_publish,
            block._ref,
            block.size if length is None else length,
            user_data,
            number,
        )
        return int(number[0])


class Message(Block):
    """A message of a queue: a reference to its block, whose `memory` is the message itself,
    read-only.

    `number`: of the message, from 1. `skipped`: messages before it that this subscriber has missed.
    `user_data`: as the publisher gave it.
    """

    number: int
    skipped: int
    user_data: int


class Subscriber(Owned):
    """Takes the messages that are published from now on. One thread at a time.

    pools: those that this process has already; others are opened, at the control socket where the
    kernel does not allow it. Raises Full.
    """

    _threads_wait = False

    def __init__(self, queue: Queue, pools: Iterable[Pool] = (), socket: SocketPath = None) -> None:
        path, own = _path(socket), list(pools)
        array = ffi.new("struct cox_pool *[]", [pool._use() for pool in own])
        options = ffi.new("struct cox_subscriber_options *", {"socket_path": path})
        options.size = ffi.sizeof("struct cox_subscriber_options")
        options.pools, options.pool_count = array, len(own)
        found = ffi.new("struct cox_subscriber **")
        queue._call(lib.cox_subscriber_new, options, found)
        self._own("subscriber", found[0], lib.cox_subscriber_free, queue, *own)
        self._keeps = path, array

    def take(self) -> Message | None:
        """The oldest message that was not taken; None: there is none. Raises PeerDead, Denied and
        Unsupported for a message that cannot be taken, which is skipped."""
        native, err = ffi.new("struct cox_message *"), new_error()
        self._hold()
        try:
            r = lib.cox_subscriber_take(self._use(), native, err)
            if r == lib.COX_EMPTY:
                return None
            check_peer(r, err)
            ref = ffi.new("struct cox_block_ref *", native.ref)
            message = Message.__new__(Message)
            message._set_up(native.pool, ref, int(native.length), False, self)
        finally:
            self._lock.release()
        message.number, message.skipped = int(native.number), int(native.skipped)
        message.user_data = int(native.user_data)
        return message

    @property
    def pending(self) -> int:
        """Messages that can be taken."""
        with self._lock:
            return int(lib.cox_subscriber_pending(self._use()))


class QueueSet(Owned):
    """Waits for messages of several subscribers, 1 to 64. One thread at a time uses it and them."""

    _threads_wait = False

    def __init__(self, *subscribers: Subscriber) -> None:
        if not subscribers:
            raise Invalid("a set has one subscriber at least")
        found, err = ffi.new("struct cox_queue_set **"), new_error()
        check(lib.cox_queue_set_new(found), err)
        self._own("queue set", found[0], lib.cox_queue_set_free, *subscribers)
        self._subscribers: dict[int, Subscriber] = {}
        for subscriber in subscribers:
            native = subscriber._use()
            check(lib.cox_queue_set_add(self._native, native, err), err)
            self._subscribers[int(ffi.cast("uintptr_t", native))] = subscriber
            subscriber._lock = self._lock

    def wait(self, timeout: float | None = None) -> Subscriber | None:
        """A subscriber with a message, in turn where several have one. timeout: seconds, None: no
        limit; when they have passed, None. Ctrl-C ends it."""
        deadline = deadline_of(timeout)
        found = ffi.new("struct cox_subscriber **")
        while True:
            self._hold()
            try:
                r = lib.cox_queue_set_wait(self._use(), _slice(deadline), found)
            finally:
                self._lock.release()
            if r == 0:
                return self._subscribers[int(ffi.cast("uintptr_t", found[0]))]
            if r != lib.COX_TIMEOUT:
                raise error_of(r, "")
            if time.monotonic_ns() >= deadline:
                return None
