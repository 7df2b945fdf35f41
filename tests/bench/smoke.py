#!/usr/bin/python3
"""coxswain-bench runs, every answer is the right one, and its JSON has every row and every target; no time is looked at.

usage: smoke.py COXSWAIN_BENCH [brief]

brief: what starts peers that take seconds.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position

# Judged once per placement.
PLACED = [
    "named by the semaphore floor, N = 2, 4, 8",
    "sealed by the futex floor, N = 8, 16, 32",
    "sealed by the semaphore floor, N = 8, 16, 32",
    "sealed by peers that sleep, every N >= 2",
    "ZeroMQ by sealed, N = 8",
    "sealed by peers that spin, N >= 8",
    "growth N = 4 to 32, sealed by the futex floor",
    "a step of 16 in each rank beside its bytes, sealed, N = 8",
    "a row of a step in each rank, sealed, N = 8",
    "a pickle ring by the step of 256, N = 8",
    "CPU at 950 rounds a second, N = 8{by the floors}",
    "group barrier, 8 ranks",
    "all-gather of 64 bytes by the barrier, 8 ranks",
    "reduction by memcpy and one barrier, 8 ranks",
    "Python call by peers that sleep",
    "CPU of a Python call by peers that sleep",
    "Python call by peers that spin, N = 8",
]
TARGETS = [f"{name}, {placement}".replace("{by the floors}", ", by the floors" if placement != "one processor" else "")
           for placement in ("placed by the kernel", "one processor") for name in PLACED] + [
    "1 MiB by the semaphore floor, N = 4",
    "N = 1 with a free core, sealed",
    "N = 1 with busy cores, by the same that does not spin",
    "synchronous call beside submit, sealed, N = 4",
    "two busy loops beside, N = 8, by the floors beside them",
    "wake-ups of an idle group, N = 8",
    "shared memory reserved, N = 8, defaults",
    "pidfd readable to error at the caller, p99",
    "replace one dead rank, channel part",
    "deadline to COX_TIMEOUT at the caller, N = 8, p99",
    "all-gather of fds, 8 ranks",
    "by-value handle open + close",
    "KV pull by memcpy",
    "channel's share of a step of the model, N = 4",
    "allocations between request and reply, both sides",
    "what Python adds to a call, N = 1",
    "Python call by peers that sleep, N = 1, workers on another processor",
    "Python method call with small arguments by bytes",
    "5 MB there and back, 2 ranks, by the memcpy of its bytes",
    "columns of 256 sequences to numpy",
]
OWN = ["semaphore", "futex", "named", "named-call", "sealed", "sealed-call"]
AGAIN = ["semaphore-again", "futex-again"]
SECTIONS = {"free": ["bytes", "call", "per-rank", "per-byte", "one", "steps", "depth", "rate", "idle", "start",
                     "allocations", "python", "python-objects", "python-arrays", "loops", "ring", "copies"],
            "one processor": ["packed", "per-rank", "steps", "rate", "python"],
            "apart": ["python", "one"]}
# Of the section: those that need a peer of PyPI may be missing, and all where the package is not built.
PYTHON = ["named-collect", "sealed-collect", "py-call-c", "py-submit-c", "py-call", "py-submit", "py-await",
          "py-call-sealed", "py-pipe", "py-zmq", "py-vllm", "pickle"]
OVER = "no time left"
PROGRAMS = ["deaths", "deadlines", "replace", "ranks", "pull", "model"]
# What the quick run measures of each row that was measured at all.
FIGURES = ["p50_us", "p99_us", "mean_us", "cpu_us", "sleeps", "preempted", "runs", "rounds", "pairs"]


def check_machine(machine):
    """On what a run was made, and what else ran meanwhile."""
    assert machine["processors"] > 0 and machine["seconds"] > 0, machine
    assert len(machine["load_begin"]) == len(machine["load_end"]) == 3, machine
    # A run may be over before the kernel has counted a tick.
    if machine["seconds"] > 0.1:
        assert 0 <= machine["elsewhere"] <= 1 and 0 <= machine["steal"] <= 1, machine
    git = subprocess.run(["git", "-C", os.path.dirname(sys.argv[1]), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert machine.get("commit") == (git.stdout.strip() if git.returncode == 0 else None), machine


def run(*words):
    """The JSON of a run, whose rows are counted as they are."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        status = subprocess.run([sys.argv[1], *words, "--json", file.name]).returncode
        assert status == 0, f"{words}: the bench has failed with {status}"
        bench = json.load(open(file.name))
    check_machine(bench["machine"])
    missing = [part["missing"] for part in [*bench["rows"], *(bench.get(name, {}) for name in PROGRAMS)] if "missing" in part]
    assert bench["counts"] == {"rows": len(bench["rows"]), "late": missing.count(OVER), "missing": len(missing) - missing.count(OVER)}, \
        f"{words}: counted wrongly: {bench['counts']}"
    return bench


