"""With what on_death 'restart' was tried: what is not in these lists is refused at start.

A setting counts if it is not SGLang's default. What a plugin or an environment variable changes in
schedulers is not seen here.
"""

from __future__ import annotations

import os
from typing import Any
from collections.abc import Collection, Mapping


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Settings that may have any value: no token depends on them.
_ANY = _words(
    """
    model_path tokenizer_path tokenizer_mode tokenizer_backend context_length revision download_dir
    weight_version tp_size base_gpu_id gpu_id_step nccl_port dist_init_addr dist_timeout numa_node
    skip_tokenizer_init host port fastapi_root_path skip_server_warmup warmups ssl_keyfile
    ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key
    served_model_name chat_template trust_request_chat_template hf_chat_template_name
    completion_template file_storage_path enable_cache_report default_chat_template_kwargs
    stream_response_default_include_usage sampling_defaults preferred_sampling_params
    reasoning_parser tool_call_parser mem_fraction_static max_running_requests max_queued_requests
    max_total_tokens max_prefill_tokens random_seed watchdog_timeout soft_watchdog_timeout
    custom_sigquit_handler gc_threshold gc_warning_threshold_secs log_level log_level_http
    log_requests log_requests_level log_requests_format log_requests_target
    uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics
    extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency
    bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets decode_log_interval
    tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels
    enable_request_time_stats_logging
    """
)
# Others, with the values that were tried. Those of _DECIDED count as SGLang has decided them.
_TRIED: dict[str, tuple[Any, ...]] = {
    "disable_radix_cache": (True,),
    "disable_overlap_schedule": (True,),
    "disable_cuda_graph": (True,),
    "device": ("cpu",),
    "dtype": ("torch.float32",),
    "attention_backend": ("torch_native",),
    "sampling_backend": ("pytorch",),
    "architecture": ("LlamaForCausalLM",),
}
# What requests could not go on with, even if it were allowed: they are kept in one process, and
# sent to one group of schedulers.
_NEVER = _words(
    """
    dp_size attn_dp_size enable_dp_attention pp_size nnodes tokenizer_worker_num
    detokenizer_worker_num use_ray disaggregation_mode encoder_only language_only
    """
)
_DECIDED = _words(
    """
    device attention_backend prefill_attention_backend decode_attention_backend sampling_backend
    kv_cache_dtype quantization speculative_algorithm uses_mamba_radix_cache enable_lora
    enable_multimodal
    """
)


def settings(args: Any) -> dict[str, Any]:
    """Of SGLang's server arguments, resolved: those that are not its defaults, and `architecture`
    and `dtype` of the model."""
    import msgspec
    from sglang.srt.arg_groups.overrides import model_config_of, resolution_result

    found = {}
    for field in msgspec.structs.fields(type(args)):
        decided = field.name in _DECIDED
        value = resolution_result(args, field.name) if decided else getattr(args, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if value != default and not field.name.startswith("_") and not (decided and not value):
            found[field.name] = value
    model = model_config_of(args)
    found["architecture"] = " ".join(model.hf_config.architectures or ["unknown"])
    found["dtype"] = str(model.dtype)
    if os.environ.get("SGLANG_RUST_SERVER", "0").lower() not in ("", "0", "false"):
        found["SGLANG_RUST_SERVER"] = True
    return found


def untried(found: Mapping[str, Any], allowed: Collection[str] = ()) -> list[str]:
    """What of settings() was not tried. allowed: names that are not asked about."""
    said = []
    for name, value in found.items():
        if name in _ANY or value in _TRIED.get(name, ()):
            continue
        if name in allowed and name not in _NEVER:
            continue
        # others may be secrets
        shown = name in _TRIED or name in _DECIDED or isinstance(value, int)
        said.append(f"{name} {value}" if shown and value is not True else name)
    return said
