"""Async scheduling: a step runs while the output of the one before is on its way."""

import os

import pytest
from conftest import run_script


def overlaps(spans):
    """How many steps a rank has begun while the output of an earlier one was late."""
    late = [(begin, end) for kind, begin, end in spans if kind == "late"]
    steps = [begin for kind, begin, _ in spans if kind == "execute"]
    return sum(any(begin < step < end for begin, end in late) for step in steps), len(late)


def halves(result):
    """How many steps rank 0 executed, and of how many it sampled."""
    kinds = [kind for kind, _, _ in result["spans"][0]]
    return kinds.count("execute"), kinds.count("late")


@pytest.fixture(scope="module")
def run(models):
    def run_one(asynchronous, regex=None):
        job = {
            "model": os.path.join(models, "random"),
            "async": asynchronous,
            "regex": regex,
        }
        return run_script("async_engine.py", job, 2, VLLM_TEST_LATE="0.02")["result"]

    return run_one


def test_steps_overlap_the_outputs_of_earlier_ones(run):
    sync, overlapped = run(False), run(True)
    assert (sync["scheduler"], overlapped["scheduler"]) == ("Scheduler", "AsyncScheduler")
    assert overlapped["tokens"] == sync["tokens"]
    # Rank 0's outputs are asked for. Without async scheduling each step waits for the last output.
    assert overlaps(sync["spans"][0])[0] == 0
    steps, outputs = overlaps(overlapped["spans"][0])
    print(f"{steps} steps overlap {outputs} late outputs")
    assert outputs >= 10 and steps >= outputs // 2
    for found in (sync, overlapped):
        assert found["requests"] == halves(found)[0]


def test_a_step_with_structured_output_begins_while_vllm_computes_its_bitmask(run):
    for asynchronous in (False, True):
        found = run(asynchronous, "[0-9]+")
        assert found["requests"] == sum(halves(found))
