"""The rank's side: attaches to the group that started this process, and serves its requests."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload
from collections.abc import Callable

from .. import _native
from . import objects as _objects
from .arguments import Buffer, NEVER, buffer_of, deadline_of, seconds_of
from .batch import Batch, ColumnMemory
from . import frames
from .errors import (
    Aborted,
    Busy,
    Closed,
    Error,
    Invalid,
    Process,
    StateError,
    bytes_of,
    check,
    code_of,
    fail,
    new_error,
    text_of,
)
from .kv import KvPool
from .owned import ALONE

if TYPE_CHECKING:
    from .ranks import RankGroup

ffi, lib = _native.ffi, _native.lib
_log = logging.getLogger("coxswain")

F = TypeVar("F", bound=Callable[..., Any])

_EXECUTE = lib.COX_CHANNEL_EXECUTE
_OPAQUE = lib.COX_TYPE_OPAQUE
_load_plain, _PLAIN_REQUEST = _objects.load_plain, _objects.PLAIN_REQUEST
# A signal that comes in C just before it sleeps does not end the sleep. So the first wait of the
# main thread ends after this long, for Python's signal handlers, and each further one after twice
# as long: an idle rank hardly wakes, and a signal waits at most as long as the rank was idle.
_FIRST_SLICE_NS = 50_000_000
_ROLES = ("unknown", "prefill", "decode", "standard")
_LORA_STATUSES = {
    "ok": 0,
    "slots_full": 1,
    "duplicated_id": 2,
    "invalid_id": 3,
    "invalid_path": 4,
    "invalid_rank": 5,
    "unsupported": 6,
}
_LINK_STATES = {"failed": 0, "linked": 1, "running": 2, "waiting": 3}
_RECOVER = {
    lib.COXPY_PAUSE: "pause",
    lib.COXPY_PAUSE_NET: "pause_net",
    lib.COXPY_CLEAR: "clear",
    lib.COXPY_REINIT: "reinit",
    lib.COXPY_START: "start",
}
# Handlers that the library has to know of when the rank attaches.
_ORDERS = {
    "lora": lib.COXPY_SERVES_LORA,
    "link": lib.COXPY_SERVES_LINK,
    "pull": lib.COXPY_SERVES_PULL,
    "recover": lib.COXPY_SERVES_RECOVER,
}
_LINK_FAILED = 2001
# Of an error in a reply, beside what the coordinator puts before it.
_TEXT_SIZE = 560
# Of a request with arrays: a smaller one is copied faster than its memory is mapped again.
_LAZY_SIZE = 256 << 10
# Their frames are above those of each handler.
_OWN_FILES = (__file__, _objects.__file__)


def _explain(error: BaseException, writes: bool = True) -> str:
    """What a rank's error says: the exception, what caused it, and where it was raised. The caller
    gets about TEXT_SIZE bytes of it; where that is not all, the rank writes all of it."""
    frames = [frame.rstrip() for frame in traceback.format_tb(_begin_of(error))]
    said, cause = _said(error), _root_of(error)
    lines = [_cut(said, _TEXT_SIZE // 2)]
    if cause is not None:
        lines.append(_cut(f"It was caused by {_said(cause)}", _TEXT_SIZE // 4))
    left = _TEXT_SIZE - sum(map(len, lines))
    # The last one raised it, those before it called it.
    first = len(frames) - 1
    while first > 0 and sum(map(len, frames[first - 1 :])) < left:
        first -= 1
    if first > 0:
        lines.append(f"  ({first} calls above)")
    lines += frames[max(first, 0) :]
    if writes and (first > 0 or cause is not None or said not in lines):
        _log.error("the whole of an error that the caller gets in short", exc_info=error)
    return bytes_of("\n".join(lines)).decode()


def _begin_of(error: BaseException) -> TracebackType | None:
    """Where the handler's own frames begin, which are what helps."""
    begin = error.__traceback__
    while begin and begin.tb_next and begin.tb_frame.f_code.co_filename in _OWN_FILES:
        begin = begin.tb_next
    return begin


def _said(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _root_of(error: BaseException) -> BaseException | None:
    """The exception with which it began; None: itself."""
    found, seen = error, set[int]()
    while id(found) not in seen:
        seen.add(id(found))
        below = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
        if below is None:
            break
        found = below
    return None if found is error else found


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[:size]}..."


def _owner(handler: Any) -> str:
    """A handler, by name and place."""
    code = getattr(inspect.unwrap(handler), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(handler, '__qualname__', type(handler).__name__)}{place}"


def _kept(sequence: int) -> StateError:
    return StateError(f"a view of request {sequence} is kept; copy what outlives the request")


