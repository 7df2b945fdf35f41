"""Coxswain in the scheduler processes of SGLang.

`Ranks` is what SGLang is given as the function of these processes. Its pickle has a rank's seat,
which comes first: by the time the process imports SGLang, its standard error is a pipe to the
server. The hooks below are what records of turns, and requests that go on, need.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib
import json
import logging
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import time
import traceback
from multiprocessing import reduction
from typing import Any
from collections.abc import Callable, Sequence

from .fork_server import await_end, calm, obstacle, renew_random_numbers
from .sglang_status import attach
from .sglang_turns import COMPUTING, IDLE, Turns, describe, id_of

logger = logging.getLogger("coxswain.sglang")

#: Of requests that go on, in the custom parameters of their sampling.
RESUMED = "coxswain"
#: What new schedulers have before the requests that go on; a rid that no request has.
BEGIN = "coxswain-begin"
# Of an exception, so that the server can say whether another rank has died before.
_FAILURE_SECONDS = 1.5
_PR_SET_PDEATHSIG = 1


def end_with_server(error_fd: int) -> None:
    """Has this process end with its parent. error_fd: a pipe that the server reads: it has
    no reader if the server has ended before."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    poll = select.poll()
    poll.register(error_fd, 0)
    if poll.poll(0):
        os._exit(1)


class Seat:
    """Of one rank: fds, of which the rank's process gets duplicates."""

    def __init__(
        self,
        rank: int,
        rank_count: int,
        group: str,
        error_fd: int,
        turns_fd: int,
        go_fd: int,
        resumes: bool,
    ) -> None:
        """group: its name, for status. error_fd: a pipe for its standard error. go_fd: a socket by
        which a fork server is asked; -1: it is none. resumes: there were ranks before it, whose
        requests go on."""
        self.rank = rank
        self._fields = (rank, rank_count, group, resumes)
        self._fds = (error_fd, turns_fd, go_fd)

    def __reduce__(self) -> Any:
        fds = [reduction.DupFd(fd) if fd >= 0 else None for fd in self._fds]
        return _take, (self._fields, fds)


class Ranks:
    """The function of the processes. Each start of one pickles it once, in order of rank."""

    def __init__(self, function: Callable[..., Any], seats: Sequence[Seat]) -> None:
        self._function = function
        self._seats = iter(seats)

    def __reduce__(self) -> Any:
        return _Rank, (next(self._seats), self._function)

    def __call__(self, *_: Any) -> None:
        """Not called: what the pickle becomes is."""


class Taken:
    """A rank's seat, in its process."""

    def __init__(self, fields: tuple[int, int, str, bool], fds: list[Any]) -> None:
        self.rank, self.rank_count, self.group, resumes = fields
        error_fd, turns_fd, self._go_fd = (fd.detach() if fd else -1 for fd in fds)
        # SGLang does so once it has imported all
        end_with_server(error_fd)
        os.dup2(error_fd, 2)
        os.close(error_fd)
        self.turns = Turns(self.rank_count, turns_fd)
        self.turn = 0
        #: it is a fork server
        self.forks = self._go_fd >= 0
        #: drops what was meant for the ranks before this one, until BEGIN
        self.closed = resumes
        self._told = False
        #: of the group without requests; it is kept as long as the process
        self.worker: Any = None

    def serve(self) -> int:
        """A fork server: it forks a rank whenever it is asked. Returns in each of them, the port of
        the ranks' process group; 0, at once: this is no fork server."""
        if self._go_fd < 0:
            return 0
        _set_title(f"coxswain::fork_server_{self.rank}")
        calm()
        with socket.socket(fileno=self._go_fd) as server:
            while True:
                data, fds, _, _ = socket.recv_fds(server, 64, 1)
                if not data:
                    os._exit(0)  # it is not needed
                if reason := obstacle():
                    server.send(json.dumps({"reason": reason}).encode())
                elif self._fork(server, fds[0]):
                    return int(data)
                os.close(fds[0])

    def _fork(self, server: socket.socket, error_fd: int) -> bool:
        """Forks a rank. Returns whether this is the rank. A process between the two ends at once,
        so that the server of SGLang becomes the rank's parent."""
        sys.stdout.flush()
        sys.stderr.flush()
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            return False
        own = os.getpid()
        if os.fork():
            os._exit(0)
        await_end(own)
        end_with_server(error_fd)
        os.dup2(error_fd, 2)
        os.close(error_fd)
        renew_random_numbers()
        server.send(json.dumps({"pid": os.getpid()}).encode())
        return True

    def decided(self, batch: Any, waiting: int) -> None:
        """Records a turn, and compares it with those of other ranks."""
        self.turn += 1
        turns, rank, turn = self.turns, self.rank, self.turn
        turns.set_state(rank, IDLE if batch is None else COMPUTING, turn)
        digest = turns.write(rank, turn, batch, waiting)
        if not self._told and turns.others(rank, turn, digest):
            rids = {} if batch is None else {id_of(req.rid): req.rid for req in batch.reqs}
            text = describe(turns, turn, rids)
            if text:
                self._told = True
                turns.set_divergence(rank, text)
                logger.error("Coxswain: %s", text)


