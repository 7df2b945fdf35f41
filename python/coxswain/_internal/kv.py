"""KV cache that other groups copy from: prefill in one group, decode in another."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import select
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .. import _native
from .arguments import deadline_of
from .errors import (
    Aborted,
    Empty,
    Error,
    Full,
    Invalid,
    NotFound,
    PeerDead,
    Stale,
    StateError,
    TimedOut,
    Unsupported,
    check,
    new_error,
)
from .handles import Exporter, Handle, SocketPath
from .owned import Mapped, Owned, check_peer

if TYPE_CHECKING:
    from .batch import Batch
    from .worker import LinkRequest, LinkState, Pull, PullRequest, PullResult, RemoteGroup, Worker

ffi, lib = _native.ffi, _native.lib

# Of the handles of one link, where they come through a control socket.
_LINK_SECONDS = 5.0
# How often a pull asks whether the other rank lives, and how long it waits for a block in between.
_ALIVE_NS = 10_000_000
_LINKS_MAX = 64


@dataclasses.dataclass(frozen=True)
class KvLayout:
    """How keys and values of a rank lie in a block. Ranks of two groups can copy blocks from each
    other where all fields are equal; `KvTransfer.open` fills in those with the default 0."""

    layer_count: int
    #: of this rank
    kv_head_first: int
    kv_head_count: int
    head_dim: int
    #: positions per block
    block_size: int
    element_bytes: int
    #: 64 bits of configuration and weights of the whole model; 0: unknown
    model_digest: int = 0
    rank: int = 0
    rank_count: int = 0
    #: of one block
    block_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class KvPool:
    """What other groups need to copy the KV blocks of a rank."""

    block_count: int
    #: of the blocks
    handle: Handle
    layout: KvLayout

    @classmethod
    def _of(cls, message: Any) -> KvPool:
        native, err = ffi.new("struct cox_kv_pool *"), new_error()
        check(lib.cox_kv_pool_read(message, native, err), err)
        fields = (field.name for field in dataclasses.fields(KvLayout))
        layout = KvLayout(**{name: int(getattr(native.layout, name)) for name in fields})
        return cls(int(native.block_count), Handle(ffi.buffer(native.handle)), layout)

    def _fill(self, native: Any) -> None:
        native.block_count = self.block_count
        ffi.memmove(native.handle, bytes(self.handle), 64)
        for name, value in dataclasses.asdict(self.layout).items():
            setattr(native.layout, name, value)

    def check_layout(self, theirs: KvPool) -> None:
        """Raises Invalid, with each field that differs, unless blocks can be copied."""
        ours, other = ffi.new("struct cox_kv_pool *"), ffi.new("struct cox_kv_pool *")
        self._fill(ours)
        theirs._fill(other)
        err = new_error()
        check(
            lib.cox_kv_layout_check(ffi.addressof(other.layout), ffi.addressof(ours.layout), err),
            err,
        )


class KvBlocks(Mapped):
    """block_count blocks of block_bytes, a multiple of 64, all zero: this process writes them, and
    others can copy them. `memory`: all blocks, one behind the other.

    Each block has a user, the number whose content it has, or 0: none. Others copy a block of the
    user that they expect; what is taken meanwhile is Stale there. `KvTransfer.step` takes and
    gives the blocks of a step. Raises Invalid and NoSpace.
    """

    _writable = True

    def __init__(self, block_count: int, block_bytes: int) -> None:
        found, err = ffi.new("struct cox_kv_blocks **"), new_error()
        check(lib.cox_kv_blocks_new(block_count, block_bytes, found, err), err)
        blocks = self._blocks = found[0]
        self.block_count, self.block_bytes = block_count, block_bytes
        self._size = block_count * block_bytes
        memory = ffi.cast("uint8_t *", lib.cox_kv_blocks_info(blocks).memory)
        self._own("KV cache", memory, lambda _: lib.cox_kv_blocks_free(blocks))

    @property
    def fd(self) -> int:
        """For readers, open until close: to pass to another process, or to export."""
        self._use()
        return int(lib.cox_kv_blocks_info(self._blocks).fd)

    def _check(self, block: int) -> int:
        self._use()
        if not 0 <= block < self.block_count:
            raise Invalid(f"KV block {block} does not exist; there are {self.block_count}")
        return block

    def take(self, block: int) -> None:
        """Before it is written: it has no user from now on."""
        lib.cox_kv_blocks_take(self._blocks, self._check(block))

    def expect(self, block: int) -> None:
        """As take, for content that is on its way: readers that know of the block wait for its
        give, or for a take. For those on other machines it is stale until then."""
        lib.cox_kv_blocks_expect(self._blocks, self._check(block))

    def give(self, block: int, user: int) -> None:
        """After it was written: it belongs to this user. Raises StateError: it was not taken."""
        r = lib.cox_kv_blocks_give(self._blocks, self._check(block), user)
        if r == lib.COX_STATE:
            raise StateError(f"KV block {block} has a user: take it first")
        if r:
            raise Invalid(f"user {user}; it may be 1 to 2^64 - 2")

    def user(self, block: int) -> int:
        """The user of a block; 0: none; 2^64 - 1: its content is on its way."""
        return int(lib.cox_kv_blocks_user(self._blocks, self._check(block)))


class KvView(Owned):
    """The KV blocks of another process, to copy from. fd: a duplicate of its `KvBlocks.fd`, which
    stays the caller's. Raises Denied, Corrupt, VersionMismatch."""

    def __init__(self, fd: int) -> None:
        found, err = ffi.new("struct cox_kv_view **"), new_error()
        check_peer(lib.cox_kv_view_attach(fd, found, err), err)
        self._own("view of a KV cache", found[0], lib.cox_kv_view_free)

    @classmethod
    def open(cls, handle: Handle, socket: SocketPath = None, timeout: float | None = 1.0) -> KvView:
        """By the handle of the blocks; socket, timeout and errors as `Handle.open`."""
        fd = handle.open(socket, timeout)
        try:
            return cls(fd)
        finally:
            os.close(fd)

    @property
    def block_count(self) -> int:
        """Blocks."""
        return int(lib.cox_kv_view_info(self._use()).block_count)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return int(lib.cox_kv_view_info(self._use()).block_size)

    def copy(self, block: int, to: Any, user: int = 0, timeout: float = 0) -> None:
        """Copies a block to a writable buffer of block_bytes. user: the one that it must have;
        0: any. timeout: seconds to wait while the block's content is on its way. Raises Stale: it
        has another user, or was taken during the copy; `to` is invalid then. Raises Empty: its
        content is still on its way."""
        deadline = deadline_of(timeout)
        with ffi.from_buffer(to, require_writable=True) as target:
            if len(target) != self.block_bytes:
                raise Invalid(f"a block has {self.block_bytes} bytes, not {len(target)}")
            self._call(
                lambda native, err: lib.cox_kv_view_copy(native, block, user, deadline, target, err)
            )


