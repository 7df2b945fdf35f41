#!/usr/bin/python3
"""Steps and bulk between a lead and nodes, by several transports, each process in a namespace.

Called by run.sh, which makes the network. A cell is a mode and a number of nodes. A round measures
every cell by every transport, one right after the other, so that a slow moment of the machine hits
all; the tables have medians over the rounds, of figures and of ratios within a round.
"""

import argparse
import collections
import json
import os
import pathlib
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from operator import itemgetter

NODES_MAX = 8
PATIENCE_S = 60
# As network.sh names them.
MACHINES = [*"abcdefghijklmnopqrstuvwxyz", *("a" + letter for letter in "abcdefgh")]
CERTIFICATES = pathlib.Path(__file__).parents[3] / "packaging/nats/coxswain-certificates"
BASELINE = "nats"
SIDES = ("lead_us", "nodes_us", "server_us")

# A program has the roles and options of peer.c, and prints one line of JSON in that of the lead.
# `server` is whether a nats-server runs beside it; `needs` are Debian packages.
Subject = collections.namedtuple("Subject", "name program variant modes server needs")
SUBJECTS = [
    Subject("tcp", "nodes-bench-tcp", "", ("full", "paced", "bulk"), False, ""),
    Subject("tls", "nodes-bench-tls", "", ("bulk", "pull"), False, "libssl-dev"),
    Subject("zmq", "nodes-bench-zmq", "", ("full", "paced"), False, "libzmq3-dev"),
    Subject(
        "grpc",
        "nodes-bench-grpc",
        "",
        ("full", "paced"),
        False,
        "libgrpc++-dev protobuf-compiler-grpc",
    ),
    Subject("nats", "nodes-bench-nats", "", ("full", "paced"), True, "libnats-dev nats-server"),
    Subject(
        "nats-flusher",
        "nodes-bench-nats",
        "flusher",
        ("full", "paced"),
        True,
        "libnats-dev nats-server",
    ),
    Subject(
        "coxswain",
        "nodes-bench-coxswain",
        "",
        ("full", "paced", "bulk", "pull"),
        True,
        "libnats-dev libssl-dev libjansson-dev nats-server",
    ),
    Subject(
        "coxswain-collect",
        "nodes-bench-coxswain",
        "collect",
        ("full", "paced"),
        True,
        "libnats-dev libssl-dev libjansson-dev nats-server",
    ),
    Subject(
        "coxswain-step",
        "nodes-bench-coxswain",
        "step",
        ("full", "paced"),
        True,
        "libnats-dev libssl-dev libjansson-dev nats-server",
    ),
]
LABELS = {
    "tcp": "raw TCP",
    "tls": "raw TLS 1.3",
    "zmq": "ZeroMQ CURVE",
    "grpc": "gRPC mTLS",
    "nats": "NATS mTLS",
    "nats-flusher": "NATS mTLS, no SendAsap",
    "coxswain": "Coxswain",
    "coxswain-collect": "Coxswain, collected",
    "coxswain-step": "Coxswain, 16 sequences",
}


def numbers(text):
    return [int(word) for word in text.split(",")]


