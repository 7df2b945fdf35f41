"""The coordinator's side: a group of ranks, and the futures of its requests."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import logging
import math
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from types import ModuleType, TracebackType
from typing import Any, Generic, Literal, TypeVar, overload
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

from . import launch as _launch, objects as _objects, output as _output, status as _status
from .. import _native
from .arguments import Buffer, NEVER, buffer_of, deadline_of, seconds_of
from .errors import (
    Closed,
    Deadlock,
    Error,
    Full,
    Invalid,
    Late,
    LateRank,
    Process,
    RankDied,
    RankError,
    StateError,
    TimedOut,
    bytes_of,
    check,
    error_of,
    fail,
    new_error,
    text_of,
)

ffi, lib = _native.ffi, _native.lib
_log = logging.getLogger("coxswain")

Gather = Literal["all", "rank0", "none"]
OnDeath = Literal["fail", "restart", "restart-all"]
OnLine = Literal["print", "log"] | Callable[[int, str], object] | None

# Constants of lib and types of ffi are looked up once: there is a lookup in each request otherwise.
_EXECUTE = lib.COX_CHANNEL_EXECUTE
_LATE = lib.COX_LATE
_ALL = lib.COX_GATHER_ALL
_RANK0 = lib.COX_GATHER_RANK0
_UINTPTR = ffi.typeof("uintptr_t")
_Message, _load_plain, _PLAIN_REPLY = _objects.Message, _objects.load_plain, _objects.PLAIN_REPLY
# A wait in the main thread ends this often, in nanoseconds, so that Python's signal handlers run.
# The library wakes as often while a reply is outstanding.
_SLICE_NS = 50_000_000
# A reply above it may be out of line; the smallest slot is of this size.
_SLOT_SIZE = 4096

_GATHERS = {
    "all": lib.COX_GATHER_ALL,
    "rank0": lib.COX_GATHER_RANK0,
    "none": lib.COX_GATHER_FIRST_ERROR,
}
_ATTACHES = {"named": lib.COX_ATTACH_NAMED, "sealed": lib.COX_ATTACH_SEALED}
# "fail": the requests that ask a dead rank fail, until it is restarted by hand. In the library's
# words the group waits for that.
_ON_DEATHS = {
    "fail": lib.COX_ON_DEATH_WAIT,
    "restart": lib.COX_ON_DEATH_RESTART,
    "restart-all": lib.COX_ON_DEATH_RESTART_ALL,
}


def _choice(what: str, value: str, choices: dict[str, int]) -> int:
    if value not in choices:
        raise Invalid(f"{what} is {value!r}; it may be {', '.join(map(repr, choices))}")
    return choices[value]


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _slice(deadline: int) -> int:
    if _in_main_thread():
        return min(deadline, time.monotonic_ns() + _SLICE_NS)
    return deadline


def _interruptible(call: Callable[[], Any]) -> Any:
    """Runs a call that blocks in C, so that a signal handler that raises ends the wait for it. The
    call itself goes on."""
    if not _in_main_thread():
        return call()
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:  # pylint: disable=broad-exception-caught
            failure.append(error)

    thread = threading.Thread(target=run, name="coxswain-call", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def _bytes_of(result: Any) -> bytes:
    size = result.size
    return ffi.buffer(result.bytes, size)[:] if size else b""


T = TypeVar("T", covariant=True)


class Future(Generic[T]):
    """The result of a request: `await` it, or call `result()`.

    Whoever waits collects: no thread of the package is in between. Use it on any thread, and in any
    number of event loops.
    """

    __slots__ = (
        "_group",
        "_sequence",
        "_done",
        "_result",
        "_error",
        "_callbacks",
        "_ranks",
        "_gather",
        "_unsent",
        "_details",
        "__weakref__",
    )

    def __init__(self, group: Group, ranks: Sequence[int] | None, gather: int) -> None:
        self._group = group
        self._sequence = 0
        self._done = False
        self._result: Any = None
        self._error: Exception | None = None
        # What is not unpickled yet: nothing; the replies; of an error, what the rank said beside.
        self._details: bytes | bool = False
        self._callbacks: Sequence[Callable[[Future[Any]], object]] = ()
        self._ranks = ranks
        self._gather = gather
        # In an event loop, of a request for which there was no room: data, deadline, ranks, gather,
        # and why there was none.
        self._unsent: tuple[Any, int, Any, str, Error | None] | None = None

    @property
    def sequence(self) -> int:
        """The number of the request on its channel, as in messages and `status()`; 0: it was not
        sent yet."""
        return self._sequence

    def done(self) -> bool:
        """True if the result is there. It may be waiting to be collected; this does not collect."""
        return self._done

    def result(self, timeout: float | None = None) -> T:
        """The replies: a list of bytes, one per asked rank; bytes for gather="rank0"; else None.
        Objects instead of bytes for `submit_method`.

        timeout: seconds to wait, beside the request's own deadline. Raises TimeoutError when they
        have passed, and otherwise what became of the request: RankDied, RankError, TimedOut, ...
        """
        if not self._done or self._details:
            self._finish(timeout)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> Exception | None:
        """As result, but returns the exception."""
        self._finish(timeout)
        return self._error

    def _finish(self, timeout: float | None) -> None:
        if not self._done:
            if self._unsent:
                self._check_sent()
            deadline = NEVER if timeout is None else deadline_of(timeout)
            if not self._group._wait_for(self, deadline):
                raise TimeoutError(f"request {self._sequence} is still in flight after {timeout} s")
        if self._details:
            self._unpickle()

    def _unpickle(self) -> None:
        """Makes objects of what has come. Not on the thread that collects, since it calls functions
        of those objects, which may wait for requests. Two threads may do so at once: the first one
        is right."""
        result, error, details = self._result, self._error, self._details
        try:
            if not details:
                return
            if error is None and self._gather == _ALL:
                ranks = range(self._group._rank_count) if self._ranks is None else self._ranks
                result = _objects.replies_of(result, ranks)
            elif isinstance(error, Error) and isinstance(details, bytes):
                error = _objects.raised(error, details)
            else:
                (result,) = _objects.replies_of((result,), (min(self._ranks or (0,)),))
        except Exception as failure:  # pylint: disable=broad-exception-caught
            result, error = None, failure
        with self._group._mutex:
            if self._details:
                self._result, self._error, self._details = result, error, False

    def _check_sent(self) -> None:
        if self._unsent:
            raise StateError("this request waits for room: await it, which sends it")

    def add_done_callback(self, function: Callable[[Future[Any]], object]) -> None:
        """Calls function(future) once it is done: at once, or on the thread that collects it.

        A thread of the group collects for callbacks, where no other thread does. A signal handler
        that raises in the main thread interrupts a callback there, as it does any code.
        """
        self._check_sent()
        with self._group._mutex:
            if not self._done:
                self._callbacks = (*self._callbacks, function)
                self._group._need_collector()
                return
        function(self)

    def __await__(self) -> Generator[Any, None, T]:
        if self._unsent:
            yield from self._group._send_in_turn(self).__await__()
        if not self._done:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            self._group._attach_loop(loop)

            def wake(_: Future[Any]) -> None:
                _wake(loop, waiter)

            with self._group._mutex:
                if not self._done:
                    self._callbacks = (*self._callbacks, wake)
                else:
                    waiter.set_result(None)
            self._group._poll()
            yield from waiter.__await__()
        return self.result()

    def __repr__(self) -> str:
        if self._unsent:
            return "<coxswain.Future of a request that waits for room>"
        state = "in flight" if not self._done else repr(self._error) if self._error else "done"
        return f"<coxswain.Future of request {self._sequence}: {state}>"


def _wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
    def set_result() -> None:
        if not waiter.done():
            waiter.set_result(None)

    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        set_result()
    else:
        # RuntimeError: the loop is closed, and nothing waits there any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(set_result)


class _Events(threading.Thread):
    """Hands what the library's threads report to Python. It sleeps in C, without the GIL."""

    def __init__(
        self,
        native: Any,
        on_line: OnLine,
        on_rank_death: Callable[[int, str], object] | None,
        on_stop: weakref.WeakMethod[Callable[[str], object]],
        waiting: threading.Event,
    ) -> None:
        super().__init__(name="coxswain-events", daemon=True)
        self.native = native
        self.on_line = on_line
        self.on_rank_death = on_rank_death
        self.on_stop = on_stop
        self.waiting = waiting
        self.output = _output.Output()
        self.socket = ""
        # the group has ended on this thread
        self.over = False

    def run(self) -> None:
        while not self.over:
            event = lib.coxpy_group_next_event(self.native)
            if event == ffi.NULL:
                self.over = True
                self.output.tell_dropped(last=True)
                return
            kind, rank, level = event.kind, event.rank, event.level
            text = ffi.string(ffi.cast("char *", event.text)).decode("utf-8", "replace")
            lib.coxpy_event_free(event)
            try:
                self.handle(kind, rank, level, text)
            except Exception:  # pylint: disable=broad-exception-caught
                text = "on_line, on_rank_death or on_stop raised"
                self.output.log(logging.ERROR, text, exc_info=True)

    def handle(self, kind: int, rank: int, level: int, text: str) -> None:
        extra, log = {"rank": rank}, self.output.log
        if kind in (lib.COXPY_EVENT_LINE, lib.COXPY_EVENT_ERROR_LINE):
            if self.on_line == "print":
                stream = sys.stdout if kind == lib.COXPY_EVENT_LINE else sys.stderr
                self.output.write(stream, f"rank {rank}: {text}")
            elif self.on_line == "log":
                log(logging.INFO, "rank %d: %s", rank, text, extra=extra)
            elif self.on_line:
                self.on_line(rank, text)
        elif kind == lib.COXPY_EVENT_DEATH:
            if self.on_rank_death:
                self.on_rank_death(rank, text)
            else:
                log(logging.WARNING, "%s", text, extra=extra)
        elif kind == lib.COXPY_EVENT_FAULT:
            log(logging.WARNING, "rank %d reports: %s", rank, text, extra=extra)
        elif kind == lib.COXPY_EVENT_WAITING:
            self.socket = text
            self.waiting.set()
        elif kind == lib.COXPY_EVENT_STOP:
            if on_stop := self.on_stop():
                on_stop(text)
        elif kind == lib.COXPY_EVENT_DROPPED:
            self.output.dropped += level
            self.output.tell_dropped()
        else:
            levels = {3: logging.ERROR, 4: logging.WARNING, 7: logging.DEBUG}
            log(levels.get(level, logging.INFO), "%s", text)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The NATS servers by which a group over several machines is held together, and who this
    process is to them (docs/nodes.md)."""

    #: "tls://HOST:PORT", several with commas
    url: str
    #: PEM files that coxswain-certificates makes: ca.pem, lead.pem and lead-key.pem
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    #: no TLS and no certificates: for trying nodes on one machine, by loopback addresses only
    insecure_loopback: bool = False
    #: "HOST:PORT" where nodes connect; None: the address from which the cluster is reached
    listen: str | None = None
    #: seconds; None: 0.3, 0.8 and 30
    suspect_after: float | None = None
    dead_after: float | None = None
    lead_grace: float | None = None
    #: ranks that an earlier lead has left on the nodes end, and others are started
    fresh: bool = False

    def _native(self, nodes: str, attach: int, keep: list[Any]) -> Any:
        made = ffi.new("struct cox_executor_nodes *")
        made.size = ffi.sizeof("struct cox_executor_nodes")

        def text(value: str | None) -> Any:
            if value is None:
                return ffi.NULL
            keep.append(ffi.new("char[]", os.fsencode(value)))
            return keep[-1]

        made.nodes = text(nodes)
        made.access.url = text(self.url)
        made.access.ca = text(self.ca)
        made.access.certificate = text(self.certificate)
        made.access.key = text(self.key)
        made.access.insecure_loopback = self.insecure_loopback
        made.listen = text(self.listen)
        made.times.suspect_ms = int((self.suspect_after or 0) * 1000)
        made.times.dead_ms = int((self.dead_after or 0) * 1000)
        made.times.lead_grace_ms = int((self.lead_grace or 0) * 1000)
        made.attach = attach
        made.fresh = self.fresh
        return made


def _rank_count(nodes: str) -> int:
    """The ranks of "a:4,b:4". 0: it is no such list, which the start says in words."""
    counts = [count for _, _, count in (node.partition(":") for node in nodes.split(","))]
    return sum(map(int, counts)) if all(count.isdecimal() for count in counts) else 0


class Group:
    """N ranks, started and driven by this process.

    ::

        with coxswain.Group(["python3", "worker.py"], ranks=4) as group:
            print(group.call(b"hello", timeout=5.0))     # a list of bytes, one per rank

    program: the command of every rank, as for subprocess; or a function, which each rank calls with
        args and kwargs. It and they travel as with multiprocessing's "spawn": by pickle, which
        names what is at the top level of a module. What has no such name (closures, functions of a
        notebook) needs cloudpickle. None with external=True.
    env: changes of the environment that the ranks inherit, replacements included: a value sets a
        variable, None removes it. (subprocess's env is the whole environment: for that, remove the
        rest.) The module path of a function's ranks is that of this process; a PYTHONPATH that is
        set here comes in front of it.
    cwd: the working directory of the ranks; None: that of this process when a rank starts. A
        command that is a relative path starts there, as do relative entries of PATH.
    attach: "named", or "sealed": nothing has a name, and no rank can write another one's memory.
    codec: "bytes": `call` and `submit` send bytes. "pickle": `call_method` and `submit_method` call
        methods of a worker object in each rank by name, with objects as arguments and results.
        program is then its class, which each rank calls with args and kwargs; a function that
        returns it; a module, or a dict of functions; or a command that calls
        `coxswain.serve(worker, codec="pickle")`. The ranks unpickle what this process sends, and
        this process what they send: whoever can write to one can run code in the other.
    depth: requests in flight, 1 to 32.
    name: of the group, for `coxswain status --name NAME`; None: "PID_NUMBER".
    timeout: seconds that the ranks have to attach, at a start and a restart; None: no limit.
    on_death: "fail": requests that ask a dead rank raise RankDied until `restart(rank)`.
        "restart": the requests in flight raise RankDied, the rank is replaced, and later calls wait
        for that. "restart-all": the same with all ranks. A rank that dies again is replaced after
        0.1 s, then 0.2 s and so on, at most 5 s. More than 5 deaths in 60 s are not made good: all
        calls raise RankDied with that, and another group has to be started. Where fds, memory or
        processes are lacking, the replacement is tried for 60 s.
    on_line: what becomes of each line that a rank writes. "print": it is written to the standard
        output or error of this process, with the rank in front. "log": it goes to logging's
        "coxswain", level INFO. A function is called with (rank, line), on a thread of the package.
        None: nothing.
    on_rank_death: called with (rank, text) when a rank has died, also while nothing is in flight,
        on the same thread; None: the text goes to logging's "coxswain", level WARNING.
    on_stop: called with a text, on the same thread, when `coxswain stop` has come for this group,
        which ends when the function returns: calls raise Closed with the text. None: the text goes
        to logging's "coxswain", level WARNING.
    external: the ranks are started by other means (torchrun, Kubernetes, by hand) with
        COXSWAIN_SOCKET set to the group's name, or to `socket`; start waits for them. A process
        that torchrun started (RANK, WORLD_SIZE) becomes that rank, any other one the next that is
        free.
    standby: `coxswain status` does not find the group until `take_name` gives it a name: it stands
        by for another group. Not with external.
    devices: the device number of each rank; None: its rank.
    spin: whether waits spin for some microseconds, and yield meanwhile, before they block.
    crash_dir: a directory of this user's: what the ranks did becomes a file there when one dies, a
        request meets its deadline, or a start fails; `coxswain postmortem FILE` tells it. None:
        that of COXSWAIN_CRASH_DIR, if it is set.
    stacks: shortly before a request meets its deadline the stacks of all ranks are gathered, for
        its error; and where ranks diverge, or are stuck at the end. False: only when asked for.

    nodes: "a:4,b:4": the ranks are on these machines, where `coxswain node --name NAME --node a ...
        -- COMMAND` runs; program is None then, and name is needed. ranks may be left out.
    cluster: with nodes: how they are reached.

    Threads: any. Not in the child of a fork.
    """

    def __init__(
        self,
        program: Sequence[str] | Callable[..., Any] | Mapping[str, Any] | ModuleType | None = None,
        ranks: int = 1,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        codec: Literal["bytes", "pickle"] = "bytes",
        attach: Literal["named", "sealed"] = "named",
        depth: int = 4,
        name: str | None = None,
        timeout: float | None = 60.0,
        on_death: OnDeath = "fail",
        on_line: OnLine = "print",
        on_rank_death: Callable[[int, str], object] | None = None,
        on_stop: Callable[[str], object] | None = None,
        external: bool = False,
        standby: bool = False,
        devices: Sequence[int] | None = None,
        spin: bool = True,
        crash_dir: str | os.PathLike[str] | None = None,
        stacks: bool = True,
        nodes: str | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self._process = Process("group")
        self._native: Any = None
        self._executor: Any = None
        self._state: Literal["new", "running", "stopped"] = "new"
        if (nodes is None) != (cluster is None):
            raise Invalid("nodes and cluster go together")
        if nodes is not None:
            if program is not None or external or name is None:
                raise Invalid("with nodes a group needs a name, and its ranks are started there")
            ranks = _rank_count(nodes)
        elif not 1 <= ranks <= lib.COX_RANK_COUNT_MAX:
            raise Invalid(f"ranks is {ranks}; it may be 1 to {lib.COX_RANK_COUNT_MAX}")
        if not 1 <= depth <= 32:
            raise Invalid(f"depth is {depth}; it may be 1 to 32")
        if (program is None) != (external or nodes is not None):
            raise Invalid("a group needs a program for its ranks, or external=True and none")
        if program is None and (env is not None or cwd is not None):
            raise Invalid(
                "env and cwd are for ranks that the group starts itself: "
                + (
                    "those of nodes have what `coxswain node` was started with"
                    if nodes
                    else "external ones have what they were started with"
                )
                + "; set them there"
            )
        changes = _launch.environment_of(env or {})
        if not (on_line is None or callable(on_line) or on_line in ("print", "log")):
            raise Invalid(f"on_line is {on_line!r}; it may be 'print', 'log', a function, or None")
        if codec not in ("bytes", "pickle"):
            raise Invalid(f"codec is {codec!r}; it may be 'bytes' or 'pickle'")
        if devices is not None and len(devices) != ranks:
            raise Invalid(f"devices has {len(devices)} numbers for {ranks} ranks")
        if timeout is not None and seconds_of(timeout) == 0:
            raise Invalid(f"timeout is {timeout}; it may be a positive number of seconds, or None")
        self._program: _launch.Program | None = None
        if codec == "pickle":  # classes of the main module have this name in ranks
            sys.modules.setdefault(_launch.MAIN, sys.modules["__main__"])
        self._codec = codec
        self._rank_count = ranks
        self._depth = depth
        self._timeout = timeout
        self._waits_for_recovery = on_death != "fail"
        executor = ffi.new("struct cox_executor_options *")
        executor.size = ffi.sizeof("struct cox_executor_options")
        server = ffi.new("struct cox_server_options *")
        server.size = ffi.sizeof("struct cox_server_options")
        keep: list[Any] = [executor, server]
        if name is not None:
            keep.append(ffi.new("char[]", bytes_of(name)))
            executor.name = keep[-1]
        executor.rank_count = ranks
        if program is not None:
            served: Any = program
            if codec == "pickle" and not isinstance(program, Sequence):
                served = _objects.Program(program)
            self._program = _launch.program_of(served, args, kwargs, env or {})
            parts = [ffi.new("char[]", os.fsencode(part)) for part in self._program.command]
            keep += [parts, ffi.new("char *[]", [*parts, ffi.NULL])]
            executor.workers.command = ffi.cast("const char *const *", keep[-1])
        executor.workers.environment_only = True
        if changes:
            parts = [ffi.new("char[]", change) for change in changes]
            keep += [parts, ffi.new("char *[]", [*parts, ffi.NULL])]
            executor.workers.environment = ffi.cast("const char *const *", keep[-1])
        if cwd is not None:
            keep.append(ffi.new("char[]", _launch.directory_of(cwd)))
            executor.workers.working_directory = keep[-1]
        if devices is not None:
            keep.append(ffi.new("int32_t[]", list(devices)))
            executor.workers.devices = keep[-1]
        executor.depth = depth
        if nodes is not None and cluster is not None:
            keep.append(cluster._native(nodes, _choice("attach", attach, _ATTACHES), keep))
            executor.nodes = keep[-1]
        else:
            executor.memory.attach = _choice("attach", attach, _ATTACHES)
        executor.spin = lib.COX_SPIN_AUTO if spin else lib.COX_SPIN_OFF
        executor.workers.external = external
        executor.socket.use = lib.COX_SOCKET_NONE if standby else lib.COX_SOCKET_IF_POSSIBLE
        if folder := crash_dir or os.environ.get("COXSWAIN_CRASH_DIR"):
            keep.append(ffi.new("char[]", os.fsencode(folder)))
            executor.recorder.crash_dir = keep[-1]
        executor.recorder.stacks = (
            lib.COX_STACKS_AT_FAILURES if stacks else lib.COX_STACKS_ON_REQUEST
        )
        # External ranks may take as long as a scheduler needs; 0 is the library's default of 60 s.
        milliseconds = max(1, int(min(2.0**62, math.inf if timeout is None else timeout * 1000)))
        executor.times.start_timeout_ms = milliseconds
        server.restart.on_death = _choice("on_death", on_death, _ON_DEATHS)
        keep.append(
            ffi.new("char[]", b"this group's ranks take no prompts: a Python program drives them")
        )
        server.prompts_refusal = keep[-1]
        self._options = keep
        # stop runs; it is over
        # the thread that ends it; 0: none
        self._ending = 0
        self._ended = False
        self._on_line = on_line
        self._on_rank_death = on_rank_death
        self._on_stop = on_stop
        # why calls raise Closed once it has ended
        self._end_text = "the group was stopped"
        self._external = external
        self._note = ""
        # external: set when ranks can connect
        self._waiting = threading.Event()
        self._events: _Events | None = None
        self._fd = -1
        self._loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        # of each loop: of the request that it sends next
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            weakref.WeakKeyDictionary()
        )
        # Protects all below. It and the sleepers' locks are bare ones. A signal handler that raises
        # in the main thread would leave a threading.Condition, or a context manager in Python, with
        # a lock that it should not have, or without one that it should.
        self._mutex = threading.Lock()
        # one lock for each thread that waits for _notify
        self._sleepers: list[threading.Lock] = []
        self._futures: dict[int, Future[Any]] = {}
        self._next_key = 1
        # the thread that collects; 0: none
        self._collecting = 0
        # of the completions that were collected last
        self._settled = 0
        # one object for each call that is inside the executor
        self._users: set[object] = set()
        self._collector: threading.Thread | None = None
        self._room: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._refused = False
        self._completions = ffi.new("struct cox_completion[]", 2 * depth)
        self._count = ffi.new("uint32_t *")
        self._collect_error = new_error()
        self._sequence = ffi.new("uint64_t *")
        self._submit_error = new_error()

    def _fork_from(self, fds: list[int]) -> None:
        """Before start: the sockets of fork servers, one for each rank (fork_server.py), -1: none.
        They are borrowed until the group has ended."""
        self._options.append(ffi.new("int[]", fds))
        self._options[0].workers.fork_server_fds = self._options[-1]

    # ---- life ----

    def start(self) -> Group:
        """Starts the ranks and waits until all have attached. `with` and `async with` do it."""
        self._process.check()
        _launch.check_main()
        if self._state != "new":
            raise Closed("a group is started once: make another one")
        err = new_error()
        native = ffi.new("struct coxpy_group **")
        check(lib.coxpy_group_new(self._options[0], self._options[1], native, err), err)
        self._native = native[0]
        self._state = "running"
        self._events = _Events(
            self._native,
            self._on_line,
            self._on_rank_death,
            weakref.WeakMethod(self._stop_for),
            self._waiting,
        )
        self._events.start()
        _groups.add(self)
        try:
            self._set_note(self._note)
            check(lib.coxpy_group_start(self._native, err), err)
            result = ffi.new("int *")
            # In slices, so that signal handlers run between them.
            while not lib.coxpy_group_await_start(
                self._native, time.monotonic_ns() + _SLICE_NS, result, err
            ):
                pass
            check(result[0], err)
        except BaseException:
            self.stop()
            raise
        self._executor = lib.cox_server_executor(self._server())
        return self

    def stop(self) -> None:
        """Ends the ranks and waits for that. Requests in flight raise Closed. Idempotent: where a
        signal handler has raised in it, the next call completes it."""
        self._process.check()
        self._detach_loops()
        with self._mutex:
            unused, self._state = self._state == "new", "stopped"
            if unused or self._ended:
                return
            ending, this = self._ending, threading.get_ident()
            self._ending = ending or this
            self._notify()
        if ending:
            # Another thread ends it, or this one, in which a signal handler has called. On the
            # thread of events it may wait for that one.
            if ending != this and self._events and self._events.ident != this:
                self._events.join()
            return
        try:
            # Threads that wait in the library return with COX_CLOSED.
            if self._executor is not None:
                lib.cox_executor_stop(self._executor)
            self._end()
        finally:
            self._ending = 0

    def _end(self) -> None:
        while True:
            with self._mutex:
                if not self._collecting and not self._users:
                    self._executor = None
                    break
                sleeper = self._sleeper()
            sleeper.acquire()
        lib.coxpy_group_stop(self._native)
        if self._program:
            self._program.close()
        for future in list(self._futures.values()):
            self._settle(future, None, Closed(self._end_text))
        self._futures.clear()
        self._wake_room()
        if self._events and self._events is threading.current_thread():
            self._events.run()  # what is left; next_event no longer waits
        elif self._events:
            self._events.join()
        self._ended = True
        _groups.discard(self)

    def _stop_for(self, text: str) -> None:
        """On the thread of events: another process has ordered the end."""
        self._end_text = text
        try:
            if self._on_stop:
                self._on_stop(text)
            elif self._events:
                self._events.output.log(logging.WARNING, "%s", text)
        finally:
            self.stop()

    def __enter__(self) -> Group:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.is_this():  # a child that was forked in the block leaves it, too
            self.stop()

    async def __aenter__(self) -> Group:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.is_this():
            self._detach_loops()
            await asyncio.to_thread(self.stop)

    def __del__(self) -> None:
        process = self.__dict__.get("_process")
        if process is None or self._native is None or not process.is_this():
            return
        if self._state == "running":
            warnings.warn(f"{self!r} was not stopped", ResourceWarning, stacklevel=2, source=self)
            self.stop()
        lib.coxpy_group_free(self._native)

    def __repr__(self) -> str:
        return f"<coxswain.Group of {self._rank_count} ranks: {self._state}>"

    # ---- what it is ----

    @property
    def rank_count(self) -> int:
        """The number of ranks."""
        return self._rank_count

    @property
    def depth(self) -> int:
        """Requests in flight, at most."""
        return self._depth

    @property
    def name(self) -> str:
        """The name of the group, for `coxswain status --name`."""
        return str(self._use(lambda executor: text_of(_status.of_group(executor).name)))

    def take_name(self, name: str) -> None:
        """Gives a standby group the name of the one that it stood by for, and that was stopped:
        from now on `coxswain status --name NAME` finds it. Raises Taken while that one lives."""
        err = new_error()
        text = ffi.new("char[]", bytes_of(name))
        check(self._use(lambda _: lib.cox_server_take_name(self._server(), text, err)), err)

    @property
    def note(self) -> str:
        """What `coxswain status` shows beside the group's own figures: text, or a JSON object, of
        which each key is a line. It may be set, also before start; 4,095 bytes at most.

        A key "not_ready" of the object makes the group degraded, and `/readyz` 503, with its value,
        a text: why this program cannot serve. An engine sets it until its ranks have run a step."""
        return self._note

    @note.setter
    def note(self, note: str) -> None:
        if self._state == "new":
            self._process.check()
        else:
            self._use(lambda _: self._set_note(note))
        self._note = note

    def _server(self) -> Any:
        return lib.coxpy_group_server(self._native)

    def _set_note(self, note: str) -> None:
        err = new_error()
        text = ffi.new("char[]", bytes_of(note))
        check(lib.cox_server_set_note(self._server(), text, err), err)

    @property
    def socket(self) -> str:
        """The path of the control socket; "": there is none. For external ranks also while another
        thread starts the group: then this waits until they can connect."""
        if self._external and self._executor is None and self._waiting.wait(self._timeout):
            assert self._events
            return self._events.socket
        return str(self._use(lambda executor: text_of(_status.of_group(executor).socket)))

    def status(self) -> _status.GroupStatus:
        """How the group and every rank is, by the coordinator's records: no rank takes part."""
        status: _status.GroupStatus = self._use(
            lambda executor: _status.read(executor, self._rank_count, os.getpid(), self._note)
        )
        return status

    def stacks(self, ranks: Sequence[int] | None = None) -> _status.Stacks:
        """Where all threads of the ranks are, with their frames; None: of all ranks.

        No rank takes part, so it works while all of them are stuck. Each is stopped for some
        milliseconds, 50 at most. Takes 3 s for 16 ranks at the longest. Raises TimedOut if
        other threads read the stacks all the time.
        """
        for rank in ranks or ():
            if not 0 <= rank < self._rank_count:
                raise Invalid(f"rank is {rank}; it may be 0 to {self._rank_count - 1}")
        stacks: _status.Stacks = self._use(lambda executor: _status.read_stacks(executor, ranks))
        return stacks

    def restart(self, rank: int, *, kill: bool = False, timeout: float | None = None) -> None:
        """Replaces a dead rank; kill: also one that lives. Waits until the new process attached.

        The other ranks keep process and state. timeout: seconds; None: that of the group.
        """
        if not 0 <= rank < self._rank_count:
            raise Invalid(f"rank is {rank}; it may be 0 to {self._rank_count - 1}")
        deadline = deadline_of(self._timeout if timeout is None else timeout)

        def run() -> None:
            err = new_error()
            check(
                self._use(
                    lambda _: lib.cox_server_restart(self._server(), rank, kill, deadline, err)
                ),
                err,
            )

        _interruptible(run)

    def kill(self, rank: int) -> None:
        """Kills the process of a rank with SIGKILL; its death is then handled like any other."""
        if not 0 <= rank < self._rank_count:
            raise Invalid(f"rank is {rank}; it may be 0 to {self._rank_count - 1}")
        err = new_error()
        check(self._use(lambda executor: lib.cox_executor_kill(executor, rank, err)), err)

    def _use(self, call: Callable[[Any], Any]) -> Any:
        """Returns call(executor), which stop does not free meanwhile."""
        self._process.check()
        token = object()
        try:
            with self._mutex:
                self._check_running()
                self._users.add(token)
                executor = self._executor
            return call(executor)
        finally:
            with self._mutex:
                self._users.discard(token)
                self._notify()

    # ---- requests ----

    @overload
    def call(
        self,
        data: Buffer,
        timeout: float | None = 60.0,
        *,
        ranks: Iterable[int] | None = None,
        gather: Literal["all"] = "all",
    ) -> list[bytes]: ...

    @overload
    def call(
        self,
        data: Buffer,
        timeout: float | None = 60.0,
        *,
        ranks: Iterable[int] | None = None,
        gather: Literal["rank0"],
    ) -> bytes: ...

    @overload
    def call(
        self,
        data: Buffer,
        timeout: float | None = 60.0,
        *,
        ranks: Iterable[int] | None = None,
        gather: Literal["none"],
    ) -> None: ...

    def call(
        self,
        data: Buffer,
        timeout: float | None = 60.0,
        *,
        ranks: Iterable[int] | None = None,
        gather: Gather = "all",
    ) -> list[bytes] | bytes | None:
        """Sends data to the ranks and waits for their replies: a list of bytes, one per asked rank.

        data: bytes-like. timeout: seconds, for all of it, None: no limit. ranks: those that are
        asked; None: all. gather: "all"; "rank0": the bytes of the lowest asked rank; "none": None.
        Waits for room and for late ranks. Raises RankDied, RankError, TimedOut, Closed, TooLarge,
        ...
        """
        if self._codec != "bytes":
            self._check_codec("bytes", "call")
        future = self._submit_when_room(data, deadline_of(timeout), ranks, gather)
        return future.result()  # type: ignore[no-any-return]

    @overload
    def submit(
        self,
        data: Buffer,
        timeout: float | None = 60.0,
        *,
        ranks: Iterable[int] | None = None,
        gather: Literal["all"] = "all",
        wait: bool | None = None,
    ) -> Future[list[bytes]]: ...

    @overload
    def submit(
        self,
        data: Buffer,
        timeout: float | None = 60.0,
        *,
        ranks: Iterable[int] | None = None,
        gather: Literal["rank0"],
        wait: bool | None = None,
    ) -> Future[bytes]: ...

    @overload
    def submit(
        self,
        data: Buffer,
        timeout: float | None = 60.0,
        *,
        ranks: Iterable[int] | None = None,
        gather: Literal["none"],
        wait: bool | None = None,
    ) -> Future[None]: ...

    def submit(
        self,
        data: Buffer,
        timeout: float | None = 60.0,
        *,
        ranks: Iterable[int] | None = None,
        gather: Gather = "all",
        wait: bool | None = None,
    ) -> Future[Any]:
        """Sends data to the ranks. The future's result is what call returns; arguments as for call.

        wait: what to do when `depth` requests are in flight, or a rank owes the reply to a request
        that has ended. False: raises Full, or Late. True: blocks until there is room. None: raises,
        but in an event loop the future waits for its turn when it is awaited; what data points to
        must stay as it is until then. Raises also RankDied.
        """
        self._check_codec("bytes", "submit")
        return self._send(data, deadline_of(timeout), ranks, gather, wait)

    @overload
    def call_method(
        self,
        name: str,
        /,
        *args: Any,
        timeout: float | None = 60.0,
        ranks: Iterable[int] | None = None,
        gather: Literal["all"] = "all",
        **kwargs: Any,
    ) -> list[Any]: ...

    @overload
    def call_method(
        self,
        name: str,
        /,
        *args: Any,
        timeout: float | None = 60.0,
        ranks: Iterable[int] | None = None,
        gather: Literal["rank0"],
        **kwargs: Any,
    ) -> Any: ...

    @overload
    def call_method(
        self,
        name: str,
        /,
        *args: Any,
        timeout: float | None = 60.0,
        ranks: Iterable[int] | None = None,
        gather: Literal["none"],
        **kwargs: Any,
    ) -> None: ...

    def call_method(
        self,
        name: str,
        /,
        *args: Any,
        timeout: float | None = 60.0,
        ranks: Iterable[int] | None = None,
        gather: Gather = "all",
        **kwargs: Any,
    ) -> Any:
        """Calls worker.name(*args, **kwargs) on the worker object of each rank, and returns what it
        returned: a list, one per asked rank. For a group with codec="pickle".

        ::

            with coxswain.Group(Engine, ranks=4, args=(path,), codec="pickle") as group:
                print(group.call_method("step", tokens, timeout=5.0))

        timeout, ranks and gather are as for call, and never the method's: it gets an argument with
        such a name by its place. Arguments and results travel by pickle; numpy arrays and CPU
        tensors beside it, without being copied into it. Who receives an array owns it: nobody else
        writes to it, it may be kept, and it is writable if it was where it came from.

        An exception of the method is raised here as itself, with the traceback of its rank as
        `__cause__`, a RankError; as that RankError if it cannot be pickled, unpickled here, or is a
        coxswain.Error. As with call the first rank that fails ends the request. Raises TypeError
        for what cannot be pickled; else as call.
        """
        if self._codec != "pickle":
            self._check_codec("pickle", "call_method")
        deadline = deadline_of(timeout)
        data = _objects.request(name, args, kwargs)
        return self._submit_when_room(data, deadline, ranks, gather).result()

    @overload
    def submit_method(
        self,
        name: str,
        /,
        *args: Any,
        timeout: float | None = 60.0,
        ranks: Iterable[int] | None = None,
        gather: Literal["all"] = "all",
        wait: bool | None = None,
        **kwargs: Any,
    ) -> Future[list[Any]]: ...

    @overload
    def submit_method(
        self,
        name: str,
        /,
        *args: Any,
        timeout: float | None = 60.0,
        ranks: Iterable[int] | None = None,
        gather: Literal["rank0"],
        wait: bool | None = None,
        **kwargs: Any,
    ) -> Future[Any]: ...

    @overload
    def submit_method(
        self,
        name: str,
        /,
        *args: Any,
        timeout: float | None = 60.0,
        ranks: Iterable[int] | None = None,
        gather: Literal["none"],
        wait: bool | None = None,
        **kwargs: Any,
    ) -> Future[None]: ...

    def submit_method(
        self,
        name: str,
        /,
        *args: Any,
        timeout: float | None = 60.0,
        ranks: Iterable[int] | None = None,
        gather: Gather = "all",
        wait: bool | None = None,
        **kwargs: Any,
    ) -> Future[Any]:
        """As call_method, and returns a future of its result: `await` it. wait: as for submit.
        Arguments may change when it returns, but for arrays of a request that waits for its
        turn."""
        self._check_codec("pickle", "submit_method")
        deadline = deadline_of(timeout)
        return self._send(_objects.request(name, args, kwargs), deadline, ranks, gather, wait)

    def _check_codec(self, codec: str, what: str) -> None:
        if self._codec != codec:
            raise StateError(
                f"{what} is for a group with codec={codec!r}; this one's is {self._codec!r}"
            )

    def _send(
        self,
        data: Buffer | _objects.Parts,
        deadline: int,
        ranks: Iterable[int] | None,
        gather: str,
        wait: bool | None,
    ) -> Future[Any]:
        if wait:
            return self._submit_when_room(data, deadline, ranks, gather)
        loop = asyncio._get_running_loop() if wait is None else None
        if loop is None:
            return self._submit(data, deadline, ranks, gather)
        turn = self._turns.get(loop)
        obstacle: Error | None = None
        if not (turn and turn.locked()):  # else others wait already
            try:
                return self._submit(data, deadline, ranks, gather)
            except (Full, Late) as error:
                obstacle = error.with_traceback(None)
        future: Future[Any] = Future(self, None, 0)
        ranks = ranks if ranks is None else tuple(ranks)
        future._unsent = data, deadline, ranks, gather, obstacle
        return future

    async def _send_in_turn(self, future: Future[Any]) -> None:
        """Sends a request for which there was no room, after those that were awaited before."""
        turn = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with turn:
            if not future._unsent:
                return  # it was awaited twice
            data, deadline, ranks, gather, obstacle = future._unsent
            while True:
                try:
                    self._submit(data, deadline, ranks, gather, future)
                    future._unsent = None
                    return
                except TimedOut:
                    if obstacle:
                        raise self._had_no_room(obstacle) from None
                    raise
                except (Full, Late) as error:
                    obstacle = error
                    left = (deadline - time.monotonic_ns()) / 1e9
                    try:
                        await asyncio.wait_for(self.room(), None if deadline == NEVER else left)
                    except TimeoutError:
                        raise self._had_no_room(obstacle) from None

    async def room(self) -> None:
        """Waits until submit has room: after Full, and after Late."""
        loop = asyncio.get_running_loop()
        self._attach_loop(loop)
        while True:
            self._poll()
            waiter = loop.create_future()
            with self._mutex:
                self._check_running()
                if len(self._futures) < self._depth and not self._refused:
                    return
                self._refused = False
                self._room.append((loop, waiter))
            # A rank may have replied and not yet returned the frame, of which no event tells.
            await asyncio.wait([waiter], timeout=0.05)

    def fileno(self) -> int:
        """An fd that polls readable when results are worth collecting, for event loops other than
        asyncio's, which needs no help: then call `poll()`. Do not read or close it."""
        err = new_error()
        fd = ffi.new("int *")
        check(self._use(lambda executor: lib.cox_executor_fd(executor, _EXECUTE, fd, err)), err)
        return int(fd[0])

    def poll(self) -> None:
        """Collects the results that are there, without waiting, and runs their callbacks."""
        self._poll()

    # ---- the work ----

    def _check_running(self) -> None:
        if self._state != "running" or self._executor is None:
            raise Closed(
                self._end_text
                if self._state == "stopped"
                else "the group is not started: use it in a with statement, or start it"
            )

    def _sleeper(self) -> threading.Lock:
        """With the mutex: a lock that the next _notify releases; wait for it without the mutex."""
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        return sleeper

    def _notify(self) -> None:
        """With the mutex."""
        if self._sleepers:
            sleepers, self._sleepers = self._sleepers, []
            for sleeper in sleepers:
                sleeper.release()

    def _rank_set(self, ranks: Iterable[int]) -> tuple[list[int], Any]:
        asked = sorted(set(ranks))
        if not asked or asked[0] < 0 or asked[-1] >= self._rank_count:
            raise Invalid(f"ranks is {asked}; it may have numbers from 0 to {self._rank_count - 1}")
        words = ffi.new("struct cox_rank_set *")
        for rank in asked:
            words.words[rank // 64] |= 1 << (rank % 64)
        return asked, words

    def _submit(
        self,
        data: Buffer | _objects.Parts,
        deadline: int,
        ranks: Iterable[int] | None,
        gather: str,
        future: Future[Any] | None = None,
    ) -> Future[Any]:
        """future: of this request, where there is one already."""
        process = self._process
        if process.forks_now != process.forks:
            process.check()
        policy = _GATHERS[gather] if gather in _GATHERS else _choice("gather", gather, _GATHERS)
        asked, words = (None, ffi.NULL) if ranks is None else self._rank_set(ranks)
        send = lib.coxpy_submit
        if type(data) is bytes:
            view = data
        elif isinstance(data, _objects.Parts):
            send, view = lib.coxpy_submit_parts, data.vectors
        else:
            view = buffer_of(data, "data")
        size = len(view)
        if future is None:
            future = Future(self, asked, policy)
        else:
            future._ranks, future._gather = asked, policy
        with self._mutex:
            if self._state != "running" or self._executor is None:
                self._check_running()
            key = self._next_key
            self._next_key = key + 1
            # Before it is sent: a thread that collects may have the reply at once. There is no call
            # in between, after which a signal handler could raise.
            self._futures[key] = future
            r = send(
                self._executor,
                view,
                size,
                policy,
                words,
                deadline,
                key,
                self._sequence,
                self._submit_error,
            )
            if r == 0:
                future._sequence = self._sequence[0]
                return future
            del self._futures[key]
            self._refused = r in (lib.COX_FULL, lib.COX_LATE)
            err, self._submit_error = self._submit_error, new_error()
        if r == lib.COX_FULL and self._poll():
            return self._submit(data, deadline, asked, gather, future)
        if r == lib.COX_CLOSED:
            raise error_of(r, self._end_text)
        if r == lib.COX_PEER_DEAD:
            raise self._death_of(asked, text_of(err.text))
        return fail(r, err)

    def _submit_when_room(
        self,
        data: Buffer | _objects.Parts,
        deadline: int,
        ranks: Iterable[int] | None,
        gather: str,
    ) -> Future[Any]:
        """Waits for room, for late ranks, and where dead ranks are replaced for that."""
        ranks = ranks if ranks is None else tuple(ranks)
        obstacle: Error | None = None
        while True:
            try:
                return self._submit(data, deadline, ranks, gather)
            except (Full, Late) as error:
                obstacle = error
                self._await_room(deadline, obstacle)
            except TimedOut:
                if obstacle:
                    raise self._had_no_room(obstacle) from None
                raise
            except RankDied as death:
                # Of a request that was never sent: a later one is for the rank's replacement.
                if not (self._waits_for_recovery and death._was_refused):
                    raise
                self._await_recovery(deadline, death)

    def _had_no_room(self, obstacle: Error) -> TimedOut:
        """The exception of a request that could not be sent until its deadline."""
        error = TimedOut(f"the request was not sent before its deadline: {obstacle}")
        error.code = lib.COX_TIMEOUT
        if isinstance(obstacle, Late):
            status = self.status()
            channel = next(one for one in status.channels if one.name == "execute")
            error.late = tuple(
                LateRank(
                    rank.rank,
                    rank.pid,
                    rank.channels["execute"].state not in (None, "idle"),
                    rank.channels["execute"].age_s or 0.0,
                    rank.liveness,
                    rank.stopped,
                )
                for rank in status.ranks
                if rank.rank in channel.late_ranks
            )
        return error

    def _death_of(self, asked: Sequence[int] | None, text: str) -> RankDied:
        """The exception of a request that was refused because a rank is dead."""
        error = RankDied(text)
        error.code = lib.COX_PEER_DEAD
        error._was_refused = True
        for rank in self.status().ranks:
            if rank.liveness != "alive" and (asked is None or rank.rank in asked):
                error.rank, error.pid = rank.rank, rank.pid
                error.signal = rank.signal or 0
                error.exit_status = -1 if rank.exit_status is None else rank.exit_status
                error.last_lines = tuple((rank.last_lines or "").splitlines())
                break
        return error

    def _await_recovery(self, deadline: int, death: Error) -> None:
        """Waits until the ranks are whole again, as on_death says."""
        while True:
            err = new_error()
            err.code = lib.COX_PEER_DEAD
            until = _slice(deadline)

            def wait(_: Any, err: Any = err, until: int = until) -> int:
                return int(lib.coxpy_group_await_recovery(self._native, until, err))

            r = self._use(wait)
            if r in (0, lib.COX_STALE):
                return
            if r != lib.COX_TIMEOUT:
                raise error_of(r, text_of(err.text)) from death
            if time.monotonic_ns() >= deadline:
                if obstacle := text_of(err.text):
                    death.args = (f"{death}; it is not replaced yet: {obstacle}",)
                raise death

    def _await_room(self, deadline: int, obstacle: Error) -> None:
        """Waits for a completion, or a moment, until submit may have room. obstacle: why it has
        none."""
        if time.monotonic_ns() >= deadline:
            raise self._had_no_room(obstacle) from None
        with self._mutex:
            self._check_running()
            sleeper = self._sleeper() if self._collecting else None
        if sleeper:
            sleeper.acquire(timeout=0.05)
            return
        self._collect(min(deadline, time.monotonic_ns() + _SLICE_NS))

    def _wait_for(self, future: Future[Any], deadline: int) -> bool:
        """Collects until this future is done, unless another thread does so. False: the
        deadline."""
        process = self._process
        if process.forks_now != process.forks:
            process.check()
        thread = threading.current_thread()
        if thread is self._events:
            raise Deadlock(
                "on_line and on_rank_death are called on the thread that other reports wait "
                "for: do not wait for a request in them"
            )
        sliced = thread is threading.main_thread()
        while not future._done:
            until = min(deadline, time.monotonic_ns() + _SLICE_NS) if sliced else deadline
            if self._collect(until, future) is None and not self._sleep_until(future, deadline):
                return False
            if not future._done and time.monotonic_ns() >= deadline:
                return False
        return True

    def _sleep_until(self, future: Future[Any], deadline: int) -> bool:
        """Sleeps until a request may have ended, where another thread collects, or stop is about to
        settle all. False: the deadline."""
        with self._mutex:
            waits = self._collecting or self._state != "running"
            sleeper = self._sleeper() if waits and not future._done else None
        if sleeper is None:
            return True
        left = (deadline - time.monotonic_ns()) / 1e9
        return left > 0 and (sleeper.acquire(timeout=min(left, threading.TIMEOUT_MAX)) or True)

    def _poll(self) -> bool:
        """Collects without waiting. True: something came."""
        return bool(self._collect(0))

    def _collect(self, deadline: int, awaited: Future[Any] | None = None) -> bool | None:
        """Collects on this thread. True: something came. None: another thread collects, `awaited`
        is done, or the group ends.

        A signal handler may raise at any point of the main thread. What the library has handed over
        is settled nevertheless, for other threads may wait for it, and the next thread can collect.
        """
        me = threading.get_ident()
        done: list[Future[Any]] = []
        try:
            with self._mutex:
                if self._collecting or self._state != "running" or self._executor is None:
                    return None
                # Else nothing may be in flight, and this would wait for ever.
                if awaited and awaited._done:
                    return None
                self._collecting = me
                self._count[0] = self._settled = 0
            if lib.cox_executor_completions(
                self._executor,
                _EXECUTE,
                self._completions,
                2 * self._depth,
                deadline,
                self._count,
                self._collect_error,
            ):
                self._collect_error.code = 0
        finally:
            if self._collecting == me:
                try:
                    self._settle_completions(done)
                finally:
                    if self._settled < self._count[0]:
                        self._settle_completions(done)  # a signal handler has raised in the first
                    room = bool(self._count[0])
                    with self._mutex:
                        self._collecting = 0
                        self._notify()
                    for future in done:
                        if future._callbacks:
                            self._call_back(future)
                    if room and self._room:
                        self._wake_room()
        return room

    def _settle_completions(self, done: list[Future[Any]]) -> None:
        """Settles what was collected, from the first that is not. What completions point to is lent
        until the next call."""
        while self._settled < self._count[0]:
            completion = self._completions[self._settled]
            status = completion.status
            if status != _LATE:
                key = int(ffi.cast(_UINTPTR, completion.request_context))
                future = self._futures.get(key)
                if future is not None:  # None: settled, and then interrupted
                    result, error, details = self._outcome(future, completion, status)
                    done.append(future)
                    with self._mutex:
                        future._result, future._error, future._details = result, error, details
                        future._done = True
                        del self._futures[key]
            self._settled += 1

    def _outcome(
        self, future: Future[Any], completion: Any, status: int
    ) -> tuple[Any, Error | None, bytes | bool]:
        """What the future gets as its _result, _error and _details."""
        has_objects = self._codec != "bytes"
        if status:
            error = self._failure(completion)
            has_detail = has_objects and isinstance(error, RankError)
            return None, error, has_detail and _bytes_of(completion.ranks[error.rank])
        read = self._object_of if has_objects else _bytes_of
        if future._gather == _ALL:
            ranks = ffi.unpack(completion.ranks, completion.rank_count)
            if future._ranks is not None:
                ranks = [ranks[rank] for rank in future._ranks]
            found = list(map(read, ranks))
            return found, None, has_objects and _Message in map(type, found)
        if future._gather == _RANK0:
            reply = read(completion.payload[0])
            return reply, None, type(reply) is _Message
        return None, None, False

    def _object_of(self, result: Any) -> Any:
        """A reply: its object where it is plain, else a Message. That has memory of its own: of a
        reply that came out of line its own, else a copy."""
        memory, size = result.bytes, result.size
        found = _load_plain(ffi.buffer(memory, size) if size else b"", _PLAIN_REPLY)
        if found is not NotImplemented:
            return found
        if size > _SLOT_SIZE and lib.cox_executor_take_reply(
            self._executor, _EXECUTE, ffi.addressof(result)
        ):
            memory = ffi.gc(ffi.cast("void *", memory), lib.cox_executor_free_reply, size)
            return _Message(memoryview(ffi.buffer(memory, size)))
        message: bytes = ffi.buffer(memory, size)[:] if size else b""
        has_buffers = message[-1:] == _objects.REPLY_WITH_BUFFERS
        return _Message(bytearray(message) if has_buffers else message)

    def _failure(self, completion: Any) -> Error:
        """The exception of a request that ended with another status than 0."""
        if completion.status == lib.COX_CLOSED:
            return error_of(completion.status, self._end_text)
        error = error_of(completion.status, text_of(completion.text))
        results = [completion.ranks[rank] for rank in range(completion.rank_count)]
        if isinstance(error, RankDied):
            for rank, result in enumerate(results):
                if result.outcome == lib.COX_OUTCOME_DEAD:
                    error.rank, error.pid, error.signal = rank, result.pid, result.signal
                    error.exit_status = result.exit_status
                    lines = _status.read(self._executor, self._rank_count, 0).ranks[rank].last_lines
                    error.last_lines = tuple((lines or "").splitlines())
                    break
        elif isinstance(error, TimedOut):
            status = _status.read(self._executor, self._rank_count, 0)
            error.late = tuple(
                LateRank(
                    rank,
                    result.pid,
                    result.taken,
                    result.silent_ns / 1e9,
                    status.ranks[rank].liveness,
                    status.ranks[rank].stopped,
                )
                for rank, result in enumerate(results)
                if result.outcome == lib.COX_OUTCOME_LATE
            )
        else:
            failed = [
                rank
                for rank, result in enumerate(results)
                if result.outcome == lib.COX_OUTCOME_ERROR
            ]
            if failed:
                error.rank = failed[0]
            if len(failed) > 1:  # the library cuts their texts, so that all have a place
                begin = str(error).partition("; rank ")[0]
                text = text_of(results[failed[0]].text)
                others = ", ".join(map(str, failed[1:]))
                ranks = "rank" if len(failed) == 2 else "ranks"
                error.args = (
                    f"{begin}; {ranks} {others} failed, too; rank {failed[0]} failed: {text}",
                )
        return error

    def _settle(self, future: Future[Any], result: Any, error: Error | None) -> None:
        with self._mutex:
            future._result, future._error, future._done = result, error, True
            self._notify()
        self._call_back(future)

    def _call_back(self, future: Future[Any]) -> None:
        """Runs the callbacks of a future that is done, once."""
        with self._mutex:
            callbacks, future._callbacks = future._callbacks, ()
        for callback in callbacks:
            try:
                callback(future)
            except Exception:  # pylint: disable=broad-exception-caught
                _log.exception("a callback of %r raised", future)

    def _wake_room(self) -> None:
        with self._mutex:
            waiters, self._room = self._room, []
        for loop, waiter in waiters:
            _wake(loop, waiter)

    # ---- event loops and callbacks ----

    def _attach_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop not in self._loops:
            loop.add_reader(self.fileno(), self._poll)
            self._fd = self.fileno()
            self._loops.add(loop)

    def _detach_loops(self) -> None:
        for loop in list(self._loops):
            self._loops.discard(loop)
            if loop.is_closed():
                continue
            try:
                if asyncio.get_running_loop() is loop:
                    loop.remove_reader(self._fd)
                    continue
            except RuntimeError:
                pass
            if loop.is_running():
                removed = threading.Event()

                def remove(
                    of: asyncio.AbstractEventLoop = loop, told: threading.Event = removed
                ) -> None:
                    of.remove_reader(self._fd)
                    told.set()

                try:
                    loop.call_soon_threadsafe(remove)
                    removed.wait(1)
                except RuntimeError:
                    pass
            else:
                loop.remove_reader(self._fd)

    def _need_collector(self) -> None:
        """With the mutex: a thread that collects for callbacks, where nobody else does."""
        if self._collector is None:
            self._collector = threading.Thread(
                target=_collect_for,
                args=(weakref.ref(self),),
                name="coxswain-callbacks",
                daemon=True,
            )
            self._collector.start()


def _collect_for(reference: weakref.ref[Group]) -> None:
    """The thread of a group with callbacks: ends when no future has one any more."""
    while True:
        group = reference()
        if group is None:
            return
        with group._mutex:
            waits = any(future._callbacks for future in group._futures.values())
            if not waits or group._state != "running":
                group._collector = None
                return
            sleeper = group._sleeper() if group._collecting else None
        if sleeper:
            sleeper.acquire()
        else:
            group._collect(NEVER)


_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def _stop_all() -> None:
    """At the end of the interpreter: no rank outlives it, and no thread is in the library."""
    groups = [group for group in _groups if group._process.is_this()]
    if groups and _in_main_thread():
        # It is bounded, and what is left half done would run while the interpreter is taken apart.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for group in groups:
        group.stop()


atexit.register(_stop_all)
