"""Weights that outlive their rank, with a real vLLM: `weights` of coxswain.vllm.Executor."""

import json
import os
import signal
import subprocess

import pytest
from conftest import SUMS, environment, run_script, wait_until

SUM = SUMS.joinpath("heldout.txt").read_text().split()[0]


def command(*words):
    path = os.path.join(os.environ["COX_BIN_DIR"], "coxswain")
    done = subprocess.run([path, "weights", *words], capture_output=True, text=True, check=True)
    return done.stdout


def users():
    return [row["users"] for row in json.loads(command("list", "--json"))]


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path, monkeypatch):
    """A holder of the test's own, which ends with what it holds."""
    monkeypatch.setenv("COXSWAIN_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PATH", f"{os.environ['COX_BIN_DIR']}:{os.environ['PATH']}")
    yield
    command("drop", "--all")


def is_right(running):
    prompt = SUM.split("=")[0] + "="
    reply = running.client().completions.create(
        model="model", prompt=prompt, max_tokens=8, temperature=0
    )
    return prompt + reply.choices[0].text == SUM


def sharing(server, **more):
    return server(VLLM_COXSWAIN_ON_DEATH=None, VLLM_COXSWAIN_WEIGHTS="shared", **more)


def test_a_later_rank_and_a_later_engine_load_nothing(server):
    with sharing(server) as running:
        assert is_right(running)
        log = running.text()
        assert log.count("Weights loaded and shared") == 2 and log.count("Weights mapped") == 0
        assert users() == [1, 1]
        assert running.note()["shared_weights_bytes"] > 100000
        os.kill(running.pids()[1], signal.SIGKILL)
        assert is_right(running)
        running.wait_for_incident(1)
        wait_until(lambda: running.text().count("Weights mapped") == 2, running.text)
    wait_until(lambda: users() == [0, 0], "the ranks are users still")
    with sharing(server, VLLM_COXSWAIN_SPARES="hot") as running:
        running.wait_for_spares()
        assert users() == [2, 2]
        assert running.text().count("Weights mapped") == 4
        assert "loaded and shared" not in running.text()
        assert is_right(running)
        os.kill(running.pids()[0], signal.SIGKILL)
        assert is_right(running)
        running.wait_for_incident(1)


def test_weights_that_are_written_are_the_ranks_own(models):
    """Of reload_weights, and of a function that an RLHF trainer has called."""
    found = run_script("weights_engine.py", {"models": models}, 1)
    result = found["result"]
    assert result["reloaded"] == result["first"]
    assert result["written"] != result["first"]
    assert result["other"] == result["first"], "another engine sees what this one has written"
    assert found["log"].count("Weights mapped") == 1


def test_what_cannot_be_shared_is_refused():
    script = "from coxswain.vllm import Options; import types as t\n"
    script += "class C(t.SimpleNamespace): pass\n"
    script += "from coxswain._internal import vllm_weights as w\n"
    script += (
        "config = C(device_config=C(device_type='cuda'), model_config=C(enable_sleep_mode=True))\n"
    )
    script += "print(w.obstacles(config))\n"
    done = subprocess.run(
        [os.sys.executable, "-c", script],
        env=environment(1),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "whose memory is not shared" in done.stdout and "sleep mode" in done.stdout
