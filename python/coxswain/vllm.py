"""vLLM over Coxswain: an executor for an unmodified vLLM.

::

    vllm serve MODEL --distributed-executor-backend coxswain.vllm.Executor

What it needs of vLLM stands in _vllm_interface.py and is checked at start.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import glob
import json
import os
import pickle
import sys
import tempfile
import threading
import time
import uuid
import weakref
from typing import Any
from collections.abc import Callable

import cloudpickle
from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.executor import abstract

from . import _launch, _vllm_interface as interface, vllm_worker
from ._errors import Error, Full, Invalid, Late, RankDied, Unsupported
from ._group import Future as GroupFuture, Group

# Below vLLM's own logger, which has the handlers.
logger = init_logger("vllm.coxswain")

_NEVER = 2**64 - 1
# For the ranks to attach: they have imported nothing but this package by then.
_ATTACH_SECONDS = 300.0
_STEPS = ("execute_model", "sample_tokens")
# Executes a command with the environment of this rank, of a list of all.
_WITH_ENVIRONMENT = """import json, os, sys
os.environ.update(json.loads(sys.argv[1])[int(os.environ["COXSWAIN_RANK"])])
os.execv(sys.argv[2], sys.argv[2:])"""


@dataclasses.dataclass
class Options:
    """The fields of "coxswain" in vLLM's additional_config, or the environment's VLLM_COXSWAIN_*:
    `--additional-config '{"coxswain": {"name": "mine"}}'`, or VLLM_COXSWAIN_NAME=mine."""

    #: of the group, for `coxswain status --name`; None: it is made up, and logged
    name: str | None = None
    #: "fail": the death of a rank ends the engine
    on_death: str = "fail"

    @classmethod
    def of(cls, config: VllmConfig) -> Options:
        """Reads them. Raises Invalid where one has no such name or value."""
        given = getattr(config, "additional_config", None)
        given = dict(given.get("coxswain", {})) if isinstance(given, dict) else {}
        fields = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(given) - set(fields))
        if unknown:
            raise Invalid(
                f"additional_config's coxswain has {', '.join(unknown)}; it may have "
                f"{', '.join(fields)}"
            )
        for field in fields:
            value = os.environ.get(f"VLLM_COXSWAIN_{field.upper()}")
            if value is not None:
                given.setdefault(field, value)
        options = cls(**given)
        if options.on_death not in ("fail",):
            raise Invalid(f"on_death is {options.on_death!r}; it may be 'fail'")
        return options


class Ranks:
    """The processes of the ranks, from their start to their end."""

    def __init__(
        self, config: VllmConfig, options: Options, on_rank_death: Callable[[int, str], object]
    ) -> None:
        parallel = config.parallel_config
        self.world_size = parallel.world_size
        self._config = config
        self._files: list[str] = []
        self._ended = False
        # Two calls for each step in flight, and some for calls from elsewhere.
        depth = min(32, 2 * _batches_in_flight(config) + 2)
        self.group = Group(
            self._command(),
            self.world_size,
            name=options.name,
            depth=depth,
            timeout=_ATTACH_SECONDS,
            on_line=_write_line,
            on_rank_death=on_rank_death,
        )

    def _command(self) -> list[str]:
        """The program of the ranks, with the environment of each: OpenMP reads it when it is
        loaded, and vLLM has it loaded before anything else."""
        if set_environment := interface.optional("set_worker_environment"):
            local = max(1, self._config.parallel_config.data_parallel_size_local)
            set_environment(self.world_size * local)
        return [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _WITH_ENVIRONMENT,
            json.dumps(self._environments()),
            *_launch.command_of(vllm_worker.main),
        ]

    def start(self) -> None:
        """Starts the processes, and loads the model in each."""
        parallel = self._config.parallel_config
        start = vllm_worker.Start(
            config=pickle.dumps(self._config),
            distributed_init_method=_distributed_init_method(),
            lock_path=os.path.join(tempfile.gettempdir(), f"coxswain_vllm_{uuid.uuid4().hex}"),
            drivers=[rank % parallel.tensor_parallel_size == 0 for rank in range(self.world_size)],
        )
        self._files = [start.lock_path, start.distributed_init_method.removeprefix("file://")]
        self.group.start()
        name = self.group.name
        logger.info(
            "The %d ranks are the Coxswain group %s: `coxswain status --name %s` says what "
            "each does.",
            self.world_size,
            name,
            name,
        )
        self.group.call(vllm_worker.pickled(start), timeout=None, gather="none")

    def _environments(self) -> list[dict[str, str]]:
        """The variables of each rank that differ from this process's."""
        manager_type = interface.optional("OMPProcessManager")
        if manager_type is None:
            return [{} for _ in range(self.world_size)]
        manager = manager_type(self._config)
        found = []
        for rank in range(self.world_size):
            before = dict(os.environ)
            with manager.configure_omp_envs(rank=rank, local_rank=rank):
                found.append(
                    {name: value for name, value in os.environ.items() if before.get(name) != value}
                )
        return found

    def submit(self, payload: bytes, deadline: float | None) -> GroupFuture:
        """Sends a call to every rank. Waits only where no more fit."""
        while True:
            try:
                return self.group.submit(payload, _left(deadline))
            except (Full, Late):
                self.group._await_room(_NEVER if deadline is None else int(deadline * 1e9))

    def stop(self, kill: bool) -> None:
        """Ends the processes. kill: at once; they may hang. Idempotent."""
        if self._ended:
            return
        self._ended = True
        if kill:
            for rank in range(self.world_size):
                try:
                    self.group.kill(rank)
                except Error:
                    pass  # it is dead
        self.group.stop()
        for path in [*self._files, *_shared_memory_of(self._files[1:])]:
            try:
                os.unlink(path)
            except OSError:
                pass  # nobody made it


