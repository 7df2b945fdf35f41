"""What vLLM says last, where an engine does not start."""

import os
import re

import pytest
from conftest import run_script, wait_for_end, children

VLLMS = r"Engine core initialization failed\. See root cause above\. Failed core proc\(s\): {.*?}"
# What a rank does at start, and what the error says. Rank 1 is stopped from outside.
FAULTS = {
    "1 raise load_model": r"rank 1 failed in load_model: ValueError: the device is on fire",
    "0 SIGKILL load_model": r"rank 0 \(pid \d+\) was killed by signal 9 \(Killed\)\. "
    r"It was in load_model",
    "stop": r".*timed out after .* rank 1.* stopped by a signal.*\. "
    r"It was in determine_available_memory\. "
    r"The limit is VLLM_ENGINE_READY_TIMEOUT_S, in seconds",
}


def start(models, tmp_path, fault, processes, **arguments):
    """The error of an engine that does not start."""
    path = tmp_path / "fault"
    if " " in fault:
        path.write_text(fault)
    job = {"model": os.path.join(models, "random"), **arguments}
    more = {"VLLM_TEST_FAULT": str(path), "VLLM_ENABLE_V1_MULTIPROCESSING": str(processes)}
    more["VLLM_TEST_STOP"] = fault if fault == "stop" else None
    if "kv_cache_memory_bytes" in arguments:
        more["VLLM_CPU_KVCACHE_SPACE"] = None  # it would count
    return run_script("starts.py", job, 2, **more)["result"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_last_line_has_the_cause(models, tmp_path, fault):
    said = start(models, tmp_path, fault, 1)
    assert re.fullmatch(rf"{VLLMS}\. The cause: {FAULTS[fault]}", said), said


def test_an_engine_in_this_process_raises_the_cause(models, tmp_path):
    said = start(models, tmp_path, "1 raise load_model", 0)
    assert said.startswith("rank 1 failed in load_model: ValueError: the device is on fire\n"), said


def test_an_error_of_the_engine_itself_is_a_cause(models, tmp_path):
    """vLLM's own, of a KV cache in which no request has room."""
    said = start(models, tmp_path, "", 1, kv_cache_memory_bytes=4096)
    assert re.match(rf"{VLLMS}\. The cause: (\w+\.)*ValueError: ", said), said


def test_the_servers_last_line_has_the_cause(server, tmp_path):
    (tmp_path / "fault").write_text("1 raise load_model")
    running = server()
    pids = children(running.process.pid)
    assert running.process.wait(600)
    running.__exit__()
    wait_for_end(pids)
    (line,) = re.findall(rf".*{VLLMS}.*", running.text())
    assert line.endswith(
        ". The cause: rank 1 failed in load_model: ValueError: the device is on fire"
    )
