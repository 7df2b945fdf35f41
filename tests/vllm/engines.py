"""Runs vLLM engines in this process, one after the other: the other half of test_tokens.py.

Usage: engines.py JOB RESULT. JOB is JSON: {"models": FOLDER, "runs": [ARGUMENTS of run, ...]}.
RESULT becomes a list with the tokens and log probabilities of each run.
"""

import gc
import json
import os
import sys

# The prompts of every run: sums, greedy and seeded samples, penalties, log probabilities.
SUMS = [(12, 30), (3, 4), (271, 64), (99, 2), (8, 130), (333, 21), (5, 77), (140, 9)]


def prompts():
    return [f"{left}+{right}=" for left, right in SUMS]


def sampling(sampling_type):
    kinds = (
        {"temperature": 0},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0.9, "seed": 1},
        {"temperature": 0.7, "seed": 2, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    )
    return [
        sampling_type(max_tokens=8 + 3 * (i % 5), ignore_eos=i % 3 == 2, **kinds[i % len(kinds)])
        for i in range(len(SUMS))
    ]


def run(folder, model, tp=1, pp=1, backend="mp", worker=""):
    from vllm import LLM, SamplingParams

    options = {"enforce_eager": True}
    if pp > 1:  # vLLM's eager CPU worker of a later stage lacks the buffers that tracing makes
        options = {"compilation_config": {"mode": 2, "backend": "eager"}}
    if worker:
        options["worker_cls"] = worker
    if backend != "mp":
        from coxswain.vllm import Executor as backend
    llm = LLM(
        os.path.join(folder, model),
        distributed_executor_backend=backend,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        max_model_len=64,
        max_num_seqs=8,
        dtype="float32",
        **options,
    )
    try:
        outputs = llm.generate(prompts(), sampling(SamplingParams), use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "text": output.outputs[0].text,
                "logprobs": [
                    sorted((token, round(entry.logprob, 3)) for token, entry in step.items())
                    for step in output.outputs[0].logprobs or []
                ],
            }
            for output in outputs
        ]
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def main():
    job = json.loads(sys.argv[1])
    result = [run(job["models"], **one) for one in job["runs"]]
    with open(sys.argv[2], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