def _batches_in_flight(config: VllmConfig) -> int:
    """Steps that vLLM has in flight at a time."""
    found = getattr(config, "max_concurrent_batches", None)
    if found is None:
        pipeline = int(config.parallel_config.pipeline_parallel_size)
        found = max(pipeline, 2 if config.scheduler_config.async_scheduling else 1)
    return int(found)


def _distributed_init_method() -> str:
    """Where the ranks of this start find each other."""
    file_store, needs_tcp = interface.optional("file_store"), interface.optional("needs_tcp_store")
    if file_store is not None and not (needs_tcp and needs_tcp()):
        return str(file_store())
    network = interface.find("vllm.utils:network_utils")
    return str(
        network.get_distributed_init_method(network.get_loopback_ip(), network.get_open_port())
    )


def _shared_memory_of(stores: list[str]) -> list[str]:
    """What vLLM's ranks leave in /dev/shm under the name of their store, on a CPU."""
    return [
        path
        for store in stores
        if os.path.isabs(store)
        for path in glob.glob(f"/dev/shm/{glob.escape(os.path.basename(store))}*")
    ]


def _write_line(rank: int, line: str) -> None:
    """A line of a rank's output, among vLLM's own, which have the process in front."""
    if "(Worker" not in line:
        line = f"(rank {rank}) {line}"
    os.write(
        sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode("utf-8", "replace") + b"\n"
    )


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class Reply(concurrent.futures.Future[Any]):
    """The result of a call. Whoever waits for it collects it, and those of the calls before it."""

    def __init__(
        self,
        executor: Executor,
        method: str,
        future: GroupFuture,
        reply_rank: int | None,
        aggregate: Callable[[list[Any]], Any] | None,
    ) -> None:
        super().__init__()
        self._executor = executor
        self._method = method
        self._future = future
        self._reply_rank = reply_rank
        self._aggregate = aggregate

    def result(self, timeout: float | None = None) -> Any:
        """As of any Future."""
        self._collect(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of any Future."""
        self._collect(timeout)
        return super().exception(timeout)

    def _collect(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        in_flight = self._executor._in_flight
        while not self.done():
            try:
                oldest = in_flight.popleft()
            except IndexError:
                return  # another thread collects this one
            try:
                oldest._future.exception(_left(deadline))
            except BaseException:
                in_flight.appendleft(oldest)
                raise
            oldest._resolve()

    def _resolve(self) -> None:
        try:
            replies = self._future.result()
            if self._executor._failure is not None:
                # vLLM may have asked for the second half of a failed step only.
                raise self._executor._failure
            if self._reply_rank is not None:
                result = pickle.loads(replies[self._reply_rank])
            else:
                result = [pickle.loads(reply) for reply in replies]
            self.set_result(self._aggregate(result) if self._aggregate else result)
        except Error as error:
            self.set_exception(self._executor._explained(error, self._method))
        except Exception as error:  # pylint: disable=broad-exception-caught
            self.set_exception(error)


class Executor(abstract.Executor):
    """vLLM's workers as the ranks of a Coxswain group."""

    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Yes: the reply of a step may come while the next one is taken."""
        return True

    def _init_executor(self) -> None:
        interface.check(type(self))
        _check_parallel(self.parallel_config)
        self._options = Options.of(self.vllm_config)
        self.world_size = self.parallel_config.world_size
        self.output_rank = self.world_size - self.parallel_config.tensor_parallel_size * getattr(
            self.parallel_config, "prefill_context_parallel_size", 1
        )
        self.is_failed = False
        self._failure: Error | None = None
        self._failure_callback: Callable[[], None] | None = None
        self._failure_lock = threading.Lock()
        self._stopping = False
        self._in_flight: collections.deque[Reply] = collections.deque()
        reference = weakref.ref(self)

        def on_rank_death(rank: int, text: str) -> None:
            if executor := reference():
                executor._on_rank_death(rank, text)

        self._ranks = Ranks(self.vllm_config, self._options, on_rank_death)
        try:
            self._ranks.start()
        except BaseException:
            self.shutdown()
            raise
        if set_torch_threads := interface.optional("set_torch_threads"):
            set_torch_threads()  # this process only schedules

    @property
    def max_concurrent_batches(self) -> int:
        """Of vLLM before it moved to VllmConfig."""
        return _batches_in_flight(self.vllm_config)

    # ---- calls ----

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: Any = None,
        ec_output_aggregator: Any = None,
    ) -> Any:
        """Calls a method of every rank's worker, or a function of it.

        Returns a list with a result per rank; with unique_reply_rank or an aggregator one result;
        with non_block a Future of it. Raises RankDied, RankError, TimedOut.
        """
        aggregators = [one for one in (kv_output_aggregator, ec_output_aggregator) if one]
        aggregate = None
        if aggregators:
            rank, unique_reply_rank = unique_reply_rank or 0, None

            def aggregate(outputs: list[Any]) -> Any:
                result = outputs[rank]
                for aggregator in aggregators:
                    result = aggregator.aggregate(outputs, output_rank=rank)
                return result

        name = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
        sent = method if isinstance(method, str) else cloudpickle.dumps(method, protocol=5)
        payload = vllm_worker.pickled((sent, args, kwargs or {}, unique_reply_rank))
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._failure is not None:
            raise self._failure
        try:
            future = self._ranks.submit(payload, deadline)
        except Error as error:
            raise self._explained(error, name) from None
        reply = Reply(self, name, future, unique_reply_rank, aggregate)
        self._in_flight.append(reply)
        return reply if non_block else reply.result()

    def _step(self, method: str, *args: Any, non_block: bool = False, whole: bool = False) -> Any:
        """A call with the reply of the last stage alone, unless an aggregator wants all."""
        aggregators = (
            {}
            if not whole
            else {
                "kv_output_aggregator": self.kv_output_aggregator,
                "ec_output_aggregator": getattr(self, "ec_output_aggregator", None),
            }
        )
        return self.collective_rpc(
            method,
            args=args,
            unique_reply_rank=self.output_rank,
            non_block=non_block,
            timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
            **aggregators,
        )

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Runs a step; None: sample_tokens gives its result."""
        return self._step("execute_model", scheduler_output, non_block=non_block, whole=True)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Samples the tokens of the step."""
        return self._step("sample_tokens", grammar_output, non_block=non_block, whole=True)

    def execute_dummy_batch(self) -> None:
        """A step without requests: other engines compute together with this one."""
        self._step("execute_dummy_batch")

    def take_draft_token_ids(self) -> Any:
        """The tokens that a draft model proposes."""
        return self._step("take_draft_token_ids")

    # ---- failure ----

    def check_health(self) -> None:
        """Raises unless every rank replies within 10 s."""
        self.collective_rpc("check_health", timeout=10)

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """callback() when a rank has died, also while the engine is idle. On any thread."""
        with self._failure_lock:
            if self._failure is None:
                self._failure_callback = callback
                return
        callback()

    def _on_rank_death(self, rank: int, text: str) -> None:
        """On the thread of the group's reports."""
        if not self._stopping:
            self._fail(self._ranks.group._death_of([rank], text))

    def _fail(self, error: Error) -> Error:
        """The executor has failed for good. Returns the first failure, which is the cause."""
        with self._failure_lock:
            if self._failure is not None or self._stopping:
                return self._failure or error
            self._failure, self.is_failed = error, True
            callback, self._failure_callback = self._failure_callback, None
        logger.error("Coxswain group %s: %s", self._ranks.group.name, error)
        if callback:
            callback()
        return error

    def _explained(self, error: Error, method: str) -> Error:
        """What a call raises. A dead rank is the end, and so is a step that failed."""
        if self._failure is None and error.code and method not in str(error):
            error.add_note(f"It was vLLM's call {method!r}.")
        if self._failure or isinstance(error, RankDied) or method in _STEPS:
            return self._fail(error)
        return error

    def shutdown(self) -> None:
        """Ends the ranks. Idempotent."""
        ranks = getattr(self, "_ranks", None)
        if ranks is None:
            return
        self._stopping = True
        # A rank that owes a reply may hang; so may one whose peer is dead.
        ranks.stop(kill=self._failure is not None or bool(self._in_flight))


def _check_parallel(parallel: Any) -> None:
    """Refuses what this executor does not do."""
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        raise Unsupported(
            "coxswain.vllm.Executor drives the ranks of one machine; this engine has "
            f"{parallel.nnodes_within_dp}: use vLLM's own executor"
        )
    if getattr(parallel, "numa_bind", False):
        raise Unsupported(
            "coxswain.vllm.Executor does not bind ranks to NUMA nodes: start vLLM "
            "under numactl, or without numa_bind"
        )
