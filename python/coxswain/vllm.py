"""vLLM over Coxswain: an executor for an unmodified vLLM.

::

    vllm serve MODEL --distributed-executor-backend coxswain.vllm.Executor

What it needs of vLLM stands in vllm_interface.py and is checked at start.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import glob
import json
import os
import pickle
import re
import sys
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

from ._internal import (
    launch as _launch,
    output as _output,
    vllm_choices as _vllm_choices,
    vllm_fork as _vllm_fork,
    vllm_interface as interface,
    vllm_plugin as _vllm_plugin,
    vllm_spares as _vllm_spares,
    vllm_survive as _vllm_survive,
    vllm_weights as _vllm_weights,
)
from . import vllm_worker
from ._internal.errors import (
    Closed,
    Error,
    Invalid,
    RankDied,
    RankError,
    TimedOut,
    Unsupported,
)
from ._internal.group import Cluster, Future as GroupFuture, Group

# Below vLLM's own logger, which has the handlers.
logger = init_logger("vllm.coxswain")
_vllm_plugin.explain()

# Of the ranks, written on the thread of a group's reports.
_lines = _output.Output()
# For the ranks to attach: they have imported nothing but this package by then.
_ATTACH_SECONDS = 300.0
# A process may be held in the kernel for longer.
_KILL_SECONDS = 3.0
_STEPS = ("execute_model", "sample_tokens")
_PARTS_OF_STEPS = (*_STEPS, "take_draft_token_ids", "execute_dummy_batch")
# What execute_model gives where sample_tokens gives the result of the step.
_NONE_YET: concurrent.futures.Future[None] = concurrent.futures.Future()
_NONE_YET.set_result(None)
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
    #: "fail": the loss of a rank ends the engine. "restart": the ranks are replaced, and the
    #: requests go on. None: "restart" where the engine's configuration allows it
    on_death: str | None = None
    #: with "restart": how often in `window` seconds, before the engine ends
    incidents: int = 10
    window: float = 600.0
    #: with "restart": processes that stand by for an incident: "none"; "hot": they have loaded the
    #: model
    spares: str = "none"
    #: "private": each rank loads its weights. "shared": later ranks of the same shard map those of
    #: the first one, also of another engine, until 10 minutes after the last has ended. "kept":
    #: until `coxswain weights drop`
    weights: str = "private"
    #: ranks are forked from a process that has imported vLLM, where that is safe; not with nodes
    fork_server: bool = True
    #: "a:2,b:2": the ranks are on these machines, where
    #: `coxswain node --name NAME --node a --stay ... -- python3 -m coxswain.vllm_worker` runs
    nodes: str | None = None
    #: with nodes: the NATS servers, and this process's certificate (coxswain.Cluster)
    cluster: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    insecure_loopback: bool = False
    #: with nodes: the address of rank 0's machine, where the ranks find each other
    master: str | None = None
    #: where `coxswain postmortem` finds what the ranks did before one died; None: that of
    #: COXSWAIN_CRASH_DIR, if it is set
    crash_dir: str | None = None
    #: clients of the API server get the whole cause of an engine's end; False: which rank failed
    #: and how, without paths, pids and other texts of this host
    tell_clients: bool = True
    #: what the ranks choose for a step is compared; not with nodes
    compare: bool = True

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
        if options.on_death not in (None, "fail", "restart"):
            raise Invalid(f"on_death is {options.on_death!r}; it may be 'fail' or 'restart'")
        obstacles = _vllm_survive.obstacles(config)
        obstacles += interface.differences(names=interface.SURVIVAL)
        if options.on_death == "restart" and obstacles:
            raise Unsupported(
                f"on_death 'restart' does not go together with {'; '.join(obstacles)}; on_death "
                "'fail' does"
            )
        if options.on_death is None:
            options.on_death = "fail" if obstacles else "restart"
            logger.info(
                "on_death is '%s': the loss of a rank %s.",
                options.on_death,
                f"ends the engine, which has {'; '.join(obstacles)}"
                if obstacles
                else "costs a pause, and no request",
            )
        if options.spares not in _vllm_spares.KINDS:
            kinds = ", ".join(map(repr, _vllm_spares.KINDS))
            raise Invalid(f"spares is {options.spares!r}; it may be {kinds}")
        if options.spares != "none" and options.on_death != "restart":
            raise Invalid(f"spares {options.spares!r} goes together with on_death 'restart' only")
        if options.weights not in _vllm_weights.KINDS:
            kinds = ", ".join(map(repr, _vllm_weights.KINDS))
            raise Invalid(f"weights is {options.weights!r}; it may be {kinds}")
        obstacles = _vllm_weights.obstacles(config) if options.weights != "private" else []
        if obstacles:
            raise Unsupported(
                f"weights {options.weights!r} does not go together with {'; '.join(obstacles)}; "
                "weights 'private' does"
            )
        options.incidents, options.window = int(options.incidents), float(options.window)
        for flag in ("insecure_loopback", "tell_clients", "fork_server", "compare"):
            setattr(options, flag, getattr(options, flag) in (True, "1", "true"))
        if options.nodes and not (options.name and options.cluster and options.master):
            raise Invalid("with nodes the group needs a name, a cluster and a master")
        if options.nodes and options.spares != "none":
            raise Invalid("nodes have no spare ranks: leave out spares")
        return options

    def machines(self) -> Cluster | None:
        """How the ranks' machines are reached; None: they are on this one."""
        if not self.nodes:
            return None
        return Cluster(
            str(self.cluster),
            ca=self.ca,
            certificate=self.certificate,
            key=self.key,
            insecure_loopback=self.insecure_loopback,
            fresh=True,  # those of another engine have its model, and its gloo
        )


