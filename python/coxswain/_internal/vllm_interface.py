"""What Coxswain uses of vLLM, in one place, and a check of it at start.

vLLM promises no stability of these names. Features are found by inspection and not by version
number: a name of NEEDED that is missing is an error that says so, a name of OPTIONAL that is
missing is a feature of another version, and its user passes over it. tests/vllm/test_interface.py
looks for all of them in the sources of several versions; docs/vllm-porting.md says how to add one.

A name is "module:Class.member", a field of a dataclass and an attribute that a constructor sets
among them. What is called has its arguments: "module:function(_, size)" is given one by position,
and `size` by name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from typing import Any
from collections.abc import Iterable, Iterator

from .errors import Unsupported

KNOWN_VERSIONS = "0.28, 0.30, 0.31 and 0.32, and fits the source of 0.33"


def _members(of: str, names: str) -> tuple[str, ...]:
    return tuple(f"{of}.{name}" for name in names.split())


_ABSTRACT = "vllm.v1.executor.abstract:Executor"
_WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
_WORKER_PROC = "vllm.v1.executor.multiproc_executor:WorkerProc"
_NETWORK = "vllm.utils.network_utils"
_OUTPUT = "vllm.v1.core.sched.output"
_LOADERS = "vllm.model_executor.model_loader"

#: Of the executor's process and of every rank.
NEEDED = (
    f"{_ABSTRACT}.__init__(vllm_config)",
    *_members(
        _ABSTRACT,
        "_init_executor collective_rpc execute_model sample_tokens execute_dummy_batch "
        "take_draft_token_ids check_health shutdown register_failure_callback "
        "supports_async_scheduling vllm_config parallel_config scheduler_config cache_config "
        "device_config kv_output_aggregator",
    ),
    f"{_WRAPPER}.__init__(rpc_rank, global_rank)",
    f"{_WRAPPER}.init_worker(_)",
    f"{_WRAPPER}.init_device()",
    f"{_WRAPPER}.initialize_from_config(_)",
    f"{_WRAPPER}.execute_model(_)",
    f"{_WRAPPER}.shutdown()",
    "vllm.v1.worker.worker_base:WorkerBase.__init__"
    "(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)",
    "vllm.v1.worker.worker_base:WorkerBase.load_model()",
    "vllm.v1.outputs:AsyncModelRunnerOutput.get_output()",
    "vllm.platforms:current_platform.is_cpu()",
    "vllm.platforms:current_platform.set_device(_)",
    "vllm.platforms:current_platform.update_block_size_for_backend(_)",
    *_members("vllm.config:VllmConfig", "additional_config"),
    "vllm.config:ModelConfig.runner_type",
    *_members(
        f"{_OUTPUT}:SchedulerOutput", "total_num_scheduled_tokens has_structured_output_requests"
    ),
    *_members(
        "vllm.config:ParallelConfig",
        "world_size tensor_parallel_size pipeline_parallel_size data_parallel_size_local "
        "enable_expert_parallel worker_cls",
    ),
    "vllm.config:SchedulerConfig.async_scheduling",
    "vllm.config:DeviceConfig.device_type",
    "vllm.envs:VLLM_ENGINE_READY_TIMEOUT_S",
    "vllm.envs:VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    "vllm.distributed:destroy_model_parallel()",
    "vllm.distributed:destroy_distributed_environment()",
    "vllm.logger:init_logger(_)",
    f"{_NETWORK}:get_distributed_init_method(_, _)",
    f"{_NETWORK}:get_loopback_ip()",
    f"{_NETWORK}:get_open_port()",
)

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

#: Where requests outlive a rank, too.
SURVIVAL = (
    f"{_SCHEDULER}.reset_prefix_cache(reset_running_requests)",
    f"{_SCHEDULER}.reset_encoder_cache()",
    *_members(_SCHEDULER, "requests kv_cache_config"),
    *_members("vllm.v1.request:Request", "request_id status output_token_ids"),
    "vllm.v1.request:RequestStatus.PREEMPTED",
    "vllm.config:SchedulerConfig.get_scheduler_cls()",
    "vllm.config:SchedulerConfig.scheduler_cls",
    f"{_ABSTRACT}.is_sleeping",
    f"{_OUTPUT}:SchedulerOutput.make_empty()",
    *_members(
        f"{_OUTPUT}:SchedulerOutput",
        "scheduled_new_reqs num_scheduled_tokens finished_req_ids",
    ),
    f"{_OUTPUT}:NewRequestData.from_request(_, _)",
    f"{_OUTPUT}:NewRequestData.req_id",
    *_members("vllm.v1.outputs:ModelRunnerOutput", "req_ids req_id_to_index"),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState.output_token_ids",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState.generator",
    *_members("vllm.v1.worker.gpu_input_batch:InputBatch", "generators req_ids"),
    f"{_RUNNER}._update_states(_)",
    *_members(_RUNNER, "requests input_batch num_prompt_logprobs"),
    *_members("vllm.v1.kv_cache_interface:KVCacheConfig", "kv_cache_groups"),
)

#: What only some versions or platforms have.
OPTIONAL = {
    # of the executor's process
    "set_worker_environment": (
        "vllm.v1.executor.multiproc_executor:set_multiprocessing_worker_envs(_)"
    ),
    "OMPProcessManager": "vllm.utils.ompmultiprocessing:OMPProcessManager",
    "configure_omp": (
        "vllm.utils.ompmultiprocessing:OMPProcessManager.configure_omp_envs(rank, local_rank)"
    ),
    "file_store": f"{_NETWORK}:get_file_store_init_method",
    "needs_tcp_store": f"{_NETWORK}:aiter_requires_tcp_store()",
    "set_torch_threads": "vllm.utils.torch_utils:set_torch_threads_for_runtime()",
    "encoder_only": "vllm.config:VllmConfig.is_mm_encoder_only",
    "ec_producer": "vllm.config:ECTransferConfig.is_ec_producer",
    "all_concurrent_batches": "vllm.config:VllmConfig.max_concurrent_batches",
    # of the engine, and of the processes that wait for it or ask it
    "engine": "vllm.v1.engine.core:EngineCore.__init__",
    "start": "vllm.v1.engine.core:EngineCore._initialize_kv_caches",
    "wait_for_start": "vllm.v1.engine.utils:wait_for_engine_startup",
    "engine_dead": "vllm.v1.engine.exceptions:EngineDeadError.__init__",
    "client_message": "vllm.v1.engine.exceptions:EngineDeadError.CLIENT_MESSAGE",
    "check_arguments": "vllm.engine.arg_utils:EngineArgs._check_feature_supported()",
    # of a rank
    "configure_logging": "vllm.logger:configure_logging(_)",
    "set_gpu_ids": "vllm.platforms.interface:set_assigned_physical_gpu_ids(_)",
    "set_net_device": "vllm.v1.executor.vllm_net_devices:set_worker_net_device(_, _)",
    "init_tracer": (
        "vllm.tracing:maybe_init_worker_tracer"
        "(instrumenting_module_name, process_kind, process_name)"
    ),
    "set_title": f"{_WORKER_PROC}.setup_proc_title_and_log_prefix(_)",
    "request_memory": "vllm.v1.worker.gpu_worker:request_memory(_, _)",
    "model_class": "vllm.model_executor.model_loader:get_model_architecture(_)",
    "enable_envs_cache": "vllm.envs:enable_envs_cache()",
    "start_watch_dog": "vllm.utils.watch_dog:start_watch_dog(_, _, _)",
    "watch_dog": "vllm.config:VllmConfig.watchdog_config",
    "feed": "vllm.utils.watch_dog:WatchDog.feed()",
    "disable": "vllm.utils.watch_dog:WatchDog.disable()",
    # weights that processes share
    "already_processed": "vllm.model_executor.utils:weights_already_processed()",
    "register_loader": f"{_LOADERS}:register_model_loader(_)",
    "get_loader": f"{_LOADERS}:get_model_loader(_)",
    "base_loader": f"{_LOADERS}.base_loader:BaseModelLoader",
    "external_weights": (
        f"{_LOADERS}.base_loader:BaseModelLoader.get_external_weight_memory(vllm_config)"
    ),
    "initialize_model": f"{_LOADERS}.utils:initialize_model(vllm_config, model_config, prefix)",
    "process_weights": f"{_LOADERS}.utils:process_weights_after_loading(_, _, _)",
    "default_dtype": "vllm.utils.torch_utils:set_default_torch_dtype(_)",
    # what a rank chooses for a step
    "tell_platform": "vllm.platforms:current_platform.set_additional_forward_context",
    "replay": "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.run_fullgraph(_)",
}

#: The last call of an engine's start.
STARTED = "compile_or_warm_up_model"

#: Calls of an engine's start, after the load of the model. vLLM sets no limit to any of it, and a
#: rank that hangs would have everybody wait for ever.
START = (
    "get_kv_cache_spec",
    "get_supported_kv_cache_layouts",
    "set_kv_cache_layout",
    "determine_available_memory",
    "initialize_from_config",
    "get_simple_cpu_offload_num_cpu_blocks",
    STARTED,
)

#: What wait_for_start raises when an engine does not start; the cause is added to it.
START_FAILED = "Engine core initialization failed."

#: The abstract methods of an output that is on its way. vLLM's own executor asks one whose
#: get_output has failed for its transfers: with its fault tolerance the engine lives on after that.
LATE_OUTPUT = ("get_output", "get_kv_connector_output")


def split(name: str) -> tuple[str, list[str], list[str] | None]:
    """A name's module, its path there, and its arguments; None: it is not called."""
    path, called, arguments = name.partition("(")
    module, path = path.split(":")
    given = [argument.strip() for argument in arguments.rstrip(")").split(",")]
    return module, path.split("."), [one for one in given if one] if called else None


