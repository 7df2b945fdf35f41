"""What ranks of vLLM choose, recorded and compared: with a platform like vLLM's, and no vLLM."""

import enum
import os
import subprocess
import sys
import types

import pytest

from coxswain._internal import vllm_choices as choices


class Mode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2


class Platform:
    """vLLM's."""

    def __init__(self):
        self.calls = 0

    def set_additional_forward_context(self, *_, **__):
        self.calls += 1
        return {}


class FlashMetadata:
    pass


class MambaMetadata:
    pass


class Rank:
    """A rank with modules of vLLM of its own."""

    def __init__(self, monkeypatch, layout="NHD", manager=None):
        self.platform, self.log = Platform(), []
        self.choices = choices.Choices(self.log.append)
        for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        platforms = types.ModuleType("vllm.platforms")
        platforms.current_platform = self.platform
        monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
        graphs = "vllm.v1.worker.gpu.cudagraph_utils"
        monkeypatch.delitem(sys.modules, graphs, raising=False)
        if manager:
            module = types.ModuleType(graphs)
            module.CudaGraphManager = manager
            monkeypatch.setitem(sys.modules, graphs, module)
        self.layout = layout
        self.choices.install(lambda: self.layout)

    def runs(self, tokens, mode=Mode.NONE, metadata=FlashMetadata, requests=None, **more):
        arguments = {
            "attn_metadata": {"layer.0": metadata(), "layer.1": metadata()},
            "num_tokens": tokens,
            "cudagraph_runtime_mode": mode,
            "batch_descriptor": types.SimpleNamespace(
                num_reqs=requests, uniform=False, num_active_loras=0
            ),
            "ubatch_slices": None,
        }
        assert self.platform.set_additional_forward_context(**arguments | more) == {}


@pytest.fixture
def ranks(monkeypatch):
    made = [Rank(monkeypatch) for _ in range(4)]
    yield made
    made.clear()  # and their files


def compared(ranks, size=4):
    return choices.Comparison([rank.choices.path for rank in ranks], size)


def step(ranks, sequence, *tokens):
    for rank, count in zip(ranks, tokens, strict=True):
        rank.choices.begin(sequence)
        rank.runs(count)


def test_ranks_that_choose_alike_differ_in_nothing(ranks):
    comparison = compared(ranks)
    for sequence in range(1, 200):
        step(ranks, sequence, *[sequence] * 4)
        assert not comparison.check(sequence) and comparison.text == ""
    assert all(rank.platform.calls == 199 and rank.log == [] for rank in ranks)


def test_the_one_that_chooses_otherwise_is_named_since_when(ranks):
    comparison = compared(ranks)
    step(ranks, 90210, 384, 384, 384, 384)
    assert not comparison.check(90210)
    step(ranks, 90211, 384, 384, 384, 512)
    assert comparison.check(90211)
    said = "rank 3 runs 512 padded tokens where ranks 0-2 run 384 padded tokens"
    assert (comparison.text, comparison.since) == (said, 90211)
    step(ranks, 90212, 8, 8, 8, 16)
    assert not comparison.check(90212)  # it was told
    assert comparison.since == 90211 and "16 padded tokens" in comparison.text
    step(ranks, 90213, 8, 8, 8, 8)
    assert comparison.check(90213) and not comparison.since and not comparison.text


def test_every_field_has_its_words(monkeypatch):
    ranks = [Rank(monkeypatch, layout) for layout in ("NHD 2 x float32 (2, 8)", "HND")]
    comparison = compared(ranks, 2)
    for rank in ranks:
        rank.choices.begin(7)
    ranks[0].runs(8, Mode.PIECEWISE, requests=4)
    ranks[0].runs(4)
    ranks[0].runs(4)
    ranks[1].runs(
        16,
        Mode.FULL,
        MambaMetadata,
        ubatch_slices=[1, 2],
        batch_descriptor=types.SimpleNamespace(num_reqs=8, uniform=True, num_active_loras=3),
    )
    assert comparison.differences(7) == (
        "rank 0 runs 8 padded tokens, 4 padded requests, piecewise CUDA graphs, queries of any "
        "length, 0 LoRA adapters, 1 microbatches, attention FlashMetadata, KV cache NHD 2 x "
        "float32 (2, 8), 2 more passes, 8 tokens in these where rank 1 runs 16 padded tokens, 8 "
        "padded requests, a full CUDA graph, queries of one length, 3 LoRA adapters, 2 "
        "microbatches, attention MambaMetadata, KV cache HND, 0 more passes, 0 tokens in these"
    )


def test_ranks_of_other_groups_may_choose_otherwise(ranks):
    """Two pipeline stages of two ranks."""
    comparison = compared(ranks, 2)
    step(ranks, 1, 8, 8, 16, 16)
    assert not comparison.check(1)
    step(ranks, 2, 8, 16, 8, 32)
    assert comparison.check(2)
    assert comparison.text == (
        "rank 0 runs 8 padded tokens where rank 1 runs 16 padded tokens; "
        "rank 2 runs 8 padded tokens where rank 3 runs 32 padded tokens"
    )


