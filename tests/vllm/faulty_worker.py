"""A worker of vLLM for tests: its steps fail as a file says, and its output may come late.

The file is VLLM_TEST_FAULT; its content is "RANK ACTION PLACE": a rank or "all", an ACTION of
Worker.fail, and the PLACE "execute" or "sample", before that is done, or "executed" or "sampled";
or a method of the start, "load_model" or "determine_available_memory".
VLLM_TEST_LATE is the number of seconds that the output of every step comes late.
"""

import ctypes
import os
import signal
import time

from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker


# What this rank did: ("execute" or "late", begin, end).
SPANS = []
CALLS = []


class Late(AsyncModelRunnerOutput):
    """An output that is on its way from a device."""

    def __init__(self, output, seconds):
        self.output = output
        self.seconds = seconds

    def get_output(self):
        begin = time.monotonic()
        time.sleep(self.seconds)
        SPANS.append(("late", begin, time.monotonic()))
        if isinstance(self.output, Exception):
            raise self.output
        # A V2 runner's comes late by itself.
        late = getattr(self.output, "get_output", None)
        return late() if late else self.output

    def get_kv_connector_output(self):
        return None


class Worker(CPUWorker):
    #: the present step computes no request, or is one of Coxswain's own
    made_up = False

    def __init__(self, vllm_config, *args, **kwargs):
        # For the runner: it has no device from which tokens would come late.
        vllm_config.scheduler_config.async_scheduling = False
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args, **kwargs):
        self.obey("load_model")
        return super().load_model(*args, **kwargs)

    def determine_available_memory(self):
        self.obey("determine_available_memory")
        return super().determine_available_memory()

    def execute_model(self, scheduler_output):
        requests = scheduler_output.num_scheduled_tokens
        self.made_up = not requests or any(name.startswith("coxswain_") for name in requests)
        self.obey("execute")
        begin = time.monotonic()
        output = super().execute_model(scheduler_output)
        SPANS.append(("execute", begin, time.monotonic()))
        self.obey("executed")
        return output

    def sample_tokens(self, grammar_output):
        self.obey("sample")
        output = super().sample_tokens(grammar_output)
        self.obey("sampled")
        seconds = float(os.environ.get("VLLM_TEST_LATE", "0"))
        return Late(output, seconds) if seconds else output

    def obey(self, place):
        """Fails, if the file says so and the step is a real one."""
        if self.made_up:
            return
        path = os.environ.get("VLLM_TEST_FAULT", "")
        if not path or not os.path.exists(path):
            return
        try:
            with open(path) as file:
                rank, action, where = file.read().split()
        except FileNotFoundError:
            return  # it was another rank's
        if rank == "all" and where == place:
            self.fail(action)
        elif rank == str(self.rank) and where == place:
            os.unlink(path)
            self.fail(action)

    def fail(self, action):
        if action == "raise":
            raise ValueError("the device is on fire")
        if action == "device":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if action == "OOM":
            import oom

            assert oom.kill([os.getpid()])
        if action == "hang":  # until there is that file
            while not os.path.exists(os.environ["VLLM_TEST_FAULT"] + ".end"):
                time.sleep(0.01)
            return
        if action == "scribble":  # a stray write into a weight
            weight = next(iter(self.get_model().parameters()))
            ctypes.memset(weight.data_ptr(), 7, 4)
            return
        if action == "gil":  # a C call that never releases it
            ctypes.PyDLL(None).sleep(600)
        os.kill(os.getpid(), getattr(signal, action))

    # ---- what tests call by name ----

    def sleep(self, level=1):
        CALLS.append("sleep")  # a CPU worker has none

    def wake_up(self, tags=None):
        CALLS.append("wake_up")

    def reload_weights(self, **_):
        CALLS.append("reload_weights")

    def get_calls(self):
        return CALLS

    def late(self, seconds, value):
        return Late(value, seconds)

    def say(self, value):
        return (self.rank, value)

    def spans(self):
        return SPANS

    def pid(self):
        return os.getpid()