def user_of(sequence: int) -> int:
    """The user of a sequence's blocks: its id, or a hash of one that is not 1 to 2^47. All
    ranks of all groups agree on it."""
    return int(lib.cox_kv_user_of(sequence))


def _again(error: Error) -> Error:
    """The same without a traceback, whose frames keep memory."""
    return type(error)(str(error))


class _Link:
    """Another group, whose rank of the same number is read."""

    view: KvView | None = None
    #: readable once the process of that rank has died
    pidfd = -1

    def __init__(self, remote: RemoteGroup) -> None:
        self.remote = remote
        #: why nothing may be copied, or None
        self.failure: Error | None = None

    def attach(self, ours: KvPool | None) -> None:
        """Opens its blocks, or notes why it cannot."""
        remote = self.remote
        try:
            if ours is None:
                raise StateError("this rank has no KV cache to pull into: init first")
            if not remote.kv_pools:
                raise Unsupported("the request does not describe its KV caches")
            if len(remote.kv_pools) != ours.layout.rank_count:
                raise Invalid(
                    "its KV blocks are laid out in another way: rank_count "
                    f"{len(remote.kv_pools)} there, {ours.layout.rank_count} here"
                )
            theirs = remote.kv_pools[ours.layout.rank]
            ours.check_layout(theirs)
            try:
                # Before the handle, which says whether the number is still this process's.
                self.pidfd = os.pidfd_open(theirs.handle.pid)
            except OSError as error:
                raise PeerDead(
                    f"process {theirs.handle.pid}, the owner of the blocks: {error}"
                ) from None
            view = KvView.open(theirs.handle, remote.socket, _LINK_SECONDS)
            there = view.block_count, view.block_bytes
            if there != (theirs.block_count, theirs.layout.block_bytes):
                raise Invalid(
                    f"its memory has {there[0]} blocks of {there[1]} bytes, but the link request "
                    f"has {theirs.block_count} of {theirs.layout.block_bytes}"
                )
            self.view = view
        except Error as error:
            self.failure = _again(error)

    def alive(self) -> bool:
        """Notes a death."""
        if self.failure is None and select.select([self.pidfd], [], [], 0)[0]:
            self.failure = PeerDead(
                f"the rank of {self.remote.cluster_id} that has the blocks is dead"
            )
        return self.failure is None

    def __del__(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)


