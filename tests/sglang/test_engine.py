"""sglang.Engine with a real SGLang: schedulers die, hang, diverge and fail under 16 clients.

SGLANG_TEST_KILLS: how often one dies; 2, nightly 20."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import HERE, PATIENCE, environment, names_of

KILLS = int(os.environ.get("SGLANG_TEST_KILLS", "2"))


ROWS = {
    "overlap": {},
    "no_overlap": {
        "options": {"disable_radix_cache": True, "disable_overlap_schedule": True},
        "penalties": True,
    },
}


@pytest.mark.parametrize("row", ROWS)
def test_requests_outlive_schedulers(model, tmp_path, row):
    result = tmp_path / "result"
    job = {"model": model, "kills": KILLS, **ROWS[row]}
    name = f"sglang_test_{os.getpid()}"
    options = {"on_death": "restart", "incidents": 1000, "hang": 3, "name": name}
    done = subprocess.run(
        [sys.executable, str(HERE / "survivor.py"), json.dumps(job), str(result)],
        env=environment(tmp_path, options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=2 * PATIENCE + 60 * KILLS,
    )
    log = done.stdout
    (tmp_path / "log").write_text(log)
    assert result.exists(), log[-8000:]
    found = json.loads(pathlib.Path(result).read_text())
    assert found["again"]["wrong"] == []
    for one in [*found["rounds"], found["stopped"], found["spins"], found["divergence"]]:
        assert one["wrong"] == [], one
    assert found["incidents"] >= KILLS + 2  # a rank that differs may end by itself
    assert found["status"]["ranks"] == [[pid, "alive"] for pid in found["pids"][1:]]
    assert found["status"]["note"]["incidents"] == found["incidents"]
    assert "the ranks differ" in found["status"]["note"]["divergence"]
    for rank, pid in enumerate(found["pids"][1:]):
        assert f"rank {rank} (pid {pid})" in found["stacks"]
        assert re.search(rf"^ +{rank} idle .* {name}$", found["top"], re.M)
    assert found["stacks"].count("in event_loop_") >= 2  # of Python, of both ranks
    assert f'coxswain_group_info{{name="{name}"' in found["metrics"]
    # told
    assert re.search(r"Coxswain: rank [01] \(pid \d+\) was killed by signal 9 \(Killed\)", log)
    assert re.search(r"Coxswain: incident 1\. .* requests go on after", log, re.S)
    assert re.search(r"Coxswain: the schedulers do not move\. .*rank 1: .*stopped by a signal", log)
    assert re.search(r"stacks: .*rank 1: .*stopped by a signal", found["stopped"]["told"][0])
    spins = r"rank 1: MainThread in fault \(faulty_plugin\.py:\d+\)"
    assert re.search(spins, found["spins"]["told"][0])
    assert re.search(spins, found["spins"]["told"][1])
    assert re.search(r"Coxswain: stacks: .*" + spins, log)
    assert re.search(r'File ".*/faulty_plugin\.py", line \d+ in fault', log)
    assert re.search(
        r"Coxswain: the ranks differ since turn \d+: .*rank 0 alone runs [0-9a-f]+", log
    )
    fault = r"rank 1 \(pid \d+\) failed: ValueError: the device is on fire"
    assert re.search(r"Coxswain: the server ends: " + fault, log)
    assert re.search(r"the client got RuntimeError: " + fault, log)
    # clean
    assert names_of(found["pids"]) == []
