"""Which rank never entered the collective that the others wait in, from PyTorch's flight recorder.

PyTorch is that of build/venv-torch (tools/torch), or of $COX_TORCH_PYTHON; without it these tests
are skipped.
"""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import coxswain
import processes
import pytest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("COX_BIN_DIR", SOURCE / "build/test/bin"))
RANKS = 4
LIMIT = 60
STEPS = 6
VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
NAMED = r"PyTorch: rank 1 never entered all_reduce (\d+); ranks 0,2-3 wait in it; "


def worker(meeting):
    """Steps of an all_reduce each; in the last one rank 1 is elsewhere."""
    import torch
    import torch.distributed as dist

    rank = coxswain.Worker()
    ready = []

    def elsewhere():
        time.sleep(LIMIT)

    @rank.opaque
    def step(data):
        if not ready:
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank.rank, world_size=RANKS
            )
            ready.append(True)
        if bytes(data) == b"hang" and rank.rank == 1:
            elsewhere()
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        return b"%d" % tensor.sum()

    rank.serve()


if __name__ == "__main__":
    worker(sys.argv[1])
    sys.exit()

PYTHON = processes.find_torch()
if PYTHON is None:
    pytest.skip(
        "no Python here has torch, safetensors and cffi; `sh tools/torch` installs them from PyPI",
        allow_module_level=True,
    )


@contextlib.contextmanager
def group_of(folder, **options):
    folder.mkdir(exist_ok=True)
    command = [PYTHON, __file__, str(folder / "meeting")]
    with coxswain.Group(command, ranks=RANKS, on_rank_death=lambda *_: None, **options) as group:
        for _ in range(STEPS):
            assert group.call(b"step", timeout=LIMIT) == [b"16"] * RANKS
        yield group
        for rank in group.status().ranks:
            os.kill(rank.pid, signal.SIGKILL)


def hang(group, timeout):
    with pytest.raises(coxswain.TimedOut) as caught:
        group.submit(b"hang", timeout=timeout).result()
    return str(caught.value)


def test_the_error_names_the_rank_that_never_entered(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    crashes = tmp_path / "crashes"
    with group_of(tmp_path, crash_dir=crashes) as group:
        future = group.submit(b"hang", timeout=LIMIT)
        end = time.monotonic() + LIMIT
        # On a busy machine a second may be too short for all of it.
        while not re.search(NAMED, (stacks := group.stacks()).text):
            assert time.monotonic() < end, stacks.text
        for rank in stacks.ranks:
            assert "torch: group 0 (default_pg): entered " in rank.text
            assert re.search(r"\n  0 \d+ all_reduce \[\[4\]\] Float: ", rank.text)
        del future
    with group_of(tmp_path / "again", crash_dir=crashes) as group:
        text = hang(group, 8)
        assert re.search("; stacks: " + NAMED + "rank 1: MainThread in elsewhere ", text), text
        shown = subprocess.run(
            [BIN / "coxswain", "status", "--json", group.name],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert re.search(NAMED, shown)
    files = sorted(crashes.glob("*.crash"))
    shown = [
        subprocess.run(
            [BIN / "coxswain", "postmortem", file], capture_output=True, text=True, check=True
        ).stdout
        for file in files
    ]
    assert any(re.search(NAMED, text) for text in shown), shown


@pytest.mark.parametrize("value", [None, "0"])
def test_without_the_variable_nothing_is_asked(tmp_path, monkeypatch, value):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    with group_of(tmp_path) as group:
        group.submit(b"hang", timeout=LIMIT)
        stacks = group.stacks()
        assert "PyTorch" not in stacks.text
        assert all(
            "torch: " not in rank.text and "PyTorch" not in rank.text for rank in stacks.ranks
        )