_taken: Taken | None = None


def taken() -> Taken | None:
    """The seat of this process; None: it is no scheduler that Coxswain has started."""
    return _taken


def _take(fields: tuple[int, int, str, bool], fds: list[Any]) -> Taken:
    global _taken  # pylint: disable=global-statement
    _taken = Taken(fields, fds)
    return _taken


class _Rank:
    """Ranks, in the process of one."""

    def __init__(self, seat: Taken, function: Callable[..., Any]) -> None:
        self._seat = seat
        self._function = function

    def __call__(self, server_args: Any, port_args: Any, *args: Any) -> None:
        if self._seat.forks:
            _import_model()
        if port := self._seat.serve():
            port_args.nccl_port = port
        self._function(server_args, port_args, *args)


def _set_title(title: str) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("setproctitle").setproctitle(title)


def _import_model() -> None:
    """What a scheduler imports beside its own module. It takes seconds; where it fails, the
    scheduler says so."""
    with contextlib.suppress(Exception):
        from sglang.srt.model_executor import model_runner  # noqa: F401
        from sglang.srt.models.registry import ModelRegistry  # noqa: F401


# ---- hooks of SGLang's functions: (the original, its arguments) ----


def run_event_loop(original: Any, scheduler: Any) -> Any:
    """Scheduler.run_event_loop."""
    seat = _seat()
    forget_names()
    seat.worker = attach(seat.group, seat.rank, seat.rank_count)
    seat.turns.set_state(seat.rank, IDLE, 0)
    try:
        return original(scheduler)
    except Exception as error:
        said = traceback.format_exception_only(error)[-1].strip()
        frames = traceback.extract_tb(error.__traceback__)
        where = (
            f" in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        )
        seat.turns.set_failure(seat.rank, f"{said}{where}")
        traceback.print_exc()
        sys.stderr.flush()
        # The server, which is woken by these lines, tells its clients. Where this is because
        # another rank has died, it replaces this one, too.
        time.sleep(_FAILURE_SECONDS)
        raise


def get_next_batch_to_run(original: Any, scheduler: Any, *args: Any, **more: Any) -> Any:
    """Scheduler.get_next_batch_to_run."""
    plan = original(scheduler, *args, **more)
    _seat().decided(plan.batch_to_run, len(scheduler.waiting_queue))
    return plan


def recv_requests(original: Any, receiver: Any, *args: Any, **more: Any) -> Any:
    """SchedulerRequestReceiver.recv_requests."""
    seat = _seat()
    seat.turns.set_state(seat.rank, IDLE, seat.turn)
    requests = original(receiver, *args, **more)
    if seat.closed and requests:
        for i, request in enumerate(requests):
            if getattr(request, "rid", None) == BEGIN:
                seat.closed = False
                return requests[i + 1 :]
        return []
    return requests


def create_generation_req(
    original: Any, scheduler: Any, recv_req: Any, *args: Any, **more: Any
) -> Any:
    """Scheduler._create_generation_req. A request that goes on has the state of one that was
    retracted: its output, of which all is sent."""
    params = recv_req.sampling_params
    found = (params.custom_params or {}).get(RESUMED)
    if found is None:
        return original(scheduler, recv_req, *args, **more)
    params.custom_params = {k: v for k, v in params.custom_params.items() if k != RESUMED} or None
    req = original(scheduler, recv_req, *args, **more)
    req._coxswain_resumed = True
    cached, seen, *output = found
    if seen:
        req.output_ids = array.array("q", output)
        req.send_token_offset = len(output)
        req.send_output_token_logprobs_offset = len(output)
        ids, _ = req.init_incremental_detokenize()
        req.send_decode_id_offset = len(ids)
        req.retracted_stain = True
        req.cached_tokens = cached
    return req


def abort_on_queued_limit(original: Any, scheduler: Any, req: Any) -> Any:
    """Scheduler._abort_on_queued_limit: not for a request that was running before."""
    return False if getattr(req, "_coxswain_resumed", False) else original(scheduler, req)


def from_schedule_batch(original: Any, cls: Any, batch: Any, *args: Any, **more: Any) -> Any:
    """SamplingBatchInfo.from_schedule_batch: penalties count the output that a request has."""
    info = original(cls, batch, *args, **more)
    orchestrator = info.penalizer_orchestrator
    if orchestrator is not None and orchestrator.is_required:
        for row, req in enumerate(batch.reqs):
            if getattr(req, "_coxswain_resumed", False) and req.output_ids:
                for penalizer in orchestrator.penalizers.values():
                    _count(penalizer, row, req.output_ids)
    return info


def _count(penalizer: Any, row: int, output: Any) -> None:
    import torch

    if not penalizer._is_prepared:
        return
    if hasattr(penalizer, "len_output_tokens"):
        penalizer.len_output_tokens[row] = len(output)
        return
    for name, adds in (("frequency", True), ("presence", False), ("repetition", False)):
        counted = getattr(penalizer, f"cumulated_{name}_penalties", None)
        if counted is not None:
            ids = torch.tensor(output, dtype=torch.int64, device=counted.device)
            penalty = getattr(penalizer, f"{name}_penalties")[row]
            values = penalty.expand(len(ids)).to(counted.dtype)
            if adds:
                counted[row].scatter_add_(0, ids, values)
            else:
                counted[row].scatter_(0, ids, values)


#: The path of the file of load snapshots, which has no name; in the environment.
LOADS = "COXSWAIN_SGLANG_LOADS"


def forget_names() -> None:
    """Removes the names in /dev/shm that this process has made: whoever needs the memory has mapped
    it once all ranks are ready. SGLang's ends are SIGKILLs, also of multiprocessing's tracker."""
    tracker = multiprocessing.resource_tracker
    for name in os.listdir("/dev/shm"):
        if name.startswith(f"sgl_shm_mq_{os.getpid()}_"):
            with contextlib.suppress(OSError):
                os.unlink(f"/dev/shm/{name}")
            with contextlib.suppress(Exception):
                tracker.unregister(f"/{name}", "shared_memory")
    finalizers: Any = multiprocessing.util._finalizer_registry  # type: ignore[attr-defined]
    for key, finalizer in list(finalizers.items()):
        arguments = getattr(finalizer, "_args", None) or ()
        name = arguments[0] if arguments and isinstance(arguments[0], str) else ""
        if name.startswith("/mp-"):  # a semaphore: SemLock._cleanup
            finalizer()
            finalizers.pop(key, None)


def _seat() -> Taken:
    assert _taken is not None
    return _taken
