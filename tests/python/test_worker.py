"""coxswain.Worker: steps, inits and orders of a coordinator in C."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

import coxswain
import workers

WORKER = """
    import coxswain
    worker = coxswain.Worker()

    @worker.init
    def init(request):
        assert request["model"] and request.get("no such key") is None
        print("init replayed" if request.replayed else "init", flush=True)
        return coxswain.InitResult(block_count=64, block_size=16, max_positions=64)

    def next_token(history):
        return 3 + (sum(history) * 31 + len(history)) % 11

    @worker.execute
    def step(batch):
        {step}

    {more}
    worker.serve()
"""

COLUMNS = """
        import numpy
        starts, tokens = numpy.asarray(batch.starts), numpy.asarray(batch.tokens)
        positions, table = numpy.asarray(batch.positions), numpy.asarray(batch.block_table())
        assert len(tokens) == len(positions) == starts[-1]
        assert len(batch.ids) == len(set(batch.slots)) == batch.row_count == len(starts) - 1
        replies = numpy.full(batch.row_count, -1, dtype=numpy.int32)
        for row in range(batch.row_count):
            mine = slice(starts[row], starts[row + 1])
            history = batch.history(row)
            assert list(positions[mine]) == list(range(positions[mine][0], len(history)))
            assert list(tokens[mine]) == history[positions[mine][0]:]
            assert (table[row, :-(-len(history) // 16)] >= 0).all() and table.dtype == numpy.int32
            assert batch.temperatures[row] == 0.5 and batch.top_ks[row] == 3
            assert batch.top_ps[row] == 1 == batch.repetition_penalties[row]
            assert batch.lora(row) is None
            if batch.emits[row]:
                replies[row] = next_token(history)
        return replies, numpy.full(batch.row_count, -0.25, dtype=numpy.float32)
"""

PLAIN = """
        return [next_token(batch.history(row)) if batch.emits[row] else -1
                for row in range(batch.row_count)]
"""


def next_token(history):
    return 3 + (sum(history) * 31 + len(history)) % 11


@pytest.fixture(name="script")
def make_script(tmp_path):
    """Writes a worker's program, which `--worker` takes."""

    def write(step=PLAIN, more=""):
        path = tmp_path / "worker"
        body = (
            textwrap.dedent(WORKER)
            .replace("{more}", textwrap.dedent(more))
            .replace("{step}", step.strip().replace("\n    ", "\n"))
        )
        path.write_text(f"#!{sys.executable}\n{body}")
        path.chmod(0o755)
        return str(path)

    return write


def generate(coxswain_command, worker, *options, prompts=("3 4 5", "6"), status=0):
    done = subprocess.run(
        [
            coxswain_command,
            "generate",
            "--tokens",
            "--json",
            "--max-tokens",
            "10",
            "--worker",
            worker,
            *options,
            *prompts,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def expected(prompt, count=10):
    history = [int(token) for token in prompt.split()]
    for _ in range(count):
        history.append(next_token(history))
    return history[-count:]


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_steps_are_columns_that_numpy_views(coxswain_command, script, ranks):
    pytest.importorskip("numpy")
    replies, _ = generate(
        coxswain_command,
        script(COLUMNS),
        "-n",
        ranks,
        "--temperature",
        "0.5",
        "--top-k",
        "3",
        prompts=("3 4 5", "6", " ".join(["7"] * 40)),
    )
    assert [reply["tokens"] for reply in replies] == [
        expected("3 4 5"),
        expected("6"),
        expected(" ".join(["7"] * 40)),
    ]


def test_tokens_may_be_a_list(coxswain_command, script):
    replies, _ = generate(coxswain_command, script())
    assert [reply["tokens"] for reply in replies] == [expected("3 4 5"), expected("6")]


@pytest.mark.parametrize(
    "keep",
    [
        "kept.append(batch.tokens)",
        "kept.append(numpy.asarray(batch.tokens))",
        "kept.append(batch.block_table()[:])",
        "kept.append(numpy.asarray(batch.emits)[1:])",
    ],
)
def test_a_view_that_outlives_its_step_raises(coxswain_command, script, keep):
    pytest.importorskip("numpy")
    worker = script(f"import numpy\n        {keep}\n        {PLAIN.strip()}", "kept = []")
    _, errors = generate(coxswain_command, worker, status=3)
    assert "kept; copy what outlives the step" in errors


def test_a_batch_that_outlives_its_step_raises(coxswain_command, script):
    worker = script(
        """
        if kept:
            try:
                kept[0].tokens
                kept[0].cancelled
            except coxswain.StateError as error:
                raise ValueError("as it must: " + str(error))
        kept.append(batch)
        """
        + PLAIN,
        "kept = []",
    )
    _, errors = generate(coxswain_command, worker, status=3)
    assert "as it must" in errors and "the step is over" in errors


@pytest.mark.parametrize(
    "reply, text",
    [
        ("return [1]", "2 rows, and 1 tokens"),
        ("return None", "TypeError"),
        ("raise RuntimeError('out of memory')", "RuntimeError: out of memory"),
        ("return ['x', 'y']", "TypeError"),
    ],
)
def test_a_step_that_fails_says_why(coxswain_command, script, reply, text):
    _, errors = generate(coxswain_command, script(reply), status=3)
    assert text in errors and "rank 0" in errors


@pytest.mark.parametrize(
    "digest, text",
    [
        ("'positions', 7", None),
        ("'positions', 7 * worker.rank", None),  # rank 0 is not compared
        ("'positions', 7 + worker.rank", "they differ in positions: rank 0 has "),
        ("'tokens', 1 + worker.rank", "they differ in sampled tokens: rank 0 has "),
        ("'colour', 7", "Invalid: a digest is one of sequences, positions, blocks, tokens, not "),
        ("'blocks', -1", "Invalid: a digest is a number of 64 bits, not -1"),
    ],
)
def test_ranks_are_compared_by_digests_of_their_own(coxswain_command, script, digest, text):
    worker = script(f"batch.set_digest({digest})\n        {PLAIN.strip()}")
    replies, errors = generate(coxswain_command, worker, "-n", "2", status=3 if text else 0)
    if text:
        assert text in errors
    else:
        assert [reply["tokens"] for reply in replies] == [expected("3 4 5"), expected("6")]


def test_an_init_that_fails_says_why(coxswain_command, tmp_path):
    path = tmp_path / "worker"
    path.write_text(
        f"#!{sys.executable}\nimport coxswain\nworker = coxswain.Worker()\n"
        "@worker.init\ndef init(request):\n    raise OSError('no such model')\n"
        "worker.serve()\n"
    )
    path.chmod(0o755)
    _, errors = generate(coxswain_command, str(path), status=3)
    assert "OSError: no such model" in errors


@pytest.fixture(name="group")
def keep_group(coxswain_command, script):
    """A group that `coxswain run` keeps, of two Python workers that print their orders."""
    name = f"orders{os.getpid()}"
    worker = script(
        more="""
    @worker.cleanup
    def cleanup(slots):
        print("cleanup", len(slots), flush=True)

    @worker.recover
    def recover(command):
        if command == "pause":
            worker.pause()
        elif command == "start":
            worker.resume()
        print("recover", command, flush=True)

    @worker.lora
    def lora(request):
        print(request.operation, request.name, request.path, flush=True)
        if request.name == "bad":
            return "invalid_rank"
        if request.name == "worse":
            raise ValueError("not this one")
    """
    )
    process = subprocess.Popen(
        [coxswain_command, "run", "-n", "2", "--name", name, "--worker", worker],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not process.stdout.readline().startswith("rank 1 pid"):
        assert process.poll() is None
    yield name, process
    subprocess.run([coxswain_command, "stop", "--name", name], check=False, capture_output=True)
    process.communicate(timeout=30)


def command(coxswain_command, *arguments, status=0):
    done = subprocess.run(
        [coxswain_command, *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def await_lines(process, *texts):
    missing = set(texts)
    while missing:
        line = process.stdout.readline()
        assert line, f"not said: {missing}"
        missing -= {text for text in missing if text in line}


def test_orders_reach_their_handlers(coxswain_command, group, tmp_path):
    name, process = group
    command(coxswain_command, "generate", "--name", name, "--tokens", "--max-tokens", "3", "3 4")
    for order in ("pause", "reinit", "start"):
        command(coxswain_command, "recover", order, "--name", name)
        await_lines(process, f"[rank 0] recover {order}", f"[rank 1] recover {order}")
    said = command(
        coxswain_command, "generate", "--name", name, "--tokens", "--max-tokens", "10", "6"
    )
    assert " ".join(map(str, expected("6"))) in said
    command(coxswain_command, "lora", "load", "good", str(tmp_path), "--name", name)
    await_lines(process, f"load good {tmp_path}")
    said = command(coxswain_command, "lora", "load", "bad", str(tmp_path), "--name", name, status=2)
    assert "rank 1: INVALID_LORA_RANK" in said
    said = command(
        coxswain_command, "lora", "load", "worse", str(tmp_path), "--name", name, status=3
    )
    assert "rank 1: UNSUPPORT_CMD: ValueError: not this one" in said
    command(coxswain_command, "lora", "unload", "good", "--name", name)
    await_lines(process, "unload good")


def test_a_rank_that_is_replaced_replays_its_init(coxswain_command, group):
    name, process = group
    command(coxswain_command, "recover", "restart", "--rank", "1", "--kill", "--name", name)
    await_lines(process, "init replayed")
    said = command(
        coxswain_command, "generate", "--name", name, "--tokens", "--max-tokens", "10", "6"
    )
    assert " ".join(map(str, expected("6"))) in said


def test_a_role_and_links_reach_their_handlers(coxswain_command, script):
    name = f"role{os.getpid()}"
    worker = script(
        more="""
    @worker.link
    def link(request):
        print("role", request.role, request.change_role, request.link, flush=True)

    @worker.link_status
    def link_status():
        return [coxswain.LinkState("other", "waiting"),
                coxswain.LinkState("third", "failed", "gone")]
    """
    )
    process = subprocess.Popen(
        [
            *(coxswain_command, "run", "-n", "2", "--name", name),
            *("--role", "prefill", "--worker", worker),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        await_lines(process, "[rank 0] role prefill True []", "[rank 1] role prefill True []")
        said = command(coxswain_command, "link-status", "--name", name, "--json", status=3)
        states = {state["name"]: state for state in json.loads(said.splitlines()[0])["links"]}
        assert states["other"]["state"] == "waiting"
        assert (states["third"]["state"], states["third"]["text"]) == ("failed", "rank 0: gone")
    finally:
        subprocess.run([coxswain_command, "stop", "--name", name], check=False, capture_output=True)
        process.communicate(timeout=30)


def test_a_wake_ends_next_once():
    with coxswain.Group(workers.woken, 2) as group:
        while group.call(b"x", timeout=30) != [b"1", b"1"]:
            pass
        assert group.call(b"x", timeout=30) == [b"1", b"1"]
