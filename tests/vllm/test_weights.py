"""Weights that outlive their rank, with a real vLLM: `weights` of coxswain.vllm.Executor."""

import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess

import pytest
import widen
from conftest import SUMS, Server, environment, run_script, status, wait_for_end, wait_until

SUM = SUMS.joinpath("heldout.txt").read_text().split()[0]
# In bytes, of the model for what memory they take.
WIDE_SIZE = 100 << 20


def command(*words):
    path = os.path.join(os.environ["COX_BIN_DIR"], "coxswain")
    done = subprocess.run([path, "weights", *words], capture_output=True, text=True, check=True)
    return done.stdout


def users():
    return [row["users"] for row in json.loads(command("list", "--json"))]


def holder_pid():
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["COXSWAIN_RUNTIME_DIR"] + "/.weights.sock")
        return struct.unpack("3i", connection.getsockopt(1, socket.SO_PEERCRED, 12))[0]


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


def sharing(server, weights="shared", **more):
    return server(VLLM_COXSWAIN_ON_DEATH=None, VLLM_COXSWAIN_WEIGHTS=weights, **more)


def counts(running):
    """How many ranks have loaded, and mapped. Lines of a dead one are repeated by the engine."""
    log = running.text()
    return tuple(
        len(set(re.findall(rf"^\(Worker\S* pid=(\d+)\) .* Weights {did}", log, re.MULTILINE)))
        for did in ("loaded and shared", "mapped")
    )


def test_a_later_rank_and_a_later_engine_load_nothing(server):
    """Also where the engine was killed, and comes back under its name."""
    name = f"vllm_test_{os.getpid()}_weights"
    with sharing(server, name=name) as running:
        assert is_right(running)
        assert counts(running) == (2, 0) and users() == [1, 1]
        assert running.note()["shared_weights_bytes"] > 100000
        os.kill(running.pids()[1], signal.SIGKILL)
        assert is_right(running)
        running.wait_for_incident(1)
        wait_until(lambda: counts(running) == (2, 2), running.text)
        pids = {status(name)["pid"], *running.pids()}
        os.kill(status(name)["pid"], signal.SIGKILL)
        wait_for_end(pids)
    wait_until(lambda: users() == [0, 0], "the ranks are users still")
    with sharing(server, name=name, VLLM_COXSWAIN_SPARES="hot") as running:
        running.wait_for_spares()
        assert users() == [2, 2] and counts(running) == (0, 4)
        assert is_right(running)
        os.kill(running.pids()[0], signal.SIGKILL)
        assert is_right(running)
        running.wait_for_incident(1)


def test_a_stray_write_ends_its_rank_and_no_other_rank_sees_it(server):
    with sharing(server) as running:
        assert is_right(running)
        running.inject("1 scribble execute")
        assert is_right(running)  # by ranks that have mapped the weights since
        running.wait_for_incident(1)
        assert "killed by signal 11" in running.note()["last_incident"]
        assert counts(running) == (2, 2)


def test_an_engine_goes_on_where_the_holder_dies_and_the_next_rank_loads(server):
    with sharing(server, "kept") as running:
        assert is_right(running) and users() == [1, 1]
        os.kill(holder_pid(), signal.SIGKILL)
        assert is_right(running)
        for incident in 1, 2:
            os.kill(running.pids()[1], signal.SIGKILL)
            assert is_right(running)
            running.wait_for_incident(incident)
        assert counts(running) == (4, 2) and users() == [1, 1]


def memory_of(running):
    """The bytes of a server's ranks and spares: the part of each page that is a process's."""
    total = 0
    for pid in {*running.pids(), *running.spare_pids()}:
        rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += int(re.search(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)[1]) << 10
    return total


