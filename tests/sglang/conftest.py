"""A model, and engines in other processes, for tests with a real SGLang (sh tools/test sglang)."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
# In seconds: a machine may have other work.
PATIENCE = 600


def environment(folder, options, **more):
    """Of a process with SGLang: small, and a core for each rank. folder: a test's own. options: of
    coxswain.sglang; None: without it."""
    path = [os.environ["PYTHONPATH"], str(HERE), install(folder)]
    found = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": f"0|{1 % (os.cpu_count() or 1)}",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_TEST_FAULT": os.path.join(folder, "fault"),
        "PYTHONPATH": os.pathsep.join(path),
        **more,
    }
    if options is not None:
        found["COXSWAIN_SGLANG"] = json.dumps(options)
    return found


def install(folder):
    """Makes folder one where this package and the plugin of tests are installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    hooks = project["entry-points"]["sglang.srt.plugins"]
    entries = {**hooks, "faulty": "faulty_plugin:register"}
    installed = pathlib.Path(folder) / "coxswain_executor-0.dist-info"
    installed.mkdir(exist_ok=True)
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: coxswain-executor\nVersion: 0\n"
    )
    (installed / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\n" + "".join(f"{name} = {entry}\n" for name, entry in entries.items())
    )
    return str(folder)


@pytest.fixture(scope="session")
def model():
    """The path of a model of random weights."""
    sys.path.insert(0, str(ROOT / "tests" / "vllm"))
    import widen

    with tempfile.TemporaryDirectory(prefix="coxswain_models_") as folder:
        widen.random_llama(ROOT / "models" / "sums", folder)
        yield folder


def children(pid):
    """The processes below one."""
    found = set()
    try:
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            found.update(map(int, (task / "children").read_text().split()))
    except OSError:
        pass  # it has ended
    return found | {below for child in found for below in children(child)}


def schedulers_of(pid):
    """The schedulers of a server, by rank."""
    found = {}
    for child in children(pid):
        try:
            title = pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"sglang::scheduler"):
            found[title] = child
    return [found[title] for title in sorted(found)]


def wait_until(condition, what, seconds=PATIENCE):
    """Returns what condition returns, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.01)
    return found


def lives(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pids):
    wait_until(lambda: not any(map(lives, pids)), "processes live on")


def names_of(pids):
    """What SGLang has left in /dev/shm."""
    found = [name for name in os.listdir("/dev/shm") if name.startswith("sglang_loads_")]
    return found + [
        name for name in os.listdir("/dev/shm") for pid in pids if f"sgl_shm_mq_{pid}_" in name
    ]


class Server:
    """SGLang's API server in a process of its own."""

    def __init__(self, folder, model, options, arguments=()):
        self.log_path = os.path.join(folder, "server.log")
        self.fault = pathlib.Path(folder) / "fault"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--tp-size", "2"]
        command += ["--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--sampling-backend", "pytorch", "--dtype", "float32", "--disable-cuda-graph"]
        command += ["--mem-fraction-static", "0.2", "--max-total-tokens", "4096"]
        command += ["--max-running-requests", "16", "--log-level", "warning", *arguments]
        self.log = open(self.log_path, "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, env=environment(folder, options), stdout=self.log, stderr=self.log
        )

    def text(self):
        return pathlib.Path(self.log_path).read_text(errors="replace")

    def get(self, path, timeout=30):
        """The status of a request without a body."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}{path}", timeout=timeout
            ) as r:
                return r.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait_until_ready(self):
        def ready():
            assert self.process.poll() is None, self.text()[-5000:]
            return self.get("/health") == 200

        wait_until(ready, self.text)

    def wait_for_text(self, text):
        wait_until(lambda: text in self.text(), lambda: f"no {text!r} in:\n{self.text()[-8000:]}")
        return self.text()

    def stream(self, prompt, **parameters):
        """The events of a /generate stream, until it ends."""
        body = {"text": prompt, "stream": True, "sampling_params": parameters}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        found = []
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    found.append(json.loads(line[6:]))
        return found

    def __enter__(self):
        try:
            self.wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        below = children(self.process.pid)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        wait_for_end(below)
        self.log.close()
