"""Requests outlive their ranks: with on_death "restart" clients get what they would get had no rank
died."""

import concurrent.futures
import json
import os
import signal

import coxswain
import openai
import pytest
from conftest import (
    PATIENCE,
    ROOT,
    SUMS,
    children,
    environment,
    ranks_of,
    run_script,
    shared_memory,
    status,
    wait_for_end,
    wait_until,
)

# Of each row of ROWS; nightly has 10.
KILLS = int(os.environ.get("VLLM_TEST_KILLS", "2"))
LIKELY = ("greedy", "logprobs", "penalties")
ALL = (*LIKELY, "prompt logprobs", "seed", "top p", "regex", "seeded regex")
V2_KINDS = ("greedy", "prompt logprobs", "seed")
LATE = 0.004
V2 = ROOT / "tests" / "vllm" / "v2", ROOT / "build" / "triton"
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
# Prompts are computed in parts, and requests are preempted. (On a CPU, vLLM fails where a prompt of
# a seeded request is computed in parts.)
FEW = {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 64}
# Jobs of survivor.py. Prefixes are cached in all where vLLM does that.
ROWS = {
    "sync": {"tp": 2, "kinds": ALL},
    "async": {"tp": 2, "kinds": ALL, "late": LATE},
    "async, calls": {"kinds": ("seed", "top p"), "late": LATE, "calls": True},
    "chunks": {"tp": 2, "options": FEW, "late": LATE},
    "spares": {"tp": 2, "kinds": ALL, "late": LATE, "coxswain": {"spares": "hot"}},
    "weights": {"tp": 2, "kinds": ALL, "coxswain": {"weights": "shared"}},
    "weights, LoRA": {
        "kinds": ("lora", "no LoRA"),
        "options": LORA,
        "late": LATE,
        "coxswain": {"weights": "shared", "spares": "hot"},
    },
    "stages": {"pp": 2, "kinds": (*LIKELY, "seed")},
    "stages of two ranks": {"tp": 2, "pp": 2, "kinds": LIKELY},
    # With a seeded request in the batch vLLM's speculation on a CPU gives other tokens the second
    # time, without any kill.
    "ngram": {"options": {"speculative_config": NGRAM}},
    "draft": {"kind": "draft"},
    "eagle": {"kind": "eagle"},
    "lora": {"kinds": ("lora", "no LoRA"), "options": LORA, "late": LATE},
    "windows": {"kind": "gemma3", "kinds": (*LIKELY, "seed")},
    "windows, async": {
        "kind": "gemma3",
        "late": LATE,
        "options": {**FEW, "num_gpu_blocks_override": 32},
    },
    "mamba": {"kind": "hybrid", "options": {"max_num_batched_tokens": 64}},
    "images": {"kind": "idefics3", "late": LATE},
    "pooling": {"kind": "embedding", "options": {"max_num_batched_tokens": 64}},
    "logits processor": {"kind": "forbid", "kinds": (*LIKELY, "seed")},
    "V2": {"v2": True, "kinds": ("greedy", "prompt logprobs", "seed"), "count": 6},
    "V2, async": {
        "v2": True,
        "kinds": ("greedy", "prompt logprobs", "seed"),
        "count": 6,
        "late": LATE,
    },
}
# Without samples there is no moment before them.
PLACES = {"embedding": ("execute", "executed", "anywhere", "replacement", "twice")}


def survive(models, kills=KILLS, v2=False, **job):
    """Runs an engine with kills."""
    if v2 and not V2[1].exists():
        pytest.skip("sh tools/vllm has not installed Triton")
    job = {"models": models, "kills": kills, **job}
    if places := PLACES.get(job.get("kind")):
        job.setdefault("places", places)
    more = {"VLLM_TEST_LATE": str(job["late"])} if "late" in job else {}
    if v2:
        more |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    path = os.pathsep.join(map(str, V2)) if v2 else ""
    ranks = job.get("tp", 1) * job.get("pp", 1)
    found = run_script("survivor.py", job, ranks, path, **more)
    for line in found["log"].splitlines():
        if "go on after" in line:
            print(line[line.index("steps go") :])
    return found["result"]


def wrong(found):
    return [one["first"] for one in found["rounds"] if one["wrong"]]