def test_a_step_that_hangs_is_compared_as_far_as_it_has_come(ranks):
    comparison = compared(ranks)
    step(ranks[:3], 5, 8, 8, 16)  # rank 3 has not begun
    assert comparison.differences(5) == (
        "rank 2 runs 16 padded tokens where ranks 0-1 run 8 padded tokens"
    )
    assert comparison.differences(6) == ""


def test_what_runs_no_model_changes_nothing(ranks):
    comparison = compared(ranks)
    step(ranks, 1, 8, 8, 8, 16)
    assert comparison.check(1)
    for rank in ranks:
        rank.choices.begin(65)  # the same record
        rank.runs(8, attn_metadata=None)  # a dummy
        rank.runs(None)  # an encoder
    assert not comparison.check(65) and comparison.since == 1


def test_the_layout_is_asked_for_again_when_it_changes(ranks):
    comparison = compared(ranks)
    step(ranks, 1, 8, 8, 8, 8)
    ranks[1].layout = "HND"
    step(ranks, 2, 8, 8, 8, 8)
    assert not comparison.check(2)
    ranks[1].choices.layout_changes()
    step(ranks, 3, 8, 8, 8, 8)
    assert comparison.check(3)
    assert comparison.text == "rank 1 runs KV cache HND where ranks 0, 2-3 run KV cache NHD"


def test_a_full_graph_of_the_v2_runner_is_recorded(monkeypatch):
    class Manager:
        replayed = 0

        def run_fullgraph(self, desc):
            Manager.replayed += 1
            return desc.num_tokens

    one = Rank(monkeypatch, manager=Manager)
    other = Rank(monkeypatch)
    comparison = compared([one, other], 2)
    for rank in (one, other):
        rank.choices.begin(1)
    desc = types.SimpleNamespace(cg_mode=Mode.FULL, num_tokens=8, num_reqs=8, num_active_loras=0)
    assert Manager().run_fullgraph(desc) == 8 and Manager.replayed == 1
    other.runs(8, Mode.PIECEWISE, requests=8)
    text = comparison.differences(1)
    assert text.startswith("rank 0 runs a full CUDA graph, ")
    assert "where rank 1 runs piecewise CUDA graphs, " in text


def test_a_field_that_this_version_lacks_is_told_once_and_left_out(monkeypatch):
    ranks = [Rank(monkeypatch) for _ in range(2)]
    comparison = compared(ranks, 2)
    for sequence, mode in ((1, Mode.NONE), (2, Mode.FULL)):
        for rank in ranks:
            rank.choices.begin(sequence)
            arguments = {"attn_metadata": FlashMetadata(), "num_tokens": 8, "other": mode}
            rank.platform.set_additional_forward_context(**arguments)
        assert not comparison.check(sequence)
    said = (
        "vLLM does not tell cudagraph_runtime_mode, batch_descriptor: not compared between ranks."
    )
    assert ranks[0].log == ranks[1].log == [said]


def test_what_cannot_be_read_ends_the_recording_and_not_the_step(monkeypatch):
    rank = Rank(monkeypatch)
    for sequence in (1, 2):
        rank.choices.begin(sequence)
        rank.runs("eight")
    (said,) = rank.log
    assert "is not compared with this vLLM: error('required argument is not an integer')" in said
    assert rank.platform.calls == 2


def test_a_vllm_without_the_hook_is_told(monkeypatch):
    monkeypatch.delattr(Platform, "set_additional_forward_context")
    rank = Rank(monkeypatch)
    assert "is not compared with this vLLM: it does not tell" in rank.log[0]


def test_more_texts_than_fit_are_told_apart_all_the_same(monkeypatch):
    ranks = [Rank(monkeypatch) for _ in range(2)]
    comparison = compared(ranks, 2)
    for i in range(40):
        ranks[0].layout = f"layout {i} " + "x" * 200
        ranks[0].choices.layout_changes()
        step(ranks, i + 1, 8, 8)
    assert comparison.check(40)
    assert comparison.text.startswith("rank 0 runs KV cache unknown (")


def test_the_page_of_a_rank_that_is_dead_can_be_read():
    script = (
        "import os, signal, sys\n"
        "from coxswain._internal import vllm_choices\n"
        "page = vllm_choices.Choices(print)\n"
        "page._layout = 0\n"
        "page.begin(3)\n"
        "page._record(8, None, None, 1, 0)\n"
        "print(page.path, flush=True)\n"
        "sys.stdin.read()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script.replace("8,", f"{tokens},")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for tokens in (8, 16)
    ]
    comparison = choices.Comparison([one.stdout.readline().strip() for one in processes], 2)
    for one in processes:
        one.communicate("")
    assert comparison.check(3)
    assert comparison.text == "rank 0 runs 8 padded tokens where rank 1 runs 16 padded tokens"
    with pytest.raises(FileNotFoundError):
        choices.Comparison([f"/proc/{os.getpid()}/fd/99999"], 1)
