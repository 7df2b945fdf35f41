"""How vLLM's requests outlive a rank (on_death "restart" of coxswain.vllm.Executor).

vLLM can preempt a request and compute it again. A Survivor has it do so when a rank is lost: the
processes of all ranks are replaced, the calls that changed the old ones are repeated, the scheduler
preempts every request and trusts no cache, and each step in flight gets an output without tokens,
which the scheduler drops. No record of requests is kept.

    whole --a rank is lost, replace--> stale --reset--> whole

Any thread may replace. The engine's thread alone resets, since that changes the scheduler.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import threading
import time
from typing import Any
from collections.abc import Iterator

from vllm.logger import init_logger

from . import vllm_interface as interface, vllm_spares as _vllm_spares
from .. import vllm_worker
from .vllm_plugin import text_of
from .errors import Closed, Error, RankDied, RankError, TimedOut

logger = init_logger("vllm.coxswain")

# For one call of a replacement; a rank that hangs in it is lost too.
_CALL_SECONDS = 600.0
# Replacements in a row without an output between them: what fails so fails again.
_FRUITLESS = 3
# Requests that ranks get to know in one call.
_AT_A_TIME = 16
# Calls that change nothing on which outputs depend: requests bring their adapters along.
_READS = re.compile(
    r"check_health|\w+_loras?$|get_|supports_|profile|reset_mm_cache|save_|compute_weight_checksums|"
    r"synchronize_device|reset_encoder_cache|release_late_interaction"
)
# Calls of a running engine that are repeated in new ranks.
_REPEATED = ("sleep", "wake_up", "reload_weights")
_DEVICE_ERRORS = re.compile(
    r"AcceleratorError|CUDA error|HIP error|NCCL|device-side|gloo|"
    r"Connection (reset|closed)"
)


# ---- in the ranks: called with the worker ----


class Sampled:
    """What a rank has sampled, and the states of the random generators after that. The output may
    still be on its way from the device."""

    def __init__(self, output: Any, generators: dict[str, bytes]) -> None:
        self.output, self.generators = output, generators

    def get_output(self) -> Sampled:
        if hasattr(self.output, "get_output"):
            self.output = self.output.get_output()
        return self


def sample_tokens(worker: Any, grammar_output: Any) -> Any:
    """sample_tokens of a V1 runner, with the states of seeded generators if there are any."""
    output = worker.sample_tokens(grammar_output)
    batch = worker.model_runner.input_batch
    if not batch.generators:
        return output
    return Sampled(
        output,
        {
            batch.req_ids[i]: one.get_state().numpy().tobytes()
            for i, one in batch.generators.items()
        },
    )


def introduce(worker: Any, requests: list[tuple[Any, list[int], Any]]) -> None:
    """Makes preempted requests known to a V1 runner, which expects to know what it resumes.
    requests: each as a new one, with its output tokens and the state of its generator."""
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput

    runner = worker.model_runner
    for new, outputs, state in requests:
        step = SchedulerOutput.make_empty()
        step.scheduled_new_reqs = [new]
        step.num_scheduled_tokens, step.total_num_scheduled_tokens = {new.req_id: 1}, 1
        runner._update_states(step)
        request = runner.requests[new.req_id]
        request.output_token_ids = outputs
        if state is not None:
            request.generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        if outputs:  # those of the prompt were delivered with the first one
            runner.num_prompt_logprobs.pop(new.req_id, None)
    runner._update_states(SchedulerOutput.make_empty())  # known, and not in the batch


def warm_up(worker: Any) -> None:
    """Compiles what vLLM's V1 sampler compiles at the first request for log probabilities."""
    import torch

    sampler = getattr(worker.model_runner, "sampler", None)
    if gather := getattr(sampler, "gather_logprobs", None):
        with worker.model_runner.device:
            gather(torch.zeros(2, 2), 1, torch.zeros(2, dtype=torch.int64))


# ---- in the engine ----