class Ranks:
    """The processes of the ranks, from their start to their end."""

    def __init__(
        self,
        executor: Executor,
        name: str | None,
        on_rank_death: Callable[[Ranks, int, str], object],
        on_stop: Callable[[Ranks, str], object],
        warm_up: Callable[[Ranks], object] | None,
        standby: bool,
    ) -> None:
        """warm_up: of spare ranks. standby: they get their name when they take over."""
        self._config = config = executor.vllm_config
        self._options = options = executor._options
        self._pickled_config = executor._pickled_config
        self.world_size = config.parallel_config.world_size
        self.on_nodes = bool(options.nodes)
        self._environments = _environments(config) if self.on_nodes else None
        #: of the group; None: not started yet
        self.name = None if standby else name
        self._warm_up = warm_up
        self._fork_servers = executor._fork_servers
        self._started = False
        #: calls of the initialisation that they have had
        self.prepared = 0
        #: of what they choose, once they are loaded; None: it is not compared
        self.comparison: _vllm_choices.Comparison | None = None
        self.loaded = False
        #: of their weights, what other processes may map
        self.shared_bytes = 0
        # what they make in /dev/shm begins so
        self._stem = f"coxswain_vllm_{uuid.uuid4().hex}"
        self.ended = False
        # Two calls for each step in flight, and some for calls from elsewhere.
        depth = min(32, 2 * _batches_in_flight(config) + 2)
        self.group = Group(
            None if self.on_nodes else executor._command,
            self.world_size,
            nodes=options.nodes,
            cluster=options.machines(),
            attach="sealed",  # nothing has a name that could outlive a killed engine
            name=self.name,
            depth=depth,
            timeout=_ATTACH_SECONDS,
            on_line=_write_line,
            on_rank_death=lambda rank, text: on_rank_death(self, rank, text),
            on_stop=lambda text: on_stop(self, text),
            standby=standby,
            crash_dir=options.crash_dir,
        )
        self._standby = standby

    def start(self) -> None:
        """Starts the processes, which have vLLM imported. Idempotent."""
        if self._started:
            return
        if self._fork_servers:
            self.group._fork_from(self._fork_servers.fds())
        self.group.start()
        self._started = True
        if not self._standby:
            self._told(self.group.name)
        # Nothing of vLLM is in it: the environment counts before vLLM is imported.
        first = vllm_worker.pickled((self._environments, self._pickled_config))
        self.group.call(first, timeout=None, gather="none")

    def load(self) -> None:
        """Loads the model in each process. Idempotent."""
        if self.loaded:
            return
        tensor_parallel_size = self._config.parallel_config.tensor_parallel_size
        stem = f"/dev/shm/{self._stem}"
        start = vllm_worker.Start(
            distributed_init_method=_distributed_init_method(
                f"{stem}_store", self._options.master if self._options.nodes else None
            ),
            lock_path=stem,
            drivers=[rank % tensor_parallel_size == 0 for rank in range(self.world_size)],
            compares=self._options.compare and not self.on_nodes,
            weights=self._options.weights,
            standby=self._standby,
        )
        try:
            replies = self.group.call(
                vllm_worker.pickled(start), timeout=envs.VLLM_ENGINE_READY_TIMEOUT_S
            )
        except Error as error:
            _place(error, "load_model")
            raise
        self.loaded = True
        paths = []
        for reply in replies:
            names, path, shared = pickle.loads(reply)
            self.shared_bytes += shared
            _unlink(names)
            paths.append(path)
        if all(paths):
            try:
                self.comparison = _vllm_choices.Comparison(paths, tensor_parallel_size)
            except OSError as error:
                logger.warning("What ranks choose for a step is not compared: %s", error)
        if self._config.device_config.device_type == "cpu":
            # All ranks have mapped them. NCCL may need its store later, at a first collective.
            _unlink(glob.glob(f"{stem}*"))

    def prepare(self) -> None:
        """Makes spare ranks ready."""
        self.start()
        self.load()
        if self._warm_up:
            self._warm_up(self)

    def take_over(self, name: str) -> None:
        """They take the place of others, which have ended."""
        if self._standby:
            try:
                self.group.take_name(name)
            except Error as error:
                text = "`coxswain status --name %s` does not find the ranks: %s"
                logger.warning(text, name, error)
            self._told(name)

    def _told(self, name: str) -> None:
        self.name = name
        logger.info(
            "The %d ranks are the Coxswain group %s: `coxswain status --name %s` says what "
            "each does.",
            self.world_size,
            name,
            name,
        )

    def liveness(self) -> list[str]:
        """Of each rank."""
        return [rank.liveness for rank in self.group.status().ranks]

    def submit(self, payload: bytes, deadline: float | None) -> GroupFuture[list[bytes]]:
        """Sends a call to every rank. Waits only where no more fit."""
        return self.group.submit(payload, _left(deadline), wait=True)

    def kill(self) -> None:
        """Kills all, and does not wait for it."""
        for rank in range(self.world_size):
            with contextlib.suppress(Error):
                self.group.kill(rank)

    def stop(self, kill: bool) -> None:
        """Ends the processes. kill: at once; they may hang. Idempotent."""
        if self.ended:
            return
        self.ended = True
        if kill:
            # A group takes its time to say goodbye to a rank that lives.
            self.kill()
            deadline = time.monotonic() + _KILL_SECONDS
            with contextlib.suppress(Error):  # it is not started
                while "alive" in self.liveness() and time.monotonic() < deadline:
                    time.sleep(0.001)
        self.group.stop()
        _unlink(glob.glob(f"/dev/shm/{self._stem}*"))


