"""The schedulers of an SGLang server: their start, their deaths, their replacement.

States: STARTING -> RUNNING -> (REPLACING -> RUNNING)* -> ENDING. A death while STARTING is SGLang's
to raise. RUNNING begins where SGLang starts its own watchdog, in whose place this is; ENDING where
it stops that one, or where a death is the end.

Threads: SGLang's, which starts the first schedulers; that of Watch, which sees deaths; and one that
starts all later schedulers. It lives as long as the process: a scheduler ends with the thread that
has started it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import ctypes
import dataclasses
import enum
import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from typing import Any
from collections.abc import Callable, Iterator

from .errors import Unsupported
from .sglang_rank import LOADS, Ranks, Seat
from .sglang_status import Status
from .sglang_survive import Requests
from .sglang_tried import settings, untried
from .sglang_turns import COMPUTING, STATES, Turns
from .sglang_watch import Child, Watch

logger = logging.getLogger("coxswain.sglang")

# An exception in a scheduler may be due to the death of another one, which is then seen within this
# time; in seconds.
_OTHER_DEATH_SECONDS = 0.3
# For clients to be sent their errors, before the server ends.
_LAST_WORDS_SECONDS = 1.0
_READ_SECONDS = 0.02
# How often is asked whether the schedulers of a server that ends are gone.
_FORGET_SECONDS = 0.2
# Starts of schedulers in a row that fail.
_STARTS = 3
# For a fork server to import SGLang, and to fork.
_FORK_SECONDS = 300.0
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class State(enum.Enum):
    STARTING = enum.auto()
    RUNNING = enum.auto()
    REPLACING = enum.auto()
    ENDING = enum.auto()


@dataclasses.dataclass
class Group:
    """Processes that were started together: the schedulers, or a fork server for each."""

    processes: list[Any]
    children: list[Child]
    wait_for_ready: Callable[[], None]
    pids: list[int]
    #: by which fork servers are asked
    sockets: list[socket.socket]

    def end(self) -> None:
        """Kills and reaps them."""
        for child in self.children:
            child.kill()
        for process in self.processes:
            process.join()
        for one in self.sockets:
            one.close()

    def lives(self) -> bool:
        return all(child.end() is None for child in self.children)


class Forked:
    """A process of a fork server, with what SGLang uses of multiprocessing's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exitcode: int | None = None

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (deadline is None or time.monotonic() < deadline):
            time.sleep(_READ_SECONDS)

    def is_alive(self) -> bool:
        if self.exitcode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.exitcode = os.waitstatus_to_exitcode(status)
        return self.exitcode is None


def _pipe() -> tuple[int, int]:
    """For a standard error."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_fd, False)
    return read_fd, write_fd


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Meanwhile this process becomes the parent of processes below it whose parent ends."""
    prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value)


