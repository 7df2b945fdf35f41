"""Runs an engine, one of whose ranks chooses otherwise for some steps: test_choices.py.

Usage: choosing_engine.py JOB RESULT. JOB is JSON: {"model": FOLDER, "async": BOOL, "what": "graph",
another mode of CUDA graphs, which an eager model on a CPU passes over; or "tokens", more padding,
and that rank hangs, as it does in a collective of a GPU; on a CPU one may pass over the rest.}
RESULT has what the engine told, and microseconds: of a step, of recording in a rank, of comparing.
"""

import dataclasses
import functools
import json
import sys
import time

import async_engine
import engines

STEPS = 4


def choose_otherwise(worker, what):
    """From now on, on rank 1."""
    if worker.rank != 1:
        return
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker import gpu_model_runner

    runner = worker.model_runner
    if what == "graph":
        gpu_model_runner.usual = gpu_model_runner.set_forward_context
        gpu_model_runner.set_forward_context = lambda *args, **kwargs: gpu_model_runner.usual(
            *args, **{**kwargs, "cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE}
        )
    else:
        determine = runner._determine_batch_execution_and_padding

        def padded(*args, **kwargs):
            mode, descriptor, *others = determine(*args, **kwargs)
            tokens = descriptor.num_tokens + 8
            return mode, dataclasses.replace(descriptor, num_tokens=tokens), *others

        runner._determine_batch_execution_and_padding = padded
        runner._model_forward = lambda *_, **__: time.sleep(3600)


def choose_alike(worker):
    from vllm.v1.worker import gpu_model_runner

    if worker.rank == 1:
        gpu_model_runner.set_forward_context = gpu_model_runner.usual


def timed(function, times):
    """A function whose times in microseconds go into a list."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        times.append((time.perf_counter() - begin) * 1e6)
        return result

    return call


def time_records(worker):
    from coxswain._internal import vllm_choices

    vllm_choices.times = []
    timed_here = timed(vllm_choices.Choices._hear, vllm_choices.times)
    vllm_choices.Choices._hear = timed_here


def times_of(worker):
    from coxswain._internal import vllm_choices

    return vllm_choices.times


def median(values):
    return round(sorted(values)[len(values) // 2], 2) if values else None


class Engine:
    """A vLLM in this process."""

    def __init__(self, job):
        from vllm import SamplingParams

        self.engine = async_engine.make(job)
        self.executor = self.engine.engine_core.engine_core.model_executor
        self.group = self.executor._ranks.group
        self.parameters = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        self.count = 0
        self.told = []

    def ask(self):
        for prompt in engines.prompts():
            self.engine.add_request(str(self.count), prompt, self.parameters)
            self.count += 1

    def steps(self, count=None):
        """Runs some; None: until all requests have ended. Returns their times."""
        times = []
        while self.engine.has_unfinished_requests() and (count is None or len(times) < count):
            begin = time.perf_counter()
            self.engine.step()
            times.append((time.perf_counter() - begin) * 1e6)
        return times

    def note(self):
        return json.loads(self.group.note or "{}").get("diverged")


def main():
    job = json.loads(sys.argv[1])
    engine = Engine(job)
    result = {"notes": [engine.note()]}
    # The costs first, without a fault.
    compared = []
    comparison = engine.executor._ranks.comparison
    comparison.check = timed(comparison.check, compared)
    engine.executor.collective_rpc(time_records)
    engine.ask()
    result["step"] = median(engine.steps())
    result["record"] = [median(one) for one in engine.executor.collective_rpc(times_of)]
    result["compare"] = median(compared)
    engine.ask()
    engine.steps(STEPS)
    result["notes"].append(engine.note())
    engine.executor.collective_rpc(choose_otherwise, args=(job["what"],))
    result["since"] = async_engine.requests(engine.group) + 1
    try:
        engine.steps(STEPS)
        result["notes"].append(engine.note())
        engine.executor.collective_rpc(choose_alike)
        engine.steps()
        result["notes"].append(engine.note())
        engine.engine.engine_core.shutdown()
    except Exception as error:  # pylint: disable=broad-exception-caught
        result["error"] = "\n".join([str(error), *getattr(error, "__notes__", ())])
    with open(sys.argv[2], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
