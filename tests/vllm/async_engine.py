"""Runs an engine with sync or async scheduling, where outputs come late: test_async.py.

Usage: async_engine.py JOB RESULT. JOB is JSON: {"model": FOLDER, "async": BOOL, "regex": a
pattern that all outputs are to match, or null}. vLLM switches
async scheduling off on CPUs while it makes a config; its scheduler and its engine do it all the
same where the finished config says so. The ranks' runner stays the one without: faulty_worker.py.
"""

import json
import sys

import engines


def requests(group):
    """How many requests the ranks were sent."""
    return next(one.published for one in group.status().channels if one.name == "execute")


def make(job):
    """The engine of a job."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from coxswain.vllm import Executor

    config = EngineArgs(
        model=job["model"],
        distributed_executor_backend=Executor,
        tensor_parallel_size=2,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=8,
        dtype="float32",
        worker_cls="faulty_worker.Worker",
    ).create_engine_config()
    config.scheduler_config.async_scheduling = job["async"]
    return LLMEngine.from_vllm_config(config)


def main():
    job = json.loads(sys.argv[1])
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    engine = make(job)
    group = engine.engine_core.engine_core.model_executor._ranks.group
    sampling = engines.sampling(SamplingParams)
    for how in sampling if job["regex"] else ():
        how.structured_outputs = StructuredOutputsParams(regex=job["regex"])
    for i, (prompt, how) in enumerate(zip(engines.prompts(), sampling, strict=True)):
        engine.add_request(str(i), prompt, how)
    published = requests(group)
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    core = engine.engine_core.engine_core
    published = requests(group) - published
    result = {
        "requests": published,
        "tokens": [tokens[i] for i in sorted(tokens)],
        "scheduler": type(core.scheduler).__name__,
        "spans": core.model_executor.collective_rpc("spans"),
    }
    engine.engine_core.shutdown()
    with open(sys.argv[2], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
