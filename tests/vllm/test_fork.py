"""Ranks of a fork server: as any other, and replaced in less time."""

import os
import pathlib
import signal

import pytest
from conftest import PATIENCE, SUMS, children, ranks_of, status, wait_for_end, wait_until

LINE = SUMS.joinpath("heldout.txt").read_text().split()[0]
REFUSED = "its program is executed"


def ask(running):
    prompt = LINE.split("=")[0] + "="
    client = running.client().with_options(timeout=PATIENCE)
    reply = client.completions.create(model="model", prompt=prompt, max_tokens=8, temperature=0)
    return prompt + reply.choices[0].text == LINE


def title(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def servers(engine):
    return [pid for pid in children(engine) if title(pid).startswith("coxswain fork server")]


def threads(pid):
    """The processors of each thread that computes, of a rank."""
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        if task.joinpath("comm").read_text().startswith("VLLM::Worker"):
            found.append(os.sched_getaffinity(int(task.name)))
    return found


def replaced(running, count):
    """Kills a rank; others serve. Returns how many are new."""
    old = running.pids()
    os.kill(old[0], signal.SIGKILL)
    assert ask(running)
    running.wait_for_incident(count)
    return len(set(running.pids()) - set(old))


def test_ranks_are_forked_and_bound(server):
    """At the start, at an incident, and after the server was killed, then without it."""
    options = ["--no-async-scheduling"]
    with server(options=options, VLLM_COXSWAIN_ON_DEATH="restart") as running:
        engine = status(running.name)["pid"]
        assert ranks_of(engine) == {*running.pids()}
        (fork_server,) = servers(engine)
        assert len(os.listdir(f"/proc/{fork_server}/task")) == 1
        assert ask(running)
        for incidents in range(2):
            for rank, pid in enumerate(running.pids()):
                allowed = threads(pid)
                assert allowed and all(one == {rank % os.cpu_count()} for one in allowed), allowed
            if incidents == 0:
                assert replaced(running, 1) == 2
        assert REFUSED not in running.text()

        os.kill(fork_server, signal.SIGKILL)
        assert replaced(running, 2) == 2
        assert "rank 0: no process of the fork server: it " in running.text()
        assert REFUSED in running.text()
        pids = children(running.process.pid)
        os.kill(engine, signal.SIGKILL)
        wait_for_end(pids)


@pytest.mark.parametrize("how", ["off", "of several processors"])
def test_other_ways(server, how):
    """Without a server, and with ranks whose threads OpenMP has bound before."""
    more = {
        "off": {"VLLM_COXSWAIN_FORK_SERVER": "0"},
        "of several processors": {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "ranks": 1},
    }[how]
    if how != "off" and os.cpu_count() < 2:
        pytest.skip("one processor")
    with server(**more) as running:
        engine = status(running.name)["pid"]
        assert ask(running)
        if how == "off":
            assert not servers(engine)
            assert all(b"COXSWAIN_RANK=" in environment(pid) for pid in running.pids())
            return
        (fork_server,) = servers(engine)
        assert REFUSED not in running.text()
        (pid,) = running.pids()
        # One thread on each: as OpenMP does it, which has read its variables in the server.
        wait_until(lambda: {0} in threads(pid) and {1} in threads(pid), lambda: str(threads(pid)))


def environment(pid):
    return pathlib.Path(f"/proc/{pid}/environ").read_bytes()
