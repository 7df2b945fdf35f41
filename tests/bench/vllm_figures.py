"""bench vLLM: vLLM's own multiprocess executor beside coxswain.vllm.Executor.

Both engines of a pair are alive, and measured in alternating rounds; the ratio of a figure is the
median of the ratios of rounds that followed each other. A table goes to the standard output, and
with --json all rows to a file. `make bench-vllm` runs it.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tests", "vllm"))
EXECUTORS = ("own", "coxswain")
# vLLM's own ranks spin for a second after their last call: the other engine is measured after that.
QUIET_SECONDS = 1.5
SEQUENCES = 16


def percentile(samples, share):
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Engine:
    """A subject: vllm_subject.py with one executor."""

    def __init__(self, executor, ranks, model, log, **more):
        cores = [str(rank % (os.cpu_count() or 1)) for rank in range(ranks)]
        environment = {
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **more,
        }
        self.process = subprocess.Popen(
            [sys.executable, os.path.join(HERE, "vllm_subject.py"), executor, str(ranks), model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )

    def ask(self, do, **arguments):
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine has ended in {do!r}")
        return json.loads(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()


def row_of(section, executor, ranks, rounds):
    """A row of results of one kind."""
    samples = [sample for result in rounds for sample in result["samples"]]
    count = max(1, len(samples))
    used = [sum(result["cpu_ns"]) for result in rounds]
    row = {"section": section, "executor": executor, "ranks": ranks, "rounds": len(rounds)}
    if section == "idle":
        seconds = sum(result["wall_ns"] for result in rounds)
        return {**row, "cpu_percent": 100 * sum(used) / seconds}
    row["p50_us"] = statistics.median(percentile(one["samples"], 0.5) for one in rounds) / 1e3
    row["p99_us"] = statistics.median(percentile(one["samples"], 0.99) for one in rounds) / 1e3
    row["cpu_us"] = (
        statistics.median(
            one / len(result["samples"]) for one, result in zip(used, rounds, strict=True)
        )
        / 1e3
    )
    row["engine_cpu_us"] = sum(result["cpu_ns"][0] for result in rounds) / count / 1e3
    if section == "step":
        row["tokens_per_s"] = statistics.median(
            SEQUENCES * len(one["samples"]) * 1e9 / sum(one["samples"]) for one in rounds
        )
    return row


def ratios_of(section, ranks, results):
    """Medians of coxswain by own, over pairs of rounds."""

    def ratio(figure):
        return statistics.median(
            figure(ours) / figure(own)
            for own, ours in zip(results["own"], results["coxswain"], strict=True)
        )

    row = {"section": section, "executor": "coxswain / own", "ranks": ranks}
    row["p50"] = ratio(lambda one: percentile(one["samples"], 0.5))
    row["p99"] = ratio(lambda one: percentile(one["samples"], 0.99))
    row["cpu"] = ratio(lambda one: sum(one["cpu_ns"]) / len(one["samples"]))
    if section == "step":
        row["tokens_per_s"] = ratio(lambda one: len(one["samples"]) / sum(one["samples"]))
    return row


def start_row(executor, ranks, starts):
    return {
        "section": "start",
        "executor": executor,
        "ranks": ranks,
        "starts": len(starts),
        "start_s": statistics.median(one["start_ns"] for one in starts) / 1e9,
        "first_batch_ms": statistics.median(one["first_batch_ns"] for one in starts) / 1e6,
    }


def show(row):
    head = f"{row['ranks']:5}  {row['section']:<9} {row['executor']:<14}"
    figures = {key: value for key, value in row.items() if isinstance(value, float)}
    print(head + "".join(f"  {key} {value:.2f}" for key, value in figures.items()), flush=True)


def figures(ranks, model, options, log):
    """Rows of the two engines of this many ranks."""
    rows = []
    with contextlib.ExitStack() as stack:
        engines = {one: stack.enter_context(Engine(one, ranks, model, log)) for one in EXECUTORS}
        for executor, engine in engines.items():
            rows.append(start_row(executor, ranks, [engine.ask("start")]))
            show(rows[-1])
        sections = {
            "rpc tight": {"do": "rpc", "count": options.count, "gap": 0},
            "rpc 10 ms": {"do": "rpc", "count": max(20, options.count // 10), "gap": 0.01},
            "step": {"do": "step", "count": 200},
        }
        for section, job in sections.items():
            results = {one: [] for one in EXECUTORS}
            for _ in range(options.rounds):
                for executor, engine in engines.items():
                    time.sleep(QUIET_SECONDS)
                    results[executor].append(engine.ask(**job))
            added = [row_of(section, one, ranks, results[one]) for one in EXECUTORS]
            rows += [*added, ratios_of(section, ranks, results)]
            for row in rows[-3:]:
                show(row)
        for executor, engine in engines.items():
            rows.append(row_of("idle", executor, ranks, [engine.ask("idle", seconds=options.idle)]))
            show(rows[-1])
        for engine in engines.values():
            engine.ask("stop")
    return rows


def kills(ranks, model, options, log):
    """Rows of kill -9 of a rank, in steps and while idle, with a new engine for each."""
    found = {(one, loaded): [] for one in EXECUTORS for loaded in (True, False)}
    starts = {one: [] for one in EXECUTORS}
    with contextlib.ExitStack() as stack:
        fail = {"VLLM_COXSWAIN_ON_DEATH": "fail"}
        engines = {
            one: stack.enter_context(Engine(one, ranks, model, log, **fail)) for one in EXECUTORS
        }
        for i in range(options.kills):
            for loaded in (True, False):
                for executor, engine in engines.items():
                    if executor == "own" and i >= options.own_kills:
                        continue
                    starts[executor].append(engine.ask("start"))
                    result = engine.ask("kill", loaded=loaded)
                    engine.ask("stop")
                    found[executor, loaded].append(result)
                    late = (result["told_ns"] - result["reported_ns"]) / 1e6
                    print(
                        f"kill {i + 1} of {options.kills}, {'step' if loaded else 'idle'}, "
                        f"{executor}: {late:.2f} ms {result['text'][:100]}",
                        file=sys.stderr,
                        flush=True,
                    )
    # The first start of a process imports more than a later one.
    rows = [start_row(one, ranks, starts[one][1:]) for one in EXECUTORS]
    for row in rows:
        show(row)
    for (executor, loaded), results in found.items():
        told = [(one["told_ns"] - one["reported_ns"]) / 1e6 for one in results]
        reported = [(one["reported_ns"] - one["killed_ns"]) / 1e6 for one in results]
        rows.append(
            {
                "section": "kill step" if loaded else "kill idle",
                "executor": executor,
                "ranks": ranks,
                "kills": len(results),
                "kernel_p50_ms": statistics.median(reported),
                "p50_ms": statistics.median(told),
                "p99_ms": percentile(told, 0.99),
                "text": results[0]["text"],
            }
        )
        show(rows[-1])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="all rows, also")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=2000, help="calls of a tight round")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds")
    parser.add_argument("--kills", type=int, default=20, help="in steps, and as many while idle")
    parser.add_argument(
        "--own-kills", type=int, default=5, help="of vLLM's own executor, which takes 10 s for each"
    )
    parser.add_argument("--log", default=os.devnull, help="for what the engines write")
    options = parser.parse_args()
    import widen

    load = os.getloadavg()
    print(f"load average at the start: {load[0]:.1f}, of {os.cpu_count()} processors")
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="coxswain-bench-") as model,
        open(options.log, "w") as log,
    ):
        widen.random_llama(os.path.join(ROOT, "models", "sums"), model)
        for ranks in options.ranks:
            if options.rounds:
                rows += figures(ranks, model, options, log)
        if options.kills:
            rows += kills(max(options.ranks), model, options, log)
    if options.json:
        machine = {
            "date": time.strftime("%Y-%m-%d"),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "load_average": load,
        }
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
