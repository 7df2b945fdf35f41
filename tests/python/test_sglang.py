"""What coxswain.sglang has without an SGLang: records of turns, deaths of processes, options."""

import array
import fcntl
import os
import queue
import select
import signal
import subprocess
import sys
import types

import pytest

import coxswain.sglang
from coxswain._internal.sglang_survive import obstacle
from coxswain._internal.sglang_tried import untried
from coxswain._internal.sglang_turns import RECORDS, Turns, describe, id_of
from coxswain._internal.sglang_watch import Watch


def batch(rids, mode=2, last=5, extend=0):
    reqs = [
        types.SimpleNamespace(rid=rid, output_ids=array.array("q", [last]), to_finish=None)
        for rid in rids
    ]
    return types.SimpleNamespace(reqs=reqs, forward_mode=mode, extend_num_tokens=extend)


@pytest.fixture
def memory():
    """Makes Turns, and closes them."""
    made = []

    def make(*arguments):
        made.append(Turns(*arguments))
        return made[-1]

    yield make
    for turns in made:
        turns.close()


def test_ranks_that_decide_alike_do_not_differ(memory):
    turns = memory(3)
    for turn in range(1, 3 * RECORDS):
        plan = None if turn % 3 == 0 else ["a", "b", "c"][: turn % 3]
        for rank in range(3):
            digest = turns.write(rank, turn, plan and batch(plan), 1)
            assert not turns.others(rank, turn, digest)
        assert describe(turns, turn, {}) == ""


@pytest.mark.parametrize(
    "other, text",
    [
        (batch(["a", "b"]), "the number of requests: rank 1 2, ranks 0, 2 3"),
        (batch(["a", "b", "x"]), "rank 1 alone runs 8cdc1683"),
        (batch(["a", "b", "c"], mode=1, extend=9), "the tokens to compute: rank 1 9, ranks 0, 2 0"),
        (batch(["a", "b", "c"], last=6), "the tokens sampled before: "),
        (None, "the forward mode: rank 1 nothing, ranks 0, 2 decode"),
    ],
)
def test_what_differs_is_told_by_the_last_rank(other, text, memory):
    turns = memory(3)
    found = []
    for rank, plan in enumerate((batch(["a", "b", "c"]), other, batch(["a", "b", "c"]))):
        digest = turns.write(rank, 9, plan, 0)
        found.append(turns.others(rank, 9, digest))
    assert found == [False, True, True]
    said = describe(turns, 9, {id_of("c"): "c"})
    assert said.startswith("the ranks differ since turn 9: ")
    assert text in said


def test_a_record_that_is_being_written_is_none(memory):
    turns = memory(2)
    turns.write(0, 1, batch(["a"]), 0)
    assert turns.read(0, 1).requests == 1
    assert turns.read(0, 2) is None
    offset = turns._offset(0, 1)
    turns._memory[offset + 20] ^= 1
    assert turns.read(0, 1) is None


def test_a_long_batch_and_the_memory_of_another_process(memory):
    turns = memory(2)
    turns.write(0, 1, batch([str(i) for i in range(1000)]), 0)
    other = memory(2, os.dup(turns.fd))
    assert other.read(0, 1).requests == 1000
    other.set_failure(1, "é" * 9000)
    assert turns.failure(1).startswith("ééé") and turns.failure(0) == ""