class Server:
    """Of one Engine, or API server."""

    def __init__(
        self, options: Any, launch: Callable[..., Any], args: tuple[Any, ...], more: Any
    ) -> None:
        """launch(server_args, port_args, function of a scheduler): SGLang's launcher."""
        self.options = options
        self.port_args = args[1]
        self._launch, self._args, self._more = launch, args, more
        self._state = State.STARTING
        # SGLang ends in a signal handler, which may find the main thread in here.
        self._mutex = threading.RLock()
        server_args = args[0]
        self._count = (server_args.tp_size or 1) * (server_args.pp_size or 1)
        reasons: list[str] = []
        if options.on_death != "fail":
            reasons = untried(settings(server_args), options.untried)
        if options.on_death == "restart" and reasons:
            raise Unsupported(
                f"Coxswain's on_death 'restart' was not tried with {'; '.join(reasons)}: use "
                "on_death 'fail', or allow by name what you have tried (untried)"
            )
        self.restarts = options.on_death == "restart" or (options.on_death is None and not reasons)
        if options.on_death is None:
            logger.info(
                "Coxswain: on_death is '%s': the loss of a scheduler %s.",
                "restart" if self.restarts else "fail",
                "costs a pause, and no request"
                if self.restarts
                else f"ends the server: 'restart' was not tried with {'; '.join(reasons)}",
            )
        self._turns = Turns(self._count)
        # ShmLoadSnapshotWriter's, which has a name in /dev/shm otherwise
        self._loads_fd = os.memfd_create("coxswain_sglang_loads")
        os.environ[LOADS] = f"/proc/{os.getpid()}/fd/{self._loads_fd}"
        self._watch = Watch(self._died, self._look)
        name = options.name or f"sglang_{os.getpid()}"
        self._status = Status(name, self._count, self._stop)
        self._group: Group | None = None
        self._fork_servers: Group | None = None
        self.requests: Requests | None = None
        self._processes: list[Any] = []
        self._result: Any = None
        #: which incident the schedulers belong to
        self.incidents = 0
        self._times: collections.deque[float] = collections.deque(maxlen=options.incidents)
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._failed_since: float | None = None
        #: the turn in which ranks hang, and those that are stopped
        self._hung: tuple[int, list[int]] = (0, [])
        self._divergence = ""
        #: why the server ends, for its log and for clients
        self.cause: tuple[str, str] | None = None

    # ---- start ----

    def start(self) -> tuple[Any, Any]:
        """In place of SGLang's launcher."""
        self._watch.start()
        threading.Thread(target=self._work, name="coxswain-sglang-launch", daemon=True).start()
        self._status.start()
        logger.info("Coxswain: `coxswain status --name %s` has this server.", self._status.name)
        self._group, self._result = self._start(self._args[1], False, False)
        self._processes = self._group.processes
        return self._result, self._processes

    def _start(self, port_args: Any, resumes: bool, forks: bool) -> tuple[Group, Any]:
        """Starts schedulers, or their fork servers."""
        seats, ours, theirs, sockets = [], [], [], []
        for rank in range(self._count):
            error_fd, write_fd = _pipe()
            ours.append(error_fd)
            theirs.append(write_fd)
            go_fd = -1
            if forks:
                one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets.append(one)
                go_fd = other.detach()
                theirs.append(go_fd)
            name, turns_fd = self._status.name, self._turns.fd
            seats.append(Seat(rank, self._count, name, write_fd, turns_fd, go_fd, resumes))
        server_args, _, function = self._args
        try:
            ranks = Ranks(function, seats)
            result, processes = self._launch(server_args, port_args, ranks, **self._more)
        finally:
            for fd in theirs:
                os.close(fd)
        pids = [process.pid for process in processes]
        children = self._watched("the fork server of rank" if forks else "rank", pids, ours)
        pids = list(result.all_child_pids)
        return Group(processes, children, result.wait_for_ready, pids, sockets), result

    def _watched(self, name: str, pids: list[int], error_fds: list[int]) -> list[Child]:
        return [
            self._watch.add(f"{name} {rank}", pid, rank, error_fd)
            for rank, (pid, error_fd) in enumerate(zip(pids, error_fds, strict=True))
        ]

    def _fork(self, servers: Group, port: int) -> Group:
        """Has fork servers fork schedulers. Raises where one cannot."""
        pids: list[int] = []
        error_fds: list[int] = []
        reason = "" if servers.lives() else "a fork server has ended"
        with _subreaper():
            asked = [] if reason else servers.sockets
            for one in asked:
                error_fd, write_fd = _pipe()
                error_fds.append(error_fd)
                with contextlib.suppress(OSError):  # it says nothing below
                    socket.send_fds(one, [str(port).encode()], [write_fd])
                os.close(write_fd)
            for one in asked:
                said: dict[str, Any] = {}
                with contextlib.suppress(OSError):
                    one.settimeout(_FORK_SECONDS)
                    said = json.loads(one.recv(4096) or b"{}")
                if "pid" in said:
                    pids.append(said["pid"])
                else:
                    reason = said.get("reason", "a fork server has ended")
        if reason:
            for fd in error_fds:
                os.close(fd)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                Forked(pid).join()
            raise RuntimeError(reason)
        children = self._watched("rank", pids, error_fds)
        processes = [Forked(pid) for pid in pids]
        return Group(processes, children, servers.wait_for_ready, pids, [])

    def watchdog_starts(self, watchdog: Any) -> bool:
        """SGLang has started, and would watch its processes. Returns whether they are this
        server's, and watched here."""
        if not self._group or not set(self._processes) <= set(watchdog._processes):
            return False
        for process, name in zip(watchdog._processes, watchdog._names, strict=True):
            if process not in self._processes:
                self._watch.add(f"the {name}", process.pid, None)
        with self._mutex:
            self._state = State.RUNNING
        watchdog._coxswain = self
        if self.restarts and self.options.fork_server:
            self._jobs.put(self._prepare)
        self._tell_deaths(self._group)
        return True

    def _tell_deaths(self, group: Group) -> None:
        """Of those that have died before this was their group, or this its state."""
        for child in group.children:
            if child.end() is not None:
                self._died(child)

    def watchdog_stops(self) -> None:
        """SGLang ends by itself."""
        self.expect_end()
        threading.Thread(target=self._forget, daemon=True).start()

    def expect_end(self) -> None:
        """No death is news any more."""
        self._watch.quiet()
        with self._mutex:
            self._state = State.ENDING

    def _forget(self) -> None:
        """Ends the threads of this server once its schedulers have ended: the process may go on."""
        group = self._group
        while group and group.lives():
            time.sleep(_FORGET_SECONDS)
        self._status.stop()
        self._watch.stop()
        self._watch.join()
        self._jobs.put(None)
        self._turns.close()
        os.close(self._loads_fd)

    def forked_by(self, processes: list[Any]) -> list[Any] | None:
        """Of the fork servers: the schedulers that they have forked last; None: they are none."""
        servers, group = self._fork_servers, self._group
        return group.processes if servers and group and servers.processes is processes else None

    def dead_at_start(self) -> str:
        """For the error of a start that fails: which scheduler has died, and its last lines."""
        children = self._group.children if self._group else []
        return "; ".join(child.death() for child in children if any(child.end() or ()))

    # ---- deaths: on the thread of Watch ----

    def _died(self, child: Child) -> None:
        """The log has it already."""
        if child.expected or (child.end() == (0, 0) and self._failure() is None):
            return
        with self._mutex:
            state = self._state
            if state is State.ENDING or child not in (self._group.children if self._group else ()):
                if child.rank is not None or state is State.ENDING:
                    return  # it was replaced, is a spare, or the server ends
            if child.rank is not None and self._turns.failure(child.rank):
                return  # by its own exception, of which _look tells
            if state is State.RUNNING and self.restarts and child.rank is not None:
                self._state = State.REPLACING
                if self.requests:
                    self.requests.holding = True
        if state is State.RUNNING and self.restarts and child.rank is not None:
            self._jobs.put(lambda: self._replace(child.death(), child.death(details=False)))
        elif state is not State.STARTING and (state is State.RUNNING or child.rank is None):
            self._end(child.death(), child.death(details=False))

    def _failure(self) -> int | None:
        """The first rank that has raised an exception; None: none has."""
        return next((rank for rank in range(self._count) if self._turns.failure(rank)), None)

    def _look(self) -> None:
        """After each event, and each second."""
        with self._mutex:
            if self._state is not State.RUNNING:
                return
        rank = self._failure()
        if rank is not None:
            now = time.monotonic()
            if self._failed_since is None:
                # The death of another one that is the reason is seen by then.
                self._failed_since = now
                timer = threading.Timer(_OTHER_DEATH_SECONDS, self._watch.wake)
                timer.daemon = True
                timer.start()
            elif now >= self._failed_since + _OTHER_DEATH_SECONDS and self._group:
                pid = self._group.children[rank].pid
                text = self._turns.failure(rank)
                self._end(f"rank {rank} (pid {pid}) failed: {text}", f"rank {rank} failed")
        divergence = self._turns.divergence()
        if divergence and divergence != self._divergence:
            self._status.set(divergence=divergence)
        self._divergence = divergence
        self._tell_hang()

    def _tell_hang(self) -> None:
        """Says once which rank does not move, and where each of its threads stands."""
        if not self._group:
            return
        states = [self._turns.state(rank) for rank in range(self._count)]
        owed = bool(self.requests and self.requests.manager.rid_to_state)
        stopped = [rank for rank, child in enumerate(self._group.children) if child.stopped()]
        late = any(
            seconds > self.options.hang and (state == COMPUTING or owed or rank in stopped)
            for rank, (state, _, seconds) in enumerate(states)
        )
        hung = (max((turn for _, turn, _ in states), default=0), stopped)
        if not late or self._hung == hung:
            return
        self._hung = hung
        said = []
        for rank, (state, turn, seconds) in enumerate(states):
            record = self._turns.read(rank, turn)
            what = STATES[state]
            if state == COMPUTING and record is not None:
                what += f" {record.mode_name()} of {record.requests} requests"
            if rank in stopped:
                what += ", stopped by a signal"
            said.append(f"rank {rank}: {what}, turn {turn}, for {seconds:.1f} s")
        text = "; ".join(said)
        logger.error("Coxswain: the schedulers do not move. %s.", text)
        if os.environ.get("COXSWAIN_STACKS") == "off":
            self._status.set(hang=text)
        else:
            threading.Thread(target=self._tell_stacks, args=(text,), daemon=True).start()

    def _tell_stacks(self, text: str) -> None:
        """A thread of its own: it takes about a second, in which a death must be acted on."""
        stacks = self._status.stacks()
        if stacks is not None:
            ranks = (f"rank {rank.rank} (pid {rank.pid}): {rank.text}" for rank in stacks.ranks)
            logger.error("Coxswain: stacks: %s\n%s", stacks.text, "\n".join(ranks))
            text += f"; stacks: {stacks.text}"
        self._status.set(hang=text)

    # ---- replacement: on the thread that starts schedulers ----

    def _work(self) -> None:
        while job := self._jobs.get():
            job()

    def _prepare(self) -> None:
        """Starts the fork servers."""
        try:
            self._fork_servers, _ = self._start(copy.copy(self.port_args), True, True)
        except Exception as error:  # pylint: disable=broad-exception-caught
            logger.warning("Coxswain: schedulers have no fork servers: %s", error)

    def _replace(self, text: str, public: str) -> None:
        begin = time.monotonic()
        reason = ""
        if self.requests and self.requests.changed:
            reason = f"new schedulers would not be like these, after {self.requests.changed}"
        limit = self._times.maxlen or 0
        if not limit or (
            len(self._times) == limit and begin - self._times[0] < self.options.window
        ):
            reason = f"that was incident {limit + 1} within {self.options.window:.0f} s"
        self._times.append(begin)
        if reason:
            self._end(f"{text}. {reason[0].upper()}{reason[1:]}", f"{public}. {reason}")
            return
        assert self._group is not None
        self._group.end()
        ended = time.monotonic()
        for attempt in range(_STARTS):
            try:
                self._take_over()
                break
            except Exception as error:  # pylint: disable=broad-exception-caught
                logger.error("Coxswain: new schedulers did not start: %s", error)
                if self._group:
                    self._group.end()
                if attempt + 1 == _STARTS:
                    self._end(f"{text}. {_STARTS} starts failed: {error}", public)
                    return
        self._resume(text, begin, ended)

    def _forked(self, port: int) -> Group | None:
        servers = self._fork_servers
        if not servers:
            return None
        try:
            return self._fork(servers, port)
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("Coxswain: schedulers import SGLang again, since %s.", error)
            self._fork_servers = None
            servers.end()
            for child in servers.children:
                self._watch.forget(child)
            return None

    def _take_over(self) -> None:
        from sglang.srt.utils.network import get_free_port_below_ephemeral

        self._turns.clear()
        self._failed_since = None
        port_args = copy.copy(self.port_args)
        port_args.nccl_port = get_free_port_below_ephemeral()
        self._status.start()
        group = self._forked(port_args.nccl_port) or self._start(port_args, True, False)[0]
        with self._mutex:
            old, self._group = self._group, group
        if old:
            for child in old.children:
                self._watch.forget(child)
        self._tell_deaths(group)
        group.wait_for_ready()
        # SGLang's own lists of its processes
        self._processes[:] = group.processes
        pids = [pid for pid in self._result.all_child_pids if not old or pid not in old.pids]
        self._result.all_child_pids[:] = group.pids + pids

    def _resume(self, text: str, begin: float, ended: float) -> None:
        ready = time.monotonic()
        with self._mutex:
            if self._state is State.ENDING:
                return
            self.incidents += 1
            incident = self.incidents
            self._state = State.RUNNING
            group = self._group
        requests = self.requests

        def is_current() -> bool:
            with self._mutex:
                return self._state is State.RUNNING and self.incidents == incident

        async def go_on() -> None:
            assert requests is not None
            try:
                count = await requests.go_on(is_current)
            except Exception as error:  # pylint: disable=broad-exception-caught
                self._end(f"{text}. Requests could not go on: {error!r}", "requests were lost")
                return
            logger.warning(
                "Coxswain: incident %d. %s. %d requests go on after %.1f s (end %.1f, start %.1f).",
                incident, text, count, time.monotonic() - begin, ended - begin, ready - ended,
            )  # fmt: skip
            self._status.set(
                incidents=incident,
                last_incident=text.partition(";")[0],
                pause_s=round(time.monotonic() - begin, 3),
            )

        loop = requests.manager.event_loop if requests else None
        if loop is not None and requests is not None:
            asyncio.run_coroutine_threadsafe(go_on(), loop)
        elif requests is not None:
            requests.holding = False  # there was no request yet
        if group:
            self._tell_deaths(group)
        if self.options.fork_server and self._fork_servers is None:
            self._jobs.put(self._prepare)

    # ---- end ----

    def _stop(self, text: str) -> None:
        """`coxswain stop`: SGLang ends when its requests have."""
        logger.warning("Coxswain: %s", text)
        os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, text: str, public: str) -> None:
        """Tells clients, and ends the server as SGLang does."""
        with self._mutex:
            if self._state is State.ENDING:
                return
            self._state = State.ENDING
        told = text if self.options.tell_clients else public
        self._watch.quiet()
        logger.error("Coxswain: the server ends: %s.", text)
        self.cause = (text, told)
        threading.Thread(target=self._tell_and_end, args=(told,), daemon=True).start()

    def _tell_and_end(self, told: str) -> None:
        requests = self.requests
        loop = requests.manager.event_loop if requests else None
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        if requests is not None and loop is not None and not loop.is_closed():
            done = threading.Event()

            def tell() -> None:
                requests.end_requests(told)
                done.set()

            requests.over = (told,)
            loop.call_soon_threadsafe(tell)
            done.wait(_LAST_WORDS_SECONDS)
            while time.monotonic() < deadline and (not done.is_set() or requests.unread()):
                time.sleep(_READ_SECONDS)
            # what was read is on its way
            time.sleep(max(0.0, min(0.2, deadline - time.monotonic())))
        os.kill(os.getpid(), signal.SIGQUIT)
