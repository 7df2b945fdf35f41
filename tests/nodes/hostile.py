"""Nodes that lie, and machines that knock: hostile.py BUILD_DIR

A cluster of machines (cluster.py) in which a process with the certificate of node b says what
cannot be, while the lead waits and while it serves. The lead names it, keeps nothing of it, and
goes on: the honest agent of node b comes up, and so does the next group. Root only; under a
minute."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

from cluster import GROUP, HERE, Cluster, Failed, Program, missing, skip, until

# What is said, and what the lead says of it.
LIES = (
    (2**64 - 2, (), "its hello says that it follows epoch 18446744073709551614"),
    (0, (f"through={2**56}",), f"its hello says that it has requests up to {2**56}"),
    (0, (f"through={2**60}",), f"its hello says that it has requests up to {2**60}"),
    (0, (f"incarnation={2**60}",), f"incarnation {2**60} of the rank group"),
    (0, ("facts=65",), "its hello has 65 facts: at most 64 are taken"),
    (0, ("facts=50000",), "its hello has 50000 facts: at most 64 are taken"),
    (0, ("lead=x\ncoxswain: node a is dead",), "a byte 0x0a in its lead's address"),
    (0, ("version=1\x1b[2J",), "a byte 0x1b in its version"),
)


def lie(group: Cluster, version: str, epoch: int, *words: str, count: int = 1) -> None:
    machine = group.machines["b"]
    machine.environment["COXSWAIN_VERSION"] = version
    server = group.machines[group.server_names[0]].address
    liar = machine.start(
        "/usr/bin/python3", str(HERE / "hello.py"), GROUP, "b", str(group.certificates), server,
        f"{machine.address}:1", str(epoch), *words, f"count={count}",
    )  # fmt: skip
    if liar.ended(20):
        raise Failed(f"hello.py: {Cluster.words(liar, 0)}")


def says(program: Program, text: str) -> list[str]:
    return [line.text for line in list(program.lines) if text in line.text]


def answers(group: Cluster) -> None:
    program = group.generate(["27+58="], "--quiet")
    if program.ended(20) or program.out != ["27+58=85\n"]:
        raise Failed(f"generate: {program.out}, {Cluster.words(program, 0)}")


def numbers(group: Cluster, version: str) -> None:
    lead = group.lead_start()
    until("the lead waits", 20, lambda: says(lead, "node a has not come"))
    for epoch, words, text in LIES:
        lie(group, version, epoch, *words)
        until(
            f"the lead says: {text}",
            10,
            lambda text=text: says(lead, f"node b: {text}") or says(lead, text),
        )
    for line in list(lead.lines):
        if line.text.startswith("coxswain: node a is dead"):
            raise Failed("a node has written a line of its own into the lead's log")
    lie(group, version, 2**64 - 2, count=20000)
    until("what is too much is counted", 20, lambda: says(lead, " more like it in the last"))
    if len(lead.lines) > 60:
        raise Failed(f"20,000 hellos make {len(lead.lines)} lines")
    for node in ("a", "b"):
        group.agent_start(node)
    group.lead_ready()
    answers(group)
    # While the group serves; and at the limit of what is believed.
    lie(group, version, 2**64 - 2)
    lie(group, version, 0, f"through={2**60}")
    answers(group)
    agents = list(group.agents.values())
    left = group.group_stop()
    if left or any(agent.status != 0 for agent in agents):
        raise Failed(left or "an agent whose group was ended in order has another status than 0")
    print("a node that lies is named, and the group and its nodes come up all the same")
    # Numbers that are just believed.
    for through in (2**39 - 1, 2**40 - 1):
        lead = group.lead_start()
        group.agent_start("a")
        until("the lead waits", 20, lambda lead=lead: says(lead, "node b has not come"))
        lie(group, version, 0, f"through={through}")
        group.agent_start("b")
        group.lead_ready()
        answers(group)
        left = group.group_stop()
        if left:
            raise Failed(left)
    print("numbers at the limit of what is believed do no harm")


def direct_port(program: Program) -> str:
    """Where it listens for the other machines."""
    shown = subprocess.run(
        program.machine.inside(["ss", "-Hltnp"]), capture_output=True, text=True, check=True
    ).stdout
    ports = re.findall(rf"({re.escape(program.machine.address)}:\d+) .*pid={program.pid},", shown)
    if len(ports) != 1:
        raise Failed(f"process {program.pid} listens at {ports}: {shown}")
    return ports[0]


def announces(group: Cluster, to: Program, peer: str, text: str, *words: str) -> None:
    """Node b, by its certificate, announces a message; the process there says `text`."""
    knock = group.machines["b"].start(
        "/usr/bin/python3", str(HERE / "knock.py"), direct_port(to), str(group.certificates), "b",
        *words[:1], peer, *words[1:],
    )  # fmt: skip
    if knock.ended(20):
        raise Failed(f"knock.py: {Cluster.words(knock, 0)}")
    until(f"{peer} says: {text}", 10, lambda: says(to, text))


def refused(group: Cluster) -> int:
    metrics = group.command("metrics", "--name", GROUP)
    metrics.ended(10)
    found = re.findall(r"^coxswain_refused_connections_total (\d+)", "".join(metrics.out), re.M)
    return int(found[0])


def future(group: Cluster) -> None:
    a = group.agent_start("a")
    until("the agent waits", 20, lambda: says(a, "waits for its lead"))
    server = group.machines[group.server_names[0]].address
    false_lead = group.machines["d"].start(
        "/usr/bin/python3", str(HERE / "false_lead.py"), GROUP, "a", str(group.certificates),
        server, str(2**64 - 2),
    )  # fmt: skip
    if false_lead.ended(20):
        raise Failed(f"false_lead.py: {Cluster.words(false_lead, 0)}")
    text = "its epoch 18446744073709551614 is 4[0-9]* h ahead of the clock of this machine"
    until(
        "the agent says why it does not follow",
        10,
        lambda: any(re.search(text, line.text) for line in list(a.lines)),
    )
    group.agent_start("b")
    group.lead_start()
    group.lead_ready()
    answers(group)
    left = group.group_stop()
    if left:
        raise Failed(left)
    print("an agent follows no lead of the future, and the next lead all the same")


def connections(group: Cluster) -> None:
    for node in ("a", "b"):
        group.agent_start(node)
    lead = group.lead_start("--on-death", "restart,1000000/60")
    group.lead_ready()
    a = group.agents["a"]
    announces(
        group,
        lead,
        "lead",
        "a HELLO of 52428800 bytes: at most 1048576",
        GROUP,
        "1",
        str(96 + (50 << 20)),
        "5",
    )
    announces(group, lead, "lead", "may send no message of kind 3 here", GROUP, "3", "100")
    announces(group, a, "node-a", "may send no message of kind 3 here", GROUP, "3", str(2 << 30))
    announces(
        group,
        a,
        "node-a",
        "node-b of the group 'other' may send no message of kind 2 here",
        "other",
        "2",
        "100",
    )
    answers(group)
    print("messages that a node may not send are refused by their first bytes")
    if refused(group):
        raise Failed("a connection with a certificate counts as refused")
    # A machine without a certificate, at the lead and at the other agent, while one is replaced.
    knocks = []
    for to in (a, lead):  # the agent tells the lead how many it has refused
        before = refused(group)
        knocks.append(
            group.machines["d"].start(
                "/usr/bin/python3", str(HERE / "knock.py"), direct_port(to), "bare", "6"
            )
        )
        until("connections are refused", 10, lambda before=before: refused(group) > before + 200)
    group.agents["b"].kill()
    until("the lead names node b", 10, lambda: says(lead, "node b is dead"))
    group.agent_start("b")

    def right() -> bool:
        program = group.generate(["27+58="], "--quiet")
        return program.ended(20) == 0 and program.out == ["27+58=85\n"]

    until("the group answers with its new agent", 20, right)
    if any(knock.status is not None for knock in knocks):
        raise Failed("the machine without a certificate has ended before the agent was there")
    counts = [int("".join(knock.out)) for knock in knocks if knock.ended(20) == 0]
    for program in (lead, a):
        until(
            "they are counted",
            20,
            lambda program=program: says(program, " more like it in the last"),
        )
        lines = says(program, "direct connections: ")
        if len(lines) > 60:
            raise Failed(f"{counts} connections make these lines: {lines}")
    print("a machine without a certificate keeps no agent out, and is counted")
    left = group.group_stop()
    if left:
        raise Failed(left)


def main() -> int:
    build = pathlib.Path(sys.argv[1]).resolve()
    why = missing()
    if why:
        skip(why)
    version = subprocess.run(
        [str(build / "bin/coxswain"), "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    with Cluster(build) as group:
        group.servers_start()
        try:
            numbers(group, version)
            future(group)
            connections(group)
        except Failed:
            for program in (group.lead, *group.agents.values()):
                for line in program.lines if program else ():
                    print(f"  {line.text[:300]!r}", file=sys.stderr)
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