@pytest.mark.parametrize(
    "code, text",
    [
        ("kill -9 $$", "was killed by signal 9 (Killed); its last lines: last"),
        ("exit 3", "exited with status 3; its last lines: last"),
    ],
)
def test_a_death_is_told_with_the_last_lines(code, text):
    told = queue.Queue()
    out_fd, fd = os.pipe()
    watch = Watch(lambda child: told.put(child), lambda: None, fd)
    watch.start()
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    script = f"echo 'first\n last ' >&2; {code}"
    process = subprocess.Popen(["sh", "-c", script], stderr=write_fd)
    os.close(write_fd)
    watch.add("rank 1", process.pid, 1, read_fd)
    child = told.get(timeout=60)
    assert child.rank == 1
    said = child.death()
    assert said.startswith(f"rank 1 (pid {process.pid}) ")
    assert text.replace("lines: last", "lines: first\nlast") in said
    assert child.death(details=False) == f"rank 1 {text.partition(';')[0]}"
    process.wait()  # it was not reaped
    assert process.returncode in (-signal.SIGKILL, 3)
    assert child.end() == ((9, 0) if process.returncode < 0 else (0, 3))
    watch.stop()
    watch.join(60)
    os.close(fd)
    with open(out_fd) as out:
        log = out.read()
    assert log.startswith("first\n last \n[2")
    assert log.endswith(f"] Coxswain: {said}\n")


def test_deaths_that_are_no_news():
    told = queue.Queue()
    out_fd, fd = os.pipe()
    watch = Watch(lambda child: told.put(child.rank), lambda: None, fd)
    watch.start()
    ways = ["read line", "exit 0", "read line", "exit 5"]
    processes, children = [], []
    for rank, way in enumerate(ways):
        processes.append(subprocess.Popen(["sh", "-c", way], stdin=subprocess.PIPE, bufsize=0))
        if rank == 3:
            watch.quiet()
        children.append(watch.add(f"rank {rank}", processes[rank].pid, rank))
        if rank == 2:  # nothing is told of it at all
            watch.forget(children[rank])
            processes[rank].kill()
        elif rank == 0:
            children[rank].kill()
        if rank != 2:
            assert told.get(timeout=60) == rank
    for process in processes:
        process.wait()
        process.stdin.close()
    assert told.empty()
    watch.stop()
    watch.join(60)
    os.close(fd)
    with open(out_fd) as out:
        assert out.read() == ""


HOLDS_THE_GIL = """
import ctypes, os, subprocess, sys
from coxswain._internal.sglang_watch import Watch
watch = Watch(lambda child: None, lambda: None)
watch.start()
process = subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE)
watch.add("rank 0", process.pid, 0)
print(process.pid, flush=True)
ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
process.wait()
process.stdin.close()
watch.stop()
watch.join()
"""


def test_a_death_is_told_while_another_thread_holds_the_gil():
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_THE_GIL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        pid = int(process.stdout.readline())
        os.kill(pid, signal.SIGKILL)
        ready, _, _ = select.select([process.stderr], [], [], 60)
        line = process.stderr.readline() if ready else ""
        process.stdin.write("x")  # only now it lets go of the GIL
        process.stdin.flush()
        assert f"Coxswain: rank 0 (pid {pid}) was killed by signal 9 (Killed)\n" in line
        assert process.wait(60) == 0


def test_standard_error_that_nobody_reads_does_not_hide_a_death():
    told = queue.Queue()
    out_fd, fd = os.pipe()
    os.write(fd, bytes(fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)))
    watch = Watch(lambda child: told.put(child.death()), lambda: None, fd)
    watch.start()
    process = subprocess.Popen(["sh", "-c", "kill $$"])
    watch.add("rank 0", process.pid, 0)
    said = told.get(timeout=60)
    assert said == f"rank 0 (pid {process.pid}) was killed by signal 15 (Terminated)"
    process.wait()
    watch.stop()
    watch.join(60)
    os.close(out_fd)
    os.close(fd)


@pytest.mark.parametrize("server_lives", [True, False])
def test_a_rank_ends_whose_server_has_ended_before(server_lives):
    read_fd, write_fd = os.pipe()
    if not server_lives:
        os.close(read_fd)
    code = "import sys; from coxswain._internal import sglang_rank as rank\n"
    code += "rank.end_with_server(int(sys.argv[1])); sys.exit(7)"
    command = [sys.executable, "-c", code, str(write_fd)]
    assert subprocess.run(command, pass_fds=[write_fd]).returncode == (7 if server_lives else 1)
    os.close(write_fd)
    if server_lives:
        os.close(read_fd)


