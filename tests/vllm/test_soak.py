"""Ranks are killed at random moments while 16 clients stream from the API server."""

import collections
import json
import os
import random
import re
import signal
import statistics
import threading
import time
import urllib.request

import pytest
from conftest import PATIENCE, Server, wait_until

CLIENTS = 16
# By spares. VLLM_TEST_KILLS: as many in each, for a longer run.
KILLS = {"none": 2, "hot": 4}
KINDS = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "extra_body": {"repetition_penalty": 1.3}, "frequency_penalty": 0.4},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    {"temperature": 0.9, "seed": 3, "extra_body": {"structured_outputs": {"regex": "[0-9]{80}"}}},
    {"temperature": 0, "model": "lora"},
    {"temperature": 0.9, "seed": 5, "model": "lora"},
)


def requests():
    """Of all kinds; a third of the prompts begin alike."""
    draw = random.Random(5)
    found = []
    for i in range(3 * len(KINDS)):
        text = "".join(draw.choice("0123456789+=") for _ in range(draw.randrange(1, 40)))
        request = {"model": "model", "max_tokens": 20 + 9 * (i % 5), **KINDS[i % len(KINDS)]}
        request["prompt"] = 4 * "12+34=46" + text if i % 3 == 0 else text
        request["extra_body"] = {
            "ignore_eos": True,
            "return_token_ids": True,
            **request.get("extra_body", {}),
        }
        found.append(request)
    return found


def ask(client, request):
    """The text, the tokens and the tokens of the log probabilities of a streamed completion."""
    text, tokens, likely = "", [], []
    for part in client.completions.create(stream=True, **request):
        choice = part.choices[0]
        text += choice.text
        tokens += choice.model_extra.get("token_ids") or []
        likely += [
            sorted(step) for step in (choice.logprobs and choice.logprobs.top_logprobs) or []
        ]
    return text, tokens, likely


class Clients:
    """They ask again and again, and compare."""

    def __init__(self, server):
        self.server = server
        self.requests = requests()
        self.reference = [ask(server.client(), request) for request in self.requests]
        self.results = collections.Counter()
        self.wrong = []
        self.longest = 0.0
        self.ending = False
        self.threads = [
            threading.Thread(target=self.run, args=(i,), daemon=True) for i in range(CLIENTS)
        ]

    def run(self, first):
        client = self.server.client().with_options(timeout=PATIENCE)
        i = first
        while not self.ending:
            which = i % len(self.requests)
            begin = time.monotonic()
            try:
                right = ask(client, self.requests[which]) == self.reference[which]
                self.results["right" if right else "wrong"] += 1
                if not right:
                    self.wrong.append(which)
            except Exception as error:
                self.results[f"error: {error!r}"[:200]] += 1
            self.longest = max(self.longest, time.monotonic() - begin)
            i += 5  # has no divisor in common with their number

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.ending = True
        for thread in self.threads:
            thread.join(PATIENCE)


def pauses(log):
    """The pause of each incident, and its parts, in seconds."""
    found = []
    for pause, parts in re.findall(r"go on after ([0-9.]+) s \(([^)]*)\); incident", log):
        named = dict(part.rsplit(" ", 1) for part in parts.split(", "))
        found.append({"pause": float(pause), **{name: float(took) for name, took in named.items()}})
    return found


def soak(models, folder, spares, kills):
    """Kills ranks. Returns what the clients saw."""
    config = {"incidents": 10000, "spares": spares}
    options = [
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "2048", "--block-size", "32"),
        *("--num-gpu-blocks-override", "16", "--enable-lora", "--max-lora-rank", "8"),
        # On a CPU, vLLM applies the adapter of the last slot to requests without one: it is empty.
        *("--max-loras", "2"),
        *("--lora-modules", f"lora={os.path.join(models, 'lora')}"),
        *("--additional-config", json.dumps({"coxswain": config})),
    ]
    model = os.path.join(models, "random")
    draw = random.Random(3)
    more = {"options": options, "length": 256, "VLLM_COXSWAIN_ON_DEATH": None}
    with Server(str(folder), model, **more) as server:
        with Clients(server) as clients:
            for i in range(kills):
                if spares != "none":
                    server.wait_for_spares()
                before = clients.results.total()
                wait_until(lambda b=before: clients.results.total() > b + 4, "no results")
                time.sleep(draw.uniform(0, 0.5))
                os.kill(draw.choice(server.pids()), signal.SIGKILL)
                server.wait_for_incident(i + 1)
                print(i + 1, dict(clients.results), pauses(server.text())[-1], flush=True)
            before = clients.results.total()
            wait_until(lambda: clients.results.total() > before + 2 * CLIENTS, "no results")
        with urllib.request.urlopen(f"{server.url}/metrics") as metrics:
            counts = re.findall(
                r"^vllm:num_preemptions_total\S* (\S+)$", metrics.read().decode(), re.M
            )
        assert server.note()["incidents"] == kills
        found = pauses(server.text())
    print(f"spares {spares}: {kills} kills, {dict(clients.results)}, preemptions {counts}")
    print(f"the longest request took {clients.longest:.2f} s; wrong kinds {set(clients.wrong)}")
    for name in found[0]:
        times = [pause[name] for pause in found]
        print(f"  {name:7} median {statistics.median(times):.3f} s, worst {max(times):.3f} s")
    assert len(found) == kills and sum(map(float, counts)) > 0
    return clients.results


@pytest.mark.parametrize("spares", KILLS)
def test_every_text_is_that_of_ranks_that_live(models, tmp_path, spares):
    kills = int(os.environ.get("VLLM_TEST_KILLS", KILLS[spares]))
    assert set(soak(models, tmp_path, spares, kills)) == {"right"}