def _name(name: str | None, parallel: Any) -> str | None:
    """Of an engine's group: engines of dense data parallelism have a number behind it, from 1."""
    number = getattr(parallel, "data_parallel_index", 0)
    return f"{name}_{number}" if name and number else name


def _command(environments: list[dict[str, str]], program: list[str]) -> list[str]:
    """Executes a program with the environment of each rank: OpenMP reads it when it is loaded, and
    vLLM has it loaded before anything else."""
    return [
        sys.executable,
        "-I",
        "-S",
        "-c",
        _WITH_ENVIRONMENT,
        json.dumps(environments),
        *program,
    ]


def _environments(config: VllmConfig) -> list[dict[str, str]]:
    """The variables of each rank that differ from this process's."""
    ranks = range(config.parallel_config.world_size)
    manager_type = interface.optional("OMPProcessManager")
    if manager_type is None:
        return [{} for _ in ranks]
    manager = manager_type(config)
    found = []
    for rank in ranks:
        before = dict(os.environ)
        with manager.configure_omp_envs(rank=rank, local_rank=rank):
            found.append(
                {name: value for name, value in os.environ.items() if before.get(name) != value}
            )
    return found


def _batches_in_flight(config: VllmConfig) -> int:
    """Steps that vLLM has in flight at a time."""
    found = getattr(config, "max_concurrent_batches", None)
    if found is None:
        pipeline = int(config.parallel_config.pipeline_parallel_size)
        found = max(pipeline, 2 if config.scheduler_config.async_scheduling else 1)
    return int(found)


