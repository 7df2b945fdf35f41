"""A cluster of machines on one, for faults.py and soak.py: what cluster.sh is for shell scripts.

Root only. Each machine is a network namespace of network.sh, and a mount namespace with a /dev/shm,
a /tmp and a runtime directory of its own. Machines a and b are the nodes, c is that of the lead and
of its clients, and d, or d, e and f, are those of the NATS servers. A shell has the network: when
this process dies, however that is, it removes the namespaces and kills all processes in them.
"""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, Any

HERE = pathlib.Path(__file__).resolve().parent
CERTIFICATES = HERE.parents[1] / "packaging/nats/coxswain-certificates"
GROUP = "big"
NODES = ("a", "b")
LEAD = "c"
SERVERS = ("d", "e", "f")
RANKS_HERE = 2
START_S = 30.0
# Bytes of the /dev/shm of a machine: a group of two ranks fits many times.
SHM_SIZE = 512 << 20


class Failed(Exception):
    """What was awaited did not happen."""


def missing() -> str:
    """Why there can be no cluster here; "": there can be one."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("nats-server", "ebtables", "ip", "nsenter", "openssl"):
        if not shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin"):
            return f"needs {program}"
    return ""


def until(what: str, seconds: float, happened: Callable[[], Any]) -> Any:
    """Returns what `happened` returns, as soon as that is true; Failed after so many seconds."""
    end = time.monotonic() + seconds
    while not (value := happened()):
        if time.monotonic() > end:
            raise Failed(f"{what}: not after {seconds:g} s")
        time.sleep(0.005)
    return value


class Network:
    """The functions of network.sh, in a shell of its own."""

    def __init__(self, count: int) -> None:
        script = (
            f". {shlex.quote(str(HERE / 'network.sh'))}; trap net_down EXIT; "
            "trap 'exit 1' HUP INT TERM; "
            'while read -r net_line; do eval "$net_line" >&2; echo $?; done'
        )
        self.shell = subprocess.Popen(
            ["sh", "-c", script, str(HERE / "cluster.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the shell
        )
        self.prefix = f"cox-{self.shell.pid}"
        self.subnet = f"10.77.{self.shell.pid % 254 + 1}"
        self.call(f"net_up {count}")

    def call(self, line: str) -> None:
        assert self.shell.stdin and self.shell.stdout
        self.shell.stdin.write(line + "\n")
        self.shell.stdin.flush()
        answer = self.shell.stdout.readline().strip()
        if answer != "0":
            raise Failed(f"network.sh: {line}: exit status {answer or 'none'}")

    def address(self, machine: str) -> str:
        return f"{self.subnet}.{ord(machine) - ord('a') + 1}"

    def close(self) -> None:
        assert self.shell.stdin
        self.shell.stdin.close()
        if self.shell.wait(30):
            raise Failed("network.sh could not remove the network")


class Line:
    """A line that a process wrote, and when."""

    def __init__(self, text: str) -> None:
        self.at = time.monotonic()
        self.text = text


class Program:
    """A process on a machine; its output is kept, line by line."""

    def __init__(
        self, machine: Machine, arguments: Sequence[str], log: pathlib.Path | None = None
    ) -> None:
        self.machine = machine
        self.arguments = list(arguments)
        self.lines: list[Line] = []
        self.out: list[str] = []
        self.started = time.monotonic()
        self.log: IO[bytes] | None = log.open("ab") if log else None
        self.process = subprocess.Popen(
            machine.inside(arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log or subprocess.PIPE,
            env=machine.environment,
            text=True,
            errors="replace",
        )
        self.readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, True), (self.process.stderr, False))
            if pair[0]
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, stream: IO[str], is_out: bool) -> None:
        for text in stream:
            if is_out:
                self.out.append(text)
            else:
                self.lines.append(Line(text.rstrip("\n")))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def status(self) -> int | None:
        return self.process.poll()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait()

    def ended(self, seconds: float) -> int:
        """Its exit status. Raises Failed if it does not end in time; it is killed then."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            what = " ".join(self.arguments[:2])
            raise Failed(f"'{what}' does not end within {seconds:g} s") from None
        for reader in self.readers:
            reader.join(5)  # a grandchild may keep the pipe open
        return status

    def since(self, at: float) -> list[Line]:
        return [line for line in list(self.lines) if line.at >= at]

    def children(self) -> list[int]:
        """Ids of its child processes, the oldest first."""
        ids: list[int] = []
        for task in pathlib.Path(f"/proc/{self.pid}/task").glob("*/children"):
            try:
                ids += map(int, task.read_text().split())
            except OSError:
                pass
        return sorted(ids)


