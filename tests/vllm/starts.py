"""Starts an engine that fails: the other half of test_start.py.

Usage: starts.py JOB RESULT. JOB is JSON: the arguments of LLM. RESULT becomes the error's text.
"""

import json
import os
import signal
import sys

from coxswain import vllm


class Executor(vllm.Executor):
    """With VLLM_TEST_STOP rank 1 is stopped when it has loaded the model, and soon missed."""

    def determine_available_memory(self):
        if "VLLM_TEST_STOP" in os.environ:
            pid = self._ranks.group.status().ranks[1].pid
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = "2"
        return super().determine_available_memory()


def main():
    from vllm import LLM

    import starts

    try:
        LLM(
            distributed_executor_backend=starts.Executor,
            tensor_parallel_size=2,
            worker_cls="faulty_worker.Worker",
            max_model_len=64,
            dtype="float32",
            enforce_eager=True,
            **json.loads(sys.argv[1]),
        )
        text = "it has started"
    except Exception as error:  # noqa: BLE001
        text = str(error)
    with open(sys.argv[2], "w") as file:
        json.dump(text, file)


if __name__ == "__main__":
    main()
