#!/usr/bin/python3
"""Runs the example for Kubernetes as it stands in the file, without Kubernetes.

Usage: pods.py BUILD_DIR [leaderworkerset.yaml]. Root only, and PyYAML. Exit status 77: not possible
here.

What a cluster does is done here with namespaces: the commands in the file's head make
certificates and secrets (`kubectl` is a script that keeps files); a pod has an address and a
/dev/shm of its own, a container an /etc, a /tmp and a /run of its own, the secrets that it mounts,
the environment of its labels, as a LeaderWorkerSet sets them, and its command. Then the probes are
asked, a prompt is completed in the container of the lead, and the second pod, then the lead's
container, is killed and comes again.

What it does not show: that Kubernetes takes the file, how it places and names pods, their addresses
(here a pod that comes again has the old one), DNS, and an image.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

import cluster

EXAMPLE = cluster.HERE.parents[1] / "examples/nodes/leaderworkerset.yaml"
LABEL = "leaderworkerset.sigs.k8s.io/"
# What the containers' programs read of an image's /etc.
ETC = ("passwd", "group", "nsswitch.conf", "ld.so.cache", "ld.so.conf", "ssl")
KUBECTL = """#!/bin/sh
# kubectl create secret generic NAME --from-file=FILE...
set -eu
[ "$1 $2 $3" = "create secret generic" ]
mkdir "$SECRETS/$4"
for file; do
    case $file in --from-file=*) install -m 644 "${file#--from-file=}" "$SECRETS/$4/" ;; esac
done
"""


def commands_of(text: str) -> str:
    """The commands in the comments at the file's head."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#   "):
            lines.append(line[1:].strip())
    return "\n".join(lines)