def _samples(config: VllmConfig) -> bool:
    """Whether vLLM calls sample_tokens after execute_model, for each step with tokens."""
    transfer = getattr(config, "ec_transfer_config", None)
    return (
        config.model_config.runner_type != "pooling"
        and not (transfer and transfer.is_ec_producer)
        and not getattr(config, "is_mm_encoder_only", False)
    )


def _distributed_init_method(path: str, master: str | None) -> str:
    """Where the ranks of this start find each other. path: of a file that may be made for it;
    master: the address of rank 0's machine, None: they are all on this one."""
    if master:
        # A port that is free on this machine, as likely as not on that one: else rank 0 says so.
        network = interface.find("vllm.utils:network_utils")
        return str(network.get_distributed_init_method(master, network.get_open_port()))
    file_store, needs_tcp = interface.optional("file_store"), interface.optional("needs_tcp_store")
    if file_store is not None and not (needs_tcp and needs_tcp()):
        return f"file://{path}"
    network = interface.find("vllm.utils:network_utils")
    return str(
        network.get_distributed_init_method(network.get_loopback_ip(), network.get_open_port())
    )


def _unlink(names: list[str]) -> None:
    """Removes names in /dev/shm."""
    for name in names:
        try:
            os.unlink(os.path.join("/dev/shm", name))
        except OSError:
            pass  # the ranks have removed it


def _write_line(rank: int, line: str) -> None:
    """A line of a rank's output, among vLLM's own, which have the process in front."""
    if "(Worker" not in line:
        line = f"(rank {rank}) {line}"
    _lines.write(sys.__stderr__, line)


def _place(error: Error, method: str) -> None:
    """Has an error say where it happened."""
    if isinstance(error, (RankDied, RankError)):
        text = re.sub(r"^.*? ranks replied; (?=rank)", "", str(error))
        # vllm_worker has its rank's error begin so.
        error.args = (text.replace(" failed: in ", " failed in "), *error.args[1:])
    if error.code and not isinstance(error, RankError):
        error.add_note(f"It was in {method}.")
    if isinstance(error, TimedOut) and method in (*interface.START, "load_model"):
        error.add_note("The limit is VLLM_ENGINE_READY_TIMEOUT_S, in seconds.")