class Request:
    """An opaque request, lent to this rank until it is replied to.

    `data`: a read-only memoryview of the request, in place. `reply(data)` or `fail(error)` ends it,
    on any thread, also after later requests were taken. What outlives the request must be copied:
    reply refuses while a numpy array or a memoryview of it exists. A tensor of torch.frombuffer is
    not seen here; handlers of `serve` are checked for those, too.
    """

    def __init__(self, worker: Worker, native: Any) -> None:
        self._worker = worker
        self.sequence = int(native.sequence)
        self._slot, self._capacity = native.reply, int(native.reply_capacity)
        self._lock = threading.Lock()
        self._over = False
        self._buffer = ffi.buffer(native.bytes, native.size) if native.size else bytearray()
        self.data = memoryview(self._buffer).toreadonly()

    @property
    def cancelled(self) -> bool:
        """The reply has no reader any more. It is owed nevertheless, and dropped."""
        worker = self._worker._lib()
        return bool(lib.cox_worker_cancelled(worker, lib.COX_CHANNEL_EXECUTE, self.sequence))

    def reply(self, data: Buffer) -> None:
        """Replies with bytes-like data. Raises StateError if it was replied to, or if a view of
        `data` is kept: what outlives the request must be copied."""
        with self._lock:
            self._check()
            source, size = (data, len(data)) if isinstance(data, bytes) else self._copy(data)
            self._end()
            err = new_error()
            r = lib.cox_worker_reply(self._worker._lib(), self.sequence, source, size, err)
            if r:
                fail(r, err)
            self._over = True

    def _copy(self, data: Buffer) -> tuple[Any, int]:
        """A reply that may be a view of the request, which ends before the reply: in its slot, or
        as bytes where it does not fit."""
        with buffer_of(data, "the reply") as view:
            size = len(view)
            if size > self._capacity:
                return ffi.buffer(view)[:], size
            ffi.memmove(self._slot, view, size)
        return self._slot, size

    def fail(self, error: BaseException | str) -> None:
        """Fails the request with a text, or an exception and its traceback: RankError at the
        caller."""
        with self._lock:
            self._check()
            self._over = True
            text = error if isinstance(error, str) else _explain(error)
            self._worker._fail(self.sequence, lib.COX_REJECTED, text)
            try:
                self._end()
            except StateError:
                pass  # of a request that has failed; the view's memory is the channel's

    def _check(self) -> None:
        if self._over:
            raise StateError(f"request {self.sequence} was replied to")

    def _end(self) -> None:
        try:
            self.data.release()
        except BufferError:
            raise _kept(self.sequence) from None
        # A numpy array or another memoryview holds the buffer, without an export of `data`.
        if sys.getrefcount(self._buffer) > 2:
            raise _kept(self.sequence)


@dataclasses.dataclass(frozen=True)
class LoraRequest:
    """Load or unload an adapter."""

    #: "load" or "unload"
    operation: str
    name: str
    path: str


@dataclasses.dataclass(frozen=True)
class RemoteGroup:
    """Another group, as a link names it."""

    cluster_id: str
    #: of each of its ranks, in order
    kv_pools: list[KvPool]
    #: the path of its control socket, from which handles can be had; None: it has none
    socket: str | None
    #: another one when its ranks may have forgotten what they had
    epoch: int


@dataclasses.dataclass(frozen=True)
class LinkRequest:
    """Links to other groups."""

    #: of this group: "prefill", "decode", "standard", "unknown"
    role: str
    change_role: bool
    #: groups to link with
    link: list[RemoteGroup]
    #: ids of groups to unlink from
    unlink: list[str]
    #: ids of pulls that are cancelled
    cancelled_pulls: list[str]
    #: the whole request: PDLinkRequest of executor.proto
    message: bytes


@dataclasses.dataclass(frozen=True)
class LinkState:
    """The state of a link: "linked", "running", "waiting", or "failed" and why."""

    cluster_id: str
    state: str
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Pull:
    """One pull of KV blocks from another group."""

    request_id: str
    cluster_id: str
    #: ids of blocks there and here, per block table
    source: list[list[int]]
    target: list[list[int]]
    #: whose blocks these are there and here; None: nobody's in particular
    source_sequence: int | None = None
    target_sequence: int | None = None
    #: time.monotonic() when the pull ends, and when the other group may use its blocks again
    deadline: float | None = None
    lease: float | None = None
    #: of RemoteGroup; None: any
    epoch: int | None = None


@dataclasses.dataclass(frozen=True)
class PullResult:
    """What became of a pull."""

    copied_bytes: int = 0
    #: that the copy took
    seconds: float = 0.0
    #: why it failed
    error: Exception | str | None = None


