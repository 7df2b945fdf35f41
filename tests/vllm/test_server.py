"""vLLM's API server over Coxswain: its texts, and what it says of a rank that fails."""

import concurrent.futures
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import time
import urllib.request

import openai
import pytest
from conftest import SUMS, children, shared_memory, status, wait_for_end, wait_until


def lines():
    return (SUMS / "heldout.txt").read_text().split()[:16]


def ask(client, prompt, **options):
    return client.completions.create(
        model="model", prompt=prompt, max_tokens=8, temperature=0, **options
    )


def left(name, before):
    """Names of the group in /dev/shm."""
    return {entry for entry in shared_memory() - before if name in entry}


def test_texts_and_the_end_of_the_engine(server):
    """Sums, streamed and not; then kill -9 of the engine leaves nothing of ours."""
    before = shared_memory()
    with server() as running:
        assert f"coxswain status --name {running.name}" in running.text()
        client = running.client()
        for line in lines():
            prompt = line.split("=")[0] + "="
            assert prompt + ask(client, prompt).choices[0].text == line
            stream = ask(client, prompt, stream=True)
            assert prompt + "".join(part.choices[0].text for part in stream) == line
        said = status(running.name)
        assert [rank["liveness"] for rank in said["ranks"]] == ["alive", "alive"]
        pids = children(running.process.pid)
        assert said["pid"] in pids and {rank["pid"] for rank in said["ranks"]} < pids
        os.kill(said["pid"], signal.SIGKILL)
        wait_for_end(pids)
        assert not left(running.name, before)


# What a step does, and what the log says of it.
FAULTS = [
    ("1 SIGKILL execute", ["rank 1 (pid {1}) was killed by signal 9"]),
    ("1 SIGSTOP execute", ["rank 1", "stopped by a signal", "rank 0"]),
    ("0 raise execute", ["rank 0", "ValueError: the device is on fire", "faulty_worker.py"]),
]


@pytest.mark.parametrize(("fault", "texts"), FAULTS)
def test_a_rank_that_fails_in_a_step(server, fault, texts):
    before = shared_memory()
    with server(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="3") as running:
        pids = [rank["pid"] for rank in status(running.name)["ranks"]]
        running.inject(fault)
        begin = time.monotonic()
        with pytest.raises(openai.InternalServerError) as caught:
            ask(running.client(), "1+2=")
        for text in texts[:2]:  # vLLM keeps paths from clients
            assert text.format(*pids) in caught.value.body["message"]
        print(f"error after {time.monotonic() - begin:.3f} s")
        log = running.wait_for_text("EngineCore encountered a fatal error")
        raised = log[log.index("EngineCore encountered a fatal error") :]
        for text in texts:
            assert text.format(*pids) in raised, raised[-6000:]
        assert running.process.wait(60) is not None
        wait_for_end(pids)
        assert not left(running.name, before)


# How rank 1 hangs, and what the error says of it: where it is, in Python.
HANGS = [
    ("1 hang execute", "--async-scheduling", "MainThread in fail (faulty_worker.py:"),
    ("1 gil execute", "--async-scheduling", "MainThread in fail (faulty_worker.py:"),
    ("1 SIGSTOP execute", "--no-async-scheduling", "stopped by a signal"),
]


@pytest.mark.parametrize(("fault", "scheduling", "place"), HANGS)
def test_a_rank_that_hangs_is_named_with_its_stack(server, scheduling, fault, place):
    options = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "8"}
    with server(options=[scheduling], **options) as running:
        running.inject(fault)
        with pytest.raises(openai.InternalServerError) as caught:
            ask(running.client(), "1+2=")
        stacks = caught.value.body["message"].split("; stacks: ")[1]
        (where,) = [part for part in stacks.split("; ") if re.match(r"rank 1\b", part)]
        assert place in where
        assert "/" not in stacks  # no path of the host
        assert running.process.wait(60) is not None


def until(readyz, status):
    """What /readyz says until it has that status, and with it."""
    said = []

    def is_so():
        found = readyz()
        if found not in said:
            said.append(found)
        return found[0] == status

    wait_until(is_so, lambda: f"{said}")
    return [text for _, text in said]


def test_ready_means_that_it_can_generate(server):
    """At the start, while a rank hangs in a step, and while ranks are replaced."""
    options = {"VLLM_COXSWAIN_ON_DEATH": None, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "15"}
    running = server(**options)
    with contextlib.ExitStack() as stack:
        stack.callback(running.__exit__)
        readyz = stack.enter_context(running.readyz())
        first = until(readyz, 200)
        assert "the engine is being started: its ranks have run no step yet\n" in first
        with running, concurrent.futures.ThreadPoolExecutor() as pool:
            running.inject("1 hang execute")
            asked = pool.submit(ask, running.client(), "27+58=")
            (*_, text) = until(readyz, 503)
            assert re.fullmatch(
                r"rank(s 0,)? 1 owes? execute \d+, and no rank has moved for a third of the 15 s "
                r"that it may take\n",
                text,
            )
            with urllib.request.urlopen(f"{running.url}/health", timeout=5) as health:
                assert health.status == 200  # vLLM's own
            pathlib.Path(running.fault + ".end").touch()
            assert asked.result().choices[0].text == "85"
            until(readyz, 200)
            pid = running.pids()[1]
            os.kill(pid, signal.SIGKILL)
            until(readyz, 503)
            cause = f"its ranks are being replaced: rank 1 (pid {pid}) was killed by signal 9"
            assert any(text.startswith(cause) for text in until(readyz, 200))
            assert ask(running.client(), "27+58=").choices[0].text == "85"


def test_coxswain_stop_ends_an_idle_server(server):
    with server(VLLM_COXSWAIN_ON_DEATH=None) as running:
        pids = running.pids()
        command = [os.path.join(os.environ["COX_BIN_DIR"], "coxswain"), "stop", running.name]
        with subprocess.Popen(command) as process:
            running.wait_for_text(f"stopped by process {process.pid} (coxswain stop)")
        assert process.returncode == 0
        assert running.process.wait(60) is not None
        wait_for_end(pids)


def test_clients_are_not_told_of_the_host(server):
    with server(VLLM_COXSWAIN_TELL_CLIENTS="0") as running:
        pids = [rank["pid"] for rank in status(running.name)["ranks"]]
        running.inject("1 SIGKILL execute")
        with pytest.raises(openai.InternalServerError) as caught:
            ask(running.client(), "1+2=")
        assert caught.value.body["message"].endswith(" The cause: rank 1 was killed by signal 9")
        running.wait_for_text(f"rank 1 (pid {pids[1]}) was killed by signal 9", 20)


def test_a_rank_that_dies_while_the_engine_is_idle(server):
    with server() as running:
        ask(running.client(), "1+2=")
        pids = [rank["pid"] for rank in status(running.name)["ranks"]]
        os.kill(pids[0], signal.SIGKILL)
        running.wait_for_text(f"rank 0 (pid {pids[0]}) was killed by signal 9", 5)
        running.wait_for_text("EngineCore encountered a fatal error", 20)
        assert running.process.wait(60) is not None
        wait_for_end(pids)


def test_stages(server):
    """Pipeline parallelism by the executor's name, with the plugin hook of an installation."""
    # vLLM's eager CPU worker of a later stage lacks the buffers that tracing makes.
    options = ["--compilation-config", '{"mode": 2, "backend": "eager"}']
    with server(parallel="pipeline", eager=False, options=options) as running:
        for line in lines()[:4]:
            prompt = line.split("=")[0] + "="
            assert prompt + ask(running.client(), prompt).choices[0].text == line
