"""The program of a rank of vLLM: it loads the model, then runs what coxswain.vllm.Executor calls.

The first request has the rank's environment and a pickled VllmConfig, for which it imports vLLM;
the second one is a Start, for which it loads the model. Nothing here imports vLLM before the rank
has attached, so that a group starts at once.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import multiprocessing.util
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from functools import partial
from multiprocessing import resource_tracker, shared_memory
from typing import Any
from collections.abc import Sequence

from ._internal import vllm_choices
from ._internal.errors import Closed
from ._internal.worker import Request, Worker, _explain


# Calls that write weights of a loaded model.
WRITERS = frozenset(("reload_weights", "update_weights", "start_weight_update", "sleep", "wake_up"))


@dataclasses.dataclass
class Start:
    """What a rank needs to load the model, beside its configuration."""

    distributed_init_method: str
    #: in /dev/shm, for the lock that the ranks share; all that they make there begins with it
    lock_path: str
    #: whether each rank is the first one of its tensor parallel group
    drivers: list[bool]
    #: what ranks choose for a step is recorded
    compares: bool
    #: of vllm_weights.KINDS
    weights: str
    #: the rank is a spare
    standby: bool


def pickled(value: Any) -> bytes:
    """As requests and replies travel."""
    return pickle.dumps(value, protocol=5)


def _pass_over_free_memory() -> None:
    """Of a spare rank on a GPU: until it takes over, the memory of its KV cache is that of the rank
    whose place it will take. So vLLM computes the budget, and does not ask whether it is free."""
    from ._internal import vllm_interface as interface

    own = interface.optional("request_memory")
    if own is None:
        return

    def request_memory(snapshot: Any, *arguments: Any, **named: Any) -> Any:
        whole = copy.copy(snapshot)
        whole.free_memory = whole.total_memory
        return own(whole, *arguments, **named)

    gpu_worker: Any = importlib.import_module("vllm.v1.worker.gpu_worker")
    gpu_worker.request_memory = request_memory


class Outputs(threading.Thread):
    """Replies with outputs that are still on the way from the device, in order, while the rank
    takes the next request."""

    def __init__(self, device: Any) -> None:
        super().__init__(name="coxswain-outputs", daemon=True)
        self.device = device
        self.queue: queue.SimpleQueue[tuple[Request, Any]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        from vllm.platforms import current_platform

        if self.device is not None and not current_platform.is_cpu():
            current_platform.set_device(
                self.device
            )  # or the first use of it makes a context on device 0
        while True:
            request, output = self.queue.get()
            try:
                request.reply(pickled(output.get_output()))
            except Closed:
                return
            except Exception as error:  # pylint: disable=broad-exception-caught
                _fail(request, error, "get_output")
            del request, output


class Rank:
    """A rank with its model."""

    def __init__(self, rank: int, config: Any) -> None:
        """Imports what `load` needs."""
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        from ._internal import vllm_interface as interface

        interface.check()
        self.rank = rank
        self.config = config
        self.worker: Any = WorkerWrapperBase(rpc_rank=rank, global_rank=rank)
        #: what it does, for the text of an error
        self.method = "init_worker"
        #: it has its model
        self.loaded = False
        #: vLLM's, which writes the stacks of this process to a file when a call takes too long;
        #: None: it is off
        self.watch_dog: Any = None
        self.outputs: Outputs | None = None
        self.choices: vllm_choices.Choices | None = None
        #: vllm_weights.Shared; None: they are private
        self.weights: Any = None
        #: in /dev/shm, that this process has the tracker remove
        self.names: list[str] = []
        worker_type = config.parallel_config.worker_cls
        if isinstance(worker_type, str):
            importlib.import_module(worker_type.rpartition(".")[0])
        if find_model := interface.optional("model_class"):
            find_model(config.model_config)

    def load(self, start: Start) -> tuple[list[str], str, int]:
        """Loads the model. Returns the names in /dev/shm that the rank has made, the path of what
        it chooses, "": it is not recorded, and how many bytes of its weights it shares."""
        from vllm.platforms import current_platform

        from ._internal import vllm_interface as interface

        rank, config = self.rank, self.config
        parallel = config.parallel_config
        _call(interface.optional("configure_logging"), getattr(config, "logging_config", None))
        _call(
            interface.optional("set_gpu_ids"), getattr(parallel, "assigned_physical_gpu_ids", None)
        )
        if set_net_device := interface.optional("set_net_device"):
            set_net_device(rank, config)
        if init_tracer := interface.optional("init_tracer"):
            init_tracer(
                instrumenting_module_name="vllm.worker",
                process_kind="worker",
                process_name=f"Worker_{rank}",
            )
        # of several machines: the number on this one
        local_rank = int(os.environ.get("COXSWAIN_LOCAL_RANK", rank))
        method = start.distributed_init_method
        world = len(start.drivers)
        if int(os.environ.get("COXSWAIN_LOCAL_WORLD_SIZE", world)) < world:
            # vLLM's CPU worker takes ranks with the same one for ranks that share memory. torch
            # passes over what it does not know here.
            method += f"?machine={rank - local_rank}"
        arguments: list[dict[str, Any]] = [{} for _ in start.drivers]
        arguments[rank] = {
            "vllm_config": config,
            "local_rank": local_rank,
            "rank": rank,
            "distributed_init_method": method,
            "is_driver_worker": start.drivers[rank],
            "shared_worker_lock": _lock(start.lock_path),
        }
        made = _made_names()
        if start.standby:
            _pass_over_free_memory()
        self.worker.init_worker(arguments)
        self.method = "init_device"
        set_title = interface.optional("set_title")
        _call(set_title, parallel.enable_expert_parallel)
        loading: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if start.weights != "private":
            from ._internal import vllm_weights

            self.weights = vllm_weights.Shared(start.weights, _logger())
            loading = self.weights.loading(config)
        with loading:
            self.worker.init_device()
            _call(set_title, parallel.enable_expert_parallel)  # now the parallel groups are known
            self.method = "load_model"
            if getattr(interface.find("vllm:envs"), "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", False):
                self.worker.elastic_ep_execute("load_model")
            else:
                self.worker.load_model()
        current_platform.update_block_size_for_backend(config)
        if enable_envs_cache := interface.optional("enable_envs_cache"):
            enable_envs_cache()
        if rank == 0 and not current_platform.is_cpu():
            self._register(os.path.basename(start.lock_path))
        watched = getattr(config, "watchdog_config", None)
        if watched is not None and watched.dump_dir:
            start_watch_dog = interface.optional("start_watch_dog")
            self.watch_dog = start_watch_dog(f"worker_{rank}", watched, _logger())
        if start.compares:
            self.choices = vllm_choices.Choices(self._log_once_for_all)
            self.choices.install(partial(vllm_choices.describe_layout, self.worker))
        self.loaded = True
        shared = sum(weights.bytes for weights in self.weights.weights) if self.weights else 0
        return made, self.choices.path if self.choices else "", shared

    def _log_once_for_all(self, text: str) -> None:
        if self.rank == 0:
            _logger().warning(text)

    def _register(self, stem: str) -> None:
        """Has the names of this start removed where the engine is killed: multiprocessing's tracker
        is a process that outlives this one."""
        self.names = [name for name in os.listdir("/dev/shm") if name.startswith(stem)]
        for name in self.names:
            resource_tracker.register(f"/{name}", "shared_memory")

    def idle(self) -> contextlib.AbstractContextManager[None]:
        """Around the wait for a request, which may take as long as it likes."""
        if self.watch_dog is None:
            return contextlib.nullcontext()
        return self.watch_dog.disable()  # type: ignore[no-any-return]

    def serve(self, request: Request) -> None:
        """Runs one call. Its reply may come later, from the thread of Outputs."""
        try:
            method, args, kwargs, reply_rank = pickle.loads(request.data)
            if self.choices is not None:
                self.choices.begin(request.sequence)
            if method == "coxswain:step":
                scheduler_output, grammar_output, sample = args
                output = self._call("execute_model", (scheduler_output,), {})
                if output is None:
                    output = self._call(sample, (grammar_output,), {})
            else:
                output = self._call(method, args, kwargs)
            if reply_rank is not None and reply_rank != self.rank:
                request.reply(b"")
            elif hasattr(output, "get_output"):  # an AsyncModelRunnerOutput
                if self.outputs is None:
                    self.outputs = Outputs(getattr(self.worker, "device", None))
                self.outputs.queue.put((request, output))
            else:
                request.reply(pickled(output))
        except Closed:
            raise
        except Exception as error:  # pylint: disable=broad-exception-caught
            _fail(request, error, self.method)

    def _call(self, method: str | bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(method, bytes):
            import cloudpickle

            function = cloudpickle.loads(method)
            self.method = getattr(function, "__qualname__", repr(function))
            function = partial(function, self.worker)
            self._writes()  # it may
        elif method.startswith("coxswain:"):
            from ._internal import vllm_survive as _vllm_survive

            self.method = method[9:]
            function = partial(getattr(_vllm_survive, self.method), self.worker)
        else:
            self.method = method
            function = getattr(self.worker, method)
            if method in WRITERS:
                self._writes()
        if self.watch_dog is not None:
            self.watch_dog.feed()
        output = function(*args, **kwargs)
        if self.choices is not None and method == "initialize_from_config":
            self.choices.layout_changes()
        if self.watch_dog is not None:
            self.watch_dog.feed()  # what follows has the whole limit again
        return output

    def _writes(self) -> None:
        if self.weights is not None:
            self.weights.unshare()

    def shutdown(self) -> None:
        from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

        if not self.loaded:
            return
        for name in self.names:
            resource_tracker.unregister(f"/{name}", "shared_memory")
            with contextlib.suppress(OSError):
                os.unlink(f"/dev/shm/{name}")
        self.worker.shutdown()
        destroy_model_parallel()
        destroy_distributed_environment()


def _call(function: Any, value: Any) -> None:
    if function is not None and value is not None:
        function(value)


def _lock(path: str) -> Any:
    from filelock import FileLock

    return FileLock(path)


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.coxswain")


def _fail(request: Request, error: Exception, method: str) -> None:
    _logger().error("a call of this rank failed", exc_info=error)
    request.fail(f"in {method}: {_explain(error)}")


def _made_names() -> list[str]:
    """A list that gets the names of shared memory that this process makes from now on. They may be
    removed as soon as all ranks have mapped it."""
    made: list[str] = []
    register, unlink = resource_tracker.register, shared_memory.SharedMemory.unlink

    def registered(name: str, kind: str) -> None:
        if kind == "shared_memory":
            made.append(name.lstrip("/"))
        register(name, kind)

    def unlinked(self: shared_memory.SharedMemory) -> None:
        try:
            unlink(self)
        except FileNotFoundError:
            resource_tracker.unregister(f"/{self.name}", "shared_memory")

    resource_tracker.register = registered  # type: ignore[assignment]
    shared_memory.SharedMemory.unlink = unlinked  # type: ignore[method-assign]
    return made


def forked(
    environments: Sequence[dict[str, str]] = (), processors: Sequence[int | None] = ()
) -> None:
    """The program of a rank that a fork server has forked. environments: what each rank's has
    beside the server's, where OpenMP has read the latter; it has no threads yet. processors: to
    which it binds the only thread of each, None: it does not."""
    if environments:
        import torch

        rank = int(os.environ["COXSWAIN_RANK"])
        os.environ.update(environments[rank])
        if (processor := processors[rank]) is not None:
            os.sched_setaffinity(0, {processor})
            torch.set_num_threads(1)
    main()


def _terminate(*_: object) -> None:
    raise SystemExit


def main() -> None:
    """Serves calls until the group ends."""
    # A terminal's Ctrl-C is the engine's business: it ends the group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
    worker = Worker().attach()
    rank: Rank | None = None
    status = 0
    try:
        for _ in range(2):
            request = worker.next()
            assert request is not None
            try:
                given = pickle.loads(request.data)
                if rank is None:
                    environments, config = given
                    if environments:
                        os.environ.update(environments[worker.rank])
                    rank = Rank(worker.rank, pickle.loads(config))  # imports vLLM
                    reply = None
                else:
                    reply = rank.load(given)
            except Exception as error:  # pylint: disable=broad-exception-caught
                _fail(request, error, rank.method if rank else "its imports")
                raise
            request.reply(pickled(reply))
            request = None
        while True:
            assert rank is not None
            with rank.idle():
                request = worker.next()
            if request is not None:
                rank.serve(request)
            request = None
    except (Closed, SystemExit):
        pass
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        if rank is not None:
            rank.shutdown()
        worker.leave()
        # As a child of multiprocessing ends: taking vLLM's objects apart one by one takes seconds.
        sys.stdout.flush()
        sys.stderr.flush()
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        os._exit(status)


if __name__ == "__main__":
    main()
