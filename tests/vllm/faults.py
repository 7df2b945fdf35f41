"""Faults of a rank, of all ranks and of the engine, with vLLM's own executor and with Coxswain's.

Usage: faults.py [--only TEXT] [--json FILE]. Prints a table in Markdown of what clients and the log
of the API server say, and when. With FILE rows that are there already are not run again. The names
of the rows: VICTIM-FAULT-MOMENT, as in ROWS; test_faults.py runs some of them.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import time

import conftest
import oom

#: while nothing is asked, inside a step (the rank does it), or beside 8 clients that stream
MOMENTS = ("idle", "step", "load")
VICTIMS = ("one", "all", "engine")
FAULTS = ("kill", "stop", "raise", "oom")
#: seconds that a step may take; the first one takes some where other programs keep the cores busy
STEP = 20
CLIENTS = 8
ROWS = [
    f"{victim}-{fault}-{moment}"
    for victim in VICTIMS
    for fault in FAULTS
    for moment in MOMENTS
    # only a step can raise, and only a rank is made to do something inside a step
    if not (fault == "raise" and (moment == "idle" or victim == "engine"))
    if not (victim == "engine" and moment == "step")
]
# The last line of the traceback of the engine's end, and what says more than that.
_ENDS = re.compile(r"\[core\.py:\d+\] ((?:[\w.]+)?(?:Error|Died|Closed|TimedOut|Exception)\b.*)")
_OURS = re.compile(r"Coxswain group \S+: (.*)")


def titled(pid, title):
    """Processes below one whose titles begin so, in the order of the titles."""
    found = []
    for child in conftest.children(pid):
        try:
            name = pathlib.Path(f"/proc/{child}/cmdline").read_text()
        except OSError:
            continue
        if name.startswith(title):
            found.append((name, child))
    return [child for _, child in sorted(found)]


def ask(server, stream):
    """What a client gets: an error's status and message, or a text."""
    import openai

    try:
        reply = server.client().completions.create(
            model="model", prompt="1+2=", max_tokens=40, temperature=0, stream=stream,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        if stream:
            for _ in reply:
                pass
        return None
    except openai.APIStatusError as error:
        return f"{error.status_code}: {error.body['message'] if error.body else error}"
    except openai.APIError as error:  # of a stream that has begun, or of a connection
        body = error.body if isinstance(error.body, dict) else {}
        return f"{type(error).__name__}: {body.get('message', error)}"


def keep_asking(server, deadline):
    """A client under load. Returns its first error, and when it came."""
    while time.monotonic() < deadline:
        text = ask(server, stream=True)
        if text:
            return text, time.monotonic()
    return None, None


def begin(server, victim, fault, ranks, engine):
    """Makes the fault happen now, from outside. Returns the time."""
    pids = {"one": ranks[-1:], "all": ranks, "engine": [engine]}[victim]
    if fault == "oom":
        if not oom.kill(pids):
            raise RuntimeError("no control group with a limit for memory can be made here")
        return time.monotonic()
    at = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    return at


def left_by(server, ranks, before):
    """New names in /dev/shm of this server's group, or of its ranks' processes."""
    marks = [server.name, *map(str, ranks)]
    return {
        name for name in conftest.shared_memory() - before if any(mark in name for mark in marks)
    }


def run(server, row):
    """Runs a row with a server that is ready. Returns texts and seconds after the fault."""
    victim, fault, moment = row.split("-")
    before = conftest.shared_memory()
    failed = ask(server, stream=False)
    assert not failed, failed
    ranks, (engine,) = (
        titled(server.process.pid, "VLLM::Worker"),
        titled(server.process.pid, "VLLM::EngineCore"),
    )
    everybody = [*ranks, engine]
    logged = len(server.text())
    own = fault == "raise" or moment == "step"
    action = {"kill": "SIGKILL", "stop": "SIGSTOP", "oom": "OOM", "raise": "raise"}[fault]
    with concurrent.futures.ThreadPoolExecutor(CLIENTS + 1) as pool:
        clients = []
        if moment == "load":
            deadline = time.monotonic() + 4 * STEP + 20
            clients = [pool.submit(keep_asking, server, deadline) for _ in range(CLIENTS)]
            time.sleep(0.5)
        if own:
            server.inject(f"{'all' if victim == 'all' else 1} {action} execute")
            at = time.monotonic()
        else:
            at = begin(server, victim, fault, ranks, engine)
        if moment == "idle":
            time.sleep(1)
        if moment != "load":
            clients = [pool.submit(lambda: (ask(server, stream=False), time.monotonic()))]
        told = [client.result() for client in clients]
    first = min(when or float("inf") for _, when in told)
    ended = time.monotonic() + STEP + 10
    while server.process.poll() is None and time.monotonic() < ended:
        time.sleep(0.02)
    log = server.text()[logged:]
    ends = _ENDS.findall(log)
    ours = _OURS.findall(log)
    time.sleep(1)
    result = {
        "client": next((text for text, _ in told if text), "nothing"),
        "client_s": None if first == float("inf") else round(first - at, 3),
        "log": (ours or ends or ["nothing"])[0],
        "engine": (ends or ["nothing"])[-1],
        "server": "lives" if server.process.poll() is None else "ended",
        "processes": sum(map(oom.is_alive, everybody)),
        "shm": sorted(left_by(server, ranks, before)),
        "pids": ranks,
    }
    for pid in everybody:
        if oom.is_alive(pid):
            os.kill(pid, signal.SIGKILL)
        oom.clear(pid)
    return result


def run_row(models, row, backend):
    with tempfile.TemporaryDirectory() as folder:
        server = conftest.Server(
            folder,
            os.path.join(models, "sums"),
            backend=backend,
            options=["--kv-cache-memory-bytes", str(64 << 20)],
            VLLM_CPU_KVCACHE_SPACE=None,
            VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=str(STEP),
        )
        with server:
            return run(server, row)


def cell(result):
    def short(text):
        text = re.sub(r"EngineCore encountered an issue\. See stack trace .*? cause\.", "...", text)
        text = text.split("\\n")[0].splitlines()[0].replace("|", "/")
        return text if len(text) <= 150 else text[:147] + "..."

    when = "" if result["client_s"] is None else f" ({result['client_s']:.2f} s)"
    left = f"; {result['processes']} processes left" if result["processes"] else ""
    return f"client{when}: {short(result['client'])}; log: {short(result['log'])}{left}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows with this in their names")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    found = {}
    if options.json and os.path.exists(options.json):
        with open(options.json) as file:
            found = json.load(file)
    import widen

    with tempfile.TemporaryDirectory(prefix="coxswain_models_") as models:
        os.mkdir(f"{models}/sums")
        widen.widen(conftest.SUMS, f"{models}/sums")
        for row in ROWS:
            for backend in ("mp", conftest.NAME):
                if options.only in row and f"{row} {backend}" not in found:
                    found[f"{row} {backend}"] = run_row(models, row, backend)
                    print(row, backend, found[f"{row} {backend}"], file=sys.stderr, flush=True)
                    if options.json:
                        with open(options.json, "w") as file:
                            json.dump(found, file, indent=1)
    print("| | its own executor | coxswain.vllm.Executor |\n|---|---|---|")
    for row in ROWS:
        cells = [found.get(f"{row} {backend}") for backend in ("mp", conftest.NAME)]
        if any(cells):
            print(f"| {row} | {' | '.join(cell(one) if one else '' for one in cells)} |")


if __name__ == "__main__":
    main()
