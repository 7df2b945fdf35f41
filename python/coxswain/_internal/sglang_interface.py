"""What Coxswain uses of SGLang, in one place; see vllm_interface.py, whose notation it has.

SGLang versions none of it. Before anything is hooked, every name and signature is looked for, and
what differs is said in a line: SGLang then goes on without Coxswain.
"""

from __future__ import annotations

from .vllm_interface import _members, differences, find

KNOWN_VERSIONS = "0.5.23"

_ENGINE = "sglang.srt.entrypoints.engine"
_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
_WATCHDOG = "sglang.srt.utils.watchdog:SubprocessWatchdog"
_IO = "sglang.srt.managers.io_struct"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver"
_BATCH = "sglang.srt.managers.schedule_batch"
_SAMPLING = "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo"
_LOADS = "sglang.srt.managers.load_snapshot:shm_path_for"

#: Of the server's process.
SERVER = (
    f"{_ENGINE}:Engine._launch_scheduler_processes(_, _, _)",
    *_members(f"{_ENGINE}:SchedulerInitResult", "wait_for_ready all_child_pids"),
    f"{_ENGINE}:_scheduler_died_error(_, _)",
    f"{_ENGINE}:_wait_for_scheduler_ready(_, _)",
    "sglang.srt.utils.common:kill_process_tree(_)",
    f"{_WATCHDOG}.__init__(_)",
    f"{_WATCHDOG}.start()",
    f"{_WATCHDOG}.stop()",
    *_members(_WATCHDOG, "_processes _names"),
    f"{_MANAGER}.__init__(_, _)",
    f"{_MANAGER}._dispatch_to_scheduler(_)",
    f"{_MANAGER}._async_dispatch_to_scheduler(_)",
    f"{_MANAGER}._handle_batch_output(_)",
    f"{_MANAGER}._handle_abort_req(_)",
    f"{_MANAGER}.init_running_status()",
    *_members(f"{_IO}:AbortReq", "rid finished_reason"),
    *_members(f"{_IO}:BatchTokenIDOutput", "rids cached_tokens"),
    *_members(f"{_IO}:TokenizedGenerateReqInput", "rid sampling_params wrap_pickle_fields"),
    f"{_IO}:sock_send(_, _)",
    "sglang.srt.arg_groups.overrides:model_config_of(_)",
    "sglang.srt.arg_groups.overrides:resolution_result(_, _)",
    *_members("sglang.srt.configs.model_config:ModelConfig", "hf_config dtype"),
    "sglang.srt.sampling.sampling_params:SamplingParams.custom_params",
    f"{_LOADS}(_)",
)

#: What a tokenizer manager has; its constructor calls what sets them.
MANAGER = ("rid_to_state", "event_loop", "send_to_scheduler", "server_args")

#: Of a scheduler's process.
RANK = (
    f"{_SCHEDULER}.run_event_loop()",
    f"{_SCHEDULER}.get_next_batch_to_run(_, _)",
    f"{_SCHEDULER}._abort_on_queued_limit(_)",
    f"{_SCHEDULER}._create_generation_req(_)",
    f"{_RECEIVER}.recv_requests()",
    f"{_SAMPLING}.from_schedule_batch(_, _)",
    *_members(f"{_BATCH}:ScheduleBatch", "reqs forward_mode extend_num_tokens"),
    *_members(
        f"{_BATCH}:Req",
        "rid output_ids to_finish send_token_offset send_decode_id_offset retracted_stain "
        "cached_tokens init_incremental_detokenize",
    ),
    f"{_LOADS}(_)",
)


def version() -> str:
    """Of the SGLang that is installed."""
    return str(find("sglang.version:__version__"))


def unfit(names: tuple[str, ...]) -> str:
    """How this SGLang differs from what is needed, in a line; "": it does not."""
    said = differences(names=names)
    if not said:
        return ""
    return (
        f"coxswain does not fit SGLang {version()}, which runs without it: {'; '.join(said)}. "
        f"It is known to work with {KNOWN_VERSIONS}"
    )
