"""Runs an engine whose ranks are killed now and then: the other half of test_survive.py.

Usage: survivor.py JOB RESULT. JOB is JSON; see Job. RESULT becomes what main writes: whether the
engine gives the same outputs twice without kills, the differences of each round with kills, and
what was said of each kill.
"""

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import coxswain
import models
from conftest import status

# Where a rank dies: in a step (faulty_worker.py), anywhere, while it replaces another one, or in
# the first step after an incident.
PLACES = ("execute", "executed", "sample", "anywhere", "replacement", "twice")


@dataclasses.dataclass
class Job:
    #: a folder for models
    models: str
    #: of models.KINDS
    kind: str = "llama"
    kills: int = 2
    tp: int = 1
    pp: int = 1
    #: async scheduling, with outputs that come late in seconds
    late: float = 0.0
    #: of KINDS; a prompt's kind is the one at its number
    kinds: tuple = ("greedy", "logprobs", "penalties")
    #: between steps the engine calls its ranks, which collects outputs that are in flight
    calls: bool = False
    #: prompts
    count: int = 16
    tokens: int = 24
    #: of vLLM
    options: dict = dataclasses.field(default_factory=dict)
    coxswain: dict = dataclasses.field(default_factory=dict)
    places: tuple = PLACES
    ranks: tuple = ()
    seed: int = 0
    #: what an incident leaves as it is, to see what becomes of it: "generators", "prefixes"
    without: tuple = ()


KINDS = {
    "greedy": {"temperature": 0},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 2, "logprobs": 1},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "seed": {"temperature": 0.9, "seed": 7, "logprobs": 1},
    "top p": {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    "regex": {"temperature": 0, "structured_outputs": "[0-9+=]{40}"},
    "seeded regex": {"temperature": 0.9, "seed": 3, "structured_outputs": "[0-9]{40}"},
    "lora": {"temperature": 0},
    "no LoRA": {"temperature": 0},
}


class Engine:
    """vLLM's engine, in this process."""

    def __init__(self, job):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from coxswain.vllm import Executor

        self.kind = models.KINDS[job.kind]
        options = {"enforce_eager": True, "worker_cls": "faulty_worker.Worker"}
        if job.pp > 1:  # vLLM's eager CPU worker of a later stage lacks the buffers of tracing
            options = {**options, "compilation_config": {"mode": 2, "backend": "eager"}}
            del options["enforce_eager"]
        config = EngineArgs(
            distributed_executor_backend=Executor,
            tensor_parallel_size=job.tp,
            pipeline_parallel_size=job.pp,
            dtype="float32",
            additional_config={"coxswain": {"incidents": 1000, **job.coxswain}},
            **{
                "max_model_len": 192,
                "block_size": 32,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 2048,
                **options,
                **models.write(job.kind, job.models),
                **job.options,
            },
        ).create_engine_config()
        if job.late:  # vLLM switches it off on CPUs
            config.scheduler_config.async_scheduling = True
        self.job = job
        self.engine = LLMEngine.from_vllm_config(config)
        self.core = self.engine.engine_core.engine_core
        self.preemptions = 0
        self.count = 0
        preempt = self.core.scheduler._preempt_request

        def counted(*args, **more):
            self.preemptions += 1
            return preempt(*args, **more)

        self.core.scheduler._preempt_request = counted

    def parameters(self, i):
        from vllm import PoolingParams, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        kind = self.job.kinds[i % len(self.job.kinds)]
        if self.kind.embeds:
            return PoolingParams(task="embed"), None
        given = dict(KINDS[kind])
        if regex := given.pop("structured_outputs", None):
            given["structured_outputs"] = StructuredOutputsParams(regex=regex)
        adapter = None
        if kind == "lora":
            from vllm.lora.request import LoRARequest

            adapter = LoRARequest("lora", 1, os.path.join(self.job.models, "lora"))
        length = self.job.tokens + 5 * (i % 4)
        return SamplingParams(max_tokens=length, ignore_eos=True, **given), adapter

    def generate(self):
        """The outputs, by the number of the prompt."""
        self.count += 1
        for i, prompt in enumerate(self.kind.prompts(self.job.count)):
            parameters, adapter = self.parameters(i)
            name = f"{self.count}-{i}"
            self.engine.add_request(name, prompt, parameters, lora_request=adapter)
        found = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    found[int(output.request_id.split("-")[1])] = said(output)
            if self.job.calls:
                self.core.model_executor.check_health()
        return [found[i] for i in sorted(found)]


def likely(steps):
    return [{t: e.logprob for t, e in (step or {}).items()} for step in steps or ()]


