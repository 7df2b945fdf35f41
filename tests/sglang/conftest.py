"""A model, and engines in other processes, for tests with a real SGLang (sh tools/test sglang)."""

import json
import os
import pathlib
import sys
import tempfile
import urllib.request

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engines"))
import engine_process
from engine_process import PATIENCE, ROOT, children, install, wait_for_end, wait_until  # noqa: F401


def environment(folder, options, **more):
    """Of a process with SGLang: small, and a core for each rank. folder: a test's own. options: of
    coxswain.sglang; None: without it."""
    own = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": f"0|{1 % (os.cpu_count() or 1)}",
        # otherwise SGLang waits a minute for core dumps of GPUs
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
        "SGLANG_TEST_FAULT": os.path.join(folder, "fault"),
        "COXSWAIN_SGLANG": None if options is None else json.dumps(options),
    }
    installed = install(folder, sglang={"faulty": "faulty_plugin:register"})
    return engine_process.environment([HERE, installed], own, more)


@pytest.fixture(scope="session")
def model():
    """The path of a model of random weights."""
    sys.path.insert(0, str(ROOT / "tests" / "vllm"))
    import widen

    with tempfile.TemporaryDirectory(prefix="coxswain_models_") as folder:
        widen.random_llama(ROOT / "models" / "sums", folder)
        yield folder


def titled(pid, title):
    """The processes below one whose titles begin so, in order of the titles."""
    found = {}
    for child in children(pid):
        try:
            command = pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if command.startswith(title.encode()):
            found[command] = child
    return [found[command] for command in sorted(found)]


def schedulers_of(pid):
    """The schedulers of a server, by rank."""
    return titled(pid, "sglang::scheduler")


def names_of(pids):
    """What SGLang has left in /dev/shm."""
    found = [name for name in os.listdir("/dev/shm") if name.startswith("sglang_loads_")]
    return found + [
        name for name in os.listdir("/dev/shm") for pid in pids if f"sgl_shm_mq_{pid}_" in name
    ]


def mapped_names(pids):
    """The names in /dev/shm whose memory processes have mapped."""
    found = set()
    for pid in pids:
        try:
            lines = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue  # it has ended
        paths = (line.split(maxsplit=5)[-1] for line in lines)
        found.update(path for path in paths if path.startswith("/dev/shm/"))
    return {path for path in found if os.path.exists(path)}


class Server(engine_process.Server):
    """SGLang's API server in a process of its own."""

    def __init__(self, folder, model, options, arguments=()):
        super().__init__(folder)
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--tp-size", "2"]
        command += ["--device", "cpu", "--attention-backend", "torch_native"]
        command += ["--sampling-backend", "pytorch", "--dtype", "float32", "--disable-cuda-graph"]
        command += ["--mem-fraction-static", "0.2", "--max-total-tokens", "4096"]
        command += ["--max-running-requests", "16", "--log-level", "warning", *arguments]
        self.start(command, environment(folder, options))

    def stream(self, prompt, **parameters):
        """The events of a /generate stream, until it ends."""
        body = {"text": prompt, "stream": True, "sampling_params": parameters}
        request = urllib.request.Request(
            f"{self.url}/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        found = []
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    found.append(json.loads(line[6:]))
        return found

    def __exit__(self, *_):
        below = children(self.process.pid)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        wait_for_end(below)
        self.log.close()