class KvTransfer:
    """Prefill in one group and decode in another: the ranks of other groups copy this rank's KV
    blocks, and this one copies theirs.

    It serves link, link_status and pull of a worker::

        transfer = coxswain.KvTransfer(worker)  # before the worker attaches

        @worker.init
        def init(request):
            blocks = coxswain.KvBlocks(512, block_bytes)
            return coxswain.InitResult(512, 16, kv_pool=transfer.open(blocks, layout))

        @worker.execute
        def execute(batch):
            with transfer.step(batch):
                ...  # writes the blocks of its rows

        worker.cleanup(transfer.forget)

    A recover handler calls `clear` for "clear" and "reinit". Handlers of pulls run on a thread of
    their own, beside steps.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        # held during a pull
        self._pulling = threading.Lock()
        self._clears = 0
        self._blocks: KvBlocks | None = None
        self._pool: KvPool | None = None
        self._exporter: Exporter | None = None
        # who has which blocks: users by slot, blocks by user, and back
        self._slots: dict[int, int] = {}
        self._used: dict[int, set[int]] = {}
        self._users: dict[int, int] = {}
        self._links: dict[str, _Link] = {}
        self._cancelled: collections.deque[str] = collections.deque(maxlen=1024)
        worker.link(self._link)
        worker.link_status(self._status)
        worker.pull(self._pull)

    # ---- this rank's blocks ----

    def open(self, blocks: KvBlocks, layout: KvLayout) -> KvPool:
        """The blocks from now on, and what InitResult says of them. Again with each init: pulls
        end, and no block has a user."""
        worker = self._worker
        self.clear()
        with self._pulling, self._lock:
            if self._exporter is None:
                self._exporter = _exporter(worker.socket)
            same = blocks is self._blocks and self._pool is not None
            handle = self._pool.handle if same and self._pool else self._exporter.export(blocks.fd)
            self._blocks = blocks
            self._pool = KvPool(
                blocks.block_count,
                handle,
                dataclasses.replace(
                    layout,
                    rank=worker.rank,
                    rank_count=worker.rank_count,
                    block_bytes=blocks.block_bytes,
                ),
            )
            return self._pool

    def clear(self) -> None:
        """Ends pulls, and all blocks lose their users."""
        self._clears += 1
        with self._pulling, self._lock:
            self._slots.clear()
            self._used.clear()
            self._users.clear()
            if self._blocks:
                for block in range(self._blocks.block_count):
                    self._blocks.take(block)

    def forget(self, slots: Iterable[int]) -> None:
        """Sequences that have ended, by their slots: a cleanup handler."""
        with self._lock:
            for slot in slots:
                self._end(self._slots.pop(slot, 0))

    def _end(self, user: int) -> None:
        for block in self._used.pop(user, ()):
            self._take(block)

    def _take(self, block: int) -> None:
        assert self._blocks
        self._blocks.take(block)
        if user := self._users.pop(block, 0):
            self._used.get(user, set()).discard(block)

    def _give(self, block: int, user: int) -> None:
        assert self._blocks
        self._blocks.give(block, user)
        self._users[block] = user
        self._used.setdefault(user, set()).add(block)

    @contextlib.contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Around what writes the blocks of a step, its copies included: they have no user
        meanwhile, and then those of their rows. Without `open` it does nothing."""
        blocks, pool = self._blocks, self._pool
        if blocks is None or pool is None:
            yield
            return
        written: dict[int, int] = {}
        with self._lock:
            self._begin(batch, pool.layout.block_size, written)
        yield
        with self._lock:
            for block, user in written.items():
                if user and not blocks.user(block):
                    self._give(block, user)

    def _begin(self, batch: Batch, size: int, written: dict[int, int]) -> None:
        """written: becomes the blocks that the step writes, with their users."""
        for slot in batch.finished:
            self._end(self._slots.pop(slot, 0))
        moves: Any = [*batch.swap_in.tolist(), *batch.copies.tolist()]
        owners: dict[int, int] = {}
        # A dummy step has no rows, and no tables; typeshed knows one dimension only.
        table: Any = batch.block_table() if batch.row_count else None
        for row, (sequence, slot) in enumerate(zip(batch.ids, batch.slots, strict=True)):
            user = self._slots[slot] = user_of(sequence)
            first, last = batch.positions[batch.starts[row]], batch.starts[row + 1] - 1
            if first == 0:
                self._end(user)
            begin, end = first // size, batch.positions[last] // size + 1
            for i in range(begin, end):
                block = table[row, i]
                written[block] = user
                begun = i > begin or first % size == 0
                if begun or self._users.get(block) != user:
                    self._take(block)
            if moves:
                owners.update((block, user) for block in table.tolist()[row])
        for _, block in moves:
            self._take(block)
            written[block] = owners.get(block, 0)

    # ---- links ----

    def _link(self, request: LinkRequest) -> None:
        self._cancelled.extend(request.cancelled_pulls)
        for cluster_id in request.unlink:
            self._drop(cluster_id, Error(f"{cluster_id} was unlinked meanwhile"))
        for remote in request.link:
            old = self._links.get(remote.cluster_id)
            if old and old.alive() and old.remote == remote:
                continue
            self._drop(remote.cluster_id, Stale(f"{remote.cluster_id} was linked again meanwhile"))
            link = _Link(remote)
            if len(self._links) >= _LINKS_MAX:
                link.failure = Full(f"there are {_LINKS_MAX} links, the maximum: unlink one")
            else:
                link.attach(self._pool)
            self._links[remote.cluster_id] = link

    def _drop(self, cluster_id: str, why: Error) -> None:
        """A pull that uses it ends."""
        link = self._links.pop(cluster_id, None)
        if link and link.failure is None:
            link.failure = why

    def _status(self) -> list[LinkState]:
        from .worker import LinkState  # pylint: disable=import-outside-toplevel

        return [
            LinkState(name, "linked" if link.alive() else "failed", str(link.failure or ""))
            for name, link in list(self._links.items())
        ]

    # ---- pulls ----

    def _pull(self, request: PullRequest) -> list[PullResult]:
        from .worker import PullResult  # pylint: disable=import-outside-toplevel

        results = []
        clears = self._clears
        for pull in request.pulls:
            begin, error = time.monotonic_ns(), None
            copied = [0]
            try:
                with self._pulling:
                    self._copy(pull, clears, copied)
            except Error as failure:
                error = _again(failure)
            results.append(PullResult(copied[0], (time.monotonic_ns() - begin) / 1e9, error))
        return results

    def _copy(self, pull: Pull, clears: int, copied: list[int]) -> None:
        blocks, link = self._blocks, self._links.get(pull.cluster_id)
        if link is None:
            raise NotFound(f"there is no link to {pull.cluster_id}")
        if blocks is None:
            raise StateError("this rank has no KV cache to pull into: init first")
        if link.alive() and pull.epoch not in (None, link.remote.epoch):
            raise Stale(
                f"{pull.cluster_id} is linked in epoch {link.remote.epoch}, and the pull is for "
                f"epoch {pull.epoch}"
            )
        self._check(pull, link, clears)
        view = link.view
        assert view
        pairs = _pairs(pull, view.block_count, blocks)
        user = 0 if pull.target_sequence is None else user_of(pull.target_sequence)
        expected = 0 if pull.source_sequence is None else user_of(pull.source_sequence)
        size, looked = blocks.block_bytes, time.monotonic_ns()
        with self._lock:
            for _, to in pairs:
                self._take(to)
        memory = blocks.memory
        for source, to in pairs:
            arrived = False
            while not arrived:
                if time.monotonic_ns() - looked > _ALIVE_NS:
                    link.alive()
                    looked = time.monotonic_ns()
                self._check(pull, link, clears)
                try:
                    target = memory[to * size : (to + 1) * size]
                    view.copy(source, target, expected, timeout=_ALIVE_NS / 1e9)
                    arrived = True
                except Empty:
                    continue
                except Error as error:
                    raise type(error)(f"{pull.cluster_id}: {error}") from None
            copied[0] += size
        with self._lock:
            for _, to in pairs:
                if blocks.user(to):
                    raise Stale(f"a step has written KV block {to} meanwhile")
            for _, to in pairs:
                if user:
                    self._give(to, user)

    def _check(self, pull: Pull, link: _Link, clears: int) -> None:
        """Raises if the pull must end."""
        if link.failure:
            raise _again(link.failure)
        if pull.request_id in self._cancelled:
            self._cancelled.remove(pull.request_id)
            raise Aborted("cancelled")
        if self._clears != clears or self._worker.pull_cancelled:
            raise Aborted("the transfer was cancelled, or the rank is pausing")
        now = time.monotonic()
        if pull.deadline is not None and now >= pull.deadline:
            raise TimedOut("its deadline has passed")
        if pull.lease is not None and now >= pull.lease:
            raise Stale(f"the lease of {pull.cluster_id} on the blocks has expired")


def _exporter(socket: str | None) -> Exporter:
    """One whose fds the control socket keeps, too, if it does."""
    if socket:
        try:
            return Exporter(socket)
        except Error:
            pass  # the kernel lets processes of one parent copy them
    return Exporter()


def _pairs(pull: Pull, source_count: int, blocks: KvBlocks) -> list[tuple[int, int]]:
    """What is copied where."""
    lengths = [[len(table) for table in tables] for tables in (pull.source, pull.target)]
    if lengths[0] != lengths[1] or not sum(lengths[0]):
        raise Invalid(f"block tables of {lengths[0]} blocks there and of {lengths[1]} here")
    pairs = [
        pair
        for source, target in zip(pull.source, pull.target, strict=True)
        for pair in zip(source, target, strict=True)
    ]
    for source, to in pairs:
        if not 0 <= source < source_count:
            raise Invalid(
                f"block {source} of {pull.cluster_id} does not exist; there are {source_count}"
            )
        if not 0 <= to < blocks.block_count:
            raise Invalid(f"KV block {to} does not exist; there are {blocks.block_count}")
    if len({to for _, to in pairs}) < len(pairs):
        raise Invalid("a KV block is a destination twice")
    return pairs
