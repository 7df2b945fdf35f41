#!/usr/bin/python3
"""Where the ranks of two machines stand: stacks.py BUILD_DIR

A group of two ranks on each of machines a and b (cluster.py) hangs: rank 2 is stopped by a signal,
rank 3 spins, ranks 0 and 1 wait. `coxswain stacks` at the lead shows all of them, the error of the
request names those of b, and so does the crash file of b. Then the agent of b is stopped: it is
named, and the ranks of a are shown. Root only; half a minute.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import re
import signal
import sys
import time

from cluster import GROUP, Cluster, Failed, Program, python_cluster, until

HERE = pathlib.Path(__file__).resolve()
RANKS = "a:2,b:2"
DEADLINE_S = 12.0
# Where the machine is busy, a second for all stacks is short, and nodes are suspect: it is tried again then.
TRIES = 3
BUSY = re.compile("suspect|has not sent|the time was up|no processor|in time")
DEAD_AFTER_S = 60.0
PYTHON = "/usr/bin/python3"


# ---- on machines a and b ----


def wait_here() -> None:
    time.sleep(1000)


def spin() -> None:
    for _ in itertools.count():
        pass


def worker() -> None:
    import coxswain

    rank = coxswain.Worker()

    @rank.opaque
    def reply(_: bytes) -> bytes:
        (spin if rank.rank == 3 else wait_here)()
        return b""

    rank.serve()


# ---- on machine c ----


def lead(url: str, certificates: str) -> None:
    import coxswain

    files = {
        "ca": f"{certificates}/ca.pem",
        "certificate": f"{certificates}/lead.pem",
        "key": f"{certificates}/lead-key.pem",
    }
    cluster = coxswain.Cluster(url, **files, dead_after=DEAD_AFTER_S)
    with coxswain.Group(name=GROUP, nodes=RANKS, cluster=cluster) as group:
        print("ready", flush=True)
        try:
            group.submit(b"", timeout=DEADLINE_S).result()
        except coxswain.TimedOut as error:
            print(f"error: {error}", flush=True)
        signal.pause()


# ---- the test ----


def stacks(group: Cluster, *options: str) -> str:
    command = group.command("stacks", "--name", GROUP, *options)
    if command.ended(20):
        raise Failed(f"stacks: {Cluster.words(command, 0)}")
    return "".join(command.out)


def pids(group: Cluster) -> dict[int, int]:
    command = group.command("status", "--name", GROUP, "--json")
    command.ended(10)
    return {rank["rank"]: rank["pid"] for rank in json.loads("".join(command.out))["ranks"]}


def shows(text: str, *patterns: str) -> bool:
    return all(re.search(pattern, text) for pattern in patterns)


WAITS = r"MainThread in wait_here \(stacks.py:\d+\) called from reply \(stacks.py:\d+\)"
SPINS = r"MainThread in spin \(stacks.py:\d+\) called from reply \(stacks.py:\d+\), runn"


def hang(group: Cluster, program: Program) -> bool:
    """Returns False: the machine was too busy."""
    until(
        "all ranks are where they shall be",
        30,
        lambda: shows(stacks(group), rf"rank 3: {SPINS}", rf"ranks 0-2: {WAITS}"),
    )
    os.kill(pids(group)[2], signal.SIGSTOP)
    stopped = rf"rank 2: {WAITS}, stopped by a signal"
    text = ""

    def told() -> bool:
        nonlocal text
        text = stacks(group)
        return shows(text, stopped, rf"rank 3: {SPINS}", rf"ranks 0-1: {WAITS}")

    until("rank 2 is stopped", 30, told)
    # The whole of each rank, and its own process.
    for rank, pid in pids(group).items():
        if not shows(text, rf"(?m)^rank {rank} \(pid {pid}\), at its request since [\d.]+ s: .*\nprocess {pid}: "):
            raise Failed(f"rank {rank} is not there: {text}")
    only = stacks(group, "--rank", "3")
    if not shows(only, r"(?m)^rank 3 \(pid ") or "\nrank 2 (" in only:
        raise Failed(f"stacks --rank 3: {only}")
    print("stacks: those of both machines")

    line = until(
        "the request fails",
        3 * DEADLINE_S,
        lambda: next((line for line in list(program.out) if line.startswith("error: ")), ""),
    )
    said = line.split("; stacks: ")[-1]
    if shows(said, rf"{stopped}.*; rank 3: {SPINS}"):
        if "/" in said:
            raise Failed(f"there is a path in: {said}")
        print("the error of the hang: those of both machines")
        return True
    if not BUSY.search(said):
        raise Failed(f"the error does not name ranks 2 and 3: {line}")
    return False


def crash_file(group: Cluster) -> None:
    """That of machine b has what its lead has asked for."""
    folder = group.folder / "crash/b"

    def postmortem() -> bool:
        for path in folder.glob("*.crash"):
            shown = group.command("postmortem", str(path))
            shown.ended(20)
            if shows("".join(shown.out), r"in wait_here \(stacks.py", r"in spin \(stacks.py"):
                return True
        return False

    until("the crash file of b has the stacks of its ranks", 20, postmortem)
    print("the crash file of a machine: those of its ranks")


def agent_stopped(group: Cluster) -> None:
    agent = group.agents["b"]
    agent.send(signal.SIGSTOP)
    begin = time.monotonic()
    silent = r"ranks 2-3: node b (is suspect: not heard for \d+ ms|has not sent its stacks in 1.0 s: see the log)"
    text = stacks(group)
    took = time.monotonic() - begin
    if not shows(text, silent, r"(?m)^rank 0 \(pid .*\nprocess ", r"(?m)^rank 2 \(pid .*\nnot there: node b "):
        raise Failed(f"an agent that is stopped: {text}")
    print(f"an agent that is stopped is named, in {took:.1f} s")
    agent.send(signal.SIGCONT)
    until("node b answers again", 20, lambda: shows(stacks(group), rf"rank 3: {SPINS}"))


def one_group(group: Cluster) -> bool:
    group.servers_start()
    for node in ("a", "b"):
        group.agent_start(node, command=[PYTHON, str(HERE), "--worker"])
    program = group.machines["c"].start(
        PYTHON, str(HERE), "--lead", group.url, str(group.certificates)
    )
    try:
        until("the lead is ready", 60, lambda: program.out or program.status is not None)
        if program.status is not None:
            raise Failed("the lead has ended")
        if not hang(group, program):
            return False
        crash_file(group)
        agent_stopped(group)
        return True
    except Failed:
        for one in (program, *group.agents.values()):
            for line in one.lines[-40:]:
                print(f"  {line.text[:300]!r}", file=sys.stderr)
            print(*list(one.out)[-20:], file=sys.stderr)
        raise
    finally:
        program.kill()


def main() -> int:
    build = pathlib.Path(sys.argv[1]).resolve()
    with python_cluster(build, PYTHON) as group:
        for left in reversed(range(TRIES)):
            if one_group(group):
                break
            group.clean()
            if not left:
                raise Failed("the machine is too busy")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker()
    elif sys.argv[1] == "--lead":
        lead(*sys.argv[2:])
    else:
        sys.exit(main())
