"""Which rank of a real vLLM has chosen otherwise for a step, with sync and async scheduling."""

import os
import re

import pytest
from conftest import run_script


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def run(models, request):
    def run_one(what, **more):
        job = {"model": os.path.join(models, "random"), "async": request.param, "what": what}
        return run_script(
            "choosing_engine.py",
            job,
            2,
            VLLM_COXSWAIN_ON_DEATH="fail",
            **more,
        )

    return run_one


def test_a_choice_without_consequence_is_told_and_the_engine_goes_on(run):
    found = run("graph")
    result, log = found["result"], found["log"]
    print({name: result[name] for name in ("step", "record", "compare")}, "us")
    said = (
        "rank 0 runs no CUDA graph where rank 1 runs piecewise CUDA graphs, since execute "
        f"{result['since']}"
    )
    assert result["notes"] == [None, None, said, None] and "error" not in result
    assert len(re.findall(f": {re.escape(said)}$", log, re.M)) == 1  # once
    assert "the ranks choose alike again, in execute" in log


def test_the_error_of_a_step_that_cannot_end_has_it(run):
    """Both ranks hang in it, and one would look like the other."""
    result = run("tokens", VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="20")["result"]
    text = result["error"]
    print(text)
    match = re.search(
        r"^rank 0 runs (\d+) padded tokens where rank 1 runs (\d+) padded tokens, since execute "
        rf"{result['since']}\.$",
        text,
        re.M,
    )
    assert "rank 0" in text and "rank 1" in text and "had not replied" in text
    assert match and int(match[2]) == int(match[1]) + 8
