"""The PyTorch worker against the reference worker: the same text, also when ranks die.

PyTorch is that of build/venv-torch (tools/torch), or of $COX_TORCH_PYTHON; without it these tests
are skipped.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess

import checkpoints
import processes
import pytest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("COX_BIN_DIR", SOURCE / "build/test/bin"))
DRAWS = BIN.parent / "tests/print_draws"
PACKAGE = BIN.parent / "python"
SUMS = SOURCE / "models/sums"
TIMEOUT = 120

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("COXSWAIN_")}
ENVIRONMENT["PYTHONPATH"] = str(PACKAGE)

GREEDY = ("--temperature", "0")
SEEDED = ("--temperature", "0.9", "--seed", "7")
BEST = ("--temperature", "1.3", "--top-k", "9", "--top-p", "0.8", "--seed", "2147483647")
RANDOM_PROMPTS = [
    " ".join(map(str, random.Random(length).choices(range(3, 97), k=length)))
    for length in (1, 3, 9, 40, 90)
]
SUM_PROMPTS = ["27+58=", "1+2=", "999+1=", "46+", "3"]


PYTHON = processes.find_torch()
if PYTHON is None:
    pytest.skip(
        "no Python here has torch, safetensors and cffi; `sh tools/torch` installs them from PyPI",
        allow_module_level=True,
    )
WORKER = ("--worker", f"{PYTHON} -m coxswain.torch_worker")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("torch")


@pytest.fixture(scope="module")
def models(folder):
    """Folders by name, with the prompts and options for each."""
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    # Sizes that 2 and 4 ranks do not divide evenly: the vocabulary, and the feed-forward.
    grouped = checkpoints.write(
        folder / "grouped",
        1,
        num_key_value_heads=2,
        head_dim=16,
        rope_scaling=rope,
        tie_word_embeddings=True,
    )
    plain = checkpoints.write(
        folder / "plain",
        2,
        ("BF16", "F16", "F32"),
        files=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=90,
        rope_theta=50.0,
    )
    tokens = ("--tokens", "--max-tokens", "24")
    return {
        "sums": (SUMS, SUM_PROMPTS, ()),
        "grouped": (grouped, RANDOM_PROMPTS, tokens),
        "plain": (plain, RANDOM_PROMPTS, tokens),
    }


@pytest.fixture(autouse=True)
def runtime_directory(folder, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "XDG_RUNTIME_DIR", str(folder))


def command(*arguments, stdin=""):
    return subprocess.run(
        [BIN / "coxswain", *map(str, arguments)],
        input=stdin,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def coxswain(*arguments, stdin="", statuses=(0,)):
    done = command(*arguments, stdin=stdin)
    assert done.returncode in statuses, done.stderr
    return done.stdout


def text(prompts, *arguments):
    return coxswain("generate", "--quiet", *arguments, "-", stdin="\n".join(prompts) + "\n")


@contextlib.contextmanager
def running(name, *arguments):
    """A group that `coxswain run` keeps; gives the pids of its ranks."""
    with subprocess.Popen(
        [BIN / "coxswain", "run", "--name", name, *map(str, arguments)],
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            pids = {}
            for line in process.stdout:
                words = line.split()
                if words[0] == "rank":
                    pids[int(words[1])] = int(words[3])
                if len(pids) == int(arguments[arguments.index("-n") + 1]):
                    break
            assert pids, "the group has not started"
            yield pids
        finally:
            process.terminate()
            process.wait(TIMEOUT)
    assert process.returncode == 0


@pytest.mark.parametrize("name", ["sums", "grouped", "plain"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_same_text(models, name, ranks):
    model, prompts, options = models[name]
    # Two ranks: memory without names.
    how = ("--attach", "sealed", *WORKER) if ranks == 2 else WORKER
    with running("same", "-n", ranks, *how, "--model", model, "--step-tokens", 24):
        for sampling in GREEDY, SEEDED, BEST:
            expected = text(prompts, "-n", 1, "--model", model, *options, *sampling)
            assert text(prompts, "--name", "same", *options, *sampling) == expected, sampling


def status():
    # 4: a rank is dead, or being replaced.
    return json.loads(coxswain("status", "--json", "--name", "dies", statuses=(0, 4)))


def until(condition, process):
    """Asks for the state of the group until it is so, while a process runs."""
    state = status()
    while not (found := condition(state)):
        assert process.poll() is None, f"the prompts ended before that; then the group: {state}"
        state = status()
    return found


def step_after(number):
    """A condition: the number of a later step that all ranks have computed, or compute."""

    def check(state):
        sequence = min(rank["channels"]["execute"]["sequence"] for rank in state["ranks"])
        return sequence if sequence > number else None

    return check


def test_killed_ranks_are_replaced_under_prompts(models):
    """And the text is also the same after the commands of recovery."""
    model, prompts, _ = models["grouped"]
    prompts = [f"{prompt} {i}" for i in range(3, 6) for prompt in prompts]
    options = ("--tokens", "--max-tokens", "150", *SEEDED)
    expected = text(prompts, "-n", 1, "--model", model, *options)
    with running("dies", "-n", 2, *WORKER, "--model", model, "--on-death", "restart") as pids:
        with subprocess.Popen(
            [BIN / "coxswain", "generate", "--name", "dies", "--quiet", *options, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        ) as prompting:
            prompting.stdin.write("\n".join(prompts) + "\n")
            prompting.stdin.close()
            sequence = until(step_after(10), prompting)
            for rank in 1, 0:
                os.kill(pids[rank], signal.SIGKILL)
                until(lambda state, rank=rank: state["ranks"][rank]["restarts"], prompting)
                sequence = until(step_after(sequence + 10), prompting)
            assert prompting.stdout.read() == expected
            assert prompting.wait(TIMEOUT) == 0
        assert [rank["restarts"] for rank in status()["ranks"]] == [1, 1]
        for command in "pause", "reinit", "start":
            assert coxswain("recover", command, "--name", "dies") == "rank 0: ok\nrank 1: ok\n"
        assert text(prompts, "--name", "dies", *options) == expected


@pytest.fixture
def holder(monkeypatch):
    """What it holds is dropped, and so it ends."""
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{BIN}:{os.environ['PATH']}")
    yield
    coxswain("weights", "drop", "--all")


def held():
    """Users by key, of what the holder has."""
    return {
        row["key"]: row["users"]
        for row in json.loads(coxswain("weights", "--json"))
        if not row["loading"]
    }


@pytest.mark.usefixtures("holder")
@pytest.mark.parametrize("name", ["grouped", "plain"])
def test_weights_outlive_their_rank_and_their_group(models, name):
    """A rank that is replaced maps those of the dead one, and so do the ranks of another group."""
    model, prompts, options = models[name]
    expected = text(prompts, "-n", 1, "--model", model, *options, *SEEDED)
    shared = (WORKER[0], f"{WORKER[1]} --weights shared", "--model", model)
    with running("dies", "-n", 2, *shared, "--on-death", "restart") as pids:
        assert text(prompts, "--name", "dies", *options, *SEEDED) == expected
        keys = held()
        assert list(keys.values()) == [1, 1]
        os.kill(pids[1], signal.SIGKILL)
        while status()["ranks"][1]["restarts"] != 1 or list(held().values()) != [1, 1]:
            pass
        with running("other", "-n", 2, *shared):
            assert text(prompts, "--name", "other", *options, *SEEDED) == expected
            assert held() == dict.fromkeys(keys, 2)
        assert text(prompts, "--name", "dies", *options, *SEEDED) == expected
    with running("last", "-n", 2, *shared):
        assert text(prompts, "--name", "last", *options, *SEEDED) == expected
        assert held() == dict.fromkeys(keys, 1)


def transfer(name):
    """What status says of pulls."""
    return json.loads(coxswain("status", "--json", "--name", name))["transfer"]


def test_prefill_in_one_group_and_decode_in_another(models):
    """The KV cache is pulled: the text is that of one group, and nothing is computed twice."""
    model, prompts, options = models["grouped"]
    prompts = [f"{prompt} {i}" for i in range(3, 6) for prompt in prompts]
    expected = text(prompts, "-n", 1, "--model", model, *options, *SEEDED)
    ranks = ("-n", 2, *WORKER, "--model", model)
    with (
        running("one", *ranks, "--role", "prefill", "--attach", "sealed"),
        running("two", *ranks, "--role", "decode"),
    ):
        coxswain("link", "--name", "two", "one")
        split = ("--prefill", "one", "--decode", "two")
        assert text(prompts, *split, *options, *SEEDED) == expected
        state = json.loads(coxswain("status", "--json", "--name", "two"))["transfer"]
        assert (state["succeeded"], state["failed"], state["recomputed"]) == (len(prompts), 0, 0)
        assert state["bytes"] > 0 and state["copy_s"] > 0


def test_another_model_has_another_digest(folder):
    """So that groups of different models do not link, also where all sizes are equal."""
    folders = [
        checkpoints.write(folder / f"model{seed}{i}", seed) for i, seed in enumerate((8, 8, 9))
    ]
    code = """if True:
        import pathlib, sys
        from coxswain.torch_checkpoint import Checkpoint
        print(*(Checkpoint(pathlib.Path(folder)).digest() for folder in sys.argv[1:]))"""
    done = subprocess.run(
        [PYTHON, "-c", code, *folders], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    one, same, other = map(int, done.stdout.split())
    assert one == same != other


def failure(*arguments):
    done = subprocess.run(
        [BIN / "coxswain", "run", "-n", "1", *WORKER, *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    return done.stderr


def test_errors_in_words(folder):
    model = checkpoints.write(folder / "biased", 3, num_hidden_layers=1, attention_bias=True)
    assert (
        "attention_bias is true; this worker computes only models where it is false or null"
        in failure("--model", model)
    )
    assert "0 KV blocks of 16 positions" in failure("--model", SUMS, "--init", "block_count=0")
    for device in "cuda:97", "tpu":
        rank = (WORKER[0], f"{WORKER[1]} --device {device}")
        assert f"--device {device}: expected cpu, cuda or cuda:N" in failure(*rank, "--model", SUMS)


def worker(*arguments):
    return subprocess.run(
        [PYTHON, "-m", "coxswain.torch_worker", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def test_started_by_hand():
    done = worker("--model", SUMS)
    assert done.returncode == 1
    assert "a worker is started by a coordinator" in done.stderr and "Traceback" not in done.stderr
    assert "--block-count N" in worker("--help").stdout


SAMPLE = """
import json, sys, torch
from coxswain.torch_sampling import sample
torch.set_num_threads(1)
for logits, history, sampling in json.load(sys.stdin):
    print(*sample(torch.tensor(logits), history, **sampling))