@dataclasses.dataclass(frozen=True)
class PullRequest:
    """Pulls; each has a result of its own."""

    pulls: list[Pull]
    #: PullKVRequest of executor.proto
    message: bytes


class InitRequest:
    """The configuration of an init: `request["model"]`, `request.get("model")`."""

    def __init__(self, worker: Worker, native: Any) -> None:
        self._worker = worker
        self._native = native

    def _lent(self) -> Any:
        if self._native is None:
            raise StateError("the init is over")
        return self._native

    def get(self, key: str, default: str | None = None) -> str | None:
        """The value of a key, or default."""
        found = lib.cox_init_request_get(self._lent(), bytes_of(key))
        return text_of(found) if found else default

    def __getitem__(self, key: str) -> str:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    @property
    def replayed(self) -> bool:
        """The same init again, since a rank was replaced: a rank may keep what it has loaded. It
        forms its rank group anew."""
        return bool(self._lent().replayed)

    @property
    def cancelled(self) -> bool:
        """The coordinator does not wait for it any more."""
        sequence = self._lent().sequence
        worker = self._worker._lib()
        return bool(lib.cox_worker_cancelled(worker, lib.COX_CHANNEL_EXECUTE, sequence))

    def join(self, *, value_size: int = 4096, timeout: float = 60.0) -> RankGroup:
        """Joins the group of all ranks of this init (RankGroup)."""
        from .ranks import RankGroup  # pylint: disable=import-outside-toplevel

        return RankGroup._of_init(self._worker, self._lent(), value_size, timeout)


@dataclasses.dataclass
class InitResult:
    """What a rank reports of itself."""

    #: blocks of its KV cache, and positions per block
    block_count: int = 0
    block_size: int = 0
    #: blocks of its swap space
    swap_block_count: int = 0
    max_positions: int = 0
    #: of KvTransfer.open: other groups may copy its KV blocks
    kv_pool: KvPool | None = None


