"""What Coxswain uses of vLLM, in one place, and a check of it at start.

vLLM promises no stability of these names. Features are found by inspection and not by version
number: a name of NEEDED that is missing is an error that says so, a name of OPTIONAL that is
missing is a feature of another version, and its user passes over it.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any
from collections.abc import Iterable

from ._errors import Unsupported

KNOWN_VERSIONS = "0.28, 0.30, 0.31 and 0.32"

_ABSTRACT = "vllm.v1.executor.abstract:Executor"
_WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
_BASE = "vllm.v1.worker.worker_base:WorkerBase"
_WORKER_PROC = "vllm.v1.executor.multiproc_executor:WorkerProc"

#: "module:attribute.attribute", each of the executor's process and of every rank
NEEDED = (
    f"{_ABSTRACT}._init_executor",
    f"{_ABSTRACT}.collective_rpc",
    f"{_ABSTRACT}.execute_model",
    f"{_ABSTRACT}.sample_tokens",
    f"{_ABSTRACT}.execute_dummy_batch",
    f"{_ABSTRACT}.take_draft_token_ids",
    f"{_ABSTRACT}.check_health",
    f"{_ABSTRACT}.shutdown",
    f"{_ABSTRACT}.register_failure_callback",
    f"{_ABSTRACT}.supports_async_scheduling",
    f"{_WRAPPER}.init_worker",
    f"{_WRAPPER}.init_device",
    f"{_WRAPPER}.initialize_from_config",
    f"{_WRAPPER}.execute_model",
    f"{_WRAPPER}.shutdown",
    f"{_BASE}.load_model",
    "vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
    "vllm.platforms:current_platform.update_block_size_for_backend",
    "vllm.envs:VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    "vllm.distributed:destroy_model_parallel",
    "vllm.distributed:destroy_distributed_environment",
    "vllm.logger:init_logger",
    "vllm.utils.network_utils:get_distributed_init_method",
    "vllm.utils.network_utils:get_loopback_ip",
    "vllm.utils.network_utils:get_open_port",
)

#: What only some versions or platforms have.
OPTIONAL = {
    # of the executor's process
    "set_worker_environment": "vllm.v1.executor.multiproc_executor:set_multiprocessing_worker_envs",
    "OMPProcessManager": "vllm.utils.ompmultiprocessing:OMPProcessManager",
    "file_store": "vllm.utils.network_utils:get_file_store_init_method",
    "needs_tcp_store": "vllm.utils.network_utils:aiter_requires_tcp_store",
    "set_torch_threads": "vllm.utils.torch_utils:set_torch_threads_for_runtime",
    # of the API server
    "EngineDeadError": "vllm.v1.engine.exceptions:EngineDeadError",
    # of a rank
    "configure_logging": "vllm.logger:configure_logging",
    "set_gpu_ids": "vllm.platforms.interface:set_assigned_physical_gpu_ids",
    "set_net_device": "vllm.v1.executor.vllm_net_devices:set_worker_net_device",
    "init_tracer": "vllm.tracing:maybe_init_worker_tracer",
    "set_title": f"{_WORKER_PROC}.setup_proc_title_and_log_prefix",
    "model_class": "vllm.model_executor.model_loader:get_model_architecture",
    "enable_envs_cache": "vllm.envs:enable_envs_cache",
}

#: The arguments that a rank's worker is made with.
WORKER_ARGUMENTS = (
    "vllm_config",
    "local_rank",
    "rank",
    "distributed_init_method",
    "is_driver_worker",
)


def find(name: str) -> Any:
    """The object "module:attribute.attribute"; None: this vLLM has none."""
    module, path = name.split(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
        if found is None:
            return None
    return found


def optional(name: str) -> Any:
    """An object of OPTIONAL, or None."""
    return find(OPTIONAL[name])


def version() -> str:
    """Of the vLLM that is installed."""
    return str(find("vllm.version:__version__"))


def differences(executor: type | None = None) -> list[str]:
    """How this vLLM differs from what is needed. executor: the class that vLLM is given."""
    said = [f"{name} is missing" for name in NEEDED if find(name) is None]
    if executor is not None:
        said += [
            f"Executor.{name} is new, and abstract"
            for name in sorted(getattr(executor, "__abstractmethods__", ()))
        ]
    said += _unlike(_WRAPPER, ("rpc_rank", "global_rank"))
    said += _unlike(_BASE, WORKER_ARGUMENTS)
    return said


def _unlike(name: str, arguments: Iterable[str]) -> list[str]:
    """How the constructor of a class differs from one that takes these arguments."""
    of = find(name)
    if of is None:
        return [f"{name} is missing"]
    parameters = dict(inspect.signature(of.__init__).parameters)
    parameters.pop("self", None)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    said = [
        f"{name} takes no {argument!r}"
        for argument in arguments
        if parameters.pop(argument, None) is None
    ]
    return said + [
        f"{name} requires {parameter.name!r}"
        for parameter in parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
    ]


def check(executor: type | None = None) -> None:
    """Raises Unsupported, with all differences, where this vLLM cannot be served."""
    said = differences(executor)
    if said:
        raise Unsupported(
            f"coxswain.vllm does not fit vLLM {version()}: {'; '.join(said)}. It is "
            f"known to work with {KNOWN_VERSIONS}."
        )