def expanded(text: str, variables: dict[str, str]) -> str:
    """As the kubelet does it: what it does not know stays."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


class Pod:
    """A machine whose programs are containers; labels: what its environment may refer to."""

    def __init__(
        self,
        network: cluster.Network,
        name: str,
        spec: Any,
        labels: dict[str, str],
        hosts: dict[str, str],
        secrets: pathlib.Path,
        build: pathlib.Path,
    ) -> None:
        self.spec, self.labels, self.hosts, self.secrets = spec, labels, hosts, secrets
        folder = secrets.parent / name
        (folder / "run").mkdir(parents=True)
        self.machine = cluster.Machine(network, name, folder, build)
        for variable in ("COXSWAIN_RUNTIME_DIR", "XDG_RUNTIME_DIR", "COXSWAIN_MODEL"):
            self.machine.environment.pop(variable, None)
        self.containers: dict[str, cluster.Program] = {}

    def mounts(self, container: Any) -> str:
        """Of a shell: the files of a container."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        script = "set -eu; umask 022\nmount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /run\n"
        script += "mkdir /tmp/etc\n"
        script += "".join(f"[ ! -e /etc/{name} ] || cp -a /etc/{name} /tmp/etc/\n" for name in ETC)
        script += "mount -t tmpfs tmpfs /etc; cp -a /tmp/etc/. /etc/; rm -r /tmp/etc\n"
        hosts = "".join(f"{address} {host}\\n" for host, address in self.hosts.items())
        script += f"printf '127.0.0.1 localhost\\n{hosts}' >/etc/hosts\n"
        for mount in container.get("volumeMounts", []):
            volume, path = volumes[mount["name"]], mount["mountPath"]
            if "secret" in volume:  # files are links, and all may read them
                secret = self.secrets / volume["secret"]["secretName"]
                script += f"mkdir -p {path}/..data; cp {secret}/* {path}/..data/\n"
                script += (
                    f"for file in {path}/..data/*; do ln -s ..data/${{file##*/}} {path}/; done\n"
                )
            elif volume["emptyDir"].get("medium") != "Memory" or path != "/dev/shm":
                raise cluster.Failed(f"{mount}: not known here")
        return script

    def environment(self, container: Any) -> dict[str, str]:
        found = {}
        for variable in container.get("env", []):
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            (label,) = re.fullmatch(r"metadata\.labels\['(.*)'\]", path).groups()
            found[variable["name"]] = self.labels[label]
        return found

    def start(self, image_command: tuple[str, ...] = ()) -> None:
        """All containers that do not run. image_command: what the image runs where the file has no
        command."""
        for container in self.spec["containers"]:
            if (old := self.containers.get(container["name"])) and old.status is None:
                continue
            variables = self.environment(container)
            arguments = [*container.get("command", image_command), *container.get("args", [])]
            command = [expanded(str(one), variables) for one in arguments]
            self.containers[container["name"]] = self.machine.start(
                "env", *(f"{name}={value}" for name, value in variables.items()),
                "unshare", "--mount", "--propagation", "private",
                "sh", "-c", self.mounts(container) + 'exec "$@"', "sh", *command,
            )  # fmt: skip

    def kill(self) -> None:
        """With all that runs in it."""
        for pid in self.machine.processes():
            os.kill(pid, signal.SIGKILL)
        for program in self.containers.values():
            program.process.wait(10)

    def execute(self, container: str, *arguments: str) -> str:
        """As `kubectl exec` does."""
        pid = self.containers[container].pid
        done = subprocess.run(
            ["nsenter", f"--target={pid}", "--mount", "--net", "--", *arguments],
            env=self.machine.environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        if done.returncode:
            raise cluster.Failed(f"{' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def probe(self, container: str, kind: str) -> int:
        """The status of a probe's answer; 0: none."""
        (found,) = [one for one in self.spec["containers"] if one["name"] == container]
        get = found[kind]["httpGet"]
        (port,) = [p["containerPort"] for p in found["ports"] if p["name"] == get["port"]]
        script = (
            "import sys, urllib.request, urllib.error\n"
            "try: print(urllib.request.urlopen(sys.argv[1], timeout=1).status)\n"
            "except urllib.error.HTTPError as error: print(error.code)\n"
            "except OSError: print(0)\n"
        )
        url = f"http://{self.machine.address}:{port}{get['path']}"
        arguments = self.machine.inside([sys.executable, "-c", script, url])
        return int(subprocess.run(arguments, capture_output=True, check=True, timeout=30).stdout)

    def said(self) -> str:
        return "\n".join(
            f"{name}: {line.text}"
            for name, program in self.containers.items()
            for line in program.lines[-8:]
        )


def run(build: pathlib.Path, folder: pathlib.Path, network: cluster.Network, text: str) -> None:
    import yaml

    documents = {one["kind"]: one for one in yaml.safe_load_all(text)}
    secrets, tools = folder / "secrets", folder / "tools"
    secrets.mkdir()
    tools.mkdir()
    (tools / "kubectl").write_text(KUBECTL)
    (tools / "coxswain-certificates").symlink_to(cluster.CERTIFICATES)
    for name in ("kubectl", "coxswain-certificates"):
        (tools / name).chmod(0o755)
    environment = {**os.environ, "SECRETS": str(secrets), "PATH": f"{tools}:{os.environ['PATH']}"}
    script = "set -eu\n" + commands_of(text)
    print(script)
    subprocess.run(["sh", "-c", script], cwd=folder, env=environment, check=True)

    # The name of the Service leads to the pod that its selector finds.
    service, deployment = documents["Service"], documents["Deployment"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    hosts = {service["metadata"]["name"]: network.address("c")}

    def pod(name: str, spec: Any, labels: dict[str, str]) -> Pod:
        return Pod(network, name, spec, labels, hosts, secrets, build)

    nats = pod("c", deployment["spec"]["template"]["spec"], {})
    template = documents["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    first, second = (
        pod(name, template[f"{kind}Template"]["spec"],
            {f"{LABEL}group-index": "0", f"{LABEL}worker-index": str(index)})
        for index, (name, kind) in enumerate((("a", "leader"), ("b", "worker")))
    )  # fmt: skip
    pods = (nats, first, second)

    def ready() -> bool:
        for one in pods:
            for name, program in one.containers.items():
                if program.status is not None:
                    raise cluster.Failed(f"{name} has ended with {program.status}: {one.said()}")
        return first.probe("lead", "readinessProbe") == 200

    try:
        nats.start(("nats-server",))  # the image's
        first.start()
        assert first.probe("lead", "readinessProbe") != 200
        second.start()
        cluster.until("the lead is ready", cluster.START_S, ready)
        assert first.probe("lead", "livenessProbe") == 200
        answer = first.execute("lead", "coxswain", "generate", "--name", "big-0", "27+58=")
        assert answer == "27+58=85\n", answer
        print("two pods have answered:", answer.strip())
        second.kill()
        cluster.until(
            "the lead is not ready", 10, lambda: first.probe("lead", "readinessProbe") != 200
        )
        assert first.probe("lead", "livenessProbe") == 200
        print("the second pod is killed:", first.containers["lead"].lines[-1].text)
        second.start()
        cluster.until("the lead is ready again", cluster.START_S, ready)
        answer = first.execute("lead", "coxswain", "generate", "--name", "big-0", "999+1=")
        assert answer == "999+1=1000\n", answer
        print("it has come again, and they answer:", answer.strip())
        ranks = first.execute("lead", "coxswain", "status", "--name", "big-0").count("alive")
        first.containers["lead"].kill()
        first.start()
        cluster.until("a new lead is ready", cluster.START_S, ready)
        answer = first.execute("lead", "coxswain", "generate", "--name", "big-0", "3+4=")
        assert answer == "3+4=7\n", answer
        print(f"so has the container of the lead, over {ranks} ranks:", answer.strip())
    except BaseException:
        for one in pods:
            print(one.said(), file=sys.stderr)
        raise


def main() -> int:
    if why := cluster.missing():
        cluster.skip(why)
    try:
        import yaml  # noqa: F401
    except ImportError:
        cluster.skip("no PyYAML")
    build = pathlib.Path(sys.argv[1]).resolve()
    text = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else EXAMPLE).read_text()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="cox-pods-", dir="/var/tmp"))
    network = cluster.Network(3)
    try:
        run(build, folder, network, text)
    finally:
        network.close()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
