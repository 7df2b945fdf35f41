"""Models, and engines in other processes, for tests with a real vLLM (sh tools/test vllm)."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engines"))
import engine_process
from engine_process import PATIENCE, ROOT, children, install, wait_for_end, wait_until  # noqa: F401

SUMS = ROOT / "models" / "sums"
NAME = "coxswain.vllm.Executor"


def pytest_addoption(parser):
    parser.addoption("--faults", action="store_true", help="all rows of test_faults.py")


def environment(ranks, path="", **more):
    """Of a process with vLLM: small, and at most a core for each rank. path: of more modules. more:
    variables; None: it is not set."""
    cores = [str(rank % (os.cpu_count() or 1)) for rank in range(ranks)]
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores),
        "VLLM_NO_USAGE_STATS": "1",
    }
    return engine_process.environment([HERE, path], own, more)


def shared_memory():
    return set(os.listdir("/dev/shm"))


@pytest.fixture(scope="session")
def models():
    """A folder with the models "sums" and "random", and "lora" for the latter."""
    import widen

    with tempfile.TemporaryDirectory(prefix="coxswain_models_") as folder:
        for name in ("sums", "random", "lora"):
            os.makedirs(os.path.join(folder, name))
        widen.widen(SUMS, os.path.join(folder, "sums"))
        widen.random_llama(SUMS, os.path.join(folder, "random"))
        widen.random_lora(os.path.join(folder, "lora"))
        yield folder


def status(name):
    """What `coxswain status --json` says of a group."""
    command = [
        os.path.join(os.environ["COX_BIN_DIR"], "coxswain"),
        "status",
        "--name",
        name,
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    # 4: degraded, as between a death and its replacement.
    assert done.returncode in (0, 4), done.stderr
    return json.loads(done.stdout)


def ranks_of(engine):
    """The processes of all ranks of an engine."""
    found = set()
    for pid in children(engine):
        try:
            parent = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[1]
            environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
            title = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        # One that a fork server has forked has its title alone.
        forked = title.startswith((b"coxswain rank", b"VLLM::Worker"))
        if int(parent) == engine and (forked or b"COXSWAIN_RANK=" in environ):
            found.add(pid)
    return found


class Server(engine_process.Server):
    """vLLM's API server in a process of its own, over a group of a name of its own."""

    count = 0

    def __init__(
        self,
        folder,
        model,
        ranks=2,
        options=(),
        parallel="tensor",
        eager=True,
        length=64,
        backend=NAME,
        name=None,
        **more,
    ):
        super().__init__(folder)
        Server.count += 1
        self.name = name or f"vllm_test_{os.getpid()}_{Server.count}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self.port)]
        command += [f"--{parallel}-parallel-size", str(ranks)]
        command += ["--distributed-executor-backend", backend]
        command += ["--worker-cls", "faulty_worker.Worker", "--dtype", "float32"]
        command += ["--enforce-eager"] if eager else []
        command += ["--max-model-len", str(length), *options]
        own = {
            "VLLM_COXSWAIN_NAME": self.name,
            "VLLM_COXSWAIN_ON_DEATH": "fail",  # None: as it is by default
            "VLLM_TEST_FAULT": self.fault,
            **more,
        }
        self.start(command, environment(ranks, install(folder), **own))

    def client(self):
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    @contextlib.contextmanager
    def readyz(self):
        """Gives a function that returns status and text of /readyz of `coxswain metrics`."""
        command = [os.path.join(os.environ["COX_BIN_DIR"], "coxswain"), "metrics"]
        command += ["--name", self.name, "--serve", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            url = process.stderr.readline().split()[-1].replace("/metrics", "/readyz")

            def ask():
                try:
                    with urllib.request.urlopen(url, timeout=20) as reply:
                        return reply.status, reply.read().decode()
                except urllib.error.HTTPError as error:
                    return error.code, error.read().decode()

            try:
                yield ask
            finally:
                process.terminate()

    def note(self):
        """What `coxswain status` says of incidents and spares."""
        return status(self.name)["note"]

    def pids(self):
        """Of the ranks that compute."""
        return [rank["pid"] for rank in status(self.name)["ranks"]]

    def spare_pids(self):
        """Of the ranks that stand by, or are about to."""
        said = status(self.name)
        return sorted(ranks_of(said["pid"]) - {rank["pid"] for rank in said["ranks"]})

    def wait_for_spares(self):
        """Until they stand by. Returns their pids."""
        wait_until(lambda: self.note()["spares"].endswith("waiting"), self.text)
        return self.spare_pids()

    def wait_for_incident(self, count):
        """Until the requests go on after it."""
        self.wait_for_text(f"incident {count}.", PATIENCE)

    def inject(self, text):
        """What the next step does: see faulty_worker.py."""
        with open(self.fault + ".new", "w") as file:
            file.write(text)
        os.rename(self.fault + ".new", self.fault)

@pytest.fixture
def server(models, tmp_path):
    """Makes a Server: server(**arguments of Server) -> a context manager."""
    return lambda **arguments: Server(str(tmp_path), os.path.join(models, "sums"), **arguments)


def run_script(script, job, ranks, modules="", **more):
    """Runs a script with a job in a process of its own, where the engine is. Returns its result.
    modules: where more are."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result")
        more.setdefault("VLLM_TEST_FAULT", os.path.join(folder, "fault"))
        more.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        done = subprocess.run(
            [sys.executable, str(HERE / script), json.dumps(job), path],
            env=environment(ranks, modules, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert done.returncode == 0, done.stdout[-8000:]
        with open(path) as file:
            return {"log": done.stdout, "result": json.load(file)}


def run_engines(models, ranks, runs, **more):
    """The results of runs of engines.py."""
    return run_script("engines.py", {"models": models, "runs": runs}, ranks, **more)["result"]
