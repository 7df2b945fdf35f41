"""Two engines that share weights: the other half of test_weights.py.

Usage: weights_engine.py JOB RESULT. JOB is JSON: {"models": FOLDER}, for the second test "change"
too. One engine writes its weights; or the files of its model change. RESULT becomes the tokens of
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


def write(one, folder):
    """An engine writes."""
    found = {"first": tokens(one)}
    one.collective_rpc("reload_weights")
    found["reloaded"] = tokens(one)
    one.collective_rpc(double)
    found["written"] = tokens(one)
    other = engine(folder)
    return found | {"other": tokens(other)}, other


def change(one, folder):
    """The files change."""
    found = {"first": tokens(one)}
    os.replace(
        os.path.join(folder, "changed", "model.safetensors"),
        os.path.join(folder, "random", "model.safetensors"),
    )
    other = engine(folder)
    found["kept"], found["other"] = tokens(one), tokens(other)
    one.collective_rpc("reload_weights")
    found["reloaded"] = tokens(one)
    return found, other


def main():
    job = json.loads(sys.argv[1])
    one = engine(job["models"])
    found, other = (change if job.get("change") else write)(one, job["models"])
    for llm in (other, one):
        llm.llm_engine.engine_core.shutdown()
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