def test_options(monkeypatch):
    read = coxswain.sglang.Options.read
    monkeypatch.delenv("COXSWAIN_SGLANG", raising=False)
    assert read() is None
    coxswain.sglang.register()  # nothing: SGLang is not even imported
    monkeypatch.setenv("COXSWAIN_SGLANG", "1")
    assert read() == coxswain.sglang.Options()
    monkeypatch.setenv("COXSWAIN_SGLANG", '{"on_death": "restart", "incidents": 3}')
    assert (read().on_death, read().incidents) == ("restart", 3)
    for wrong in ('{"on_death": "never"}', '{"no": 1}', "yes"):
        monkeypatch.setenv("COXSWAIN_SGLANG", wrong)
        with pytest.raises(coxswain.Invalid, match="may be"):
            read()


LLAMA = {
    "model_path": "llama",
    "tp_size": 8,
    "device": "cpu",
    "dtype": "torch.float32",
    "attention_backend": "torch_native",
    "architecture": "LlamaForCausalLM",
}


def test_what_was_tried_is_allowed():
    assert untried(LLAMA) == []
    assert untried({**LLAMA, "disable_radix_cache": True, "api_key": "secret"}) == []


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("architecture", "Mamba2ForCausalLM", "architecture Mamba2ForCausalLM"),
        ("architecture", "Gemma3ForCausalLM", "architecture Gemma3ForCausalLM"),
        ("uses_mamba_radix_cache", True, "uses_mamba_radix_cache"),
        ("disable_hybrid_swa_memory", True, "disable_hybrid_swa_memory"),
        ("device", "cuda", "device cuda"),
        ("dtype", "torch.bfloat16", "dtype torch.bfloat16"),
        ("quantization", "fp8", "quantization fp8"),
        ("attention_backend", "flashinfer", "attention_backend flashinfer"),
        ("prefill_attention_backend", "fa3", "prefill_attention_backend fa3"),
        ("speculative_algorithm", "EAGLE", "speculative_algorithm EAGLE"),
        ("enable_lora", True, "enable_lora"),
        ("lora_paths", ["a=/srv/a"], "lora_paths"),
        ("ep_size", 2, "ep_size 2"),
        ("grammar_backend", "outlines", "grammar_backend"),
        ("enable_hierarchical_cache", True, "enable_hierarchical_cache"),
        ("chunked_prefill_size", 64, "chunked_prefill_size 64"),
        ("enable_custom_logit_processor", True, "enable_custom_logit_processor"),
        ("enable_multimodal", True, "enable_multimodal"),
        ("watermark_key", "secret", "watermark_key"),
        ("an_option_of_a_later_version", "x", "an_option_of_a_later_version"),
    ],
)
def test_what_was_not_tried_is_refused_by_name(name, value, said):
    assert untried({**LLAMA, name: value}) == [said]
    assert untried({**LLAMA, name: value}, [name]) == []


@pytest.mark.parametrize(
    "name, value",
    [
        ("pp_size", 2),
        ("dp_size", 2),
        ("enable_dp_attention", True),
        ("tokenizer_worker_num", 2),
        ("disaggregation_mode", "prefill"),
        ("encoder_only", True),
    ],
)
def test_what_cannot_go_on_is_refused_even_if_it_is_allowed(name, value):
    (said,) = untried({**LLAMA, name: value}, [name])
    assert said.startswith(name)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({}, ""),
        ({"frequency_penalty": 0.5}, ""),
        ({"frequency_penalty": 0.5, "repetition_penalty": 1.2}, "its two penalties"),
        ({"json_schema": "{}"}, "its json_schema"),
        ({"beam_width": 4}, "its beams"),
    ],
)
def test_requests_that_cannot_go_on(fields, said):
    params = types.SimpleNamespace(**{"repetition_penalty": 1.0, **fields})
    assert obstacle(types.SimpleNamespace(sampling_params=params)) == said
    assert obstacle(types.SimpleNamespace(sampling_params=params, lora_id="a")) == (
        said or "its lora_id"
    )
