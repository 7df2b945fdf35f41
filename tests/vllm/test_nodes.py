"""vLLM whose ranks are on two machines: network namespaces with gloo on their link."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import NAME, PATIENCE, ROOT, environment, run_engines, wait_until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("nats-server"),
    reason="network namespaces need root; and nats-server is needed",
)


class Machines:
    """Two machines, each with an agent of one rank."""

    def __init__(self, ranks, **more):
        build = os.path.dirname(os.environ["COX_BIN_DIR"])
        hold = ["sh", str(ROOT / "tests" / "nodes" / "hold.sh"), build, "2"]
        self.holder = subprocess.Popen(
            hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.holder.stdout and self.holder.stdin
        self.prefix, self.url, self.certificates, self.address = (
            self.holder.stdout.readline().split()
        )
        self.name = f"vllm_nodes_{os.getpid()}"
        nodes = [{"name": node, "ranks": 1} for node in "ab"]
        cluster = {"servers": [self.url], "certificates": ".", "nodes": nodes}
        with open(f"{self.certificates}/cluster.json", "w", encoding="utf-8") as file:
            json.dump(cluster, file)
        self.environment = environment(
            ranks,
            GLOO_SOCKET_IFNAME="eth0",
            VLLM_COXSWAIN_NAME=self.name,
            VLLM_COXSWAIN_NODES="a:1,b:1",
            VLLM_COXSWAIN_CLUSTER=self.url,
            VLLM_COXSWAIN_CA=f"{self.certificates}/ca.pem",
            VLLM_COXSWAIN_CERTIFICATE=f"{self.certificates}/lead.pem",
            VLLM_COXSWAIN_KEY=f"{self.certificates}/lead-key.pem",
            VLLM_COXSWAIN_MASTER=self.address,
            VLLM_HOST_IP=self.address,
            LD_LIBRARY_PATH=os.path.join(build, "lib"),
            **more,
        )
        self.agents = {}
        self.closing = threading.Event()
        self.keeper = threading.Thread(target=self._keep)
        for node in "ab":
            self.agent(node)

    def on(self, node, command, output=None, **more):
        """Runs a command on a machine."""
        inside = ["nsenter", f"--net=/run/netns/{self.prefix}-{node}", "--", *command]
        return subprocess.Popen(
            inside, env={**self.environment, **more}, stdout=output, stderr=output
        )

    def agent(self, node):
        address = ".".join([*self.address.split(".")[:3], str(1 + "ab".index(node))])
        command = [os.path.join(os.environ["COX_BIN_DIR"], "coxswain"), "node", "--stay"]
        command += ["--name", self.name, "--node", node]
        command += ["--cluster", f"{self.certificates}/cluster.json"]
        command += ["--", sys.executable, "-m", "coxswain.vllm_worker"]
        self.agents[node] = self.on(node, command, VLLM_HOST_IP=address)

    def keep(self):
        """From now on an agent that ends is started again, as systemd does it."""
        self.keeper.start()

    def _keep(self):
        while not self.closing.wait(0.5):
            for node in "ab":
                if self.agents[node].poll() is not None:
                    self.agent(node)

    def close(self):
        self.closing.set()
        if self.keeper.ident:
            self.keeper.join()
        for agent in self.agents.values():
            agent.terminate()
        for agent in self.agents.values():
            agent.wait(30)
        self.holder.stdin.close()
        self.holder.wait(30)


@pytest.fixture
def machines(tmp_path):
    found = Machines(2, VLLM_TEST_FAULT=str(tmp_path / "fault"))
    yield found
    found.close()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_m19_tokens_are_those_of_one_machine(models, machines, tmp_path, tp, pp):
    runs = [{"model": "random", "tp": tp, "pp": pp, "backend": NAME}]
    (usual,) = run_engines(models, 2, runs=runs)
    result = tmp_path / "result"
    job = json.dumps({"models": models, "runs": runs})
    engine = machines.on(
        "a", [sys.executable, str(ROOT / "tests" / "vllm" / "engines.py"), job, str(result)]
    )
    assert engine.wait(PATIENCE) == 0
    assert json.loads(result.read_text()) == [usual]


def test_m19_a_dead_machine_is_named(models, machines, tmp_path):
    """Within a second, in what the engine's caller gets."""
    script = tmp_path / "engine.py"
    script.write_text(
        f"""
import os
from vllm import LLM, SamplingParams
from coxswain.vllm import Executor
if __name__ == "__main__":  # the engine's process imports this file again
    llm = LLM({os.path.join(models, "random")!r}, distributed_executor_backend=Executor,
              tensor_parallel_size=2, max_model_len=64, dtype="float32", enforce_eager=True)
    open({str(tmp_path / "ready")!r}, "w").close()
    while True:
        llm.generate(["1+1="], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
"""
    )
    log = tmp_path / "log"
    with open(log, "w") as file:
        engine = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{machines.prefix}-a", "--", sys.executable, str(script)],
            env={**machines.environment, "VLLM_COXSWAIN_ON_DEATH": "fail"},
            stdout=file,
            stderr=file,
        )
    try:
        wait_until(
            lambda: (tmp_path / "ready").exists() or engine.poll() is not None, log.read_text
        )
        assert engine.poll() is None, log.read_text()[-5000:]
        time.sleep(1)
        machines.agents["b"].kill()
        killed = time.monotonic()
        wait_until(lambda: "node b" in log.read_text(), log.read_text, 10)
        assert time.monotonic() - killed < 1 or os.environ.get("VLLM_TEST_SLOW")
        engine.wait(PATIENCE)
    finally:
        engine.kill()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_m19_a_dead_machine_is_survived(models, machines, tmp_path, tp, pp):
    """As a dead rank is: its process in a step, then the agent of its machine and all below it."""
    machines.keep()
    result, log = tmp_path / "result", tmp_path / "log"
    job = {"models": models, "tp": tp, "pp": pp, "kinds": ["greedy", "logprobs", "seed"]}
    cable = f"ip -n {machines.prefix}-switch link set dev b"
    places = ["executed", "agent", f"{cable} down; sleep 3; {cable} up"]
    job |= {"ranks": [1], "places": places, "kills": len(places)}
    with open(log, "w") as file:
        script = str(ROOT / "tests" / "vllm" / "survivor.py")
        engine = machines.on(
            "a",
            [sys.executable, script, json.dumps(job), str(result)],
            output=file,
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )
        try:
            engine.wait(PATIENCE)
        finally:
            engine.kill()
    said = log.read_text(errors="replace")
    assert engine.returncode == 0, said[-8000:]
    found = json.loads(result.read_text())
    for line in said.splitlines():
        if "go on after" in line:
            print(line)
    for place, seconds, cause in found["told"]:
        print(f"{place}: {seconds:.3f} s: {cause[:200]}")
    assert found["incidents"] == found["kills"] == job["kills"]
    assert not found["again"]["wrong"]
    assert not [one["first"] for one in found["rounds"] if one["wrong"]]
    assert "not enough values" not in said  # a call of the new engine to ranks of the old one


def test_m19_ranks_of_a_killed_engine_end(machines):
    """They have a model and a gloo of their own: the next engine's ranks are other ones, also while
    agents keep those of a lead that is lost."""
    script = """
import os, signal, sys
import coxswain
found = os.environ
cluster = coxswain.Cluster(
    found["VLLM_COXSWAIN_CLUSTER"], ca=found["VLLM_COXSWAIN_CA"],
    certificate=found["VLLM_COXSWAIN_CERTIFICATE"], key=found["VLLM_COXSWAIN_KEY"],
    fresh=sys.argv[1] == "fresh")
group = coxswain.Group(name=found["VLLM_COXSWAIN_NAME"], nodes=found["VLLM_COXSWAIN_NODES"],
                       cluster=cluster, attach="sealed")
group.start()
print([rank.pid for rank in group.status().ranks], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

    def pids(*how):
        command = [sys.executable, "-c", script, *how]
        lead = machines.on("a", command, output=subprocess.PIPE)
        said = lead.communicate(timeout=60)[0].decode()
        assert lead.returncode == -signal.SIGKILL, said
        return json.loads(said.splitlines()[-1])

    first = pids("kept")
    assert pids("kept") == first
    second = pids("fresh")
    assert not {*first} & {*second}
