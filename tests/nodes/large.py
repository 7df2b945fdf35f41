#!/usr/bin/python3
"""Requests that are too large for NATS: large.py BUILD_DIR

A group of two ranks on each of machines a and b (cluster.py). Requests of up to 96 MiB come to all ranks as they were
sent, in any order of sizes and several at once, and no agent holds one: it receives it into the memory that its ranks
map, and uses that again, but not while a rank that is late may read it. An agent that is killed while it receives one
leaves nothing, and the request names its node. Root only; a minute.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from typing import Any

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
# What it keeps for the next requests (payload_memory.h), and for how long.
KEPT_MAX = 256 * MIB
KEPT_S = 10
# A request that begins so is late: its rank replies once the file exists that it names.
HOLD = b"hold "
LATE_S = 4.0


# ---- on machines a and b ----


def worker() -> None:
    import coxswain

    rank = coxswain.Worker()

    @rank.opaque
    def reply(request: memoryview) -> bytes:
        digest = hashlib.sha256(request).digest()
        if request[: len(HOLD)] == HOLD:
            name = bytes(request[len(HOLD) : 4096]).split(b"\0")[0].decode()
            pathlib.Path(name + ".held").touch()
            until("the end of a request", 60, pathlib.Path(name).exists)
            same = hashlib.sha256(request).digest() == digest
            pathlib.Path(name + (".kept" if same else ".changed")).touch()
        return digest

    rank.serve()


# ---- on machine c ----


def payload(size: int) -> bytes:
    """Which differs from byte to byte, from page to page, and between sizes."""
    block = hashlib.shake_128(str(size).encode()).digest(min(size, 65521))
    return (block * (size // len(block) + 1))[:size]


def held(folder: str, name: str) -> tuple[bytes, str]:
    path = f"{folder}/{name}"
    return HOLD + path.encode() + b"\0" + payload(33 * MIB), path


def check(group: Any, sizes: tuple[int, ...], ranks: list[int]) -> None:
    """Several at once."""
    several = [payload(size) for size in sizes]
    futures = [group.submit(sent, timeout=DEADLINE_S, ranks=ranks) for sent in several]
    for sent, future in zip(several, futures):
        if [bytes(one) for one in future.result()] != [hashlib.sha256(sent).digest()] * len(ranks):
            print(f"wrong: {len(sent)} bytes to {ranks}", flush=True)


def late_rank(group: Any, folder: str, attach: str) -> None:
    """What a rank reads stays as it is while others get theirs, and when its request has ended."""
    import coxswain

    sent, path = held(folder, f"late-{attach}")
    future = group.submit(sent, timeout=LATE_S, ranks=[2])
    until("a rank reads", 30, pathlib.Path(path + ".held").exists)
    check(group, (33 * MIB, 32 * MIB, 33 * MIB), [0, 3])  # which end after it
    if not isinstance(future.exception(), coxswain.TimedOut):
        print("wrong: a rank that holds a request has replied", flush=True)
    pathlib.Path(path).touch()
    changed = pathlib.Path(path + ".changed")
    until("a rank ends", 30, lambda: changed.exists() or pathlib.Path(path + ".kept").exists())
    if changed.exists():
        print("wrong: a late rank has read another request", flush=True)

    def returned() -> bool:
        try:
            check(group, (33 * MIB,), [0, 1, 2, 3])
        except coxswain.Late:
            return False
        return True

    until("the late rank replies", 30, returned)


def dead_rank(group: Any, folder: str, attach: str) -> None:
    """What a rank has read that is dead is used again."""
    import coxswain

    sent, path = held(folder, f"dead-{attach}")
    future = group.submit(sent, timeout=DEADLINE_S, ranks=[3])
    until("a rank reads", 30, pathlib.Path(path + ".held").exists)
    group.kill(3)
    if not isinstance(future.exception(), coxswain.Error):
        print("wrong: a rank that was killed has replied", flush=True)
    check(group, (33 * MIB, 40 * MIB, 33 * MIB), [1, 2])


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
            check(group, (size,), [0, 1, 2, 3])
        check(group, SIZES[-4:], [0, 1, 2, 3])
        late_rank(group, certificates, attach)
        print("done", flush=True)
        sys.stdin.readline()
        dead_rank(group, certificates, attach)
        print("killed", flush=True)
        sys.stdin.readline()
        while True:
            try:
                group.submit(payload(96 * MIB), timeout=DEADLINE_S, ranks=[0, 2]).result()
            except coxswain.Error as error:
                print(f"error: {error}", flush=True)
                break


# ---- the test ----


def own(pid: int) -> int:
    """Bytes of its own that the process has, besides shared memory."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) * 1024


def kept(pid: int) -> int:
    """Bytes of the memory that the agent can write to, for requests."""
    text = pathlib.Path(f"/proc/{pid}/maps").read_text()
    found = re.findall(r"^(\w+)-(\w+) rw-s .*cox_large_payload", text, re.M)
    return sum(int(end, 16) - int(begin, 16) for begin, end in found)


class Peaks:
    """The largest number of bytes of their own that processes have in a while."""

    def __init__(self, pids: list[int]) -> None:
        self.most = dict.fromkeys(pids, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            for pid in self.most:
                self.most[pid] = max(self.most[pid], own(pid))

    def end(self) -> dict[int, int]:
        self._ended.set()
        self._thread.join()
        return self.most


def tell(program: subprocess.Popen[str]) -> None:
    assert program.stdin
    program.stdin.write("\n")
    program.stdin.flush()


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
        before = {node: own(pid) for node, pid in agents.items()}
        peaks = Peaks(list(agents.values()))
        try:
            said = program.stdout.readline()
        finally:
            most = peaks.end()
        if said != "done\n":
            raise Failed(said or "the lead has ended")
        for node, pid in agents.items():
            more = most[pid] - before[node]
            if more > HELD_MAX or not 0 < kept(pid) <= KEPT_MAX:
                raise Failed(f"{node} has {kept(pid)} bytes for requests, and {more} more")
        print(f"{attach}: up to {max(SIZES) // MIB} MiB to all ranks, and none at an agent")
        until("idle", KEPT_S + 20, lambda: not any(kept(pid) for pid in agents.values()))
        print(f"{attach}: and nothing for requests that do not come")
        tell(program)
        said = program.stdout.readline()
        if said != "killed\n":
            raise Failed(said or "the lead has ended")
        received = direct_bytes(group)
        tell(program)
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
