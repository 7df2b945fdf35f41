"""bench weights: what `weights: shared` of coxswain.vllm.Executor saves, and costs on a CPU.

Engines with a random Llama of 2.1 GiB, one after the other: weights private or shared, spare ranks
none or hot, TP = 1 and 2. A rank of each is killed --kills times beside 8 requests, whose tokens
must stay. Last, an engine whose weights are kept is started twice. `make bench-weights` runs it.
"""

import argparse
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "vllm"))
REQUESTS = 8
TOKENS = 32


def processes(pid):
    """A process and all that descend from it."""
    found = {pid}
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            children = pathlib.Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        except OSError:
            continue
        for child in children:
            found |= processes(int(child))
    return found


def memory():
    """MiB of this process and of its ranks. What several map counts once (PSS)."""
    total = 0
    for pid in processes(os.getpid()):
        try:
            text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        found = re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)
        total += int(found[1]) if found else 0
    return total / 1024


class Subject:
    """An engine in this process."""

    def __init__(self, model, options):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from coxswain.vllm import Executor

        arguments = EngineArgs(
            model=model,
            distributed_executor_backend=Executor,
            tensor_parallel_size=options["ranks"],
            max_model_len=128,
            max_num_seqs=REQUESTS,
            dtype="float32",
            enforce_eager=True,
            additional_config={
                "coxswain": {key: options[key] for key in ("weights", "spares")}
                | {"incidents": 1000}
            },
        )
        before = time.monotonic()
        self.engine = LLMEngine.from_vllm_config(arguments.create_engine_config())
        self.start = time.monotonic() - before
        self.executor = self.engine.engine_core.engine_core.model_executor
        self.survivor = self.executor._survivor

    def tokens(self, name):
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        for one in range(REQUESTS):
            self.engine.add_request(f"{name}-{one}", f"{one}+{3 * one}=", sampling)
        found = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    found[output.request_id.split("-")[1]] = list(output.outputs[0].token_ids)
        return found

    def wait_for_spares(self, options):
        while options["spares"] == "hot" and not self.survivor.spares.ready:
            time.sleep(0.05)

    def measure(self, options):
        """A row: seconds, MiB and tokens a second."""
        self.wait_for_spares(options)
        expected = self.tokens("first")
        before = time.monotonic()
        if self.tokens("timed") != expected:
            raise SystemExit("an engine that nobody disturbs gives other tokens")
        rate = REQUESTS * TOKENS / (time.monotonic() - before)
        time.sleep(1)  # what has started has given back what it needed for that
        row = {**options, "start": self.start, "tokens_per_second": rate, "memory": memory()}
        pauses, loads = [], []
        for kill in range(options["kills"]):
            self.wait_for_spares(options)
            ranks = self.executor._ranks.group.status().ranks
            os.kill(ranks[kill % len(ranks)].pid, signal.SIGKILL)
            if self.tokens(f"kill{kill}") != expected or self.survivor.count != kill + 1:
                raise SystemExit(f"kill {kill}: other tokens, or no incident")
            pauses.append(self.survivor._incident.pause)
            loads.append(self.survivor._incident.parts["load"])
        if pauses:
            row["pause"] = statistics.median(pauses)
            row["worst_pause"] = max(pauses)
            row["load"] = statistics.median(loads)
        self.engine.engine_core.shutdown()
        return row


def run(model, **options):
    """A row, of a process of its own."""
    cores = [str(rank % (os.cpu_count() or 1)) for rank in range(options["ranks"])]
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--subject", json.dumps({"model": model, **options})],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    rows = re.findall(r"^ROW (.*)$", done.stdout, re.MULTILINE)
    if done.returncode or not rows:
        raise SystemExit(f"{done.stdout[-3000:]}\n{options}: exit status {done.returncode}")
    row = json.loads(rows[0])
    # The longest is the last of the ranks that loaded at the start.
    for name, pattern in (
        ("loaded", r"Weights loaded and shared in ([\d.]+) s"),
        ("mapped", r"Weights mapped in ([\d.]+) s"),
    ):
        if found := [float(one) for one in re.findall(pattern, done.stdout)]:
            row[name] = max(found) if name == "loaded" else statistics.median(found)
    return row


def text_of(row):
    fields = [str(row["ranks"]), row["weights"], row["spares"]]
    for name in ("start", "loaded", "mapped", "load", "pause", "worst_pause"):
        fields.append(f"{row[name]:.2f}" if name in row else "")
    fields += [f"{row['memory']:.0f}", f"{row['tokens_per_second']:.1f}"]
    return f"| {' | '.join(fields)} |"


def measure_all(kills):
    import widen

    rows = []
    with tempfile.TemporaryDirectory(prefix="coxswain_weights_") as folder:
        os.environ["COXSWAIN_RUNTIME_DIR"] = os.path.join(folder, "run")
        model = os.path.join(folder, "model")
        os.mkdir(model)
        widen.random_llama(
            ROOT / "models" / "sums", model, layers=16, hidden=2048, heads=64, kv_heads=8
        )
        size = os.path.getsize(os.path.join(model, "model.safetensors")) / 2**20
        print(f"weights: {size:.0f} MiB; load average {os.getloadavg()[0]:.1f}; {kills} kills\n")
        heads = "TP | weights | spares | start | loaded | mapped | load | pause | worst"
        heads += " | MiB | tokens/s"
        print(f"| {heads} |\n|{'---|' * len(heads.split('|'))}", flush=True)
        jobs = [
            {"ranks": ranks, "spares": spares, "weights": weights, "kills": kills}
            for ranks in (1, 2)
            for spares in ("none", "hot")
            for weights in ("private", "shared")
        ]
        jobs += [{"ranks": 2, "spares": "none", "weights": "kept", "kills": 0}] * 2
        try:
            for job in jobs:
                rows.append(run(model, **job))
                print(text_of(rows[-1]), flush=True)
                if job["weights"] == "shared":
                    drop()
        finally:
            drop()
    return rows


def drop():
    """The holder has nothing, and ends."""
    command = ["coxswain", "weights", "drop", "--all"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="of each engine (10)")
    parser.add_argument("--json", help="all rows go to this file")
    parser.add_argument("--subject", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.subject:
        options = json.loads(arguments.subject)
        model = options.pop("model")
        print("ROW", json.dumps(Subject(model, options).measure(options)), flush=True)
        return
    rows = measure_all(arguments.kills)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
