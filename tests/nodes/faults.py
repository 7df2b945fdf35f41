#!/usr/bin/python3
"""Each fault of a group over two nodes, one after the other, under a client that never pauses.

Usage: faults.py BUILD_DIR [--only PATTERN] [--repeat N] [--json FILE] [--logs DIR]

Cases are named TARGET/FAULT, as in agent/kill; PATTERN is one of the shell. Each has a group of its
own: 2 nodes of 2 ranks, the lead on a machine of its own, one NATS server or three. Required:

  - the log of the lead, or the error of a process that is refused, names the node, the rank or the
    cluster within 1 s of the fault, where the fault is longer than a blip;
  - a prompt is answered rightly within 2 s of the heal: of the moment when the cause has ended, and
    what was killed is started again;
  - every text is that of a group on one machine, byte for byte; each call ends within 60 s;
  - no rank runs a request twice: by the flight recorders of the nodes;
  - after `coxswain stop`, no machine has a process or a file of the group;
  - nothing crashes.

Packet loss and delay are not among the faults: they need netem, which the kernels of the test
machines lack. Exit status: 0; 1: a requirement was missed; 77: not possible here.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable

import cluster
from cluster import Cluster, Failed, Program

NAMED_MS = 1000
REJOIN_MS = 2000
CALL_S = 60.0
# When a case is given up.
ANSWER_S = 15.0
# Longer than dead-after (0.8 s) and shorter than lead-grace (30 s).
HOLD_S = 1.5
PROMPTS = 40
ROW = "{:24} {:>6} {:>7} {:>6}  {:6} {}"
BAD = re.compile(
    r"SIGSEGV|SIGABRT|SIGBUS|SIGILL|signal 6|signal 11|[Aa]ssert|[Cc]orrupt|[Dd]iverge|Sanitizer"
)
LAST_RANK = 3
THE_RANK = re.compile(r"rank 3\b")
NODE_B = re.compile(r"node b\b|rank [23]\b")
CLUSTER = re.compile(r"the cluster|NATS|certificate|node [ab]\b")


class Runs:
    """Which request each rank has run, and when, by the flight recorders (recorder_layout.h)."""

    # (records, their size) of each channel: execute, link, transfer, recover
    RINGS = (2048, 64, 256, 64)
    HEAD, RECORD = 2048, 64

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.seen: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.twice: list[str] = []

    def read(self) -> None:
        for path in self.folder.glob("*/*.rank*.ring"):
            try:
                data = path.read_bytes()
            except OSError:
                continue  # its group has just ended
            if len(data) < self.HEAD or not (pid := struct.unpack_from("<Q", data, 32)[0]):
                continue
            self._rank(int(path.name.split(".rank")[1].split(".")[0]), pid, data)

    def _rank(self, rank: int, pid: int, data: bytes) -> None:
        offset = self.HEAD
        for channel, count in enumerate(self.RINGS):
            found = []
            for i in range(count):
                index, taken = struct.unpack_from("<QQ", data, offset + i * self.RECORD)
                if index and taken:
                    found.append((index, taken))
            offset += count * self.RECORD
            found.sort()
            for (index, taken), (other, later) in zip(found, found[1:], strict=False):
                if later < taken:
                    self.twice.append(f"rank {rank} took request {index} after {other}")
            for index, taken in found:
                before = self.seen.setdefault((rank, channel, index), (pid, taken))
                if before != (pid, taken):
                    self.twice.append(
                        f"rank {rank} took request {index} of channel {channel} twice: "
                        f"{before} and {(pid, taken)}"
                    )
                    self.seen[rank, channel, index] = (pid, taken)


class Load(threading.Thread):
    """A client that asks all the time: every text must be right. A call may fail without a lead."""

    def __init__(self, group: Cluster, texts: dict[str, str], seed: int, count: int = 8) -> None:
        super().__init__(daemon=True)
        self.group, self.texts, self.count = group, texts, count
        self.dice = random.Random(seed)
        self.stopping = threading.Event()
        self.failures_allowed = threading.Event()
        self.calls = self.prompts = 0
        self.failed_calls = 0
        self.slowest = 0.0
        self.wrong: list[str] = []
        self.hangs: list[str] = []
        self.errors: list[str] = []
        self.clients: list[Program] = []

    def run(self) -> None:
        while not self.stopping.is_set():
            try:
                self.call()
            except Exception as why:  # a thread that dies silently would count nothing
                self.errors.append(repr(why))
                return

    def call(self) -> None:
        prompts = self.dice.sample(sorted(self.texts), self.count)
        client = self.group.generate(prompts, "--quiet")
        self.clients.append(client)
        del self.clients[:-50]
        try:
            status = client.ended(CALL_S)
        except Failed as why:
            self.hangs.append(f"{why}: {prompts}")
            return
        self.calls += 1
        self.slowest = max(self.slowest, time.monotonic() - client.started)
        if status:
            self.failed_calls += 1
            if not self.failures_allowed.is_set():
                self.errors.append(f"status {status}: {Cluster.words(client, 0)}")
            self.stopping.wait(0.05)
        right = [self.texts[prompt] for prompt in prompts]
        # A call that fails has printed the prompts that were complete.
        rest = iter(right)
        if not all(line in rest for line in client.out) or (status == 0 and next(rest, None)):
            self.wrong.append(
                f"status {status}: {''.join(client.out)!r} instead of {''.join(right)!r}"
            )
        self.prompts += len(client.out)

    def finish(self) -> list[str]:
        self.stopping.set()
        self.join(CALL_S + 10)
        return [f"wrong text: {text}" for text in self.wrong[:3]] + [
            f"client: {text}" for text in (self.hangs + self.errors)[:3]
        ]


@dataclasses.dataclass
class Result:
    case: str
    said: str = ""
    named_ms: float | None = None
    named_wanted: bool = True
    answer_ms: float | None = None
    prompts: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)

    def row(self) -> str:
        def ms(value: float | None, wanted: bool) -> str:
            return (
                "-"
                if value is None and not wanted
                else "never"
                if value is None
                else f"{value:.0f}"
            )

        named, answer = ms(self.named_ms, self.named_wanted), ms(self.answer_ms, True)
        state = "FAILED" if self.wrong else "ok"
        return ROW.format(self.case, named, answer, self.prompts, state, self.said[:110])


class Trial:
    """One case, while it runs: the group, and when the fault came and went."""

    def __init__(self, group: Cluster, texts: dict[str, str], result: Result) -> None:
        self.group, self.texts, self.result = group, texts, result
        self.fault_at = self.heal_at = 0.0
        self.logs: list[Program] = []
        self.runs = Runs(group.folder / "crash")
        self.load = Load(group, texts, 1)
        assert group.lead
        self.lead = group.lead

    @property
    def agent(self) -> Program:
        return self.group.agents["b"]

    def net(self, line: str) -> None:
        assert self.group.network
        self.group.network.call(line)

    def fault(self) -> None:
        self.fault_at = time.monotonic()

    def heal(self) -> None:
        self.heal_at = time.monotonic()

    def await_named(
        self, pattern: re.Pattern[str], *programs: Program, seconds: float = HOLD_S
    ) -> None:
        """Waits so long in any case; notes the first line after the fault that has the pattern."""
        end = self.fault_at + seconds
        while True:
            for program in (*programs, *self.load.clients):
                for line in program.since(self.fault_at):
                    ms = (line.at - self.fault_at) * 1e3
                    if pattern.search(line.text) and (
                        self.result.named_ms is None or ms < self.result.named_ms
                    ):
                        self.result.named_ms, self.result.said = ms, line.text
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, 0.02))

    def answer(self) -> None:
        """A prompt that is asked after the heal: in how many ms the right answer is there."""
        prompt = next(iter(self.texts))
        end = self.heal_at + ANSWER_S
        client = None
        while time.monotonic() < end:
            client = self.group.generate([prompt], "--quiet")
            if client.ended(ANSWER_S) == 0:
                if client.out != [self.texts[prompt]]:
                    self.result.wrong.append(f"wrong text after the heal: {client.out}")
                self.result.answer_ms = (time.monotonic() - self.heal_at) * 1e3
                return
            time.sleep(0.02)
        if client:
            self.result.wrong.append(f"no answer after the heal: {Cluster.words(client, 0)}")


# ---- the cases ----

Case = Callable[[Trial], None]
CASES: dict[str, tuple[Case, int]] = {}


def case(name: str, servers: int = 1) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[name] = (function, servers)
        return function

    return add


@case("agent/kill")
def agent_kill(trial: Trial) -> None:
    trial.fault()
    trial.agent.kill()
    trial.await_named(NODE_B, trial.lead, seconds=0.5)
    trial.heal()
    trial.group.agent_start("b")


@case("agent/stop")
def agent_stop(trial: Trial) -> None:
    trial.fault()
    trial.agent.send(signal.SIGSTOP)
    trial.await_named(NODE_B, trial.lead)
    trial.heal()
    trial.agent.send(signal.SIGCONT)


def signal_rank(trial: Trial, number: int) -> int:
    """To the process of the last rank, on node b. Returns its id."""
    pid = trial.group.rank_pids()[LAST_RANK]
    os.kill(pid, number)
    return pid


@case("worker/kill")
def worker_kill(trial: Trial) -> None:
    trial.fault()
    signal_rank(trial, signal.SIGKILL)
    trial.heal()  # nobody starts it again but the group
    trial.answer()
    trial.await_named(THE_RANK, trial.lead, seconds=1.0)


@case("worker/stop")
def worker_stop(trial: Trial) -> None:
    trial.fault()
    pid = signal_rank(trial, signal.SIGSTOP)
    named = status_names(trial, LAST_RANK)
    trial.await_named(THE_RANK, trial.lead)
    if named and (trial.result.named_ms is None or named[0] < trial.result.named_ms):
        trial.result.named_ms, trial.result.said = named
    trial.heal()
    os.kill(pid, signal.SIGCONT)


def status_names(trial: Trial, rank: int) -> tuple[float, str] | None:
    """What `coxswain status` says of a rank that does not run, as soon as it does."""
    while time.monotonic() < trial.fault_at + HOLD_S:
        command = trial.group.command("status", "--name", cluster.GROUP, "--json")
        command.ended(CALL_S)
        ranks = json.loads("".join(command.out))["ranks"]
        if ranks[rank]["stopped"] or ranks[rank]["liveness"] != "alive":
            return (time.monotonic() - trial.fault_at) * 1e3, f"(status) rank {rank} is stopped"
        time.sleep(0.02)
    return None


@case("lead/kill")
def lead_kill(trial: Trial) -> None:
    trial.load.failures_allowed.set()
    trial.fault()
    trial.lead.kill()
    trial.await_named(
        re.compile(r"group|coordinator|lead"), *trial.group.agents.values(), seconds=1.0
    )
    trial.heal()
    lead_again(trial)


def lead_again(trial: Trial) -> None:
    trial.lead = trial.group.lead_start()
    trial.group.lead_ready()


@case("lead/stop")
def lead_stop(trial: Trial) -> None:
    trial.fault()
    trial.lead.send(signal.SIGSTOP)
    trial.await_named(re.compile(r"the lead has not been heard"), *trial.group.agents.values())
    trial.heal()
    trial.lead.send(signal.SIGCONT)


def network_fault(target: str, machine: str, fault: str) -> Case:
    """A fault of the network of a machine; "": the server that the lead is connected with."""
    ways = {
        "link": ("net_cut {0}", "net_heal {0}"),
        "partition-to": ("net_partition_to {0}", "net_unpartition {0}"),
        "partition-from": ("net_partition_from {0}", "net_unpartition {0}"),
    }

    def run(trial: Trial) -> None:
        where = machine or trial.group.server_of(cluster.LEAD)
        trial.fault()
        if fault == "blip":
            trial.net(f"net_blip {where} 150")
            trial.heal()
            trial.result.named_wanted = False
            return
        trial.net(ways[fault][0].format(where))
        trial.await_named(NODE_B if target == "agent" else CLUSTER, trial.lead)
        trial.heal()
        trial.net(ways[fault][1].format(where))

    return run


for _target, _machine, _servers in (
    ("agent", "b", 1),
    ("lead", cluster.LEAD, 1),
    ("server", "d", 1),
    ("one-of-three", "", 3),
):
    for _fault in ("link", "partition-to", "partition-from", "blip"):
        CASES[f"{_target}/{_fault}"] = (network_fault(_target, _machine, _fault), _servers)


def server_kill(trial: Trial) -> None:
    name = trial.group.server_of(cluster.LEAD)
    trial.fault()
    trial.group.servers[name].kill()
    trial.await_named(CLUSTER, trial.lead)
    trial.heal()
    trial.group.server_start(name)


def server_stop(trial: Trial) -> None:
    server = trial.group.servers[trial.group.server_of(cluster.LEAD)]
    trial.fault()
    server.send(signal.SIGSTOP)
    trial.await_named(CLUSTER, trial.lead)
    trial.heal()
    server.send(signal.SIGCONT)


def server_gone(trial: Trial) -> None:
    """With two servers left the group needs no heal: the answer counts from the fault."""
    name = trial.group.server_of(cluster.LEAD)
    trial.fault()
    trial.heal()
    trial.group.servers[name].kill()
    trial.answer()
    trial.await_named(CLUSTER, trial.lead)
    trial.group.server_start(name)


CASES["server/kill"] = (server_kill, 1)
CASES["server/stop"] = (server_stop, 1)
CASES["one-of-three/kill"] = (server_gone, 3)
CASES["one-of-three/stop"] = (server_stop, 3)


# ---- disks ----


def ended_or(program: Program, seconds: float) -> None:
    """Waits until the process ends by itself, for so long at most; then it is killed."""
    try:
        program.ended(seconds)
    except Failed:
        pass


def agent_on_full(folder: str | None) -> Case:
    """The agent starts on a machine whose /dev/shm, or runtime dir (None), is full."""

    def run(trial: Trial) -> None:
        machine = trial.group.machines["b"]
        trial.agent.kill()
        cluster.until("the ranks of the killed agent are gone", 2, lambda: not machine.processes())
        machine.fill(folder or str(machine.run))
        trial.fault()
        agent = trial.group.agent_start("b")
        trial.await_named(
            re.compile(r"[Nn]o space|full|ENOSPC|0 are free"), trial.lead, agent, seconds=1.5
        )
        trial.result.named_wanted = folder is not None  # sockets need no bytes
        machine.empty()
        trial.heal()
        if agent.status is not None:
            trial.group.agent_start("b")

    return run


CASES["agent/shm-full"] = (agent_on_full("/dev/shm"), 1)
CASES["agent/run-full"] = (agent_on_full(None), 1)


@case("worker/shm-full")
def worker_on_full(trial: Trial) -> None:
    machine = trial.group.machines["b"]
    machine.fill("/dev/shm")
    trial.fault()
    signal_rank(trial, signal.SIGKILL)
    trial.await_named(NODE_B, trial.lead)
    trial.heal()
    machine.empty()


def log_full(who: str) -> Case:
    """The disk of a log, and of crash files, is full, and a rank dies: work goes on."""

    def run(trial: Trial) -> None:
        machine = trial.group.machines["b" if who == "agent" else cluster.LEAD]
        log = machine.path(f"/tmp/{who}.log")
        trial.load.failures_allowed.set()
        if who == "agent":
            trial.agent.kill()
            trial.group.agent_start("b", log=log)
        else:
            trial.lead.kill()
            trial.lead = trial.group.lead_start("--crash-dir", "/tmp/crash", log=log)
            trial.group.lead_ready()
        trial.heal()
        trial.answer()
        trial.load.failures_allowed.clear()
        machine.fill("/tmp")
        trial.fault()
        signal_rank(trial, signal.SIGKILL)
        trial.heal()
        trial.answer()
        trial.result.named_wanted = who == "agent"
        trial.await_named(NODE_B, trial.lead, seconds=1.0)
        machine.empty()
        log.unlink()

    return run


CASES["agent/log-full"] = (log_full("agent"), 1)
CASES["lead/log-full"] = (log_full("lead"), 1)


@case("server/log-full")
def server_on_full(trial: Trial) -> None:
    """The server starts anew with a log on a full disk, and a rank dies: work goes on."""
    name = trial.group.server_names[0]
    machine = trial.group.machines[name]
    log = machine.path("/tmp/nats.log")
    machine.fill("/tmp")
    trial.fault()
    trial.group.servers[name].kill()
    trial.group.server_start(name, log="/tmp/nats.log")
    trial.heal()
    trial.answer()
    trial.load.failures_allowed.clear()
    signal_rank(trial, signal.SIGKILL)
    trial.answer()
    trial.await_named(NODE_B, trial.lead, seconds=1.0)
    machine.empty()
    log.unlink()


# ---- certificates ----


def bad_certificate(target: str, kind: str) -> Case:
    """The process is killed, comes back with a certificate that is refused, then with its own."""

    def run(trial: Trial) -> None:
        group = trial.group
        who = None
        if kind == "other-node":
            folder, who = group.certificates, "node-a"
        else:
            folder = group.folder / f"certificates-{kind}"
        names = re.compile(r"certificate|refuse|ermission|uthori")
        if target == "agent":
            trial.agent.kill()
            trial.fault()
            wrong = group.agent_start("b", folder, who)
            trial.await_named(names, wrong, trial.lead)
            ended_or(wrong, 0.1)
            trial.heal()
            group.agent_start("b")
        elif target == "lead":
            trial.load.failures_allowed.set()
            trial.lead.kill()
            trial.fault()
            wrong = group.lead_start(certificates=folder, who=who)
            trial.await_named(names, wrong)
            ended_or(wrong, 0.1)
            trial.heal()
            lead_again(trial)
        else:
            group.servers["d"].kill()
            trial.fault()
            wrong = group.server_start("d", folder)
            trial.await_named(CLUSTER, trial.lead)
            wrong.kill()
            trial.heal()
            group.server_start("d")

    return run


for _target in ("agent", "lead", "server"):
    for _kind in ("wrong", "expired") + (("other-node",) if _target != "server" else ()):
        CASES[f"{_target}/cert-{_kind}"] = (bad_certificate(_target, _kind), 1)


# ---- running them ----


def certificates_make(group: Cluster) -> None:
    group.make_certificates("certificates-wrong")  # of another CA
    expired = group.folder / "certificates-expired"
    expired.mkdir()
    for name in ("ca.pem", "ca-key.pem"):
        shutil.copy(group.certificates / name, expired / name)
    group.make_certificates("certificates-expired", "--not-after", "20240101000000Z")


def run_case(
    group: Cluster, texts: dict[str, str], name: str, function: Case, logs: pathlib.Path
) -> Result:
    result = Result(name)
    trial = None
    try:
        group.servers_start()
        group.group_start()
        trial = Trial(group, texts, result)
        trial.load.start()
        cluster.until(
            "the client is answered",
            20,
            lambda: trial and (trial.load.calls > 1 or trial.load.errors),
        )
        trial.runs.read()
        function(trial)
        trial.runs.read()
        if result.answer_ms is None:
            trial.answer()
        trial.runs.read()
    except Failed as why:
        result.wrong.append(str(why))
    if trial:
        result.wrong += trial.load.finish()
        result.prompts = trial.load.prompts
        trial.runs.read()
        result.wrong += trial.runs.twice[:3]
    programs = {
        **{f"agent {node}": agent for node, agent in group.agents.items()},
        "lead": group.lead,
    }
    for what, program in programs.items():
        if program and program.status not in (None, 0):
            result.wrong.append(
                f"the {what} has ended with status {program.status}: "
                f"{Cluster.words(program, 0)[-300:]}"
            )
    left = group.group_stop()
    if left:
        result.wrong.append(f"left: {left}")
    if result.named_wanted and (result.named_ms is None or result.named_ms > NAMED_MS):
        result.wrong.append("not named in time")
    if result.answer_ms is None or result.answer_ms > REJOIN_MS:
        result.wrong.append("no right answer in time")
    everything = {
        **{f"server {server}": program for server, program in group.servers.items()},
        **programs,
    }
    for what, program in everything.items():
        if program:
            result.wrong += [
                f"{what}: {line.text}" for line in program.lines if BAD.search(line.text)
            ][:3]
    if result.wrong:
        folder = logs / name.replace("/", "-")
        folder.mkdir(parents=True, exist_ok=True)
        zero = trial.fault_at if trial else 0
        for what, program in everything.items():
            if program:
                (folder / what.replace(" ", "-")).write_text(
                    "".join(f"{line.at - zero:9.3f} {line.text}\n" for line in program.lines)
                )
        (folder / "wrong").write_text("".join(text + "\n" for text in result.wrong))
    group.clean()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases, as in 'agent/*'")
    parser.add_argument("--repeat", type=int, default=1, help="of each case")
    parser.add_argument("--json", type=pathlib.Path, help="results go there, too")
    parser.add_argument(
        "--logs",
        type=pathlib.Path,
        default=pathlib.Path("/var/tmp/coxswain-faults"),
        help="of the cases that failed (%(default)s)",
    )
    chosen = parser.parse_args()
    if why := cluster.missing():
        cluster.skip(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the machines are removed
    dice = random.Random(1)
    prompts = sorted({f"{dice.randrange(100)}+{dice.randrange(100)}=" for _ in range(PROMPTS)})
    results: list[Result] = []
    print(ROW.format("fault", "named", "answer", "texts", "", "said first"), flush=True)
    begun = time.monotonic()
    for servers in (1, 3):
        cases = {
            name: function
            for name, (function, count) in sorted(CASES.items())
            if count == servers and fnmatch.fnmatch(name, chosen.only)
        }
        if not cases:
            continue
        with Cluster(chosen.build, servers) as group:
            certificates_make(group)
            texts = cluster.expected_texts(chosen.build, prompts, group.folder)
            for _ in range(chosen.repeat):
                for name, function in cases.items():
                    results.append(run_case(group, texts, name, function, chosen.logs))
                    print(results[-1].row(), flush=True)
                    for text in results[-1].wrong:
                        print("    " + text[:400], flush=True)
    named = sorted(result.named_ms for result in results if result.named_ms is not None)
    answers = sorted(result.answer_ms for result in results if result.answer_ms is not None)
    failed = [result.case for result in results if result.wrong]
    for what, values in (("named", named), ("answer", answers)):
        if values:
            p99 = values[min(len(values) - 1, int(len(values) * 0.99))]
            median = values[len(values) // 2]
            print(f"{what}: median {median:.0f} ms, p99 {p99:.0f} ms, of {len(values)}")
    print("skipped: packet loss and delay, since this kernel has no netem")
    texts_count = sum(result.prompts for result in results)
    seconds = time.monotonic() - begun
    where = f"; logs in {chosen.logs}: {', '.join(failed)}" if failed else ""
    print(
        f"{len(results)} cases, {len(failed)} failed, {texts_count} texts, {seconds:.0f} s{where}"
    )
    if chosen.json:
        chosen.json.write_text(
            json.dumps([dataclasses.asdict(result) for result in results], indent=1) + "\n"
        )
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