@pytest.mark.parametrize("name", ROWS)
def test_outputs_are_those_of_ranks_that_live(models, name):
    found = survive(models, seed=len(name), **ROWS[name])
    assert not found["again"]["wrong"], found["again"]["first"]
    assert found["kills"] > 0 and found["incidents"] >= found["kills"]
    assert not wrong(found), wrong(found)
    assert set(found["ranks"]) == {"alive"}  # and these are found by the group's name
    assert name != "chunks" or found["preemptions"] > 16  # more than incidents make
    assert "windows" not in name or found["groups"] > 1


@pytest.mark.parametrize("part", ["generators", "prefixes"])
def test_the_outputs_can_be_wrong(models, part):
    """Where the state of generators is lost, or the scheduler believes in cached prefixes that only
    lost ranks had computed."""
    found = survive(models, kills=3, kinds=("seed",), without=[part], places=["executed"])
    assert not found["again"]["wrong"] and wrong(found)


def survivor(server, spares="none", **more):
    """A server whose requests outlive its ranks."""
    return server(
        VLLM_COXSWAIN_ON_DEATH=None,
        VLLM_COXSWAIN_SPARES=spares,
        **more,
    )


LINES = SUMS.joinpath("heldout.txt").read_text().split()


def ask(running, line, **more):
    """Asks for a sum. Returns whether the text is right."""
    prompt = line.split("=")[0] + "="
    client = running.client().with_options(timeout=PATIENCE)
    reply = client.completions.create(
        model="model", prompt=prompt, max_tokens=8, temperature=0, **more
    )
    return prompt + reply.choices[0].text == line


def asked(running, count=8):
    """Asks for sums at the same time. Returns whether all texts are right."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return all(pool.map(lambda line: ask(running, line), LINES[:count]))


def left(running, pids, before):
    """Names in /dev/shm of the groups of a server."""
    return {
        name
        for name in shared_memory() - before
        if running.name in name or name.split("_")[0] in map(str, pids)
    }


def kill(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def kill_in_a_replacement(running):
    """The ranks, and one of those that replace them."""
    old, engine = running.pids(), status(running.name)["pid"]
    kill(old[:1])
    # Spares, or such as import vLLM by now.
    kill(wait_until(lambda: ranks_of(engine) - set(old), "no new ranks"))


# What becomes of the ranks, and what the log says of the cause.
FAULTS = {
    "dies": (lambda running: running.inject("1 SIGKILL sample"), "killed by signal 9"),
    "hangs": (lambda running: running.inject("0 SIGSTOP execute"), "stopped by a signal"),
    "reports": (lambda running: running.inject("1 device execute"), "CUDA error"),
    "all die": (lambda running: kill(running.pids()), "killed by signal 9"),
    "new ones die": (kill_in_a_replacement, "killed by signal 9"),
}


@pytest.mark.parametrize("spares", ["none", "hot"])
def test_requests_outlive(server, spares):
    """Each of FAULTS is one incident, however many ranks it costs, and no text is another one."""
    with survivor(server, spares, VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="15") as running:
        assert asked(running)
        assert running.note()["incidents"] == 0
        for i, (name, (happens, cause)) in enumerate(FAULTS.items()):
            if spares != "none":
                running.wait_for_spares()
            print(f"a rank {name}")
            happens(running)
            assert asked(running), running.text()[-5000:]
            running.wait_for_incident(i + 1)
            note = running.note()
            assert note["incidents"] == i + 1, note
            assert cause in note["last_incident"]
            assert note["pause_s"] == pytest.approx(sum(note["pause_parts_s"].values()), abs=0.01)
            print(note)
        assert status(running.name)["name"] == running.name


def test_engines_of_dense_data_parallelism_outlive_their_ranks(server):
    """Each by itself: the other one's requests go on."""
    options = "--data-parallel-size", "2"
    with survivor(server, ranks=1, options=options, VLLM_CPU_OMP_THREADS_BIND="0|1") as running:
        names = running.name, f"{running.name}_1"
        assert asked(running, 16)
        for name in names:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                told = pool.submit(asked, running, 16)
                kill([status(name)["ranks"][0]["pid"]])
                assert told.result(), running.text()[-5000:]
            assert asked(running, 16)
            wait_until(lambda name=name: status(name)["note"]["incidents"] == 1, running.text)
        assert [status(name)["note"]["incidents"] for name in names] == [1, 1]