def _for_clients(error: Error) -> str:
    """An error without paths, pids and other texts of this host."""
    if isinstance(error, RankDied) and error.rank >= 0:
        how = "is lost"
        if error.signal:
            how = f"was killed by signal {error.signal}"
        elif error.exit_status >= 0:
            how = f"ended with status {error.exit_status}"
        return f"rank {error.rank} {how}"
    if isinstance(error, TimedOut) and error.late:
        return f"no reply in time from rank {', '.join(str(late.rank) for late in error.late)}"
    if isinstance(error, RankError) and error.rank >= 0:
        return f"rank {error.rank} failed"
    return "the ranks failed"


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class Reply(concurrent.futures.Future[Any]):
    """The result of a call. Whoever waits for it collects it, and those of the calls before it."""

    def __init__(
        self,
        executor: Executor,
        method: str,
        step: Any,
        payload: bytes,
        timeout: float | None,
        reply_rank: int | None,
        aggregate: Callable[[list[Any]], Any] | None,
    ) -> None:
        super().__init__()
        self._executor = executor
        self.method, self.payload = method, payload
        self._timeout = timeout
        self._reply_rank = reply_rank
        self._aggregate = aggregate
        self._future: GroupFuture[list[bytes]] | None = None
        self._error: Error | None = None
        #: that it was sent to
        self.ranks: Ranks | None = None
        #: it is a part of a step: it is not repeated in other ranks
        self.drops = method in _PARTS_OF_STEPS
        #: the SchedulerOutput of that step
        self.step = step
        #: states of random generators, that count once vLLM takes this result
        self.generators: dict[str, bytes] = {}
        #: how often requests had been preempted when it was made
        self.resets = 0

    def send(self) -> None:
        """Sends the call, for the first time or to other ranks."""
        executor = self._executor
        self._future = self._error = None
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            if executor._survivor and not executor._survivor.fits(self):
                raise Closed("the ranks are new")
            self.ranks = executor._ranks
            self._future = self.ranks.submit(self.payload, deadline)
        except Error as error:
            self._error = error

    def result(self, timeout: float | None = None) -> Any:
        """As of any Future."""
        self._collect(timeout)
        result = super().result(timeout)
        if self.drops and self._executor._survivor and result is not None:
            self._executor._survivor.taken(self)
        return result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of any Future."""
        self._collect(timeout)
        return super().exception(timeout)

    def _collect(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        in_flight = self._executor._in_flight
        if future := self._future:
            future.exception(_left(deadline))  # mostly the last of them: one wait for all
        while not self.done():
            try:
                oldest = in_flight[0]
            except IndexError:
                continue  # another thread has just collected this one
            if future := oldest._future:
                future.exception(_left(deadline))
            with self._executor._lock:
                # Unless another thread was faster, or the call was sent again.
                if in_flight and in_flight[0] is oldest and oldest._future is future:
                    oldest._resolve()
                    if oldest.done():
                        in_flight.popleft()

    def _resolve(self) -> None:
        """Takes the result, unless the call is sent to other ranks."""
        executor = self._executor
        survivor = executor._survivor
        try:
            if self._future is None:
                assert self._error
                raise self._error
            replies = self._future.result()
            if executor._failure is not None:
                # vLLM may have asked for the second half of a failed step only.
                raise executor._failure
            if survivor and self.ranks is not executor._ranks:
                raise Closed("the ranks were replaced")
            chosen = replies if self._reply_rank is None else [replies[self._reply_rank]]
            results = [pickle.loads(reply) for reply in chosen]
            if survivor:
                results = survivor.succeeded(self, results)
            if self.drops and self.ranks and self.ranks.comparison:
                executor._compare(self.ranks.comparison, self._future.sequence)
            result: Any = results if self._reply_rank is None else results[0]
            self.set_result(self._aggregate(result) if self._aggregate else result)
        except Error as error:
            if not (survivor and survivor.recover(error, self)):
                self.set_exception(executor._explained(error, self))
        except Exception as error:  # pylint: disable=broad-exception-caught
            self.set_exception(error)


class Executor(abstract.Executor):  # type: ignore[misc]
    """vLLM's workers as the ranks of a Coxswain group."""

    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Yes: the reply of a step may come while the next one is taken."""
        return True

    def _init_executor(self) -> None:
        _vllm_plugin.write_cause("")  # of an earlier engine
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
        # Steps with tokens have their output from sample_tokens.
        self._samples = _samples(self.vllm_config)
        # A step that execute_model was given, and sample_tokens sends.
        self._held: Any = None
        # Protects what is in flight and the survivor. It is not held while a reply is awaited.
        self._lock = threading.RLock()
        self._in_flight: collections.deque[Reply] = collections.deque()
        # Of this moment: vLLM changes it, and repeats these changes in ranks by calls.
        self._pickled_config = pickle.dumps(self.vllm_config)
        #: why the engine cannot serve, for /readyz; "": its ranks have run the model
        self.not_ready = "the engine is being started: its ranks have run no step yet"
        self._survivor: _vllm_survive.Survivor | None = None
        if self._options.on_death == "restart":
            self._survivor = _vllm_survive.Survivor(self, self._options)
        if set_environment := interface.optional("set_worker_environment"):
            local = max(1, self.parallel_config.data_parallel_size_local)
            set_environment(self.world_size * local)
        environments = _environments(self.vllm_config)
        self._program = _launch.program_of(vllm_worker.main)
        self._command = _command(environments, self._program.command)
        self._fork_servers = None
        self._ranks: Any = None
        try:
            if self._options.fork_server and not self._options.nodes:
                self._fork_servers = _vllm_fork.ForkServers(self.vllm_config, environments)
            self._ranks = self._new_ranks(_name(self._options.name, self.parallel_config))
            self.note()
            self._ranks.start()
            self._ranks.load()
        except BaseException:
            self._end(kill=True)  # a rank may hang, or wait for another
            raise
        if set_torch_threads := interface.optional("set_torch_threads"):
            set_torch_threads()  # this process only schedules

    def note(self) -> None:
        """Has `coxswain status` and /readyz tell whether the engine is ready. Any thread."""
        note = self._survivor.note() if self._survivor else {}
        if self.not_ready:
            note["not_ready"] = self.not_ready
        if self._ranks.shared_bytes:
            note["shared_weights_bytes"] = self._ranks.shared_bytes
        comparison = self._ranks.comparison
        if comparison and comparison.since:
            note["diverged"] = f"{comparison.text[:1000]}, since execute {comparison.since}"
        with contextlib.suppress(Error):  # the next ranks get it
            self._ranks.group.note = json.dumps(note) if note else ""

    def _new_ranks(
        self,
        name: str | None,
        warm_up: Callable[[Ranks], object] | None = None,
        standby: bool = False,
    ) -> Ranks:
        reference = weakref.ref(self)

        def on_rank_death(ranks: Ranks, rank: int, text: str) -> None:
            if executor := reference():
                executor._on_rank_death(ranks, rank, text)

        def on_stop(ranks: Ranks, text: str) -> None:
            if executor := reference():
                executor._on_stop(ranks, text)

        return Ranks(self, name, on_rank_death, on_stop, warm_up, standby)

    @property
    def max_concurrent_batches(self) -> int:
        """Of vLLM before it moved to VllmConfig."""
        return _batches_in_flight(self.vllm_config)

    # ---- calls ----

    def collective_rpc(
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
        name = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
        sent = method if isinstance(method, str) else cloudpickle.dumps(method, protocol=5)
        if timeout is None and method in interface.START:
            timeout = envs.VLLM_ENGINE_READY_TIMEOUT_S
        aggregators = [one for one in (kv_output_aggregator, ec_output_aggregator) if one]
        reply = self._call(
            name, (sent, args, kwargs or {}), timeout, unique_reply_rank, aggregators
        )
        if non_block:
            return reply
        result = reply.result()
        if method == interface.STARTED:
            self._first_step()
        return result

    def _first_step(self) -> None:
        """The engine has started: once every rank has run the model, it is ready. Engines that
        compute in lockstep may have started at other times: they run none."""
        try:
            if self._samples and self.parallel_config.data_parallel_size == 1:
                timeout = envs.VLLM_ENGINE_READY_TIMEOUT_S  # it may still import and compile
                self.collective_rpc("execute_dummy_batch", timeout)
        except BaseException:
            self._end(kill=True)  # vLLM does not shut down an engine that has not started
            raise
        self.not_ready = ""
        self.note()

    def _call(
        self,
        name: str,
        call: tuple[str | bytes, tuple[Any, ...], dict[str, Any]],
        timeout: float | None,
        reply_rank: int | None,
        aggregators: list[Any],
    ) -> Reply:
        """Sends a method and its arguments. name: of the method, for people. reply_rank: whose
        result counts, where aggregators do not want all; None: all."""
        aggregate = None
        if aggregators:
            rank, reply_rank = reply_rank or 0, None

            def aggregate(outputs: list[Any]) -> Any:
                result = outputs[rank]
                for aggregator in aggregators:
                    result = aggregator.aggregate(outputs, output_rank=rank)
                return result

        step = call[1][0] if name == "execute_model" else None
        payload = vllm_worker.pickled((*call, reply_rank))
        reply = Reply(self, name, step, payload, timeout, reply_rank, aggregate)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._survivor:
                self._survivor.begin(reply)
            self._in_flight.append(reply)
            reply.send()
        return reply

    def _step(self, name: str, *args: Any, sent: str | None = None, non_block: bool = False) -> Any:
        """A call with the reply of the last stage alone, unless an aggregator wants all."""
        aggregators: list[Any] = []
        if name in _STEPS:
            both = self.kv_output_aggregator, getattr(self, "ec_output_aggregator", None)
            aggregators = [one for one in both if one]
        timeout = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        reply = self._call(name, (sent or name, args, {}), timeout, self.output_rank, aggregators)
        return reply if non_block else reply.result()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Runs a step; None: sample_tokens gives its result. Where that follows at once, nothing is
        sent before it is called, so that a step costs one round trip; vLLM's Ray executor does the
        same. With structured output vLLM computes a bitmask meanwhile, and the ranks begin."""
        if self._held is not None:
            raise Invalid("sample_tokens must be called after execute_model has returned None")
        if (
            self._samples
            and scheduler_output.total_num_scheduled_tokens
            and not scheduler_output.has_structured_output_requests
        ):
            self._held = scheduler_output
            return _NONE_YET if non_block else None
        return self._step("execute_model", scheduler_output, non_block=non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Samples the tokens of the step."""
        held, self._held = self._held, None
        sample = self._survivor.sample if self._survivor else "sample_tokens"
        if held is None:
            return self._step("sample_tokens", grammar_output, sent=sample, non_block=non_block)
        args = held, grammar_output, sample
        return self._step("execute_model", *args, sent="coxswain:step", non_block=non_block)

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

    def _on_rank_death(self, ranks: Ranks, rank: int, text: str) -> None:
        """On the thread of the group's reports."""
        seen = time.monotonic()
        if self._stopping or ranks.ended:
            return
        survivor = self._survivor
        if ranks is not self._ranks:
            if survivor:
                survivor.spares.died(ranks, text)
        elif ranks.loaded:  # else the thread that starts them sees it
            death = ranks.group._death_of([rank], text)
            if survivor:
                survivor.rank_died(death, ranks, seen)
            else:
                self._fail(death)

    def _on_stop(self, ranks: Ranks, text: str) -> None:
        """On that thread, before the group ends: `coxswain stop` is the end of the engine."""
        if ranks is self._ranks:
            self._fail(Closed(text))

    def _compare(self, comparison: _vllm_choices.Comparison, sequence: int) -> None:
        """Tells when ranks begin to choose otherwise for a step, and when that is over. It is no
        failure: what is harmful hangs, or fails, and has the same text then."""
        if not comparison.check(sequence):
            return
        if comparison.since:
            text = "Coxswain group %s: %s, since execute %d"
            logger.error(text, self._ranks.name, comparison.text, comparison.since)
        else:
            text = "Coxswain group %s: the ranks choose alike again, in execute %d"
            logger.info(text, self._ranks.name, sequence)
        self.note()

    def _cause(self, error: Error, reply: Reply) -> Error:
        """What is behind an error: a death, and what ranks have chosen otherwise in that step."""
        error = self._death(error, reply)
        comparison = reply.ranks.comparison if reply.ranks else None
        if comparison and reply._future and (sequence := reply._future.sequence):
            if text := comparison.differences(sequence):
                text = f"{text}, since execute {comparison.since or sequence}."
                if text not in getattr(error, "__notes__", ()):
                    error.add_note(text)
        return error

    def _death(self, error: Error, reply: Reply) -> Error:
        """The death behind an error: a rank whose peer died may say so first."""
        ranks = reply.ranks
        if isinstance(error, RankError) and ranks and self.world_size > 1:
            deadline = time.monotonic() + 0.1
            while reply.method in _STEPS and not ranks.ended and time.monotonic() < deadline:
                for rank in ranks.group.status().ranks:
                    if rank.liveness != "alive":
                        text = rank.death or f"rank {rank.rank} is {rank.liveness}"
                        return ranks.group._death_of([rank.rank], f"{text}; {error}")
                time.sleep(0.005)
        return error

    def _fail(self, error: Error) -> Error:
        """The executor has failed for good. Returns the first failure, which is the cause."""
        with self._failure_lock:
            if self._failure is not None or self._stopping:
                return self._failure or error
            self._failure, self.is_failed = error, True
            callback, self._failure_callback = self._failure_callback, None
        text = _vllm_plugin.text_of(error)
        logger.error("Coxswain group %s: %s", self._ranks.name, text)
        _vllm_plugin.write_cause(
            f"Coxswain group {self._ranks.name}: {text}",
            None if self._options.tell_clients else _for_clients(error),
        )
        if callback:
            callback()
        return error

    def _explained(self, error: Error, reply: Reply) -> Error:
        """What a call raises. A dead rank is the end, and so is a step or a start that failed."""
        error, method = self._cause(error, reply), reply.method
        if self._failure is None:
            _place(error, method)
        last = (*_STEPS, *interface.START)
        if self._failure or isinstance(error, RankDied) or method in last:
            error = self._fail(error)
        if method in interface.START:
            self._ranks.stop(kill=True)  # vLLM does not shut down an engine that has not started
        return error

    def shutdown(self) -> None:
        """Ends the ranks. Idempotent."""
        if getattr(self, "_ranks", None):
            # A rank that owes a reply may hang; so may one whose peer is dead.
            self._end(kill=self._failure is not None or bool(self._in_flight))

    def _end(self, kill: bool) -> None:
        self._stopping = True
        if self._survivor:
            self._survivor.spares.stop()
        if self._ranks:
            self._ranks.stop(kill)
        if self._fork_servers:
            self._fork_servers.stop()
        self._program.close()


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