def test_hot_spares_hold_the_weights_once(tmp_path):
    """Of a model of 100 MB they hold a second copy where weights are private."""
    model = tmp_path / "wide"
    model.mkdir()
    widen.random_llama(SUMS, str(model), hidden=1024, heads=32, kv_heads=8)
    assert (model / "model.safetensors").stat().st_size > WIDE_SIZE
    found = {}
    for weights in "private", "shared":
        with Server(
            str(tmp_path),
            str(model),
            ranks=1,
            VLLM_COXSWAIN_ON_DEATH=None,
            VLLM_COXSWAIN_SPARES="hot",
            VLLM_COXSWAIN_WEIGHTS=weights,
        ) as running:
            running.wait_for_spares()
            running.client().completions.create(model="model", prompt="1+2=", max_tokens=8)
            found[weights] = memory_of(running)
    print({weights: size >> 20 for weights, size in found.items()}, "MiB")
    assert found["private"] - found["shared"] > 0.85 * WIDE_SIZE, found


def test_weights_that_are_written_are_the_ranks_own(models):
    """Of reload_weights, and of a function that an RLHF trainer has called."""
    found = run_script("weights_engine.py", {"models": models}, 1)
    result = found["result"]
    assert result["reloaded"] == result["first"]
    assert result["written"] != result["first"]
    assert result["other"] == result["first"], "another engine sees what this one has written"
    assert found["log"].count("Weights mapped") == 1


def test_a_checkpoint_that_changed_on_disk_is_loaded_anew(tmp_path):
    """And changes nothing that is mapped: a running engine has the new one by reload_weights."""
    for seed, name in enumerate(("random", "changed")):
        (tmp_path / name).mkdir()
        widen.random_llama(SUMS, str(tmp_path / name), seed=seed)
    found = run_script("weights_engine.py", {"models": str(tmp_path), "change": True}, 1)
    result = found["result"]
    assert result["kept"] == result["first"]
    assert result["other"] == result["reloaded"] != result["first"]
    assert found["log"].count("Weights loaded and shared") == 2
    assert found["log"].count("Weights mapped") == 0


def printed_by(script):
    done = subprocess.run(
        [os.sys.executable, "-c", script],
        env=environment(1),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_spare_on_a_gpu_counts_on_the_memory_of_the_rank_whose_place_it_takes():
    script = """
import types
from vllm.v1.worker import gpu_worker
from coxswain import vllm_worker

def request():
    cache = types.SimpleNamespace(gpu_memory_utilization=0.9)
    return gpu_worker.request_memory(snapshot, cache)

# The other rank has its cache: 10 % of the GPU are free.
snapshot = types.SimpleNamespace(total_memory=80 << 30, free_memory=8 << 30, device_="cuda:0")
try:
    request()
except ValueError as error:
    print("vLLM:", error)
vllm_worker._pass_over_free_memory()
print("budget", request() >> 30, "free", snapshot.free_memory >> 30)
"""
    printed = printed_by(script)
    assert "vLLM: Free memory on device cuda:0" in printed
    assert "budget 72 free 8" in printed


def test_what_cannot_be_shared_is_refused():
    script = """
import types
from coxswain._internal import vllm_weights

def config(device, **others):
    parts = {"sleep": False, "eplb": False, "offload": 0, **others}
    of = types.SimpleNamespace
    return of(
        device_config=of(device_type=device),
        model_config=of(enable_sleep_mode=parts["sleep"]),
        parallel_config=of(enable_eplb=parts["eplb"]),
        offload_config=of(
            uva=of(cpu_offload_gb=parts["offload"]), prefetch=of(offload_group_size=0)
        ),
    )

print(vllm_weights.obstacles(config("cpu")), vllm_weights.obstacles(config("cuda")))
print(vllm_weights.obstacles(config("xpu", sleep=True, eplb=True, offload=4)))
"""
    printed = printed_by(script)
    none, all_of_them = printed.splitlines()[-2:]
    assert none == "[] []"
    for text in "the device xpu", "sleep mode", "load balancing of experts", "offloaded":
        assert text in all_of_them