def said(output):
    """All that a client gets."""
    if not hasattr(output.outputs, "__len__"):
        return {"vector": output.outputs.data.tolist()}
    (one,) = output.outputs
    return {
        "tokens": list(one.token_ids),
        "text": one.text,
        "reason": one.finish_reason,
        "logprobs": likely(one.logprobs),
        "prompt logprobs": likely(output.prompt_logprobs),
    }


def differ(one, other):
    """Whether outputs differ. Numbers are equal but for what another batch shape makes of them."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) > 2e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(differ(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(map(differ, one, other))
    return one != other


def compared(texts, reference):
    """The prompts with other outputs, and what differs in the first one of them."""
    wrong = [i for i, pair in enumerate(zip(texts, reference, strict=True)) if differ(*pair)]
    first = wrong[:1] and [[one[wrong[0]] for one in (texts, reference)]]
    return {"wrong": wrong, "first": str(first)[:3000]}


class Forgetful(dict):
    def __setitem__(self, key, value):
        pass


class Killer(threading.Thread):
    """Kills a rank at a random moment, again and again; at "agent" the process that started it.
    Other places are commands of a shell."""

    def __init__(self, executor, job):
        super().__init__(daemon=True)
        self.executor, self.job = executor, job
        self.draw = random.Random(job.seed)
        self.done = 0
        #: of each kill: the place, the seconds until the incident, and its cause
        self.told = []

    def pids(self):
        return [rank.pid for rank in self.executor._ranks.group.status().ranks]

    def kill_at(self, place, rank):
        path = os.environ["VLLM_TEST_FAULT"]
        with open(path + ".new", "w") as file:
            file.write(f"{rank} SIGKILL {place}")
        os.rename(path + ".new", path)

    def kill_a_replacement(self, old):
        """As soon as it is there, or a little later."""
        while self.executor._ranks is old:
            time.sleep(0.001)
        later, pids = self.draw.choice((0, self.draw.uniform(0, 2))), [0]
        time.sleep(later)
        while not all(pids):
            with contextlib.suppress(coxswain.Closed):  # it is not started
                pids = self.pids()
        os.kill(self.draw.choice(pids), signal.SIGKILL)

    def run(self):
        survivor = self.executor._survivor
        for i in range(self.job.kills):
            place = self.job.places[i % len(self.job.places)]
            time.sleep(self.draw.uniform(0.02, 0.3))
            ranks = self.job.ranks or range(self.job.tp * self.job.pp)
            rank = self.draw.choice(list(ranks))
            before, old = survivor.count, self.executor._ranks
            begin = time.monotonic()
            if place in ("anywhere", "replacement", "agent"):
                pid = self.pids()[rank]
                if place == "agent":
                    with open(f"/proc/{pid}/stat") as file:
                        pid = int(file.read().rsplit(")")[1].split()[1])
                os.kill(pid, signal.SIGKILL)
            elif place in PLACES:
                self.kill_at("execute" if place == "twice" else place, rank)
            else:
                subprocess.Popen(place, shell=True)
            while survivor.count == before:
                time.sleep(0.001)
            seconds = time.monotonic() - begin
            if place == "replacement":
                self.kill_a_replacement(old)
            if place == "twice":
                self.kill_at("executed", rank)
                before += 1
            # Until a step has ended: three losses without one are the end.
            while survivor.count == before or survivor._fruitless:
                time.sleep(0.001)
            self.told.append([place, seconds, survivor._incident.cause])
            self.done += 1


def main():
    job = Job(**json.loads(sys.argv[1]))
    engine = Engine(job)
    survivor, scheduler = engine.core.model_executor._survivor, engine.core.scheduler
    if "generators" in job.without:
        survivor._generators = Forgetful()
    begin = time.monotonic()
    reference = engine.generate()
    took = time.monotonic() - begin
    scheduler.reset_prefix_cache()
    again = compared(engine.generate(), reference)
    scheduler.reset_prefix_cache()
    if "prefixes" in job.without:
        scheduler.kv_cache_manager.block_pool.reset_prefix_cache = lambda: True
    engine.preemptions = 0
    killer = Killer(engine.core.model_executor, job)
    killer.start()
    rounds = []
    while killer.is_alive():
        rounds.append(compared(engine.generate(), reference))
    rounds.append(compared(engine.generate(), reference))
    name = engine.core.model_executor._ranks.name
    with open(sys.argv[2], "w") as file:
        json.dump(
            {
                "again": again,
                "rounds": rounds,
                "kills": killer.done,
                "told": killer.told,
                "incidents": survivor.count,
                "seconds": took,
                "preemptions": engine.preemptions,
                "ranks": [rank["liveness"] for rank in status(name)["ranks"]],
                "groups": len(scheduler.kv_cache_config.kv_cache_groups),
            },
            file,
        )
    engine.engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