class Worker:
    """This process as a rank of the group that started it.

    ::

        worker = coxswain.Worker()

        @worker.execute
        def step(batch):
            return model.forward(batch.tokens, batch.positions, batch.block_table())

        worker.serve()

    A handler that raises fails its request: the coordinator gets the traceback with the rank. The
    handlers of execute, init, cleanup and opaque requests run on the thread of serve; those of
    link, lora, pull and recover on a thread per channel, so that they overtake a step that is
    stuck.

    There is one per process. It attaches with its first use (`rank`, `serve`, `next`).
    """

    def __init__(self) -> None:
        self._process = Process("worker")
        self._native: Any = None
        # of the library, of _native
        self._worker: Any = None
        self._options: Any = None
        self._started = False
        self._ended = False
        self._handlers: dict[str, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        # held by the thread that takes: the two structs below are its
        self._taking = threading.Lock()
        self._sliced = False  # the thread that takes is the main one, which runs signal handlers
        # wake was called, and no next has returned for it
        self._woken = False
        self._request = ffi.new("struct cox_worker_request *")
        self._next_error = new_error()
        # of a batch that has ended, and of which nothing is kept
        self._memory: list[ColumnMemory] = []
        self._threads: list[threading.Thread] = []

    # ---- handlers ----

    def _register(self, kind: str, function: F) -> F:
        if kind in self._handlers:
            raise Busy(f"this worker has a handler for {kind}")
        if self._native is not None and kind in _ORDERS:
            raise StateError(
                f"the handler for {kind} comes too late: the rank has attached, and the "
                "group knows what it serves; register it before rank and serve"
            )
        self._handlers[kind] = function
        return function

    def opaque(self, function: F) -> F:
        """handler(data) -> bytes-like: requests of Group.call. data is a read-only memoryview."""
        return self._register("opaque", function)

    def init(self, function: F) -> F:
        """handler(InitRequest) -> InitResult or None."""
        return self._register("init", function)

    def execute(self, function: F) -> F:
        """handler(Batch) -> tokens, or (tokens, logprobs): one per row, -1 where it does not
        emit."""
        return self._register("execute", function)

    def cleanup(self, function: F) -> F:
        """handler(slots): these sequences have ended without a step."""
        return self._register("cleanup", function)

    def lora(self, function: F) -> F:
        """handler(LoraRequest) -> None, or "slots_full", "duplicated_id", "invalid_id",
        "invalid_path", "invalid_rank", "unsupported"."""
        return self._register("lora", function)

    def link(self, function: F) -> F:
        """handler(LinkRequest): begins linking; link_status reports. KvTransfer serves it, and
        link_status and pull."""
        return self._register("link", function)

    def link_status(self, function: F) -> F:
        """handler() -> list of LinkState."""
        return self._register("link_status", function)

    def pull(self, function: F) -> F:
        """handler(PullRequest) -> a list with a PullResult per pull; None: it succeeded."""
        return self._register("pull", function)

    def recover(self, function: F) -> F:
        """handler(command): "pause", "pause_net", "clear", "reinit" or "start"."""
        return self._register("recover", function)

    # ---- life ----

    def attach(self) -> Worker:
        """Attaches to the group, as the environment says (COXSWAIN_*) and the flags of sys.argv,
        which are removed from it."""
        self._process.check()
        with self._lock:
            if self._native is not None:
                return self
            if self._ended:
                raise Closed("this process has left its group")
            options = ffi.new("struct cox_worker_options *")
            options.size = ffi.sizeof("struct cox_worker_options")
            self._parse(options)
            served = sum(bit for kind, bit in _ORDERS.items() if kind in self._handlers)
            err = new_error()
            native = ffi.new("struct coxpy_worker **")
            frames.register()
            check(lib.coxpy_worker_new(options, served, native, err), err)
            self._options, self._native = options, native[0]
            self._worker = lib.coxpy_worker_of(self._native)
        return self

    @staticmethod
    def _parse(options: Any) -> None:
        own = ["COXSWAIN_SOCKET", "COXSWAIN_PREFIX"]
        if not any(name in os.environ for name in own) and len(sys.argv) < 2:
            raise Invalid(
                "this process is no rank: start it by coxswain.Group or `coxswain run`, or "
                "set COXSWAIN_SOCKET to the name of a group that waits for ranks"
            )
        given = list(sys.argv)
        if "COXSWAIN_SOCKET" in os.environ and "COXSWAIN_PREFIX" not in os.environ:
            # Started by other means: the control socket tells the rest.
            options.rank = lib.COX_WORKER_RANK_ANY
            given += ["--socket", os.environ["COXSWAIN_SOCKET"]]
            if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # torchrun
                given += [
                    "--local_rank",
                    os.environ["RANK"],
                    "--local_world_size",
                    os.environ["WORLD_SIZE"],
                ]
        arguments = [ffi.new("char[]", os.fsencode(argument)) for argument in given]
        argv = ffi.new("char *[]", [*arguments, ffi.NULL])
        argc = ffi.new("int *", len(arguments))
        err = new_error()
        check(lib.cox_worker_options_parse(options, argc, argv, err), err)
        sys.argv[:] = [os.fsdecode(ffi.string(argv[i])) for i in range(argc[0])]

    def _lib(self) -> Any:
        process, worker = self._process, self._worker
        if process.forks_now != process.forks:
            process.check()
        if worker is None:
            if self._ended:
                raise Closed("this process has left its group")
            self.attach()
            worker = self._worker
        return worker

    @property
    def rank(self) -> int:
        """This rank, 0 to rank_count - 1."""
        return int(lib.cox_worker_rank(self._lib()))

    @property
    def rank_count(self) -> int:
        """The number of ranks."""
        self._lib()
        return int(self._options.rank_count)

    @property
    def device(self) -> int:
        """The device number that the coordinator gave this rank."""
        self._lib()
        return int(self._options.device)

    @property
    def incarnation(self) -> int:
        """1 for the first process of this rank, and one more with each replacement."""
        self._lib()
        return int(self._options.incarnation)

    @property
    def group_name(self) -> str:
        """The name of the group."""
        self._lib()
        return text_of(self._options.prefix).lstrip("/")

    @property
    def socket(self) -> str | None:
        """The path of the group's control socket; None: it has none."""
        self._lib()
        return text_of(self._options.fd_store) or text_of(self._options.control_socket) or None

    def _start(self) -> None:
        with self._lock:
            if self._started:
                return
            err = new_error()
            check(lib.cox_worker_start(self._worker, 1 << lib.COX_CHANNEL_EXECUTE, err), err)
            self._started = True
        for kinds, channel in (
            (("lora", "link"), lib.COX_CHANNEL_LINK),
            (("pull",), lib.COX_CHANNEL_TRANSFER),
            (("recover",), lib.COX_CHANNEL_RECOVER),
        ):
            if any(kind in self._handlers for kind in kinds):
                thread = threading.Thread(
                    target=self._serve_orders,
                    args=(channel,),
                    daemon=True,
                    name=f"coxswain-channel-{channel}",
                )
                thread.start()
                self._threads.append(thread)

    def next(self, timeout: float | None = None) -> Request | None:
        """The next opaque request, for a loop of one's own instead of serve; None: timeout seconds
        have passed, or `wake` was called. Steps, inits and clean-ups go to their handlers
        meanwhile. Raises Closed when the group has ended; Busy: another thread is in next or serve.
        """
        deadline = deadline_of(timeout)
        self._begin_taking()
        try:
            return Request(self, self._request) if self._take(deadline) else None
        finally:
            self._taking.release()

    def _begin_taking(self) -> None:
        """Takes the lock of the only thread that takes."""
        if not self._taking.acquire(blocking=False):
            raise Busy("another thread is in next or serve of this worker")
        self._sliced = threading.current_thread() is threading.main_thread()

    def _take(self, deadline: int) -> bool:
        """The next opaque request, into _request; False: as next's None."""
        worker = self._lib()
        if not self._started:
            self._start()
        request, err = self._request, self._next_error
        slice_ns = _FIRST_SLICE_NS
        while True:
            until = min(deadline, time.monotonic_ns() + slice_ns) if self._sliced else deadline
            r = lib.cox_worker_next(worker, _EXECUTE, until, request, err)
            if r == 0:
                if request.type == _OPAQUE:
                    return True
                if request.batch:
                    memory = self._memory.pop() if self._memory else ColumnMemory()
                    self._step(Batch(request.batch, memory))
                else:
                    self._init(request.sequence, InitRequest(self, request.init))
            elif r == -4:  # EINTR: Python runs its signal handlers between two calls
                continue
            elif r == lib.COX_TIMEOUT:
                if until == deadline:
                    return False
                slice_ns *= 2
            elif r == lib.COX_EMPTY:
                # Of a clean-up, of wake, or of both.
                if not self._clean_up() or self._woken:
                    self._woken = False
                    return False
            else:
                fail(r, err)

    def wake(self) -> None:
        """Ends a next that waits, or the one that comes, with None. Any thread."""
        worker = self._lib()
        self._woken = True
        lib.cox_worker_wake(worker, _EXECUTE)

    def serve(self) -> None:
        """Serves requests until the group ends. Ctrl-C and exceptions of signal handlers end it."""
        opaque = self._handlers.get("opaque")
        serve = self._serve
        if isinstance(opaque, _objects.Methods):
            serve = self._serve_method
        self._begin_taking()
        try:
            while True:
                try:
                    taken = self._take(NEVER)
                except Closed:
                    return
                if taken and opaque:
                    serve(opaque)
                elif taken:
                    self._fail(
                        self._request.sequence,
                        lib.COX_REJECTED,
                        "this worker has no handler for opaque requests: @worker.opaque",
                    )
        finally:
            try:
                self.leave()
            finally:
                self._taking.release()

    def _serve(self, handler: Callable[[memoryview], Buffer]) -> None:
        """Replies to the request that was taken. No Request: what N ranks execute on each round
        with cold caches is most of their time."""
        native = self._request
        sequence, size = native.sequence, native.size
        buffer = ffi.buffer(native.bytes, size) if size else bytearray()
        data = memoryview(buffer).toreadonly()
        try:
            reply = handler(data)
            if type(reply) is not bytes:
                memory = buffer_of(reply, f"the reply of {_owner(handler)}")
                if isinstance(reply, bytearray) or _owns_its_data(reply):
                    reply = memory
                else:  # it may be a view of the request
                    reply = ffi.buffer(memory)[:]
                    ffi.release(memory)
            if sys.getrefcount(data) > ALONE:  # torch keeps the view itself
                raise _kept(sequence)
            try:
                data.release()
            except BufferError:
                raise _kept(sequence) from None
            if sys.getrefcount(buffer) > ALONE:
                raise _kept(sequence)
            r = lib.cox_worker_reply(self._lib(), sequence, reply, len(reply), self._next_error)
            if r:
                fail(r, self._next_error)
        except BaseException as error:
            self._fail(sequence, lib.COX_REJECTED, _explain(error))
            with contextlib.suppress(BufferError):
                data.release()
            if not isinstance(error, Exception):
                raise

    def _serve_method(self, methods: _objects.Methods) -> None:
        """As _serve, by a method of the worker object, which gets a copy of the request."""
        native = self._request
        sequence, size = native.sequence, native.size
        reply: Any
        try:
            lent = ffi.buffer(native.bytes, size) if size else b""
            request = _load_plain(lent, _PLAIN_REQUEST)
            if request is not NotImplemented:
                reply = methods.call(request)
            elif size > _objects.IN_BAND and lent[-1:] == _objects.REQUEST_WITH_BUFFERS:
                copy = self._copy_request(size)  # which lives until the reply is sent
                reply = (
                    self._call_with_arrays(methods, copy)
                    if copy
                    else methods.call_pickled(bytearray(lent))
                )
            else:
                reply = methods.call_pickled(lent[:])
            send = lib.cox_worker_reply
            if type(reply) is not bytes:
                parts, send = reply, lib.cox_worker_reply_parts  # parts keeps the memory
                reply = parts.vectors
            r = send(self._lib(), sequence, reply, len(reply), self._next_error)
            if r:
                fail(r, self._next_error)
        except BaseException as error:
            self._fail(
                sequence,
                lib.COX_REJECTED,
                _explain(error, False),
                _objects.failure(error, _begin_of(error)),
            )
            if not isinstance(error, Exception):
                raise

    @staticmethod
    def _call_with_arrays(methods: _objects.Methods, copy: Any) -> Any:
        """The reply to a request with arrays, which are views of this copy. No page of it is copied
        before somebody writes to it, or keeps it."""
        alone = sys.getrefcount(copy)
        try:
            reply: Any = methods.call_pickled(memoryview(copy))
            if type(reply) is not bytes:
                reply.let_go(copy)
            return reply
        finally:
            # Also by the traceback of an exception. A fork completes it, too.
            kept = sys.getrefcount(copy) > alone
            if kept and lib.cox_worker_complete_copy(ffi.from_buffer(copy)):
                raise MemoryError(f"no memory to keep the {len(copy)} bytes of a request")

    def _copy_request(self, size: int) -> Any:
        """None: it is in its frame, or as easily copied."""
        if size < _LAZY_SIZE:
            return None
        pages = ffi.new("void **")
        if lib.cox_worker_copy_request(self._lib(), self._request, pages, self._next_error):
            return None
        return ffi.buffer(ffi.gc(pages[0], lib.cox_worker_free_copy, size), size)

    def leave(self) -> None:
        """Leaves the group: requests of this rank fail from now on. Idempotent."""
        self._process.check()
        with self._lock:
            native, self._native, self._worker, self._ended = self._native, None, None, True
        if native is None:
            return
        lib.cox_worker_stop(lib.coxpy_worker_of(native))
        lib.coxpy_worker_end(native)
        for thread in self._threads:
            thread.join(1)
        if self._started:
            lib.cox_worker_join(lib.coxpy_worker_of(native), new_error())
        if not any(thread.is_alive() for thread in self._threads):
            lib.coxpy_worker_free(native)

    def report_fault(self, text: str, timeout: float = 1.0) -> None:
        """Reports a fault to the coordinator outside any reply."""
        deadline = deadline_of(timeout)
        r = lib.cox_worker_report_fault(self._lib(), bytes_of(text), deadline)
        if r:
            err = new_error()
            fail(r, err)

    @property
    def pull_cancelled(self) -> bool:
        """For the pull handler: nobody waits for the pulls any more, or the rank is pausing."""
        return bool(lib.cox_worker_cancelled(self._lib(), lib.COX_CHANNEL_TRANSFER, 0))

    def pause(self, timeout: float = 0.5) -> None:
        """For the recover handler: asks what is running to return, and waits. Until `resume`, steps
        are refused."""
        err = new_error()
        check(lib.cox_worker_pause(self._lib(), int(seconds_of(timeout) * 1000), err), err)

    def resume(self) -> None:
        """Ends a pause."""
        lib.cox_worker_resume(self._lib())

    # ---- what next serves itself ----

    def _fail(self, sequence: int, code: int, text: str, detail: bytes = b"") -> None:
        err = new_error()
        # COX_STATE: the group has ended meanwhile
        lib.cox_worker_reply_error(
            self._lib(), sequence, code, bytes_of(text), detail, len(detail), err
        )

    def _step(self, batch: Batch) -> None:
        sequence, rows = batch.sequence, batch.row_count
        handler = self._handlers.get("execute")
        if handler is None:
            self._fail(sequence, lib.COX_UNSUPPORTED, "this worker has no handler for steps")
            return
        try:
            reply = handler(batch)
            tokens, logprobs = reply if isinstance(reply, tuple) else (reply, None)
            own_tokens = _column("tokens", tokens, "int32_t", rows)
            own_logprobs = (
                ffi.NULL if logprobs is None else _column("logprobs", logprobs, "float", rows)
            )
            reply = tokens = logprobs = None
            for which, value in batch._digests.items():
                lib.cox_worker_set_digest(self._lib(), which, value)
            kept = batch._end()
            if kept:
                raise StateError(f"a view of {kept} is kept; copy what outlives the step")
            self._memory.append(batch._memory)
        except BaseException as error:
            code = lib.COX_ABORTED if isinstance(error, Aborted) else lib.COX_REJECTED
            self._fail(sequence, code, _explain(error))
            batch._end()
            if not isinstance(error, Exception):
                raise
            return
        err = new_error()
        check(
            lib.cox_worker_reply_step(self._lib(), sequence, own_tokens, own_logprobs, rows, err),
            err,
        )

    def _init(self, sequence: int, request: InitRequest) -> None:
        handler = self._handlers.get("init")
        result = ffi.new("struct cox_init_result *")
        lib.cox_init_result_init(result)
        if handler is None:
            self._fail(sequence, lib.COX_UNSUPPORTED, "this worker has no handler for init")
            return
        try:
            said = handler(request) or InitResult()
            request._native = None
            result.npu_block_count = said.block_count
            result.cpu_block_count = said.swap_block_count
            result.max_position_embeddings = said.max_positions
            if said.block_size:
                result.kv_cache_count = 1
                result.kv_caches[0].block_count = said.block_count
                result.kv_caches[0].block_size = said.block_size
            if said.kv_pool:
                said.kv_pool._fill(result.kv_pool)
        except BaseException as error:
            request._native = None
            self._fail(sequence, lib.COX_REJECTED, _explain(error))
            if not isinstance(error, Exception):
                raise
            return
        err = new_error()
        check(lib.cox_worker_reply_init(self._lib(), sequence, result, err), err)

    def _clean_up(self) -> bool:
        """Hands ended sequences to the handler. False: there are none."""
        slots = ffi.new("uint32_t[]", 4096)
        count = lib.coxpy_worker_cleanups(self._native, slots, 4096)
        if count and "cleanup" in self._handlers:
            try:
                self._handlers["cleanup"](ffi.unpack(slots, count))
            except Exception as error:  # pylint: disable=broad-exception-caught
                self.report_fault(f"cleanup: {_explain(error)}")
        return bool(count)

    # ---- orders ----

    def _serve_orders(self, channel: int) -> None:
        native = self._native
        while True:
            order = lib.coxpy_order_next(native, channel)
            if order == ffi.NULL:
                return
            result, lora, text = 0, 0, ""
            try:
                lora, text = self._serve_order(order)
            except BaseException as error:  # pylint: disable=broad-exception-caught
                # A LoRA reply has a status of its own for it.
                result = 0 if order.kind == lib.COXPY_LORA else lib.COX_REJECTED
                lora, text = _LORA_STATUSES["unsupported"], _explain(error)
            lib.coxpy_order_done(native, order, result, lora, bytes_of(text))

    def _handler(self, kind: str) -> Callable[..., Any]:
        if kind not in self._handlers:
            raise Error(f"this worker has no handler for {kind}")
        return self._handlers[kind]

    def _serve_order(self, order: Any) -> tuple[int, str]:
        if order.kind == lib.COXPY_LORA:
            operation = "unload" if order.lora.lora_op_type == 1 else "load"
            said = self._handler("lora")(
                LoraRequest(operation, text_of(order.lora.lora_name), text_of(order.lora.lora_path))
            )
            status = _LORA_STATUSES.get(said or "ok")
            if status is None:
                raise Invalid(
                    f"the lora handler returned {said!r}; it may return None or one of "
                    f"{', '.join(_LORA_STATUSES)}"
                )
            return status, said or ""
        if order.kind == lib.COXPY_LINK:
            self._handler("link")(_link_request(order))
        elif order.kind == lib.COXPY_LINK_STATUS:
            for state in self._handler("link_status")():
                lib.coxpy_order_link_state(
                    order,
                    bytes_of(state.cluster_id),
                    _LINK_STATES[state.state],
                    _LINK_FAILED,
                    bytes_of(state.text),
                )
        elif order.kind == lib.COXPY_PULL:
            self._pull(order)
        else:
            self._handler("recover")(_RECOVER[order.kind])
        return 0, ""

    def _pull(self, order: Any) -> None:
        request = _pull_request(order)
        try:
            results = list(self._handler("pull")(request))
            if len(results) != len(request.pulls):
                raise Invalid(
                    f"the pull handler returned {len(results)} results for "
                    f"{len(request.pulls)} pulls"
                )
        except Exception as error:  # pylint: disable=broad-exception-caught
            results = [PullResult(error=_explain(error))] * len(request.pulls)
        for pull, result in zip(request.pulls, results, strict=True):
            result = result or PullResult()
            failure = result.error
            lib.coxpy_order_pull_result(
                order,
                bytes_of(pull.request_id),
                result.copied_bytes,
                int(result.seconds * 1e9),
                0 if failure is None else code_of(failure),
                bytes_of("" if failure is None else str(failure) or "it failed"),
            )


def _owns_its_data(array: Any) -> bool:
    return bool(getattr(getattr(array, "flags", None), "owndata", False))


def _message(order: Any) -> bytes:
    buffer = ffi.new("uint8_t[]", lib.coxpy_order_message(order, ffi.NULL))
    lib.coxpy_order_message(order, buffer)
    return bytes(ffi.buffer(buffer))


def _remotes(count: int, infos: Any) -> list[RemoteGroup]:
    return [
        RemoteGroup(
            text_of(info.host_info[0].cluster_id),
            [KvPool._of(info.kv_pools[rank]) for rank in range(info.n_kv_pools)],
            text_of(info.control_socket) or None,
            int(info.epoch),
        )
        for info in (infos[i] for i in range(count))
        if info.n_host_info
    ]


def _link_request(order: Any) -> LinkRequest:
    link: list[RemoteGroup] = []
    unlink: list[str] = []
    role, change = 0, False
    for i in range(order.link.n_pd_link_info):
        info = order.link.pd_link_info[i]
        role, change = info.pd_role, bool(info.change_role)
        link += _remotes(info.n_link_info, info.link_info)
        unlink += [remote.cluster_id for remote in _remotes(info.n_unlink_info, info.unlink_info)]
    cancelled = [
        text_of(order.link.cancelled_pulls[i]) for i in range(order.link.n_cancelled_pulls)
    ]
    return LinkRequest(
        _ROLES[role] if role < len(_ROLES) else "unknown",
        change,
        link,
        unlink,
        cancelled,
        _message(order),
    )


def _tables(count: int, tables: Any) -> list[list[int]]:
    return [
        list(memoryview(ffi.buffer(tables[i].data, tables[i].len // 8 * 8)[:]).cast("q"))
        for i in range(count)
    ]


def _pull_request(order: Any) -> PullRequest:
    pulls = []
    for i in range(order.pull.n_pull_kv_infos):
        info = order.pull.pull_kv_infos[i]
        sequence = info.seq_group_metadata
        pulls.append(
            Pull(
                text_of(sequence.request_id) if sequence else "",
                text_of(info.cluster_id),
                _tables(info.n_src_block_tables, info.src_block_tables),
                _tables(info.n_dst_block_tables, info.dst_block_tables),
                int(info.src_sequence) if info.has_src_sequence else None,
                int(info.dst_sequence) if info.has_dst_sequence else None,
                info.deadline_ns / 1e9 if info.deadline_ns else None,
                info.lease_ns / 1e9 if info.lease_ns else None,
                int(info.epoch) or None,
            )
        )
    return PullRequest(pulls, _message(order))


def _column(name: str, values: Any, type_: str, count: int) -> Any:
    """One value per row as an array of C; a copy, so that no view of the step is kept."""
    if len(values) != count:
        raise Invalid(f"the step has {count} rows, and {len(values)} {name} were returned")
    column = ffi.new(f"{type_}[]", count)
    try:
        view = memoryview(values)
    except TypeError:
        column[0:count] = [value.item() if hasattr(value, "item") else value for value in values]
        return column
    if view.itemsize == 4 and view.contiguous and view.format == ("f" if type_ == "float" else "i"):
        ffi.memmove(column, view, 4 * count)
    else:
        column[0:count] = view.tolist()
    return column


_worker: Worker | None = None
_worker_lock = threading.Lock()


def _this_worker() -> Worker:
    """The worker of this process that the functions of the package use."""
    global _worker  # pylint: disable=global-statement
    with _worker_lock:
        if _worker is None:
            _worker = Worker()
        return _worker


def rank() -> int:
    """The rank of this process in the group that started it, 0 to rank_count() - 1."""
    return _this_worker().rank


def rank_count() -> int:
    """The number of ranks in the group that started this process."""
    return _this_worker().rank_count


@overload
def serve(handler: Callable[[memoryview], Buffer], codec: Literal["bytes"] = "bytes") -> None: ...


@overload
def serve(handler: object, codec: Literal["pickle"]) -> None: ...


def serve(handler: Any, codec: str = "bytes") -> None:
    """Serves the requests of `Group.call` with handler(data) -> bytes-like, until the group ends.

    ::

        import coxswain

        def shout(data):
            return bytes(data).upper()

        coxswain.serve(shout)

    data is a read-only memoryview of the request, in place: what outlives the call must be copied.
    An exception of the handler fails the request: the caller gets RankError with the traceback.

    codec "pickle": handler is the worker object, a module, or a dict of functions. It serves the
    requests of `Group.call_method`, one after the other; what begins with an underscore is not
    called. Arguments belong to the method: it may keep them, and write to the arrays among them
    that were writable at the caller. It unpickles what the coordinator sends.
    """
    if codec not in ("bytes", "pickle"):
        raise Invalid(f"codec is {codec!r}; it may be 'bytes' or 'pickle'")
    worker = _this_worker()
    if codec == "pickle":
        handler = _objects.Methods(handler)
    worker._handlers["opaque"] = handler
    worker.serve()
