"""Runs kinds of models.py with vLLM's own executor, and says whether their outputs repeat.

Usage: repeat.py RUN... A run is JSON: {"kind": KIND, "tp": 1, "count": prompts of it, "tokens": the
most that one gets, "options": {arguments of LLM}}; all but the kind may be left out. An engine gets
its prompts three times: at once, at once again with prefixes forgotten, and one by one, so in other
batches. Printed are, of the second and of the third time, how many prompts have other tokens, how
many the same tokens and other values (log probabilities or vectors), and by how much at most.

As the tests do, it wants VLLM_ENABLE_V1_MULTIPROCESSING=0, VLLM_CPU_KVCACHE_SPACE=1, and
VLLM_CPU_OMP_THREADS_BIND as "0" for one rank, "0|1" for two. The V2 model runner wants
VLLM_USE_V2_MODEL_RUNNER=1, TRITON_INTERPRET=1, and Triton and tests/vllm/v2 in PYTHONPATH.
"""

import gc
import json
import sys
import tempfile

import models

METRICS = {
    "vllm:num_preemptions",
    "vllm:prefix_cache_hits",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
}


def allow_async():
    """vLLM switches async scheduling off on a CPU; after this it stays as it was asked for."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keep(config):
        wanted = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = keep


def sampling(sampling_type, count, tokens, seeded):
    kinds = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0, "prompt_logprobs": 1},
    ]
    if seeded:
        kinds.append({"temperature": 0.9, "seed": 7})
    return [
        sampling_type(
            max_tokens=min(20 + 7 * (i % 6), tokens), ignore_eos=True, **kinds[i % len(kinds)]
        )
        for i in range(count)
    ]


def outputs(llm, embeds, prompts, parameters):
    """Of each prompt its tokens and its log probabilities, or its vector."""
    if embeds:
        return [([], one.outputs.embedding) for one in llm.embed(prompts, use_tqdm=False)]

    def values(steps):
        return [entry.logprob for step in steps or [] for _, entry in sorted((step or {}).items())]

    return [
        (
            list(one.outputs[0].token_ids),
            values(one.outputs[0].logprobs) + values(one.prompt_logprobs),
        )
        for one in llm.generate(prompts, parameters, use_tqdm=False)
    ]


def differences(one, other):
    same = [(left, right) for left, right in zip(one, other, strict=True) if left[0] == right[0]]
    off = [
        max((abs(a - b) for a, b in zip(left[1], right[1], strict=True)), default=0)
        for left, right in same
    ]
    return {
        "other tokens": len(one) - len(same),
        "other values": sum(map(bool, off)),
        "by at most": max(off, default=0),
    }


def run(kind, tp=1, count=None, tokens=64, options=None):
    from vllm import LLM, SamplingParams

    embeds = models.KINDS[kind].embeds
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "distributed_executor_backend": "mp",
            "tensor_parallel_size": tp,
            "enforce_eager": True,
            "max_model_len": 192,
            "block_size": 32,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "async_scheduling": False,
            "dtype": "float32",
            "disable_log_stats": False,
            **models.write(kind, folder),
            **(options or {}),
        }
        llm = LLM(**arguments)
        core = llm.llm_engine.engine_core.engine_core
        prompts = models.KINDS[kind].prompts()[:count]
        # vLLM's CPU runner fails where a prompt with a seed is computed in parts.
        whole = arguments["max_num_batched_tokens"] >= 2048
        parameters = sampling(SamplingParams, len(prompts), tokens, whole)
        first = outputs(llm, embeds, prompts, parameters)
        core.scheduler.reset_prefix_cache()
        again = outputs(llm, embeds, prompts, parameters)
        core.scheduler.reset_prefix_cache()
        alone = [
            outputs(llm, embeds, [prompt], [one])[0]
            for prompt, one in zip(prompts, parameters, strict=True)
        ]
        found = {
            "again": differences(first, again),
            "alone": differences(first, alone),
            "tokens seen": len({token for one in first for token in one[0]}),
            "groups": [
                f"{len(group.layer_names)} x {type(group.kv_cache_spec).__name__}"
                f" of {group.kv_cache_spec.block_size}"
                for group in core.scheduler.kv_cache_config.kv_cache_groups
            ],
            "scheduler": type(core.scheduler).__name__,
            "prefix caching": core.scheduler.vllm_config.cache_config.enable_prefix_caching,
            "metrics": {one.name: one.value for one in llm.get_metrics() if one.name in METRICS},
        }
        llm.llm_engine.engine_core.shutdown()
    return found


def main():
    allow_async()
    for job in map(json.loads, sys.argv[1:]):
        try:
            found = run(**job)
        except Exception as error:
            found = {"failed": repr(error)}
        print(json.dumps({"run": job, **found}), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