class Machine:
    """A network namespace with files of its own."""

    def __init__(
        self, network: Network, name: str, folder: pathlib.Path, build: pathlib.Path
    ) -> None:
        self.name = name
        self.address = network.address(name)
        self.run = folder / "run"
        self.full: list[pathlib.Path] = []
        self.environment = {
            **os.environ,
            "COXSWAIN_RUNTIME_DIR": str(self.run),
            "PATH": f"{build / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin",
        }
        self.environment.pop("COXSWAIN_CRASH_DIR", None)
        mounts = (
            ("/dev/shm", SHM_SIZE, 1777),
            ("/tmp", 64 << 20, 1777),
            (str(self.run), 64 << 20, 700),
        )
        script = "".join(
            f"mount -t tmpfs -o size={size},mode={mode} tmpfs {path} && "
            for path, size, mode in mounts
        )
        self.holder = subprocess.Popen(
            [
                "nsenter",
                f"--net=/run/netns/{network.prefix}-{name}",
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                script + "echo ready && exec sleep infinity",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.holder.stdout
        if self.holder.stdout.readline() != "ready\n":
            raise Failed(f"machine {name} has no files of its own")
        self.network_id = os.stat(f"/proc/{self.holder.pid}/ns/net").st_ino

    def inside(self, arguments: Sequence[str]) -> list[str]:
        # nsenter becomes the command: its process id is the command's.
        return ["nsenter", f"--target={self.holder.pid}", "--mount", "--net", "--", *arguments]

    def start(self, *arguments: str, log: pathlib.Path | None = None) -> Program:
        return Program(self, arguments, log)

    def path(self, inner: str | pathlib.Path) -> pathlib.Path:
        """A file of the machine, as this process sees it."""
        return pathlib.Path(f"/proc/{self.holder.pid}/root{inner}")

    def processes(self) -> dict[int, str]:
        """All but the one that keeps the namespaces; zombies are none."""
        found: dict[int, str] = {}
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.holder.pid:
                continue
            try:
                if os.stat(entry / "ns/net").st_ino == self.network_id:
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")[:60]
            except OSError:
                pass
        return found

    def files(self) -> list[str]:
        found = []
        for folder in ("/dev/shm", "/tmp", str(self.run)):
            for parent, _, names in os.walk(self.path(folder)):
                inner = pathlib.Path(parent).relative_to(self.path(folder))
                found += [f"{folder}: {inner / name}" for name in names]
        return found

    def fill(self, folder: str) -> None:
        """No byte is free there any more; empty() frees them."""
        path = self.path(folder) / "full"
        self.full.append(path)
        with path.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 20))
            except OSError:
                pass
            try:
                while True:
                    file.write(bytes(512))
            except OSError:
                pass

    def empty(self) -> None:
        while self.full:
            self.full.pop().unlink()


