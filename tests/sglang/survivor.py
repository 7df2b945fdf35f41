"""Runs an engine whose schedulers die, hang and diverge: the other half of test_engine.py.

Usage: survivor.py JOB RESULT. JOB is JSON; see Job. RESULT becomes what main writes. The last fault
ends the process, as SGLang does.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import sglang
from conftest import schedulers_of, wait_until

import coxswain.sglang


@dataclasses.dataclass
class Job:
    model: str
    kills: int = 2
    clients: int = 16
    #: of sglang.Engine
    options: dict = dataclasses.field(default_factory=dict)
    #: whether requests with penalties are among them
    penalties: bool = False
    seed: int = 0


KINDS = (
    {"temperature": 0},
    {"temperature": 0.9, "sampling_seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 11},
    {"temperature": 0, "stop": ["7+", "=="], "no_stop_trim": True},
    {"temperature": 0.9, "sampling_seed": 3, "stop": ["00"]},
    {"temperature": 0, "ignore_eos": False},
)
# With the overlap schedule SGLang gives other outputs twice with them, without any kill. It applies
# two of them in the order of a set, which is another one in each process.
PENALTIES = (
    {"temperature": 0, "frequency_penalty": 0.4},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "sampling_seed": 11, "presence_penalty": 0.3},
    {"temperature": 0, "min_new_tokens": 8, "ignore_eos": False},
)


def prompts(count):
    """Each third begins with the same text."""
    draw = random.Random(5)
    found = []
    for i in range(count):
        text = "".join(draw.choice("0123456789+=") for _ in range(draw.randrange(1, 40)))
        found.append("12+34=46" * 6 + text if i % 3 == 0 else text)
    return found


class Engine:
    def __init__(self, job):
        self.job = job
        self.engine = sglang.Engine(
            **{
                "model_path": job.model,
                "device": "cpu",
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "dtype": "float32",
                "tp_size": 2,
                "disable_cuda_graph": True,
                "mem_fraction_static": 0.2,
                "max_total_tokens": 4096,
                "max_running_requests": 16,
                "log_level": "warning",
                **job.options,
            }
        )
        (self.server,) = coxswain.sglang._servers

    async def client(self, i, prompt):
        """A stream: what it has got, once it has ended."""
        kinds = KINDS + PENALTIES if self.job.penalties else KINDS
        kind = {"ignore_eos": True, "max_new_tokens": 24 + 3 * (i % 5), **kinds[i % len(kinds)]}
        text, last = "", None
        async for part in await self.engine.async_generate(prompt, kind, stream=True):
            if "text" in part:
                assert part["text"].startswith(text), (text, part)  # nothing twice, nothing lost
                text = part["text"]
            last = part
        meta = last["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            raise RuntimeError(meta["finish_reason"]["message"])
        return {
            "text": text,
            "ids": list(last["output_ids"]),
            "reason": meta["finish_reason"],
            "usage": [meta["prompt_tokens"], meta["completion_tokens"]],
        }

    async def clients(self):
        texts = prompts(self.job.clients)
        return await asyncio.gather(*(self.client(i, text) for i, text in enumerate(texts)))

    def generate(self, during=None):
        """The outputs of all clients. during: a coroutine beside them."""

        async def run():
            beside = asyncio.create_task(during()) if during else None
            found = await self.clients()
            if beside:
                await beside
            return found

        return self.engine.loop.run_until_complete(run())


def compared(found, reference):
    wrong = [i for i, pair in enumerate(zip(found, reference, strict=True)) if pair[0] != pair[1]]
    return {"wrong": wrong, "first": [[found[i], reference[i]] for i in wrong[:1]]}


def kills(engine, reference, took):
    """Rounds with a kill at a random moment each; in each fourth a new scheduler dies, too, as soon
    as it is there."""
    draw = random.Random(engine.job.seed)
    rounds = []
    for number in range(engine.job.kills):
        pids = schedulers_of(os.getpid())

        async def kill(pids=pids, twice=number % 4 == 3):
            await asyncio.sleep(draw.uniform(0, took))
            os.kill(draw.choice(pids), signal.SIGKILL)
            if twice:
                while not (found := set(schedulers_of(os.getpid())) - set(pids)):
                    await asyncio.sleep(0.01)
                os.kill(found.pop(), signal.SIGKILL)

        begin = time.monotonic()
        rounds.append(compared(engine.generate(kill), reference))
        # one that came after the last token
        wait_until(lambda count=number + 1: engine.server.incidents >= count, "no incident")
        rounds[-1]["seconds"] = time.monotonic() - begin
    return rounds


async def told_of_a_hang(engine, what):
    """Until it and the stacks are there. A turn may be slow, too. Returns what status has then."""
    while what not in (found := engine.server._status._note.get("hang", "")):
        await asyncio.sleep(0.05)
    return found


def stopped(engine, reference):
    """A stopped scheduler is told, and goes on."""
    pid = schedulers_of(os.getpid())[-1]
    told = []

    async def stop():
        os.kill(pid, signal.SIGSTOP)
        told.append(await told_of_a_hang(engine, "stopped by a signal"))
        os.kill(pid, signal.SIGCONT)

    return {**compared(engine.generate(stop), reference), "told": told}


def spins(engine, reference):
    """A scheduler in an endless loop of Python is told with its frames; a kill ends that."""
    pathlib.Path(os.environ["SGLANG_TEST_FAULT"]).write_text("1 spin")
    told = []

    async def replace():
        told.append(await told_of_a_hang(engine, "in fault (faulty_plugin.py"))
        command = [os.path.join(os.environ["COX_BIN_DIR"], "coxswain"), "stacks"]
        command.append(engine.server.options.name)
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        told.append((await process.communicate())[0].decode())
        os.kill(schedulers_of(os.getpid())[1], signal.SIGKILL)

    return {**compared(engine.generate(replace), reference), "told": told}


def divergence(engine, reference):
    """A rank that does not run a request hangs with the others; a kill ends that."""
    pathlib.Path(os.environ["SGLANG_TEST_FAULT"]).write_text("1 drop")

    before = engine.server.incidents
    engine.server._status.set(divergence="")

    async def replace():
        while not engine.server._status._note["divergence"]:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        if engine.server.incidents == before:  # gloo may have ended one for it
            with contextlib.suppress(IndexError):
                os.kill(schedulers_of(os.getpid())[0], signal.SIGKILL)

    return compared(engine.generate(replace), reference)


def asked(*command):
    """What the command `coxswain` prints."""
    words = [os.path.join(os.environ["COX_BIN_DIR"], "coxswain"), *command]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    # 4: degraded, as between a death and its replacement.
    assert done.returncode in (0, 4), done.stderr
    return done.stdout


def status(name):
    """What `coxswain status --json` says."""
    found = json.loads(asked("status", "--name", name, "--json"))
    ranks = [[rank["pid"], rank["liveness"]] for rank in found["ranks"]]
    return {"note": found["note"], "ranks": ranks}


def main():
    job = Job(**json.loads(sys.argv[1]))
    engine = Engine(job)
    reference = engine.generate()
    begin = time.monotonic()
    again = compared(engine.generate(), reference)
    took = time.monotonic() - begin
    found = {
        "again": again,
        "rounds": kills(engine, reference, took),
        "stopped": stopped(engine, reference),
        "spins": spins(engine, reference),
        "divergence": divergence(engine, reference),
        "incidents": engine.server.incidents,
        "took": took,
        "status": status(engine.server.options.name),
        "stacks": asked("stacks", engine.server.options.name),
        "metrics": asked("metrics", engine.server.options.name),
        "top": asked("top", "--once", engine.server.options.name),
        "pids": [os.getpid(), *schedulers_of(os.getpid())],
    }
    pathlib.Path(sys.argv[2]).write_text(json.dumps(found))
    pathlib.Path(os.environ["SGLANG_TEST_FAULT"]).write_text("1 raise")
    try:
        engine.generate()
    except BaseException as error:
        print(f"the client got {type(error).__name__}: {error}", flush=True)
    engine.engine.loop.run_until_complete(asyncio.sleep(60))  # SGLang ends this process


if __name__ == "__main__":
    main()