def test_a_spare_that_dies_is_replaced(server):
    """Three that die in a row are enough, until the next incident."""
    with survivor(server, "hot") as running:
        for i in range(3):
            if i == 1:
                wait_until(lambda: len(running.spare_pids()) == 2, "no spares")
            else:
                running.wait_for_spares()
            kill(running.spare_pids()[:1])
            log = running.wait_for_text(f"Spare ranks failed ({i + 1} in a row")
        assert "no others are started until an incident" in log
        assert running.note()["spares"] == "hot, given up"
        assert running.note()["incidents"] == 0
        kill(running.pids()[:1])
        assert ask(running, LINES[0])
        running.wait_for_spares()


def test_ranks_that_die_while_spares_load_wait_for_them(server):
    before = shared_memory()
    with survivor(server, "hot") as running:
        spares = wait_until(lambda: len(found := running.spare_pids()) == 2 and found, "no spares")
        assert running.note()["spares"] == "hot, starting"
        kill(running.pids())
        assert ask(running, LINES[0])
        assert sorted(running.pids()) == spares
        pids = children(running.process.pid)
    wait_for_end(pids)
    assert not left(running, pids, before)


def test_nothing_is_left_of_a_killed_engine_with_spares(server):
    before = shared_memory()
    with survivor(server, "hot") as running:
        pids = children(running.process.pid) | {*running.wait_for_spares()}
        kill(running.pids()[:1])
        assert ask(running, LINES[0])
        pids |= {*running.wait_for_spares(), *running.pids()}
        for pid in {*running.spare_pids(), *running.pids()}:
            # vLLM's own, too: no name of what the ranks have mapped is there.
            with open(f"/proc/{pid}/maps") as maps:
                mapped = {line.split(maxsplit=5)[5].strip() for line in maps if "/dev/shm/" in line}
            assert mapped and all(name.endswith("(deleted)") for name in mapped)
        kill([status(running.name)["pid"]])
        wait_for_end(pids)
    assert not left(running, pids, before)


def test_what_cannot_go_on_ends_in_words(server):
    """All ranks that die at once are one incident, and a second one is too many."""
    config = {"coxswain": {"incidents": 1}}
    more = {"VLLM_COXSWAIN_ON_DEATH": None}
    with server(options=["--additional-config", json.dumps(config)], **more) as running:
        assert "on_death is 'restart'" in running.text()
        kill(running.pids())
        assert ask(running, LINES[0])
        pid = running.pids()[1]
        running.inject("1 SIGKILL sample")
        with pytest.raises(openai.APIError):
            ask(running, LINES[0])
        log = running.wait_for_text("EngineCore encountered a fatal error")
        assert f"rank 1 (pid {pid}) was killed by signal 9" in log
        assert "The requests cannot be continued: it is incident 2 in 600 s" in log
        assert running.process.wait(PATIENCE) is not None


def test_calls_that_change_ranks(models):
    """Some are repeated, in order; after another one the next incident is the end, in words."""
    found = run_script("changes.py", {"model": os.path.join(models, "random")}, 1)["result"]
    assert found["asleep"] == ["reload_weights", "sleep"]
    assert found["awake"] == ["reload_weights"]
    assert found["right"]
    assert "vLLM's call say changed the ranks, and is not repeated" in found["end"]


# What is refused, by the arguments of an engine or by what it can only be told.
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
REFUSED = [
    ({"kv_transfer_config": CONNECTOR}, (), "a KV connector"),
    ({}, ("parallel_config.data_parallel_size", 2), "experts over several engines"),
    ({}, ("ec_transfer_config", "any"), "an encoder cache connector"),
]


@pytest.mark.parametrize(("arguments", "told", "text"), REFUSED)
def test_what_cannot_go_on_is_refused_at_start(models, monkeypatch, arguments, told, text):
    """In one line, with the reason; on_death is "fail" then unless "restart" is asked for."""
    for name, value in environment(1).items():
        monkeypatch.setenv(name, value)
    from vllm.engine.arg_utils import EngineArgs

    from coxswain.vllm import Executor, Options

    config = EngineArgs(
        model=os.path.join(models, "random"),
        max_model_len=64,
        dtype="float32",
        distributed_executor_backend=Executor,
        **arguments,
    ).create_engine_config()
    if not arguments:
        assert Options.of(config).on_death == "restart"
        *path, last = told[0].split(".")
        owner = getattr(config, path[0]) if path else config
        object.__setattr__(owner, last, told[1])
    assert Options.of(config).on_death == "fail"
    config.additional_config = {"coxswain": {"on_death": "restart"}}
    with pytest.raises(coxswain.Unsupported, match=text):
        Options.of(config)