# A peer that is not here.
ABSENT = {"not built", "ray is not installed", "vllm is not installed", "mpi4py is not installed", "numpy is not installed"}


def check_brief():
    """A brief run has a figure in every row for which there is time, those of one process that goes through all its rows
    too, and leaves nothing of it behind."""
    kinds = "futex,sealed,mpi,pickle,py-pipe,py-mpi4py-object,py-mpi4py-array"
    bench = run("--brief", "--sections", "one,allocations,python,packed", "--kinds", kinds)
    assert bench["counts"]["late"] == 0, bench["counts"]
    for row in bench["rows"]:
        assert "p50_us" in row or "allocations" in row or row["missing"] in ABSENT, row
    rows = [row for row in bench["rows"] if row["kind"] == "mpi"]
    assert [row["ranks"] for row in rows] == [2, 4, 8, 16, 32], rows
    assert all(row["processors"] == 1 for row in rows if "missing" not in row), rows
    visits = {row["visits"] for row in bench["rows"] if row["section"] == "one"}
    assert min(visits) > 1, visits
    for row in bench["rows"]:
        assert "visits" not in row or len(row["pairs"]) >= row["visits"], row


def check_stopped():
    """After a SIGTERM it ends soon, writes nothing, and leaves no process and no file, nor one of an earlier run; what has
    the id of a process that lives stays."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    old, living = ("/dev/shm/coxswain-bench-%d-left" % pid for pid in (ended.pid, os.getpid()))
    for path in old, living:
        os.makedirs(path + "/of it")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "bench.json")
        bench = subprocess.Popen([sys.argv[1], "--sections", "packed", "--kinds", "futex,mpi,pickle", "--json", path],
                                 stdout=subprocess.PIPE)
        for line in bench.stdout:  # a row: its subjects are there
            if b" futex " in line:
                break
        bench.terminate()
        bench.stdout.read()
        assert bench.wait() == 130, bench.returncode
        assert not os.path.exists(path)
    harness.check(harness.all_gone(10), "processes of it are still there")
    assert os.path.isdir(living) and not os.path.exists(old), old
    shutil.rmtree(living)
    named = [re.match(r"coxswain-bench-(?:mpi-)?(\d+)", name) for name in os.listdir("/dev/shm")]
    left = [name[0] for name in named if name and not os.path.exists("/proc/" + name[1])]
    assert not left, left


def check_budget():
    """A run without time has every row, brief or not, and each that has no figure says so."""
    found = []
    for words in [], ["--brief"]:
        bench = run(*words, "--budget", "1")
        assert bench["counts"]["late"] > 1000, bench["counts"]
        assert all(bench[program].get("missing") == OVER for program in PROGRAMS), bench
        rows = [row for row in bench["rows"] if "p50_us" in row or "missing" in row or row["section"] in ("idle", "allocations", "start")]
        found.append({tuple(row[name] for name in ("section", "kind", "placement", "ranks", "bytes", "busy")) for row in rows})
    assert found[0] == found[1], found[0] ^ found[1]


def main():
    if sys.argv[2:] == ["brief"]:
        check_brief()
        check_stopped()
        return
    check_budget()
    # All of ours; peers are subjects of their own, and have their own test.
    bench = run("--quick")
    assert bench["counts"]["late"] == 0, bench["counts"]
    names = [target["name"] for target in bench["targets"]]
    assert sorted(names) == sorted(TARGETS), f"other targets than expected: {set(names) ^ set(TARGETS)}"
    for target in bench["targets"]:
        assert set(target) == {"name", "target", "measured", "quartiles", "met", "detail"}, target
        assert not target["quartiles"] or target["quartiles"] == sorted(target["quartiles"]), target
        assert target["met"] in (True, False, None) and target["target"], target
        assert target["measured"] is not None or target["met"] is None, target

    rows = bench["rows"]
    found = {placement: {row["section"] for row in rows if row["placement"] == placement} for placement in SECTIONS}
    for placement, sections in SECTIONS.items():
        assert found[placement] == set(sections), f"{placement}: {found[placement] ^ set(sections)}"
    # As the kernel tells it of all threads of a subject, peers too: none binds itself elsewhere.
    processors = len(os.sched_getaffinity(0))
    allowed = {"free": processors, "one processor": 1, "apart": min(processors, 2)}
    for row in rows:
        assert "missing" in row or row["processors"] == allowed[row["placement"]], f"placed elsewhere: {row}"
    for ranks in 1, 2, 8:
        for kind in OWN:
            for busy in False, True:
                for size in 4096, 1 << 20:
                    found = [row for row in rows if row["section"] == "bytes"
                             and (row["ranks"], row["kind"], row["busy"], row["bytes"])
                             == (ranks, kind, busy, size)]
                    assert len(found) == 1, (ranks, kind, busy, size, found)
                    missing = [name for name in FIGURES if name not in found[0]]
                    assert not missing, (found[0], missing)
    for ranks in 2, 8:
        packed = [row["kind"] for row in rows if row["section"] == "packed" and row["ranks"] == ranks]
        assert packed[:2] == OWN[:2] and packed[-2:] == AGAIN and set(OWN) < set(packed), packed
    again = {row["bytes"] for row in rows if row["kind"] in AGAIN}
    assert again == {4096}, f"floors again, of {again} bytes"
    allocated = [row["allocations"] for row in rows if row["section"] == "allocations"]
    assert len(allocated) == 4 and not any(allocated), f"allocations: {allocated}"
    shares = [row for row in bench["model"]["rows"] if row["ranks"] > 1]
    assert shares and all(0 < row["group_share"] <= 1 for row in shares), f"the group has no time: {shares}"
    python = [row for row in rows if row["section"] == "python"]
    assert [row["kind"] for row in python if row["placement"] == "apart"] == PYTHON, python
    assert not any("missing" in row for row in python if row["kind"] in ("py-pipe", "named-collect")), python
    for program in PROGRAMS:
        assert bench[program]["rows"], f"nothing of {program}"
    deadlines = bench["deadlines"]["rows"]
    assert [(row["attach"], row["by"], row["load"]) for row in deadlines] == [
        (attach, by, load) for attach in ("named", "sealed") for by in ("submit", "call", "call of the link channel")
        for load in ("idle", "requests beside")], deadlines
    for row in deadlines:
        assert row["ranks"] == 8 and row["wrong"] == 0, f"not ended by its deadline: {row}"
        assert (row["beside_per_s"] > 0) == (row["load"] == "requests beside"), row
    placements = [(row["ranks"], row["placement"]) for row in bench["ranks"]["rows"]]
    assert placements == [(8, "free"), (8, "one processor")], placements


harness.script(main)