"""


def test_draws_as_the_reference_worker():
    """Also with ties, and with a repetition penalty, which the command has no option for."""
    if not DRAWS.exists():
        pytest.skip(f"{DRAWS} is not built")
    noise, cases = random.Random(11), []
    for i in range(400):
        count = noise.choice((2, 16, 97, 1000))
        logits = [noise.gauss(0, 3) for _ in range(count)]
        if i % 3 == 0:
            logits = [float(round(logit)) for logit in logits]
        history = [noise.randrange(count) for _ in range(noise.randrange(40))]
        sampling = {
            "seed": noise.getrandbits(64),
            "temperature": noise.choice((0.0, 0.3, 1.0, 2.5)),
            "top_k": noise.choice((0, 0, 1, 5, count, 5000)),
            "top_p": noise.choice((1.0, 0.5, 0.03125)),
            "repetition_penalty": noise.choice((1.0, 1.25, 0.5)),
        }
        # As floats, which is what both sides get.
        cases.append(
            (
                [checkpoints.float32(logit) for logit in logits],
                history,
                {**sampling, "temperature": checkpoints.float32(sampling["temperature"])},
            )
        )
    lines = []
    for logits, history, sampling in cases:
        lines += [
            *map(
                str,
                (
                    sampling["seed"],
                    sampling["temperature"].hex(),
                    sampling["top_k"],
                    sampling["top_p"],
                    sampling["repetition_penalty"],
                    len(history),
                    *history,
                    len(logits),
                ),
            ),
            *(logit.hex() for logit in logits),
        ]
    theirs = subprocess.run(
        [DRAWS], input=" ".join(lines), capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    ours = subprocess.run(
        [PYTHON, "-c", SAMPLE],
        input=json.dumps(cases),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    for case, their, our in zip(
        cases, theirs.stdout.splitlines(), ours.stdout.splitlines(), strict=True
    ):
        token, logprob = their.split()
        assert int(our.split()[0]) == int(token), case[2]
        assert abs(float(our.split()[1]) - float.fromhex(logprob)) < 1e-5, case[2]
