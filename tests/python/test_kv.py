"""KvBlocks, KvView and KvTransfer: ranks of one group copy the KV cache of another."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

import coxswain
import workers
from kv_worker import next_token

WORKER = f"{sys.executable} {pathlib.Path(__file__).with_name('kv_worker.py')}"
PROMPTS = [" ".join(str(3 + (i * k) % 11) for k in range(1, 5 + 3 * i)) for i in range(1, 9)]


def expected(prompt, count):
    history = [int(token) for token in prompt.split()]
    for _ in range(count):
        history.append(next_token(history))
    return history[-count:]


# ---- blocks and views ----


def test_a_view_copies_what_was_given():
    with coxswain.KvBlocks(4, 128) as blocks, coxswain.KvView(blocks.fd) as view:
        assert (view.block_count, view.block_bytes, blocks.size) == (4, 128, 512)
        blocks.take(2)
        blocks.memory[256:384] = bytes(range(128))
        blocks.give(2, 77)
        assert blocks.user(2) == 77 and blocks.user(1) == 0
        to = bytearray(128)
        view.copy(2, to, 77)
        assert to == bytes(range(128))
        view.copy(2, memoryview(to))
        with pytest.raises(coxswain.Stale):
            view.copy(2, to, 78)
        with pytest.raises(coxswain.StateError, match="take it first"):
            blocks.give(2, 79)
        blocks.take(2)
        with pytest.raises(coxswain.Stale):
            view.copy(2, to, 77)


def test_what_is_expected_is_awaited():
    with coxswain.KvBlocks(2, 64) as blocks, coxswain.KvView(blocks.fd) as view:
        blocks.expect(1)
        assert blocks.user(1) == 2**64 - 1
        with pytest.raises(coxswain.Empty, match="on its way"):
            view.copy(1, bytearray(64), 7)
        with pytest.raises(coxswain.Empty):
            view.copy(1, bytearray(64), 7, timeout=0.01)
        timer = threading.Timer(0.05, lambda: blocks.give(1, 7))
        timer.start()
        view.copy(1, bytearray(64), 7, timeout=60)
        timer.join()


def test_misuse_is_an_exception():
    with coxswain.KvBlocks(4, 128) as blocks, coxswain.KvView(blocks.fd) as view:
        for call in (
            lambda: blocks.take(4),
            lambda: blocks.give(-1, 7),
            lambda: blocks.user(1 << 33),
            lambda: blocks.give(0, 0),
            lambda: view.copy(4, bytearray(128)),
            lambda: view.copy(0, bytearray(127)),
            lambda: coxswain.KvBlocks(4, 100),
            lambda: coxswain.KvBlocks(0, 64),
        ):
            with pytest.raises(coxswain.Invalid):
                call()
        with pytest.raises((TypeError, BufferError, ValueError)):
            view.copy(0, bytes(128))
        memory = blocks.memory
        with pytest.raises(coxswain.StateError, match="a view of its memory"):
            blocks.close()
        del memory
    with pytest.raises(coxswain.Closed):
        blocks.take(0)
    with pytest.raises(coxswain.Closed):
        view.copy(0, bytearray(128))
    read, write = os.pipe()
    for fd in read, write:
        with pytest.raises(coxswain.Error):
            coxswain.KvView(fd)
        os.close(fd)


def test_a_view_outlives_the_blocks():
    blocks = coxswain.KvBlocks(1, 64)
    blocks.memory[:] = b"k" * 64
    blocks.give(0, 1)
    with coxswain.KvView(blocks.fd) as view:
        blocks.close()
        to = bytearray(64)
        view.copy(0, to, 1)
        assert to == b"k" * 64


def test_pulls_that_cannot_be_are_told_apart():
    """In a rank that is linked to itself."""
    with coxswain.Group(workers.kv_errors, 1, timeout=30) as group:
        found = json.loads(group.call(b"", timeout=30)[0])
    assert found == {
        "right": "",
        "of another user": "Stale: me: ",
        "no such block": "Invalid: block 9 of me does not exist; there are 4",
        "no such target": "Invalid: KV block 4 does not exist; there are 4",
        "a target twice": "Invalid: a KV block is a destination twice",
        "no table": "Invalid: block tables of [] blocks there and of [] here",
        "unequal tables": "Invalid: block tables of [2] blocks there and of [1] here",
        "no such group": "NotFound: there is no link to you",
        "of another epoch": "Stale: me is linked in epoch 3, and the pull is for epoch 4",
        "too late": "TimedOut: its deadline has passed",
        "lease over": "Stale: the lease of me on the blocks has expired",
        "cancelled": "Aborted: cancelled",
        "another layout": "Invalid: its KV blocks are laid out in another way: "
        "head_dim 8 there, 1 here",
        "more ranks": "Invalid: its KV blocks are laid out in another way: "
        "rank_count 2 there, 1 here",
        "no caches": "Unsupported: the request does not describe its KV caches",
        "unlinked": "NotFound: there is no link to me",
    }


# ---- two groups ----


@pytest.fixture(name="command")
def make_command(coxswain_command):
    def command(*arguments, status=0):
        done = subprocess.run(
            [coxswain_command, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
        assert status in (done.returncode, None), done.stdout + done.stderr
        return done.stdout + done.stderr

    return command


@contextlib.contextmanager
def running(coxswain_command, name, *arguments):
    name = f"{name}{os.getpid()}"
    process = subprocess.Popen(
        [coxswain_command, "run", "-n", "2", "--name", name, "--worker", WORKER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while not (line := process.stdout.readline()).startswith("rank 1 pid"):
            assert process.poll() is None, line
        yield name
    finally:
        process.terminate()
        process.communicate(timeout=60)


def generate(command, prefill, decode):
    said = command(
        *("generate", "--prefill", prefill, "--decode", decode, "--tokens", "--json"),
        *("--max-tokens", 10, *PROMPTS),
    )
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return [line["tokens"] for line in lines]


def states(command, name):
    said = command("link-status", "--name", name, "--json", status=None)
    return {one["name"]: one for one in json.loads(said.splitlines()[0])["links"]}


def status(command, name):
    """Its exit status is 4 while a rank is missing."""
    return json.loads(command("status", "--name", name, "--json", status=None))


def test_prefill_in_one_group_and_decode_in_another(coxswain_command, command):
    right = [expected(prompt, 10) for prompt in PROMPTS]
    with (
        running(coxswain_command, "pre", "--role", "prefill", "--attach", "sealed") as prefill,
        running(coxswain_command, "de", "--role", "decode", "--on-death", "restart") as decode,
    ):
        command("link", "--name", decode, prefill)
        assert states(command, decode)[prefill]["state"] == "success"
        assert generate(command, prefill, decode) == right
        state = status(command, decode)["transfer"]
        assert (state["succeeded"], state["failed"], state["recomputed"]) == (len(PROMPTS), 0, 0)
        assert state["bytes"] >= 2 * 64 * len(PROMPTS)
        # A rank of the group that decodes is replaced: it has no link any more, and gets one.
        ranks = status(command, decode)["ranks"]
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while status(command, decode)["ranks"][1]["restarts"] < 1:
            assert time.monotonic() < deadline
        assert generate(command, prefill, decode) == right
        # A rank of the other one dies for good: the link says so.
        ranks = status(command, prefill)["ranks"]
        os.kill(ranks[0]["pid"], signal.SIGKILL)
        while states(command, decode)[prefill]["state"] != "failed":
            assert time.monotonic() < deadline
        assert "dead" in states(command, decode)[prefill]["text"]
        command("unlink", "--name", decode, prefill)
        assert prefill not in states(command, decode)