def options():
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="of the programs")
    parser.add_argument("--network", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--subnet", required=True, help=argparse.SUPPRESS)
    parser.add_argument(
        "--subjects",
        default=",".join(s.name for s in SUBJECTS),
        metavar="LIST",
        help="of %(default)s (all)",
    )
    parser.add_argument(
        "--modes", default="full,paced,bulk,pull", metavar="LIST", help="of %(default)s (all)"
    )
    parser.add_argument(
        "--nodes",
        type=numbers,
        default=[1, 2, 4, 8],
        metavar="LIST",
        help="numbers of nodes, up to %d (1,2,4,8)" % NODES_MAX,
    )
    parser.add_argument("--request", default=1280, type=int, help="bytes to a node (%(default)s)")
    parser.add_argument("--reply", default=1024, type=int, help="bytes back (%(default)s)")
    parser.add_argument("--rounds", default=5, type=int, help="(%(default)s)")
    parser.add_argument(
        "--ms",
        default=1000,
        type=int,
        help="of a cell; paced ones take twice as long (%(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one short round in under a minute; the figures mean little",
    )
    parser.add_argument("--json", type=pathlib.Path, help="also writes every line to this file")
    chosen = parser.parse_args()
    for given, known in (
        (chosen.subjects, [subject.name for subject in SUBJECTS]),
        (chosen.modes, ["full", "paced", "bulk", "pull"]),
    ):
        for word in given.split(","):
            if word not in known:
                parser.error("what is '%s'? There are %s" % (word, ", ".join(known)))
    if not all(1 <= count <= NODES_MAX for count in chosen.nodes):
        parser.error("--nodes: from 1 to %d" % NODES_MAX)
    if chosen.quick:
        chosen.rounds, chosen.ms = 1, 200
    return chosen


def why_missing(subject, folder):
    """Why a subject cannot be measured here, or None."""
    if not (folder / subject.program).exists():
        needs = ": needs " + subject.needs if subject.needs else ""
        return "%s was not built%s" % (subject.program, needs)
    if subject.server and not nats_server():
        return "there is no nats-server: needs " + subject.needs
    return None


def nats_server():
    for path in ("/usr/sbin/nats-server", "/usr/bin/nats-server", "/usr/local/bin/nats-server"):
        if pathlib.Path(path).exists():
            return path
    return None


class Network:
    """Who is where, with which keys."""

    def __init__(self, chosen, keys, nodes_max=NODES_MAX):
        self.chosen, self.keys = chosen, keys
        self.lead, self.server, *self.nodes = (
            "%s.%d" % (chosen.subnet, i + 1) for i in range(len(MACHINES))
        )
        made = subprocess.run(
            [CERTIFICATES, keys, "--server", self.server, "--days", "2"]
            + [word for i in range(nodes_max) for word in ("--node", str(i))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if made.returncode:
            sys.exit("coxswain-certificates: " + made.stdout.decode())
        zmq = chosen.folder / "nodes-bench-zmq"
        if zmq.exists():
            subprocess.run([zmq, "keys", keys, str(nodes_max)], check=True)

    def spawn(self, machine, command, **streams):
        # nsenter becomes the command: its process id is the command's.
        path = "/run/netns/%s-%s" % (self.chosen.network, MACHINES[machine])
        return subprocess.Popen(["nsenter", "--net=" + path, "--", *map(str, command)], **streams)

    def start(self, subject, mode, count, errors, processes, words):
        """Starts the processes of a cell and lists them, the lead last. words: further options of the lead."""
        chosen = self.chosen
        program = chosen.folder.resolve() / subject.program
        if mode == "pull" and subject.name == "coxswain":
            count = 2
        common = [
            "--lead",
            self.lead,
            "--server",
            self.server,
            "--folder",
            self.keys,
            "--nodes",
            ",".join(self.nodes[:count]),
            "--mode",
            mode,
            "--request",
            chosen.request,
            "--reply",
            chosen.reply,
        ]
        if subject.variant:
            common += ["--variant", subject.variant]
        if subject.server:
            command = [nats_server(), "-c", self.keys / "coxswain-nats.conf"]
            processes.append(self.spawn(1, command, stderr=subprocess.DEVNULL))
            common += ["--server-pids", processes[0].pid]
        pids = []
        for i in range(count):
            node = self.spawn(2 + i, [program, "node", *common, "--index", i], stderr=errors)
            processes.append(node)
            pids.append(str(node.pid))
        command = [
            program,
            "lead",
            *common,
            "--node-pids",
            ",".join(pids),
            "--ms",
            chosen.ms * (2 if mode == "paced" else 1),
            *words,
        ]
        processes.append(self.spawn(0, command, stdout=subprocess.PIPE, stderr=errors))

    def measure(self, subject, mode, count, *words):
        """The line of one cell. Raises RuntimeError with what the processes wrote."""
        processes = []
        with open(self.keys / "errors", "w+", encoding="utf-8") as errors:
            try:
                self.start(subject, mode, count, errors, processes, words)
                await_lead(processes, PATIENCE_S + self.chosen.ms / 500)
                # Not what they write about their end.
                said = (self.keys / "errors").read_text(encoding="utf-8")
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            with processes[-1].stdout as output:
                line = output.read()
            if not line:
                raise RuntimeError("; ".join(said.splitlines()[-3:]) or "no result")
        return json.loads(line)


def await_lead(processes, patience_s):
    """Returns when the lead has ended, when it has not in time, or soon after another one has."""
    lead = processes[-1]
    fds = {os.pidfd_open(process.pid): process for process in processes}
    try:
        ended = select.select(fds, [], [], patience_s)[0]
        # Nodes end when the lead closes their connections.
        if ended and lead not in [fds[fd] for fd in ended]:
            lead.wait(timeout=1)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for fd in fds:
            os.close(fd)


def cells(chosen):
    for mode in chosen.modes.split(","):
        for count in [1] if mode in ("bulk", "pull") else chosen.nodes:
            yield mode, count


def measure_all(network, subjects):
    """Lists of lines by (subject, mode, nodes), one a round; None where a cell failed."""
    found = collections.defaultdict(list)
    for _ in range(network.chosen.rounds):
        for mode, count in cells(network.chosen):
            for subject in subjects:
                if mode not in subject.modes:
                    continue
                try:
                    line = network.measure(subject, mode, count)
                except RuntimeError as error:
                    line = None
                    print(
                        "%s, %d nodes, %s: %s" % (subject.name, count, mode, error), file=sys.stderr
                    )
                found[subject.name, mode, count].append(line)
    return found


def median(lines, figure):
    values = [figure(line) for line in lines if line]
    return statistics.median(values) if values else None


def ratio(lines, base, figure):
    pairs = [
        figure(a) / figure(b) for a, b in zip(lines, base, strict=False) if a and b and figure(b)
    ]
    return statistics.median(pairs) if pairs else None


def cpu_us(line):
    return sum(line[side] for side in SIDES)


def text(form, *values):
    return "-" if None in values else form % values


def print_table(title, subjects, columns, cell):
    print("\n" + title)
    print("%-24s" % "" + "".join("%18s" % column for column in columns))
    for name in subjects:
        print(
            "%-24s" % LABELS.get(name, name)
            + "".join("%18s" % cell(name, column) for column in columns)
        )


def print_steps(found, mode, subjects, counts):
    def lines(name, column):
        return found[name, mode, int(column[2:])]

    def table(title, cell):
        print_table(title, subjects, ["K=%d" % count for count in counts], cell)

    def with_ratio(form, figure):
        return lambda name, k: (
            text(form, median(lines(name, k), figure))
            + "%7s" % text("%.2f", ratio(lines(name, k), lines(BASELINE, k), figure))
        )

    how = "back to back" if mode == "full" else "one step every 10 ms"
    table(
        "%s: p50/p99 of a step, us" % how,
        lambda name, k: text(
            "%.0f/%.0f",
            median(lines(name, k), itemgetter("p50_us")),
            median(lines(name, k), itemgetter("p99_us")),
        ),
    )
    table(
        "%s: p50 beside that of %s" % (how, LABELS[BASELINE]),
        lambda name, k: text(
            "%.2f", ratio(lines(name, k), lines(BASELINE, k), itemgetter("p50_us"))
        ),
    )
    if mode == "full":
        table(
            "%s: steps a second, and beside %s" % (how, LABELS[BASELINE]),
            with_ratio("%.0f", itemgetter("steps_s")),
        )
    table("%s: CPU us a step, and beside %s" % (how, LABELS[BASELINE]), with_ratio("%.0f", cpu_us))
    table(
        "%s: CPU us a step of lead + nodes + server" % how,
        lambda name, k: text(
            "%.0f+%.0f+%.0f", *(median(lines(name, k), itemgetter(side)) for side in SIDES)
        ),
    )
    table(
        "%s: bytes a step on the lead's wire, both ways" % how,
        lambda name, k: text("%.0f", median(lines(name, k), itemgetter("wire_bytes"))),
    )


def print_bulk(found, mode, subjects):
    def cell(name, column):
        lines = found[name, mode, 1]
        if column == "ratio":
            return text("%.2f", ratio(lines, found["tls", mode, 1], itemgetter("gb_s")))
        return text("%.2f", median(lines, itemgetter(column)))

    print_table(
        "%s: GB/s, CPU s/GB of both, and GB/s beside %s"
        % (
            "bulk, 64 MiB to one node, acknowledged, in calls of 1 MiB (Coxswain: one request)"
            if mode == "bulk"
            else "pull, 64 KV blocks of 1 MiB (TLS: as many bytes, in calls of 1 MiB)",
            LABELS["tls"],
        ),
        subjects,
        ["gb_s", "cpu_s_gb", "ratio"],
        cell,
    )


def main():
    chosen = options()
    subjects = []
    for subject in SUBJECTS:
        reason = why_missing(subject, chosen.folder)
        if subject.name not in chosen.subjects.split(","):
            continue
        if reason:
            print("%s is not measured: %s" % (LABELS.get(subject.name, subject.name), reason))
        else:
            subjects.append(subject)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-nodes-") as keys:
        found = measure_all(Network(chosen, pathlib.Path(keys)), subjects)
    print(
        "%d bytes to each of K nodes, %d back from each; medians of %d rounds; %.0f s"
        % (chosen.request, chosen.reply, chosen.rounds, time.monotonic() - start)
    )
    for mode in chosen.modes.split(","):
        names = [subject.name for subject in subjects if mode in subject.modes]
        if mode in ("bulk", "pull"):
            print_bulk(found, mode, names)
        else:
            print_steps(found, mode, names, chosen.nodes)
    lines = [line for of_cell in list(found.values()) for line in of_cell]
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            for line in filter(None, lines):
                file.write(json.dumps(line) + "\n")
    return 1 if None in lines else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