def obstacles(config: Any) -> list[str]:
    """Why the requests of an engine cannot outlive a rank."""
    multimodal = getattr(config.model_config, "multimodal_config", None)
    found = {
        "a KV connector, to which ranks that died may have given a part of a request's KV cache": (
            config.kv_transfer_config
        ),
        "an encoder cache connector, which was not tried": getattr(
            config, "ec_transfer_config", None
        ),
        "an encoder-decoder model, which was not tried": config.model_config.is_encoder_decoder,
        "experts over several engines, which compute in lockstep": (
            config.parallel_config.data_parallel_size > 1
        ),
        "mm_processor_cache_type 'shm', whose ranks read inputs only once": (
            getattr(multimodal, "mm_processor_cache_type", None) == "shm"
        ),
    }
    return [what for what, is_so in found.items() if is_so]


@dataclasses.dataclass
class Incident:
    """From the loss of a rank until steps go on."""

    cause: str
    #: of the pause, in seconds
    parts: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(
            ("detect", "stop", "start", "load", "KV", "preempt"), 0.0
        )
    )

    @property
    def pause(self) -> float:
        return sum(self.parts.values())

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.parts[name] += time.monotonic() - begin


class Survivor:
    """Replaces the ranks of an executor. All methods are called with the executor's lock, but for
    rank_died."""

    def __init__(self, executor: Any, options: Any) -> None:
        config = executor.vllm_config
        self._executor = executor
        self._incidents, self._window = options.incidents, options.window
        self._is_v1 = not getattr(config, "use_v2_model_runner", False)
        self.spares = _vllm_spares.Spares(options.spares, self._new_spares, executor.note)
        # of the group
        self._name = ""
        # of the engine, once it has made it
        self._scheduler: Any = None
        self._watch_scheduler(config.scheduler_config)
        # Names and payloads of calls that bring a new process to where the old one is: those of the
        # engine's start, and later ones.
        self._setup: list[tuple[str, bytes]] = []
        self._later: list[tuple[str, bytes]] = []
        # A call that cannot be repeated.
        self._change = ""
        # The engine has started.
        self._started = False
        # The last call of execute_model.
        self._step: Any = None
        # After the last output that vLLM took, of requests with a seed (V1).
        self._generators: dict[str, bytes] = {}
        #: the ranks are new, and the scheduler does not know it
        self.stale = False
        # how often it got to know it
        self._resets = 0
        self._incident: Incident | None = None
        #: incidents so far; one lasts until steps go on, however many ranks it costs
        self.count = 0
        self._times: collections.deque[float] = collections.deque()
        # seconds, of all incidents before the present one
        self._earlier_pauses = 0.0
        # replacements in this incident; 0: all is well
        self._attempts = 0
        # replacements since the last output
        self._fruitless = 0

    def _watch_scheduler(self, config: Any) -> None:
        """Has vLLM make a scheduler that is known here."""
        base, survivor = config.get_scheduler_cls(), self

        class Scheduler(base):  # type: ignore[misc, valid-type]
            """As its base."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                survivor._scheduler = self

        Scheduler.__name__ = Scheduler.__qualname__ = base.__name__
        config.scheduler_cls = Scheduler

    # ---- calls ----

    def begin(self, reply: Any) -> None:
        """A call is about to be sent."""
        method, reply.resets = reply.method, self._resets
        if method == "execute_model":
            self._step = reply
            for request_id in reply.step.finished_req_ids if self._generators else ():
                self._generators.pop(request_id, None)
        elif method == "sample_tokens":
            reply.step = self._step.step
        elif self._started and not (reply.drops or method in _REPEATED or _READS.match(method)):
            text = "vLLM's call %s changes ranks, and is not repeated: the loss of one is the end"
            logger.warning(text, method)
            self._change = method

    def fits(self, reply: Any) -> bool:
        """Whether the ranks know what a call needs."""
        ranks = self._executor._ranks
        return not self.stale and (reply.method != "sample_tokens" or self._step.ranks is ranks)

    @property
    def sample(self) -> str:
        """The method that samples."""
        return "coxswain:sample_tokens" if self._is_v1 else "sample_tokens"

    def succeeded(self, reply: Any, results: list[Any]) -> list[Any]:
        """Returns what vLLM gets of ranks."""
        call = reply.method, reply.payload
        if reply.drops:
            for i, result in enumerate(results):
                if isinstance(result, Sampled):
                    results[i], reply.generators = result.output, result.generators
        elif not self._started:
            self._setup.append(call)
            if reply.method == interface.STARTED:
                self._started = True
                self.spares.fill()
        elif reply.method in _REPEATED:
            self._prune()
            self._later.append(call)
        return results

    def taken(self, reply: Any) -> None:
        """vLLM takes an output of a step, and drops it if its requests were preempted meanwhile."""
        if reply.resets == self._resets:
            self._fruitless = 0
            for name, state in reply.generators.items():
                if name in self._scheduler.requests:
                    self._generators[name] = state

    def _prune(self) -> None:
        """While the engine is awake nothing counts of its sleeps but the weights that it loaded."""
        if not self._executor.is_sleeping:
            self._later = [one for one in self._later if one[0] == "reload_weights"][-1:]

    # ---- a rank is lost ----

    def rank_died(self, error: Error, ranks: Any, seen: float) -> None:
        """New ranks load while the engine computes on, or waits; it resets when it calls."""

        def replace() -> None:
            with self._executor._lock:
                if self._replace(error, ranks, seen) and not self._executor._in_flight:
                    self._attempts = self._fruitless = 0
                    self.spares.fill()

        threading.Thread(target=replace, name="coxswain-replace", daemon=True).start()

    def recover(self, error: Error, reply: Any) -> bool:
        """On the engine's thread, with a call that is lost: it gets a result, or is sent to other
        ranks. False: the error stands."""
        executor, seen = self._executor, time.monotonic()
        if executor._stopping or executor._failure is not None:
            return False
        cause, ranks = error, reply.ranks
        if ranks is executor._ranks and not self.stale:
            cause = executor._cause(error, reply)
            if not self._is_loss(cause, reply.drops):
                return False
        while self.stale or ranks is executor._ranks:
            if not self.stale and not self._replace(cause, executor._ranks, seen):
                return False
            try:
                self._reset()
            except Exception as again:  # pylint: disable=broad-exception-caught
                if not (isinstance(again, Error) and self._is_loss(again, True)):
                    # A request that cannot be preempted, or made known.
                    error.add_note(f"The requests cannot be continued: {again}")
                    return False
                cause, ranks, seen, self.stale = again, executor._ranks, time.monotonic(), False
        if reply.drops:
            reply.set_result(None if reply.step is None else _nothing(reply.step))
        else:
            reply.send()
        return True

    def _is_loss(self, error: Error, in_step: bool) -> bool:
        """Whether an error means that ranks have to be replaced."""
        return isinstance(error, (RankDied, Closed)) or (
            in_step
            and (
                isinstance(error, TimedOut)
                or (isinstance(error, RankError) and bool(_DEVICE_ERRORS.search(str(error))))
            )
        )

    def _replace(self, error: Error, ranks: Any, seen: float) -> bool:
        """Replaces the processes of all ranks, unless that is done. seen: when the loss was. False:
        it is the end of the engine."""
        executor = self._executor
        while executor._ranks is ranks:
            if executor._stopping or executor._failure is not None:
                return False
            if obstacle := self._obstacle():
                error.add_note(f"The requests cannot be continued: {obstacle}.")
                executor._fail(error)
                return False
            name = ranks.name or self._name
            logger.error("Coxswain group %s: %s. Replacing its ranks.", name, text_of(error))
            self._count(error, seen)
            self.stale = True
            executor.not_ready = f"its ranks are being replaced: {_first_line(error)}"
            try:
                self._start_ranks()
            except Exception as again:  # pylint: disable=broad-exception-caught
                error = again if isinstance(again, Error) else Closed(f"{again!r}")
                ranks, seen = executor._ranks, time.monotonic()
        executor.not_ready = ""
        executor.note()
        return True

    def _obstacle(self) -> str:
        """Why the requests cannot be continued; empty: they can."""
        # Pauses do not count: with long ones a limit by time would never be reached.
        now = time.monotonic() - self._pauses()
        while self._times and self._times[0] < now - self._window:
            self._times.popleft()
        if not self._started:
            return "the engine has not started"
        if self._change:
            return f"vLLM's call {self._change} changed the ranks, and is not repeated"
        if self._fruitless >= _FRUITLESS:
            return f"ranks were replaced {_FRUITLESS} times without an output since"
        if not self._attempts and len(self._times) >= self._incidents:
            return f"it is incident {len(self._times) + 1} in {self._window:.0f} s"
        return ""

    def _count(self, cause: Error, seen: float) -> None:
        if not self._attempts:
            self._times.append(time.monotonic() - self._pauses())
            self.count += 1
            if self._incident:
                self._earlier_pauses += self._incident.pause
            self._incident = Incident(str(cause))
            self._incident.parts["detect"] = time.monotonic() - seen
        self._attempts += 1
        self._fruitless += 1

    def _pauses(self) -> float:
        return self._earlier_pauses + (self._incident.pause if self._incident else 0.0)

    def _new_spares(self) -> Any:
        return self._executor._new_ranks(None, self._warm_up, standby=True)

    def _start_ranks(self) -> None:
        executor, incident = self._executor, self._incident
        old = executor._ranks
        self._name = old.name or self._name  # those that never took over have none
        assert incident
        with incident.part("stop"):
            old.kill()
            if old.on_nodes:
                old.stop(kill=True)
        try:
            with incident.part("start"):
                ranks = self.spares.take() or executor._new_ranks(
                    self._name, standby=not old.on_nodes
                )
                executor._ranks = ranks
                executor.note()
                if executor._stopping:
                    ranks.stop(kill=True)
                    raise Closed("the engine ends")
                ranks.start()
        finally:
            with incident.part("stop"):
                old.stop(kill=True)  # their memory is free for what is loaded now
        ranks.take_over(self._name)
        with incident.part("load"):
            ranks.load()
        with incident.part("KV"):
            self._prune()
            for _, payload in self._setup[ranks.prepared :] + self._later:
                self._send(payload, ranks)

    def _warm_up(self, ranks: Any) -> None:
        """Brings spare ranks, which have loaded the model, to where a KV cache is made."""
        count = [method for method, _ in self._setup].index("initialize_from_config")
        for _, payload in self._setup[:count]:
            self._send(payload, ranks)
        self._send(vllm_worker.pickled(("coxswain:warm_up", (), {}, 0)), ranks)
        ranks.prepared = count

    def _reset(self) -> None:
        """On the engine's thread: the scheduler takes notice that the ranks are new."""
        assert self._incident
        with self._incident.part("preempt"):
            if self._scheduler is not None:
                self._resets += 1
                self._scheduler.reset_prefix_cache(reset_running_requests=True)
                self._scheduler.reset_encoder_cache()
                if self._is_v1:
                    self._introduce()
        self.stale, self._attempts = False, 0
        incident, name = self._incident, self._executor._ranks.name
        parts = ", ".join(f"{part} {took:.3f}" for part, took in incident.parts.items())
        logger.info(
            "Coxswain group %s: steps go on after %.3f s (%s); incident %d.",
            *(name, incident.pause, parts, self.count),
        )
        self.spares.fill()
        self._executor.note()

    def _introduce(self) -> None:
        from vllm.v1.core.sched.output import NewRequestData
        from vllm.v1.request import RequestStatus

        groups = len(self._scheduler.kv_cache_config.kv_cache_groups)
        requests = [
            (
                NewRequestData.from_request(one, tuple([] for _ in range(groups))),
                list(one.output_token_ids),
                self._generators.get(one.request_id),
            )
            for one in self._scheduler.requests.values()
            if one.status == RequestStatus.PREEMPTED
        ]
        for first in range(0, len(requests), _AT_A_TIME):
            some = requests[first : first + _AT_A_TIME]
            payload = vllm_worker.pickled(("coxswain:introduce", (some,), {}, 0))
            self._send(payload, self._executor._ranks)

    def _send(self, payload: bytes, ranks: Any) -> None:
        ranks.submit(payload, time.monotonic() + _CALL_SECONDS).result()

    def note(self) -> dict[str, Any]:
        """What `coxswain status` shows of incidents and spares."""
        note: dict[str, Any] = {
            "spares": str(self.spares),
            "spares_ready": int(self.spares.ready),
            "incidents": self.count,
            "pauses_s": round(self._pauses(), 3),
        }
        if incident := self._incident:
            note["last_incident"] = _first_line(incident.cause)
            note["pause_s"] = round(incident.pause, 3)
            note["pause_parts_s"] = {part: round(took, 3) for part, took in incident.parts.items()}
        return note


def _first_line(cause: object) -> str:
    return str(cause).split("\n")[0][:500]


def _nothing(step: Any) -> Any:
    """The output of a step that was lost with its ranks."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}
    )
