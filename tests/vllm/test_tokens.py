"""An engine over Coxswain computes what one over vLLM's own executor does."""

import engines
import pytest
from conftest import NAME, run_engines


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_tokens_are_those_of_vllms_own_executor(models, tp, pp):
    runs = [
        {"model": model, "tp": tp, "pp": pp, "backend": backend}
        for model in (("sums", "random") if tp * pp == 1 else ("random",))
        for backend in ("mp", NAME)
    ]
    *sums, random, own_random = run_engines(models, tp * pp, runs=runs)
    assert own_random == random
    assert any(output["logprobs"] for output in own_random)
    if not sums:
        return
    own_sums = sums[1]
    assert own_sums == sums[0]
    for i, (left, right) in enumerate(engines.SUMS):
        if i % 4 in (0, 1):  # greedy
            assert own_sums[i]["text"].startswith(str(left + right))


def test_outputs_that_come_late(models):
    """As on a device: the reply of a step comes from a second thread."""
    runs = [
        {"model": "random", "tp": 2, "backend": NAME, "worker": worker}
        for worker in ("", "faulty_worker.Worker")
    ]
    usual, late = run_engines(models, 2, runs=runs, VLLM_TEST_LATE="0.005")
    assert late == usual
