"""bench vLLM: an engine with its ranks, which measures itself as vllm_figures.py asks it.

Usage: vllm_subject.py EXECUTOR RANKS MODEL. EXECUTOR: "own" is vLLM's multiprocess executor,
"coxswain" the one of this repository. Each line of the standard input is JSON, {"do": METHOD of
Subject, ...ARGUMENTS}; each has a line with the result. vLLM writes to the standard error.
"""

import gc
import json
import os
import random
import subprocess
import sys
import threading
import time

SEQUENCES = 16
# Kills a process and says when the kernel had made its pidfd readable.
WATCHER = """import os, select, signal, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
fd = os.pidfd_open(pid)
poll = select.poll()
poll.register(fd, select.POLLIN)
print("ready", flush=True)
time.sleep(seconds)
killed = time.monotonic_ns()
os.kill(pid, signal.SIGKILL)
poll.poll()
print(killed, time.monotonic_ns(), flush=True)"""


def cpu_ns(pid):
    """The processor time of a process: its clock, as of clock_getcpuclockid."""
    return time.clock_gettime_ns((~pid << 3) | 2)


class Subject:
    def __init__(self, executor, ranks, model):
        from vllm import LLM, SamplingParams

        self.engine_type, self.sampling_type = LLM, SamplingParams
        self.backend, self.ranks, self.model = "mp", ranks, model
        if executor == "coxswain":
            from coxswain.vllm import Executor

            self.backend = Executor
        self.number = 0

    def start(self):
        """Starts an engine, and times its first batch."""
        begin = time.monotonic_ns()
        llm = self.engine_type(
            self.model,
            distributed_executor_backend=self.backend,
            tensor_parallel_size=self.ranks,
            max_model_len=256,
            max_num_seqs=SEQUENCES,
            dtype="float32",
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
        )
        self.engine = llm.llm_engine
        self.executor = self.engine.engine_core.engine_core.model_executor
        self.pids = [
            os.getpid(),
            *self.executor.collective_rpc(lambda _: __import__("os").getpid()),
        ]
        started = time.monotonic_ns()
        self._add(1)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return {"start_ns": started - begin, "first_batch_ns": time.monotonic_ns() - started}

    def _add(self, tokens):
        sampling = self.sampling_type(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.number += 1
        for i in range(SEQUENCES):
            self.engine.add_request(
                f"{self.number}-{i}", {"prompt_token_ids": [1, 3 + i % 8]}, sampling
            )

    def _cpu(self):
        return [cpu_ns(pid) for pid in self.pids]

    def _measured(self, samples, before, begin):
        used = [after - one for after, one in zip(self._cpu(), before, strict=True)]
        return {"samples": samples, "cpu_ns": used, "wall_ns": time.monotonic_ns() - begin}

    def rpc(self, count, gap):
        """Calls a method that does nothing, back to back or one each `gap` seconds."""
        call, now, samples = self.executor.collective_rpc, time.monotonic_ns, []
        for _ in range(20):
            call("check_health")
        begin, before = now(), self._cpu()
        due = begin
        for _ in range(count):
            if gap:
                due += int(gap * 1e9)
                time.sleep(max(0, due - now()) / 1e9)
            asked = now()
            call("check_health")
            samples.append(now() - asked)
        return self._measured(samples, before, begin)

    def step(self, count):
        """Decode steps of 16 sequences."""
        self._add(count + 11)
        step, now, samples = self.engine.step, time.monotonic_ns, []
        for _ in range(10):
            step()
        begin, before = now(), self._cpu()
        for _ in range(count):
            asked = now()
            step()
            samples.append(now() - asked)
        result = self._measured(samples, before, begin)
        while self.engine.has_unfinished_requests():
            step()
        return result

    def idle(self, seconds):
        """Does nothing. vLLM's own ranks spin for a second after a call: not counted."""
        time.sleep(2)
        begin, before = time.monotonic_ns(), self._cpu()
        time.sleep(seconds)
        return self._measured([], before, begin)

    def kill(self, loaded):
        """Has a rank killed, in steps or while idle. Returns the times of the kill, of the kernel's
        report, and of the error: of a step, or the call of the failure callback."""
        rank = random.randrange(self.ranks)
        told = []
        called = threading.Event()
        self.executor.register_failure_callback(
            lambda: (told.append(time.monotonic_ns()), called.set())
        )
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WATCHER, str(self.pids[1 + rank])]
            + [str(random.uniform(0.2, 0.4) if loaded else 2.0)],
            stdout=subprocess.PIPE,
        )
        watcher.stdout.readline()
        text = ""
        if loaded:
            try:
                while True:
                    self._add(200)
                    while self.engine.has_unfinished_requests():
                        self.engine.step()
            except Exception as error:
                told.insert(0, time.monotonic_ns())
                text = f"{type(error).__name__}: {error}"
        else:
            called.wait(60)
        killed, reported = map(int, watcher.stdout.readline().split())
        watcher.wait()
        return {"killed_ns": killed, "reported_ns": reported, "told_ns": told[0], "text": text}

    def stop(self):
        engine, self.engine, self.executor = self.engine, None, None
        engine.engine_core.shutdown()
        gc.collect()
        return {}


def main():
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    executor, ranks, model = sys.argv[1:]
    subject = Subject(executor, int(ranks), model)
    for line in sys.stdin:
        job = json.loads(line)
        result = getattr(subject, job.pop("do"))(**job)
        out.write(json.dumps(result) + "\n")
        out.flush()
    os._exit(0)  # taking vLLM apart takes seconds


if __name__ == "__main__":
    main()
