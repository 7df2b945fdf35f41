"""What tests with a real vLLM and a real SGLang share: installation, processes, API servers."""

import os
import pathlib
import socket
import subprocess
import time
import tomllib
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).parent.parent.parent
# In seconds: a machine may have other work.
PATIENCE = 600


def environment(folders, own, more):
    """Of a process with an engine. folders: of modules. own, more: variables; None: it is not
    set."""
    path = [os.environ["PYTHONPATH"], *map(str, folders)]
    found = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path),
        **own,
        **more,
    }
    return {name: value for name, value in found.items() if value is not None}


def install(folder, **more):
    """Makes folder one where this package is installed, for engines to find its plugin hooks. more:
    of each group of hooks, others. Returns folder."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    installed = pathlib.Path(folder) / "coxswain_executor-0.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: coxswain-executor\nVersion: 0\n"
    )
    lines = []
    for group, entries in groups.items():
        entries = {**entries, **more.get(group.partition(".")[0], {})}
        lines += [f"[{group}]", *(f"{name} = {entry}" for name, entry in entries.items())]
    (installed / "entry_points.txt").write_text("\n".join([*lines, ""]))
    return str(folder)


def children(pid):
    """The processes below one."""
    found = set()
    try:
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            found.update(map(int, (task / "children").read_text().split()))
    except OSError:
        pass  # it has ended
    return found | {below for child in found for below in children(child)}


def lives(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, what, seconds=PATIENCE):
    """Returns what condition returns, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.01)
    return found


def wait_for_end(pids):
    wait_until(lambda: not any(map(lives, pids)), "processes live on")


class Server:
    """An API server in a process of its own; its log is a file of folder."""

    def __init__(self, folder):
        self.log_path = os.path.join(folder, "server.log")
        self.fault = os.path.join(folder, "fault")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, command, variables):
        self.log = open(self.log_path, "w")  # noqa: SIM115
        self.process = subprocess.Popen(command, env=variables, stdout=self.log, stderr=self.log)

    def text(self):
        """Its log, and that of its processes."""
        return pathlib.Path(self.log_path).read_text(errors="replace")

    def get(self, path, timeout=30):
        """The status of a request without a body; 0: there is no answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait_until_ready(self):
        def ready():
            assert self.process.poll() is None, self.text()[-5000:]
            return self.get("/health") == 200

        wait_until(ready, self.text)

    def wait_for_text(self, text, seconds=PATIENCE):
        """Waits until the log has it. Returns the log."""
        wait_until(
            lambda: text in self.text(),
            lambda: f"no {text!r} in:\n{self.text()[-8000:]}",
            seconds,
        )
        return self.text()

    def __enter__(self):
        try:
            self.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
