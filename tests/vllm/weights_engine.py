"""Two engines that share weights, of which one writes them: the other half of test_weights.py.

Usage: weights_engine.py JOB RESULT. JOB is JSON: {"models": FOLDER}. RESULT becomes the tokens of
each moment.
"""

import json
import os
import sys

os.environ["VLLM_COXSWAIN_WEIGHTS"] = "shared"


def double(worker):
    """What a trainer does: it writes weights in place."""
    for parameter in worker.get_model().parameters():
        parameter.data.mul_(2)


def engine(folder):
    from vllm import LLM

    from coxswain.vllm import Executor

    return LLM(
        os.path.join(folder, "random"),
        distributed_executor_backend=Executor,
        max_model_len=64,
        max_num_seqs=8,
        dtype="float32",
        enforce_eager=True,
    )


def tokens(llm):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(["1+2=", "30+4="], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def main():
    job = json.loads(sys.argv[1])
    one = engine(job["models"])
    found = {"first": tokens(one)}
    one.collective_rpc("reload_weights")
    found["reloaded"] = tokens(one)
    one.collective_rpc(double)
    found["written"] = tokens(one)
    other = engine(job["models"])
    found["other"] = tokens(other)
    for llm in (other, one):
        llm.llm_engine.engine_core.shutdown()
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
