#!/usr/bin/python3
"""Prompts of four clients on a group over two nodes, while machines, processes and cables fail.

Usage: soak.py BUILD_DIR [--minutes M] [--seed S] [--servers 1|3] [--faults KIND,...] [--json FILE]
           [--logs DIR]

The faults of faults.py, of random length, on any machine, one or two at a time. Each text is
compared with that of a group on one machine; each call ends within 60 s. A call may fail while the
lead is dead, and at no other time. After each fault the group must answer again within 10 s; the
times are printed. At the end nothing is left on any machine. Exit status: 0; 1: something was
wrong; 77: not possible here.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable

import cluster
import faults
from cluster import Cluster, Failed, Program

CLIENTS = 4
BACK_S = 10.0
GROUP_WAIT_S = 20.0


class Soak:
    def __init__(self, group: Cluster, texts: dict[str, str], seed: int) -> None:
        self.group, self.texts = group, texts
        self.dice = random.Random(seed)
        self.begun = time.monotonic()
        self.wrong: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.back_ms: list[float] = []
        self.history: list[str] = []
        self.ended: list[tuple[str, Program]] = []
        self.loads = [faults.Load(group, texts, seed + 1 + i) for i in range(CLIENTS)]
        self.runs = faults.Runs(group.folder / "crash")

    def note(self, text: str) -> None:
        self.history.append(f"{time.monotonic() - self.begun:9.3f} {text}")

    def net(self, line: str) -> None:
        assert self.group.network
        self.group.network.call(line)

    def hold(self) -> None:
        """How long a fault lasts: shorter than suspicion, longer than death, or between."""
        time.sleep(
            self.dice.choice((0.05, 0.15, 0.3, 0.5, 0.8, 1.2, 2.0)) * self.dice.uniform(0.7, 1.3)
        )

    # ---- faults: each does it, holds it, and ends it ----

    def agent_kill(self) -> None:
        node = self.dice.choice(cluster.NODES)
        self.group.agents[node].kill()
        self.ended.append((f"agent {node}", self.group.agents[node]))
        self.hold()
        self.group.agent_start(node)

    def agent_stop(self) -> None:
        self.pause(self.group.agents[self.dice.choice(cluster.NODES)].pid)

    def worker(self) -> int | None:
        node = self.dice.choice(cluster.NODES)
        children = self.group.agents[node].children()
        return self.dice.choice(children) if children else None

    def worker_kill(self) -> None:
        if pid := self.worker():
            self.signal(pid, signal.SIGKILL)

    def worker_stop(self) -> None:
        if pid := self.worker():
            self.pause(pid)

    def lead_kill(self) -> None:
        for load in self.loads:
            load.failures_allowed.set()
        assert self.group.lead
        self.group.lead.kill()
        self.ended.append(("lead", self.group.lead))
        self.hold()
        self.group.lead_start()
        self.group.lead_ready()
        time.sleep(0.2)  # calls that the dead lead has failed are over
        for load in self.loads:
            load.failures_allowed.clear()

    def lead_stop(self) -> None:
        assert self.group.lead
        self.pause(self.group.lead.pid)

    def server_kill(self) -> None:
        name = self.dice.choice(self.group.server_names)
        self.group.servers[name].kill()
        self.hold()
        self.group.server_start(name)

    def server_stop(self) -> None:
        self.pause(self.group.servers[self.dice.choice(self.group.server_names)].pid)

    def link(self) -> None:
        machine = self.dice.choice(list(self.group.machines))
        self.net(f"net_cut {machine}")
        self.hold()
        self.net(f"net_heal {machine}")

    def partition(self) -> None:
        machine = self.dice.choice(list(self.group.machines))
        self.net(f"net_partition_{self.dice.choice(('to', 'from'))} {machine}")
        self.hold()
        self.net(f"net_unpartition {machine}")

    def two(self) -> None:
        """Both nodes lose what they have at once, or a node and the server."""
        node = self.dice.choice(cluster.NODES)
        machine = self.dice.choice(list(self.group.machines))
        self.net(f"net_cut {machine}")
        self.group.agents[node].kill()
        self.ended.append((f"agent {node}", self.group.agents[node]))
        self.hold()
        self.group.agent_start(node)
        self.net(f"net_heal {machine}")

    # ---- what they share ----

    @staticmethod
    def signal(pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has been replaced meanwhile

    def pause(self, pid: int) -> None:
        self.signal(pid, signal.SIGSTOP)
        self.hold()
        self.signal(pid, signal.SIGCONT)

    def back(self, what: str) -> None:
        """Waits until a prompt that is asked now is answered."""
        begun = time.monotonic()
        prompt = self.dice.choice(sorted(self.texts))
        while True:
            client = self.group.generate([prompt], "--quiet")
            status = client.ended(faults.CALL_S)
            if status == 0:
                break
            if time.monotonic() - begun > GROUP_WAIT_S:
                raise Failed(f"after {what}: no answer: {Cluster.words(client, 0)}")
            time.sleep(0.05)
        if client.out != [self.texts[prompt]]:
            self.wrong.append(f"after {what}: {client.out} instead of {self.texts[prompt]!r}")
        ms = (time.monotonic() - begun) * 1e3
        self.back_ms.append(ms)
        if ms > BACK_S * 1e3:
            self.wrong.append(f"after {what}: an answer after {ms:.0f} ms")
        self.note(f"answered after {ms:.0f} ms")

    def check(self) -> None:
        """Nothing has ended that should live."""
        for node, agent in self.group.agents.items():
            if agent.status is not None:
                self.counts["agents that ended by themselves"] += 1
                self.ended.append((f"agent {node}", agent))
                self.wrong.append(
                    f"{self.history[-1]}: agent {node} has ended with status "
                    f"{agent.status}: {Cluster.words(agent, 0)[-300:]}"
                )
                self.group.agent_start(node)
        lead = self.group.lead
        assert lead
        if lead.status is not None:
            raise Failed(
                f"the lead has ended with status {lead.status}: "
                f"{' / '.join(line.text for line in lead.lines[-4:])}"
            )

    def run(self, minutes: float, kinds: dict[str, Callable[[], None]]) -> None:
        self.group.servers_start()
        self.group.group_start()
        for load in self.loads:
            load.start()
        end = self.begun + minutes * 60
        while time.monotonic() < end:
            what = self.dice.choice(sorted(kinds))
            self.counts[what] += 1
            self.note(what)
            kinds[what]()
            self.runs.read()
            self.check()
            self.back(what)
            self.runs.read()
            time.sleep(self.dice.uniform(0.05, 0.8))
            for load in self.loads:
                if load.hangs or load.wrong or load.errors:
                    raise Failed(f"a client after {what}")

    def finish(self) -> None:
        for load in self.loads:
            self.wrong += load.finish() if load.ident else []
        self.runs.read()
        self.wrong += self.runs.twice[:5]
        ended = self.ended + [(f"agent {node}", agent) for node, agent in self.group.agents.items()]
        if self.group.lead:
            ended.append(("lead", self.group.lead))
        self.ended = ended
        try:
            if left := self.group.group_stop():
                self.wrong.append(f"left: {left}")
        except Failed as why:
            self.wrong.append(f"at the end: {why}")
        for what, program in ended:
            self.wrong += [
                f"{what}: {line.text}" for line in program.lines if faults.BAD.search(line.text)
            ][:2]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000)
    parser.add_argument("--servers", type=int, choices=(1, 3), default=1)
    parser.add_argument("--faults", default="", help="only these, as in agent_kill,link")
    parser.add_argument("--json", type=pathlib.Path, help="the summary goes there, too")
    parser.add_argument(
        "--logs",
        type=pathlib.Path,
        default=pathlib.Path("/var/tmp/coxswain-soak"),
        help="if something was wrong (%(default)s)",
    )
    chosen = parser.parse_args()
    if why := cluster.missing():
        cluster.skip(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the machines are removed
    dice = random.Random(chosen.seed)
    prompts = sorted({f"{dice.randrange(100)}+{dice.randrange(100)}=" for _ in range(300)})
    print(f"seed {chosen.seed}", flush=True)
    with Cluster(chosen.build, chosen.servers) as group:
        texts = cluster.expected_texts(chosen.build, prompts, group.folder)
        soak = Soak(group, texts, chosen.seed)
        names = [
            name
            for name in (
                "agent_kill",
                "agent_stop",
                "worker_kill",
                "worker_stop",
                "lead_kill",
                "lead_stop",
                "server_kill",
                "server_stop",
                "link",
                "partition",
                "two",
            )
            if not chosen.faults or name in chosen.faults.split(",")
        ]
        try:
            soak.run(chosen.minutes, {name: getattr(soak, name) for name in names})
        except Failed as why:
            soak.wrong.append(str(why))
        soak.finish()
        if soak.wrong:
            chosen.logs.mkdir(parents=True, exist_ok=True)
            (chosen.logs / "history").write_text("\n".join(soak.history + soak.wrong) + "\n")
            for i, (what, program) in enumerate(soak.ended):
                (chosen.logs / f"{i:03}-{what.replace(' ', '-')}").write_text(
                    "".join(f"{line.at - soak.begun:9.3f} {line.text}\n" for line in program.lines)
                )
    back = sorted(soak.back_ms) or [0.0]
    summary = {
        "seed": chosen.seed,
        "minutes": round((time.monotonic() - soak.begun) / 60, 1),
        "faults": sum(soak.counts.values()),
        "kinds": dict(sorted(soak.counts.items())),
        "texts": sum(load.prompts for load in soak.loads),
        "calls": sum(load.calls for load in soak.loads),
        "calls_failed_without_lead": sum(load.failed_calls for load in soak.loads),
        "wrong_texts": sum(len(load.wrong) for load in soak.loads),
        "hangs": sum(len(load.hangs) for load in soak.loads),
        "slowest_call_s": round(max(load.slowest for load in soak.loads), 2),
        "back_ms": {
            "median": round(statistics.median(back)),
            "p99": round(back[min(len(back) - 1, int(len(back) * 0.99))]),
            "max": round(back[-1]),
        },
        "wrong": soak.wrong,
    }
    print(json.dumps(summary, indent=1))
    if chosen.json:
        chosen.json.write_text(json.dumps(summary) + "\n")
    if soak.wrong:
        print(f"seed {chosen.seed}; logs in {chosen.logs}; the last faults:")
        print("\n".join(soak.history[-12:]))
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
