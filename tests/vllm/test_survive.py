"""Requests outlive their ranks: with on_death "restart" their texts are as if no rank had died."""

import concurrent.futures
import json
import os
import signal

import coxswain
import openai
import pytest
from conftest import (
    PATIENCE,
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

# Chunked prefill and preemptions in two ranks; seeded samples; stages. Prefixes are cached in all.
JOBS = {
    "tp": {"tp": 2, "kills": 5, "options": {"num_gpu_blocks_override": 16}},
    "seeded": {"kills": 2, "seeded": True},
    "pp": {"pp": 2, "kills": 2, "seeded": True, "spares": "hot"},
}


def survive(models, **job):
    """Runs an engine with kills; as many as VLLM_TEST_KILLS says, for a longer run."""
    job["model"] = os.path.join(models, "random")
    job["kills"] = int(os.environ.get("VLLM_TEST_KILLS", job["kills"]))
    found = run_script("survivor.py", job, job.get("tp", 1) * job.get("pp", 1))
    for line in found["log"].splitlines():
        if "loaded the model after" in line or "go on after" in line:
            print(line)
    return found["result"]


def wrong(found):
    return [
        sum(one != other for one, other in zip(texts, found["reference"], strict=True))
        for texts in found["rounds"]
    ]


@pytest.mark.parametrize("name", JOBS)
def test_texts_are_those_of_ranks_that_live(models, name):
    found = survive(models, **JOBS[name])
    assert found["incidents"] == found["kills"] > 0
    assert not any(wrong(found)), wrong(found)
    assert name != "tp" or found["preemptions"] > 0


def test_prefixes_of_lost_ranks_are_forgotten(models):
    """The test above can fail: prefixes that only lost ranks had computed give other texts. For the
    KV cache of the requests test_soak.py shows it."""
    found = survive(models, kills=3, seeded=True, without=["_forget_blocks"])
    assert any(wrong(found))


def survivor(server, spares="none", **more):
    """A server whose requests outlive its ranks."""
    return server(
        options=["--no-async-scheduling", *more.pop("options", ())],
        VLLM_COXSWAIN_ON_DEATH="restart",
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


def priority(pid):
    return os.getpriority(os.PRIO_PROCESS, pid)


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


LONG = pytest.mark.skipif("VLLM_TEST_KILLS" not in os.environ, reason="VLLM_TEST_KILLS is not set")


@pytest.mark.parametrize(
    "spares", [pytest.param("none", marks=LONG), pytest.param("warm", marks=LONG), "hot"]
)
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


def test_a_spare_that_dies_is_replaced(server):
    """Three that die in a row are enough, until the next incident."""
    with survivor(server, "warm") as running:
        for i in range(3):
            if i == 1:
                wait_until(lambda: len(running.spare_pids()) == 2, "no spares")
            else:
                running.wait_for_spares()
            kill(running.spare_pids()[:1])
            log = running.wait_for_text(f"Spare ranks failed ({i + 1} in a row")
        assert "no others are started until an incident" in log
        assert running.note()["spares"] == "warm, given up"
        assert running.note()["incidents"] == 0
        kill(running.pids()[:1])
        assert ask(running, LINES[0])
        running.wait_for_spares()


def test_ranks_that_die_while_spares_load_wait_for_them(server):
    before = shared_memory()
    with survivor(server, "hot") as running:
        spares = wait_until(lambda: len(found := running.spare_pids()) == 2 and found, "no spares")
        assert running.note()["spares"] == "hot, starting"
        engine = priority(status(running.name)["pid"])
        if os.geteuid() == 0:
            wait_until(lambda: priority(spares[0]) == engine + 5, "no low priority")
        kill(running.pids())
        assert ask(running, LINES[0])
        assert sorted(running.pids()) == spares
        assert {priority(pid) for pid in spares} == {engine}
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
    """All ranks that die at once are one incident, and a second one is too many. Nor are there log
    probabilities of a prompt, which no step gives again."""
    config = {"coxswain": {"on_death": "restart", "incidents": 1}}
    with server(
        options=["--no-async-scheduling", "--additional-config", json.dumps(config)]
    ) as running:
        kill(running.pids())
        assert ask(running, LINES[0])
        pid = running.pids()[1]
        running.inject("1 SIGKILL sample")
        with pytest.raises(openai.APIError):
            ask(running, LINES[0], extra_body={"prompt_logprobs": 1})
        log = running.wait_for_text("EngineCore encountered a fatal error")
        assert f"rank 1 (pid {pid}) was killed by signal 9" in log
        assert "it is incident 2 in 600 s" in log
        assert "it asks for log probabilities of its prompt" in log
        assert running.process.wait(PATIENCE) is not None


# What vLLM makes of an engine's arguments on a CPU, and what it can only be told.
ARGUMENTS = [
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        "speculative decoding",
    ),
    (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "a KV connector",
    ),
]
TOLD = [
    ("scheduler_config.async_scheduling", True, "async scheduling"),
    ("model_config.runner_type", "pooling", "a pooling model"),
]


def test_what_cannot_go_on_exactly_is_refused_at_start(models, monkeypatch):
    for name, value in environment(1).items():
        monkeypatch.setenv(name, value)
    from vllm.engine.arg_utils import EngineArgs

    from coxswain import _vllm_survive
    from coxswain.vllm import Executor

    def config_of(**more):
        return EngineArgs(
            model=os.path.join(models, "random"),
            max_model_len=64,
            dtype="float32",
            distributed_executor_backend=Executor,
            additional_config={"coxswain": {"on_death": "restart"}},
            **more,
        ).create_engine_config()

    config = config_of()
    _vllm_survive.check(config)
    for arguments, text in ARGUMENTS:
        with pytest.raises(coxswain.Unsupported, match=text):
            Executor(config_of(**arguments))
    for path, value, text in TOLD:
        owner, name = path.split(".")
        owner = getattr(config, owner)
        before = getattr(owner, name)
        object.__setattr__(owner, name, value)
        with pytest.raises(coxswain.Unsupported, match=text):
            _vllm_survive.check(config)
        object.__setattr__(owner, name, before)


def test_a_live_request_with_images_is_an_obstacle():
    from coxswain import _vllm_survive
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData

    image = MultiModalFeatureSpec(None, "image", "1", PlaceholderRange(offset=0, length=1))
    for features, found in (([], []), ([image], ["request 7: it has multimodal inputs"])):
        new = NewRequestData("7", [1], features, SamplingParams(), None, ([1],), 0, None)
        assert _vllm_survive.Live.of(new).obstacles() == found


def test_a_step_without_samples_ends_itself():
    """In a pipeline one may have its result while an older one awaits its samples."""
    import types

    from coxswain import _vllm_survive
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    def step(method, scheduled=None):
        call = types.SimpleNamespace(method=method, repeated=False)
        if scheduled:
            survivor.submitted(call, method, (scheduled,))
        return call

    parallel = types.SimpleNamespace(data_parallel_size=1)
    config = types.SimpleNamespace(
        parallel_config=parallel,
        model_config=types.SimpleNamespace(runner_type="generate"),
        scheduler_config=types.SimpleNamespace(async_scheduling=False),
        speculative_config=None,
        kv_transfer_config=None,
    )
    spares = types.SimpleNamespace(fill=lambda: None)
    executor = types.SimpleNamespace(vllm_config=config, _spares=spares)
    survivor = _vllm_survive.Survivor(executor, 1, 1.0)
    sampling, empty = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
    sampling.scheduled_new_reqs = [
        NewRequestData("7", [1], [], SamplingParams(), None, ([1],), 0, None)
    ]
    sampling.num_scheduled_tokens = {"7": 1}
    first, second = step("execute_model", sampling), step("execute_model", empty)
    survivor.resolved(first, None)
    survivor.resolved(second, EMPTY_MODEL_RUNNER_OUTPUT)
    assert [one.scheduled for one in survivor._steps] == [sampling] and not survivor._live
    survivor.resolved(step("sample_tokens"), (EMPTY_MODEL_RUNNER_OUTPUT, {}))
    assert not survivor._steps and list(survivor._live) == ["7"]
