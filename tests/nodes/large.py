#!/usr/bin/python3
"""Requests that are too large for NATS: large.py BUILD_DIR

A group of two ranks on each of machines a and b (cluster.py). Requests of up to 96 MiB come to all ranks as they were
sent, in any order of sizes and several at once, and no agent holds one: it receives it into the memory that its ranks
map. An agent that is killed while it receives one leaves nothing, and the request names its node. Root only; half a
minute.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import signal
import subprocess
import sys

from cluster import GROUP, Cluster, Failed, python_cluster, until

HERE = pathlib.Path(__file__).resolve()
RANKS = "a:2,b:2"
DEADLINE_S = 60.0
PYTHON = "/usr/bin/python3"
MIB = 1 << 20
# By NATS, by the direct connection, and from 8 MiB on into memory; there and back.
SIZES = (10, MIB - 1, 2 * MIB, 8 * MIB, 8 * MIB + 1, 96 * MIB, 9 * MIB + 4097, 3, 33 * MIB)
# What an agent may hold more than before: the buffers of a connection.
HELD_MAX = 24 * MIB


# ---- on machines a and b ----


def worker() -> None:
    import coxswain

    rank = coxswain.Worker()

    @rank.opaque
    def reply(request: bytes) -> bytes:
        return hashlib.sha256(request).digest()

    rank.serve()


# ---- on machine c ----


def payload(size: int) -> bytes:
    """Which differs from byte to byte, from page to page, and between sizes."""
    block = hashlib.shake_128(str(size).encode()).digest(min(size, 65521))
    return (block * (size // len(block) + 1))[:size]


def lead(url: str, certificates: str, attach: str) -> None:
    import coxswain

    files = {
        "ca": f"{certificates}/ca.pem",
        "certificate": f"{certificates}/lead.pem",
        "key": f"{certificates}/lead-key.pem",
    }
    cluster = coxswain.Cluster(url, **files, dead_after=20.0)
    with coxswain.Group(name=GROUP, nodes=RANKS, cluster=cluster, attach=attach) as group:
        print("ready", flush=True)
        for size in SIZES:
            sent = payload(size)
            replies = group.submit(sent, timeout=DEADLINE_S).result()
            if [bytes(one) for one in replies] != [hashlib.sha256(sent).digest()] * 4:
                print(f"wrong: {size} bytes", flush=True)
        several = [payload(size) for size in SIZES[-4:]]
        futures = [group.submit(sent, timeout=DEADLINE_S) for sent in several]
        for sent, future in zip(several, futures):
            if [bytes(one) for one in future.result()] != [hashlib.sha256(sent).digest()] * 4:
                print(f"wrong: {len(sent)} bytes, of several", flush=True)
        print("done", flush=True)
        sys.stdin.readline()
        while True:
            try:
                group.submit(payload(96 * MIB), timeout=DEADLINE_S).result()
            except coxswain.Error as error:
                print(f"error: {error}", flush=True)
                break


# ---- the test ----


def peak(pid: int) -> int:
    """Bytes of its own that the process has had at most."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", text)[1]) * 1024


def one_group(group: Cluster, attach: str) -> None:
    group.servers_start()
    for node in ("a", "b"):
        group.agent_start(node, command=[PYTHON, str(HERE), "--worker"])
    words = [PYTHON, str(HERE), "--lead", group.url, str(group.certificates), attach]
    program = subprocess.Popen(
        group.machines["c"].inside(words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=group.machines["c"].environment,
        text=True,
    )
    assert program.stdin and program.stdout
    try:
        if program.stdout.readline() != "ready\n":
            raise Failed("the lead has ended")
        agents = {node: agent.pid for node, agent in group.agents.items()}
        before = {node: peak(pid) for node, pid in agents.items()}
        said = program.stdout.readline()
        if said != "done\n":
            raise Failed(said or "the lead has ended")
        for node, pid in agents.items():
            more = peak(pid) - before[node]
            if more > HELD_MAX:
                raise Failed(f"the agent of {node} has held {more / MIB:.0f} MiB")
        print(f"{attach}: up to {max(SIZES) // MIB} MiB to all ranks, and none at an agent")
        received = direct_bytes(group)
        program.stdin.write("\n")
        program.stdin.flush()
        until("b receives", 30, lambda: direct_bytes(group) > received + 4 * MIB)
        os.kill(agents["b"], signal.SIGKILL)
        said = program.stdout.readline()
        if not re.search(r"^error: .*node b\b", said):
            raise Failed(f"an agent that is killed: {said}")
        program.stdin.close()
        program.wait(30)
        print(f"{attach}: an agent that is killed while it receives: {said[7:-1][:120]}")
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def direct_bytes(group: Cluster) -> int:
    """What machine b has received so far."""
    text = pathlib.Path(f"/proc/{group.machines['b'].holder.pid}/net/dev").read_text()
    return sum(
        int(line.split(":")[1].split()[0]) for line in text.splitlines()[2:] if "lo:" not in line
    )


def main() -> int:
    build = pathlib.Path(sys.argv[1]).resolve()
    with python_cluster(build, PYTHON) as group:
        for attach in ("named", "sealed"):
            one_group(group, attach)
            group.clean()
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker()
    elif sys.argv[1] == "--lead":
        lead(*sys.argv[2:])
    else:
        sys.exit(main())