def find(name: str) -> Any:
    """What has this name; True: it is set by a constructor; None: this vLLM has none."""
    module, path, _ = split(name)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for attribute in path:
        owner, found = found, getattr(found, attribute, None)
        if found is None:
            found = _is_set_by(owner, attribute) or None
        if found is None:
            return None
    return found


def _is_set_by(owner: Any, attribute: str) -> bool:
    """Whether objects of a class have it: a field, or something that a constructor sets."""
    if attribute in getattr(owner, "__dataclass_fields__", ()):
        return True
    constructors = [
        vars(base).get(name)
        for base in getattr(owner, "__mro__", ())
        for name in ("__init__", "__post_init__")
    ]
    codes = [getattr(inspect.unwrap(one), "__code__", None) for one in constructors if one]
    return any(attribute in code.co_names for code in codes if code)


def optional(name: str) -> Any:
    """An object of OPTIONAL, or None."""
    return find(OPTIONAL[name])


def is_loaded(name: str) -> bool:
    """Whether the module of an object of OPTIONAL was imported."""
    return split(OPTIONAL[name])[0] in sys.modules


def replace(name: str, function: Any) -> None:
    """Has vLLM call another function in place of one of OPTIONAL, which is there."""
    module, path, _ = split(OPTIONAL[name])
    setattr(functools.reduce(getattr, path[:-1], sys.modules[module]), path[-1], function)


