"""What clients and the log are told of a fault over Coxswain: the rows of faults.py.

Some rows; with --faults all of them, half an hour.
"""

import faults

SOME = ("all-kill-load", "one-oom-idle", "engine-kill-load")
# A rank that computes nothing tells nobody that it is stopped, and so does a stopped engine.
TOLD = [row for row in faults.ROWS if not row.startswith("engine-stop")]


def pytest_generate_tests(metafunc):
    metafunc.parametrize("row", TOLD if metafunc.config.getoption("--faults") else SOME)


def test_a_fault_is_told(models, row):
    result = faults.run_row(models, row, faults.conftest.NAME)
    victim, fault, moment = row.split("-")
    if victim == "engine":
        # vLLM's own text: no executor is left that could say more.
        assert result["client"].startswith(("500: EngineCore encountered", "API"))
    elif fault == "raise":
        assert "ValueError: the device is on fire" in result["client"]
    elif fault == "stop":
        assert "stopped by a signal" in result["client"]
    else:
        ranks = range(2) if victim == "all" else [1]
        said = result["client"]
        if moment == "idle" and said.startswith("APIConnectionError"):
            said = result["log"]  # the server had ended before it was asked
        texts = [f"rank {i} (pid {result['pids'][i]}) was killed by signal 9" for i in ranks]
        assert any(text in said for text in texts), result
    assert result["server"] == "ended"
    assert result["processes"] == 0
    assert result["shm"] == []
