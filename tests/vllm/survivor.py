"""Runs an engine whose ranks are killed now and then: the other half of test_survive.py.

Usage: survivor.py JOB RESULT. JOB is JSON; see main. RESULT becomes what main writes: the outputs
without kills, of each round with kills, and what was said of each kill.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

PLACES = ("execute", "executed", "sample", "sampled", "anywhere")


def prompts():
    draw = random.Random(5)
    shared = "12+34=46"
    found = []
    for i in range(24):
        text = "".join(draw.choice("0123456789+=") for _ in range(draw.randrange(1, 60)))
        found.append(shared * 4 + text if i % 3 == 0 else text)
    return found


def sampling(sampling_type, seeded):
    kinds = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    ]
    if seeded:  # on a CPU, vLLM fails where such a prompt is computed in parts
        kinds += [
            {"temperature": 0.9, "seed": 7},
            {"temperature": 0.8, "top_p": 0.9, "seed": 11},
        ]
    return [
        sampling_type(max_tokens=20 + 7 * (i % 6), ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(len(prompts()))
    ]


def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")")[1].split()[1])


class Killer(threading.Thread):
    """Kills a rank at a random place of a random step, again and again; at "agent" the process that
    started it. Other places are commands of a shell."""

    def __init__(self, executor, kills, ranks, seed, places):
        super().__init__(daemon=True)
        self.executor, self.kills, self.ranks, self.places = executor, kills, ranks, places
        self.draw = random.Random(seed)
        self.done = 0
        #: of each kill: the place, the seconds until the incident, and its cause
        self.told = []

    def run(self):
        path = os.environ["VLLM_TEST_FAULT"]
        for i in range(self.kills):
            place = self.places[i % len(self.places)]
            time.sleep(self.draw.uniform(0.02, 0.3))
            rank = self.draw.choice(self.ranks)
            survivor = self.executor._survivor
            before = survivor.count
            begin = time.monotonic()
            if place in ("anywhere", "agent"):
                pid = self.executor._ranks.group.status().ranks[rank].pid
                os.kill(parent(pid) if place == "agent" else pid, signal.SIGKILL)
            elif place not in PLACES:
                subprocess.Popen(place, shell=True)
            else:
                with open(path + ".new", "w") as file:
                    file.write(f"{rank} SIGKILL {place}")
                os.rename(path + ".new", path)
            while survivor.count == before:
                time.sleep(0.001)
            seconds = time.monotonic() - begin
            while survivor.count == before or survivor.stale:
                time.sleep(0.01)
            self.told.append([place, seconds, survivor.incident.cause])
            self.done += 1


def main():
    job = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams

    from coxswain import _vllm_survive
    from coxswain.vllm import Executor

    for part in job.get("without", []):
        setattr(_vllm_survive.Survivor, part, lambda self, recomputes: None)
    options = {"enforce_eager": True}
    if job.get("pp", 1) > 1:
        options = {"compilation_config": {"mode": 2, "backend": "eager"}}
    ranks = job.get("tp", 1) * job.get("pp", 1)
    llm = LLM(
        job["model"],
        distributed_executor_backend=Executor,
        tensor_parallel_size=job.get("tp", 1),
        pipeline_parallel_size=job.get("pp", 1),
        max_model_len=128,
        block_size=32,
        max_num_seqs=8,
        max_num_batched_tokens=2048 if job.get("seeded") else 48,
        dtype="float32",
        worker_cls="faulty_worker.Worker",
        additional_config={
            "coxswain": {
                "on_death": "restart",
                "incidents": 1000,
                "spares": job.get("spares", "none"),
            }
        },
        **options,
        **job.get("options", {}),
    )
    core = llm.llm_engine.engine_core.engine_core
    executor = core.model_executor
    preemptions = []
    preempt = core.scheduler._preempt_request
    core.scheduler._preempt_request = lambda *args, **more: (
        preemptions.append(1),
        preempt(*args, **more),
    )[1]

    def generate():
        outputs = llm.generate(
            prompts(), sampling(SamplingParams, job.get("seeded")), use_tqdm=False
        )
        return [
            [
                list(output.outputs[0].token_ids),
                [sorted(step) for step in output.outputs[0].logprobs or []],
            ]
            for output in outputs
        ]

    begin = time.monotonic()
    reference = generate()
    took = time.monotonic() - begin
    core.scheduler.reset_prefix_cache()
    killer = Killer(
        executor,
        job["kills"],
        job.get("ranks", range(ranks)),
        job.get("seed", 0),
        job.get("places", PLACES),
    )
    killer.start()
    rounds = []
    while killer.is_alive() or not rounds:
        rounds.append(generate())
    rounds.append(generate())
    with open(sys.argv[2], "w") as file:
        json.dump(
            {
                "reference": reference,
                "rounds": rounds,
                "kills": killer.done,
                "told": killer.told,
                "incidents": executor._survivor.count,
                "seconds": took,
                "preemptions": len(preemptions),
            },
            file,
        )
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