def version() -> str:
    """Of the vLLM that is installed."""
    return str(find("vllm.version:__version__"))


def unlike(name: str, signature: inspect.Signature) -> Iterator[str]:
    """How what has this name differs from something that takes the arguments in it."""
    parameters = dict(signature.parameters)
    for own in ("self", "cls"):
        parameters.pop(own, None)
    kinds = {parameter.kind for parameter in parameters.values()}
    shown = name.partition("(")[0].removesuffix(".__init__")
    for argument in split(name)[2] or ():
        if argument == "_":
            argument = next(iter(parameters), "")
            is_any = inspect.Parameter.VAR_POSITIONAL in kinds
            taken = "so many arguments"
        else:
            is_any = inspect.Parameter.VAR_KEYWORD in kinds
            taken = repr(argument)
        if parameters.pop(argument, None) is None and not is_any:
            yield f"{shown} does not take {taken}"
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            yield f"{shown} requires {parameter.name!r}"


def narrower(name: str, ours: inspect.Signature, theirs: inspect.Signature) -> Iterator[str]:
    """What a method of the executor does not take, and vLLM may give it."""
    if not any(one.kind is one.VAR_KEYWORD for one in ours.parameters.values()):
        for parameter in theirs.parameters:
            if parameter not in ours.parameters:
                yield f"Executor.{name} is given {parameter!r}, too"


def differences(executor: type | None = None, names: Iterable[str] = NEEDED) -> list[str]:
    """How this vLLM differs from what is needed. executor: the class that vLLM is given."""
    said = []
    for name in names:
        found = find(name)
        if found is None:
            said.append(f"{name.partition('(')[0]} is missing")
        elif split(name)[2] is not None:
            said += unlike(name, inspect.signature(found))
    if executor is not None:
        base = find(_ABSTRACT)
        for name in sorted(getattr(executor, "__abstractmethods__", ())):
            said.append(f"Executor.{name} is new, and abstract")
        for name, ours in vars(executor).items():
            theirs = getattr(base, name, None)
            if inspect.isfunction(ours) and inspect.isfunction(theirs):
                said += narrower(name, inspect.signature(ours), inspect.signature(theirs))
    return said


def check(executor: type | None = None) -> None:
    """Raises Unsupported, with all differences, where this vLLM cannot be served."""
    said = differences(executor)
    if said:
        raise Unsupported(
            f"coxswain.vllm does not fit vLLM {version()}: {'; '.join(said)}. It is "
            f"known to work with {KNOWN_VERSIONS}."
        )
