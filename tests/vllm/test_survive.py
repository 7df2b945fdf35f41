"""Requests outlive their ranks: with on_death "restart" their texts are as if no rank had died."""

import concurrent.futures
import json
import os
import random
import signal
import time

import coxswain
import pytest
from conftest import SUMS, environment, run_script, status

# Chunked prefill and preemptions in two ranks; seeded samples; stages. Prefixes are cached in all.
JOBS = {
    "tp": {"tp": 2, "kills": 5, "options": {"num_gpu_blocks_override": 16}},
    "seeded": {"kills": 2, "seeded": True},
    "pp": {"pp": 2, "kills": 2, "seeded": True},
}


def survive(models, **job):
    """Runs an engine with kills; as many as VLLM_TEST_KILLS says, for a longer run."""
    job["model"] = os.path.join(models, "random")
    job["kills"] = int(os.environ.get("VLLM_TEST_KILLS", job["kills"]))
    found = run_script("survivor.py", job, job.get("tp", 1) * job.get("pp", 1))
    for line in found["log"].splitlines():
        if "loaded the model after" in line or "go on after" in line:
            print(line)
    return found["result"]


def wrong(found):
    return [
        sum(one != other for one, other in zip(texts, found["reference"], strict=True))
        for texts in found["rounds"]
    ]


@pytest.mark.parametrize("name", JOBS)
def test_texts_are_those_of_ranks_that_live(models, name):
    found = survive(models, **JOBS[name])
    assert found["incidents"] == found["kills"] > 0
    assert not any(wrong(found)), wrong(found)
    assert name != "tp" or found["preemptions"] > 0


@pytest.mark.parametrize("part", ["_recompute", "_forget_blocks"])
def test_no_part_of_it_can_be_left_out(models, part):
    """The test above can fail: without the KV cache of the requests, and with prefixes that only
    lost ranks had computed."""
    found = survive(models, kills=3, seeded=True, without=[part])
    assert any(wrong(found))


def test_clients_see_a_pause(server):
    """Ranks die at random while clients stream sums: every text is right, and none is an error."""
    lines = SUMS.joinpath("heldout.txt").read_text().split()[:48]
    with server(options=["--no-async-scheduling"], VLLM_COXSWAIN_ON_DEATH="restart") as running:
        client = running.client()

        def ask(line):
            prompt = line.split("=")[0] + "="
            begin = time.monotonic()
            stream = client.completions.create(
                model="model", prompt=prompt, max_tokens=8, temperature=0, stream=True
            )
            text = "".join(part.choices[0].text for part in stream)
            return prompt + text == line, time.monotonic() - begin

        draw = random.Random(3)
        kills = 0
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            futures = []
            while kills < 3:
                futures += [pool.submit(ask, line) for line in lines]
                time.sleep(draw.uniform(0.05, 0.3))
                rank = draw.choice(status(running.name)["ranks"])
                os.kill(rank["pid"], signal.SIGKILL)
                kills += 1
                running.wait_for_text(f"incident {kills}.", 120)
            results = [future.result(timeout=300) for future in futures]
        assert all(right for right, _ in results)
        print(f"the longest wait was {max(wait for _, wait in results):.2f} s")
        ranks = [rank["pid"] for rank in status(running.name)["ranks"]]
        assert f"rank {rank['rank']} (pid {rank['pid']}) was killed by signal 9" in running.text()
        assert rank["pid"] not in ranks


def test_too_many_incidents_are_the_end(server):
    config = {"coxswain": {"on_death": "restart", "incidents": 1}}
    with server(
        options=["--no-async-scheduling", "--additional-config", json.dumps(config)]
    ) as running:
        client = running.client()
        for i in range(2):
            rank = status(running.name)["ranks"][1]
            os.kill(rank["pid"], signal.SIGKILL)
            if i == 0:
                assert (
                    client.completions.create(
                        model="model", prompt="1+2=", max_tokens=1, temperature=0
                    )
                    .choices[0]
                    .text
                    == "3"
                )
        log = running.wait_for_text("EngineCore encountered a fatal error")
        assert f"rank 1 (pid {rank['pid']}) was killed by signal 9" in log
        assert "it is incident 2 in 600 s" in log
        assert running.process.wait(60) is not None


REFUSED = [
    ("scheduler_config.async_scheduling", True, "async scheduling"),
    ("model_config.runner_type", "pooling", "a pooling model"),
    ("speculative_config", object(), "speculative decoding"),
    ("kv_transfer_config", object(), "a KV connector"),
]


def test_what_cannot_go_on_exactly_is_refused_at_start(models, monkeypatch):
    for name, value in environment(1).items():
        monkeypatch.setenv(name, value)
    from vllm.engine.arg_utils import EngineArgs

    from coxswain import _vllm_survive
    from coxswain.vllm import Executor

    config = EngineArgs(
        model=os.path.join(models, "random"),
        max_model_len=64,
        dtype="float32",
        distributed_executor_backend=Executor,
    ).create_engine_config()
    _vllm_survive.check(config)
    for path, value, text in REFUSED:
        *owners, name = path.split(".")
        owner = getattr(config, owners[0]) if owners else config
        before = getattr(owner, name)
        object.__setattr__(owner, name, value)
        with pytest.raises(coxswain.Unsupported, match=text):
            _vllm_survive.check(config)
        object.__setattr__(owner, name, before)
