"""Calls that change ranks, and an incident after them: the other half of
test_survive.test_calls_that_change_ranks.

Usage: changes.py JOB RESULT. JOB is JSON with a model.
"""

import json
import os
import signal
import sys

from conftest import wait_until


def main():
    job = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from coxswain.vllm import Executor

    llm = LLM(
        job["model"],
        distributed_executor_backend=Executor,
        worker_cls="faulty_worker.Worker",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=8,
        dtype="float32",
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
    )
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    survivor = executor._survivor

    def generate():
        found = llm.generate(["1+2=", "99+1="], SamplingParams(temperature=0), use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    def lose_a_rank():
        count = survivor.count
        os.kill(executor._ranks.group.status().ranks[0].pid, signal.SIGKILL)
        wait_until(lambda: survivor.count > count or executor.is_failed, "no incident")

    reference = generate()
    adapter = os.path.join(os.path.dirname(job["model"]), "lora")
    executor.add_lora(LoRARequest("lora", 1, adapter))
    for _ in range(3):
        executor.sleep(1)
        executor.wake_up()
        executor.collective_rpc("reload_weights")
    executor.sleep(1)
    lose_a_rank()
    asleep = executor.collective_rpc("get_calls")[0]
    executor.wake_up()
    lose_a_rank()
    result = {
        "asleep": asleep,
        "awake": executor.collective_rpc("get_calls")[0],
        "right": generate() == reference,
    }
    executor.collective_rpc("say", args=("something",))
    lose_a_rank()
    try:
        generate()
    except Exception as error:
        result["end"] = "\n".join([str(error), *getattr(error, "__notes__", ())])
    with open(sys.argv[2], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