class Cluster:
    """Machines, certificates and NATS servers; the group comes and goes."""

    def __init__(self, build: pathlib.Path, servers: int = 1, lead: str = LEAD) -> None:
        self.build = build.resolve()
        if not (self.build / "bin/coxswain").exists():
            raise Failed(f"there is no {self.build}/bin/coxswain")
        if self.build.is_relative_to("/tmp"):
            raise Failed("the build may not be in /tmp, which machines have of their own")
        self.coxswain = str(self.build / "bin/coxswain")
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="cox-nodes-", dir="/var/tmp"))
        (self.folder / "run").mkdir()
        self.network: Network | None = None
        self.machines: dict[str, Machine] = {}
        self.servers: dict[str, Program] = {}
        self.agents: dict[str, Program] = {}
        self.lead: Program | None = None
        self.lead_on = lead
        self.server_names = SERVERS[:servers]
        try:
            self.network = Network(3 + servers)
            for name in (*NODES, LEAD, *self.server_names):
                self.machines[name] = Machine(self.network, name, self.folder, self.build)
            self.url = ",".join(
                f"tls://{self.machines[name].address}:4222" for name in self.server_names
            )
            self.certificates = self.make_certificates("certificates")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes on the machines, and removes the machines."""
        try:
            if self.network:
                self.network.close()
        finally:
            for program in (*self.servers.values(), *self.agents.values(), self.lead):
                if program:
                    program.process.wait(10)
            for machine in self.machines.values():
                machine.holder.wait(10)
            shutil.rmtree(self.folder, ignore_errors=True)

    def make_certificates(self, name: str, *options: str) -> pathlib.Path:
        folder = self.folder / name
        addresses = ",".join(self.machines[server].address for server in self.server_names)
        nodes = [word for node in NODES for word in ("--node", node)]
        made = subprocess.run(
            ["sh", str(CERTIFICATES), str(folder), "--server", addresses, *nodes, *options],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise Failed(f"coxswain-certificates: {made.stderr or made.stdout}")
        return folder

    # ---- its processes ----

    def _cluster_file(
        self, name: str, certificates: pathlib.Path | None, who: str | None = None
    ) -> str:
        """The file of --cluster. With other certificates or those of another, one of its own for
        the process `name`, lead or node-NODE."""
        folder = self.certificates
        path = self.folder / "cluster.json"
        if certificates or who:
            folder = self.folder / f"{name}-has-{who or 'others'}"
            path = folder.with_suffix(".json")
            folder.mkdir(exist_ok=True)
            shutil.copy(self.certificates / "ca.pem", folder)
            for end in (".pem", "-key.pem"):
                taken = (certificates or self.certificates) / f"{who or name}{end}"
                shutil.copy(taken, folder / f"{name}{end}")
        described = {
            "servers": self.url.split(","),
            "certificates": str(folder),
            "nodes": [{"name": node, "ranks": RANKS_HERE} for node in NODES],
        }
        # A process that was started before this one may be about to read it.
        written = path.with_suffix(".new")
        written.write_text(json.dumps(described, indent=2) + "\n")
        written.rename(path)
        return str(path)

    def server_start(
        self, name: str, certificates: pathlib.Path | None = None, log: str | None = None
    ) -> Program:
        text = (self.certificates / "coxswain-nats.conf").read_text()
        if certificates:
            for file in ("server.pem", "server-key.pem"):
                text = text.replace(str(self.certificates / file), str(certificates / file))
        if len(self.server_names) > 1:
            routes = ", ".join(
                f'"nats://{self.machines[other].address}:6222"' for other in self.server_names
            )
            tls = "".join(
                f'{key}: "{self.certificates / file}"\n'
                for key, file in (
                    ("cert_file", "server.pem"),
                    ("key_file", "server-key.pem"),
                    ("ca_file", "ca.pem"),
                )
            )
            text += (
                f'\nserver_name: "{name}"\ncluster {{\nname: "coxswain"\nlisten: "0.0.0.0:6222"\n'
                'no_advertise: true\nauthorization { user: "CN=server", password: "" }\n'
                f"tls {{\n{tls}verify_and_map: true\ntimeout: 2\n}}\nroutes: [{routes}]\n}}\n"
            )
        path = self.folder / f"nats-{name}.conf"
        path.write_text(text)
        logging = ["--log", log] if log else []
        program = self.machines[name].start("nats-server", "-c", str(path), *logging)
        self.servers[name] = program
        return program

    def servers_start(self) -> None:
        for name in self.server_names:
            self.server_start(name)
        self._servers_say("Server is ready", 1)
        self._servers_say("Route connection created", len(self.servers) - 1)

    def _servers_say(self, what: str, times: int) -> None:
        def said() -> bool:
            return all(
                sum(what in line.text for line in list(program.lines)) >= times
                for program in self.servers.values()
            )

        until(f"the NATS servers say '{what}'", START_S, said)

    def agent_start(
        self,
        node: str,
        certificates: pathlib.Path | None = None,
        who: str | None = None,
        log: pathlib.Path | None = None,
        command: Sequence[str] = (),
    ) -> Program:
        recorders = self.folder / "crash" / node
        recorders.mkdir(parents=True, exist_ok=True)
        program = self.machines[node].start(
            self.coxswain,
            "node",
            "--name",
            GROUP,
            "--node",
            node,
            "--crash-dir",
            str(recorders),
            "--cluster",
            self._cluster_file(f"node-{node}", certificates, who),
            *(("--", *command) if command else ()),
            log=log,
        )
        self.agents[node] = program
        return program

    def lead_start(
        self,
        *options: str,
        certificates: pathlib.Path | None = None,
        who: str | None = None,
        log: pathlib.Path | None = None,
    ) -> Program:
        self.lead = self.machines[self.lead_on].start(
            self.coxswain,
            "run",
            "--name",
            GROUP,
            "--cluster",
            self._cluster_file("lead", certificates, who),
            "--on-death",
            "restart,1000000/60",
            *options,
            log=log,
        )
        return self.lead

    def lead_ready(self, seconds: float = START_S) -> None:
        lead = self.lead
        assert lead
        until(
            "the lead is ready",
            seconds,
            lambda: (
                lead.status is not None or any(text.startswith("name ") for text in list(lead.out))
            ),
        )
        if lead.status is not None:
            raise Failed(f"the lead ended: {self.words(lead, 0)}")

    def group_start(self, *options: str) -> None:
        for node in NODES:
            self.agent_start(node)
        self.lead_start(*options)
        self.lead_ready()

    def command(self, *arguments: str) -> Program:
        """A command of coxswain beside the lead."""
        return self.machines[self.lead_on].start(self.coxswain, *arguments)

    def generate(self, prompts: Sequence[str], *options: str) -> Program:
        return self.command("generate", "--name", GROUP, *options, *prompts)

    def rank_pids(self) -> dict[int, int]:
        command = self.command("status", "--name", GROUP, "--json")
        command.ended(10)
        ranks = json.loads("".join(command.out))["ranks"]
        return {rank["rank"]: rank["pid"] for rank in ranks if rank["liveness"] == "alive"}

    @staticmethod
    def words(program: Program, since: float) -> str:
        return " / ".join(line.text for line in program.since(since)[:8])

    def server_of(self, machine: str) -> str:
        """The server that a process of the machine is connected with."""
        shown = subprocess.run(
            self.machines[machine].inside(["ss", "-Htn", "state", "established"]),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name in self.server_names:
            if f"{self.machines[name].address}:4222" in shown:
                return name
        raise Failed(f"machine {machine} has no connection with a server")

    def group_stop(self, seconds: float = 10) -> str:
        """Stops the group as a user does; returns what it left behind, in words; "": nothing."""
        wrong = []
        if self.lead and self.lead.status is None:
            try:
                self.command("stop", "--name", GROUP).ended(seconds)
                self.lead.ended(seconds)
            except Failed as why:
                wrong.append(str(why))
        for node, agent in self.agents.items():
            if agent.status is None:
                try:
                    agent.ended(seconds)
                except Failed as why:
                    wrong.append(f"node {node}: {why}")
        self.agents.clear()
        self.lead = None
        return "; ".join(wrong + self.leftovers())

    def leftovers(self) -> list[str]:
        """What is left when group and clients have ended: processes, and files on each machine."""
        expected = {program.pid for program in self.servers.values()}

        def found() -> list[str]:
            left = []
            for name, machine in self.machines.items():
                left += [
                    f"{name}: process {pid} {what}"
                    for pid, what in machine.processes().items()
                    if pid not in expected
                ]
                left += [f"{name}: {what}" for what in machine.files()]
            return left

        end = time.monotonic() + 2  # what was killed is reaped a moment later
        while (left := found()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def clean(self) -> None:
        """Kills and removes all that a failed case has left, so that the next one begins anew."""
        for machine in self.machines.values():
            for pid in machine.processes():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        until(
            "all processes end", 10, lambda: not any(m.processes() for m in self.machines.values())
        )
        for machine in self.machines.values():
            machine.full.clear()
            for folder in ("/dev/shm", "/tmp", str(machine.run)):
                for entry in machine.path(folder).iterdir():
                    shutil.rmtree(
                        entry
                    ) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        for program in (*self.servers.values(), *self.agents.values(), self.lead):
            if program:
                program.process.wait(10)
        self.servers.clear()
        self.agents.clear()
        self.lead = None


def expected_texts(
    build: pathlib.Path, prompts: Sequence[str], folder: pathlib.Path
) -> dict[str, str]:
    """What the ranks of one machine make of each prompt."""
    run = folder / "alone"
    run.mkdir()
    listed = folder / "prompts"
    listed.write_text("".join(prompt + "\n" for prompt in prompts))
    made = subprocess.run(
        [
            str(build.resolve() / "bin/coxswain"),
            "generate",
            "-n",
            str(RANKS_HERE * len(NODES)),
            "--quiet",
            "--file",
            str(listed),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "COXSWAIN_RUNTIME_DIR": str(run)},
    )
    lines = made.stdout.splitlines(keepends=True)
    if made.returncode or len(lines) != len(prompts):
        raise Failed(f"generate on one machine: status {made.returncode}: {made.stderr}")
    return dict(zip(prompts, lines, strict=True))


def skip(why: str) -> None:
    print(f"skipped: {why}", file=sys.stderr)
    sys.exit(77)


def python_cluster(build: pathlib.Path, python: str) -> Cluster:
    """One whose machines have the package for this interpreter; skips where there can be none."""
    why = missing()
    if why:
        skip(why)
    if subprocess.run([python, "-c", "import cffi"], check=False, capture_output=True).returncode:
        skip(f"{python} has no cffi")
    cluster = Cluster(build)
    for machine in cluster.machines.values():
        machine.environment["PYTHONPATH"] = str(build / "python")
        machine.environment["LD_LIBRARY_PATH"] = str(build / "lib")
    return cluster
