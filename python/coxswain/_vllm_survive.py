"""How vLLM's requests outlive a rank (on_death "restart" of coxswain.vllm.Executor).

The executor sees all that its ranks know of a request: SchedulerOutput and ModelRunnerOutput. A
Survivor keeps it. When a rank is lost, the processes of all ranks are replaced, the calls of the
initialisation are repeated, the requests' states are put back, their KV cache is computed again as
vLLM does after a preemption, and the calls in flight are issued again. The scheduler notices
nothing but the pause.

    lost ---replace---> stale ---restore---> whole
     ^                    |                     |
     +--- a rank is lost -+---------------------+

Any thread may replace. The thread of the engine alone restores, since restoring reads what that
thread schedules and takes blocks out of the scheduler's prefix cache.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pickle
import re
import time
from typing import Any
from collections.abc import Iterator

import cloudpickle

from . import vllm_worker
from ._errors import Error, RankDied, RankError, TimedOut, Unsupported

# For one call of a restore; a rank that hangs in it is lost too.
_RESTORE_SECONDS = 600.0
# Calls after the first step that leave the ranks as they are.
_READS = re.compile(
    r"check_health|list_loras|get_|supports_|profile|reset_mm_cache|save_|"
    r"synchronize_device|execute_dummy_batch|take_draft_token_ids|"
    r"reset_encoder_cache|release_late_interaction"
)
# Calls that are repeated in the order in which they came.
_REPEATED = ("add_lora", "remove_lora", "pin_lora")
_DEVICE_ERRORS = re.compile(
    r"AcceleratorError|CUDA error|HIP error|NCCL|device-side|gloo|"
    r"Connection (reset|closed)"
)


# ---- in the ranks: called with the worker ----


def sample(worker: Any, grammar_output: Any) -> tuple[Any, dict[str, Any]]:
    """sample_tokens, and the states of the random generators that it has advanced."""
    output = worker.sample_tokens(grammar_output)
    requests = worker.model_runner.requests
    return output, {
        request_id: requests[request_id].generator.get_state()
        for request_id in getattr(output, "req_ids", None) or ()
        if request_id in requests and requests[request_id].generator is not None
    }


def put_states(worker: Any, states: list[dict[str, Any]]) -> None:
    """Makes requests known as they were, without their generators: recomputing draws nothing."""
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    known = {field.name for field in dataclasses.fields(CachedRequestState)}
    for state in states:
        fields = {name: value for name, value in state.items() if name in known}
        worker.model_runner.requests[state["req_id"]] = CachedRequestState(generator=None, **fields)


def put_generators(worker: Any, states: dict[str, Any], seeds: dict[str, int]) -> None:
    """Gives requests their generators: with a state, or at their beginning."""
    import torch

    runner = worker.model_runner
    for request_id, seed in seeds.items():
        generator = torch.Generator(device=runner.device)
        generator.manual_seed(seed)
        if request_id in states:
            generator.set_state(states[request_id])
        runner.requests[request_id].generator = generator


def warm_up(worker: Any) -> None:
    """Runs made-up requests on the null block of a small KV cache, which is freed again."""
    from vllm.config import set_current_vllm_config
    from vllm.sampling_params import SamplingParams

    runner = worker.model_runner
    make = getattr(runner, "_init_minimal_kv_cache_for_profiling", None)
    if make is None:
        return  # the first steps of these ranks take longer
    kinds = (
        {"temperature": 0.0, "repetition_penalty": 1.1, "logprobs": 1},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 2, "presence_penalty": 0.1, "seed": 1},
    )
    # How many blocks vLLM makes; None in some eager configurations.
    size = runner.compilation_config.max_cudagraph_capture_size
    object.__setattr__(runner.compilation_config, "max_cudagraph_capture_size", size or 1)
    with set_current_vllm_config(runner.vllm_config):
        make()
    object.__setattr__(runner.compilation_config, "max_cudagraph_capture_size", size)
    states = [
        {
            "req_id": f"coxswain_{i}",
            "prompt_token_ids": [0, 0],
            "mm_features": [],
            "sampling_params": SamplingParams(**kind),
            "pooling_params": None,
            "lora_request": None,
            "block_ids": tuple([0] for _ in runner.kv_cache_config.kv_cache_groups),
            "num_computed_tokens": 0,
            "output_token_ids": [],
        }
        for i, kind in enumerate(kinds)
    ]
    names = [state["req_id"] for state in states]
    put_states(worker, states)
    put_generators(worker, {}, {names[1]: 1})
    # The prompt, an output, the end.
    for computed, count in ((0, 2), (2, 1), (3, 0)):
        if worker.execute_model(_made_up_step(states, computed, count)) is None:
            worker.sample_tokens(None)
    runner._cleanup_profiling_kv_cache()


def _made_up_step(states: list[dict[str, Any]], computed: int, count: int) -> Any:
    """Computes tokens of each request; none: they have finished."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    scheduled, cached = SchedulerOutput.make_empty(), CachedRequestData.make_empty()
    names = [state["req_id"] for state in states]
    if not count:
        scheduled.finished_req_ids = set(names)
        return scheduled
    cached.req_ids = names
    cached.resumed_req_ids = set() if computed else set(names)
    cached.new_block_ids = [None if computed else state["block_ids"] for state in states]
    cached.num_computed_tokens = [computed for _ in names]
    cached.num_output_tokens = [computed // 2 for _ in names]
    cached.all_token_ids = {} if computed else {name: [0, 0] for name in names}
    scheduled.scheduled_cached_reqs = cached
    scheduled.num_scheduled_tokens = dict.fromkeys(names, count)
    scheduled.total_num_scheduled_tokens = count * len(names)
    return scheduled


# ---- in the engine ----


@dataclasses.dataclass
class Live:
    """A request that the ranks know."""

    new: Any
    #: of its KV cache, per group
    block_ids: tuple[list[int], ...]
    #: tokens whose keys and values are in the KV cache; 0: preempted
    computed: int
    outputs: list[int]
    #: of its random generator, after the last sample
    generator: Any = None

    @classmethod
    def of(cls, new: Any) -> Live:
        return cls(new, _copy(new.block_ids), new.num_computed_tokens, [])

    @property
    def seed(self) -> int | None:
        parameters = self.new.sampling_params
        return parameters.seed if parameters is not None else None

    def state(self) -> dict[str, Any]:
        """The fields of vLLM's CachedRequestState."""
        new = self.new
        return {
            "req_id": new.req_id,
            "prompt_token_ids": new.prompt_token_ids,
            "mm_features": new.mm_features,
            "sampling_params": new.sampling_params,
            "pooling_params": new.pooling_params,
            "lora_request": new.lora_request,
            "block_ids": self.block_ids,
            "num_computed_tokens": self.computed,
            "output_token_ids": list(self.outputs),
        }

    def obstacles(self) -> list[str]:
        """Why it cannot be continued exactly."""
        new, parameters = self.new, self.new.sampling_params
        found = {
            "it has multimodal inputs": bool(new.mm_features),
            "its prompt has embeddings": getattr(new, "prompt_embeds", None) is not None,
            "it is a pooling request": new.pooling_params is not None,
            "it asks for log probabilities of its prompt": parameters is not None
            and parameters.prompt_logprobs is not None,
        }
        return [f"request {new.req_id}: {why}" for why, is_so in found.items() if is_so]


@dataclasses.dataclass(eq=False)
class Step:
    """A SchedulerOutput whose ModelRunnerOutput is not there yet."""

    scheduled: Any
    #: the reply of execute_model was collected
    executed: bool = False

    @property
    def gone(self) -> set[str]:
        """Requests whose blocks may belong to others by now."""
        return set(self.scheduled.finished_req_ids) | set(self.scheduled.preempted_req_ids or ())


@dataclasses.dataclass
class Incident:
    """From the loss of a rank until the requests go on."""

    cause: str
    #: of the pause, in seconds
    parts: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(
            ("detect", "stop", "start", "load", "KV", "replay"), 0.0
        )
    )

    @property
    def pause(self) -> float:
        return sum(self.parts.values())


@dataclasses.dataclass
class Recompute:
    """KV cache that has to be computed again: tokens 0 to count - 1 of a request."""

    live: Live
    block_ids: tuple[list[int], ...]
    count: int
    position: int = 0


def _copy(block_ids: tuple[list[int], ...]) -> tuple[list[int], ...]:
    return tuple(list(ids) for ids in block_ids)


_scheduler: list[Any] = []


def register_scheduler(config: Any) -> None:
    """Has vLLM make a scheduler that says where it is: its prefix cache has to forget blocks."""
    base = config.scheduler_config.get_scheduler_cls()

    class Scheduler(base):  # type: ignore[misc, valid-type]
        """As its base."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _scheduler[:] = [self]

    config.scheduler_config.scheduler_cls = Scheduler


def check(config: Any) -> None:
    """Raises Unsupported where an engine cannot outlive a rank."""
    parallel, model = config.parallel_config, config.model_config
    found = {
        "async scheduling (use --no-async-scheduling)": config.scheduler_config.async_scheduling,
        "speculative decoding": config.speculative_config is not None,
        "a KV connector": config.kv_transfer_config is not None,
        "an encoder cache connector": getattr(config, "ec_transfer_config", None) is not None,
        "data parallelism": parallel.data_parallel_size > 1,
        "a pooling model": model.runner_type == "pooling",
        "the V2 model runner": getattr(config, "use_v2_model_runner", False),
        "logits processors of one's own": bool(getattr(model, "logits_processors", None)),
        "an encoder-decoder model": getattr(model, "is_encoder_decoder", False),
    }
    said = [what for what, is_so in found.items() if is_so]
    if said:
        raise Unsupported(
            f"on_death 'restart' does not go together with {', '.join(said)}; on_death 'fail' does"
        )


class Survivor:
    """What the ranks of an executor know, and how to give it to other processes.

    All methods are called with the executor's lock.
    """

    def __init__(self, executor: Any, incidents: int, window: float) -> None:
        check(executor.vllm_config)
        self._executor = executor
        self._incidents, self._window = incidents, window
        self._times: collections.deque[float] = collections.deque()
        #: names and payloads of calls that bring a new process to where the first step found the
        #: old one, and of later ones that are repeated
        self._setup: list[tuple[str, bytes]] = []
        self._changes: list[str] = []
        self._live: dict[str, Live] = {}
        self._steps: collections.deque[Step] = collections.deque()
        self._stepped = False
        #: the ranks are new, and know nothing yet
        self.stale = False
        #: incidents so far; one lasts until the requests go on, however many ranks it costs
        self.count = 0
        self.incident: Incident | None = None
        #: seconds, of all incidents before the present one
        self._earlier_pauses = 0.0
        #: how often it has replaced the ranks so far; 0: all is well
        self._attempts = 0

    # ---- what happens ----

    def submitted(self, reply: Any, method: Any, args: tuple[Any, ...]) -> None:
        """A call is about to be issued."""
        if method == "execute_model":
            if not self._stepped:
                self._executor._spares.fill()
            self._stepped = True
            self._steps.append(Step(args[0]))
        elif reply.method == "sample_tokens":
            pass
        elif not self._stepped or method in _REPEATED:
            if method == "initialize_from_config":
                _check_kv_cache(args[0])
            reply.repeated = True
        elif not (isinstance(method, str) and _READS.match(method)):
            self._changes.append(reply.method)

    def resolved(self, reply: Any, result: Any) -> Any:
        """A call has its result. Returns what vLLM gets."""
        if reply.method == "execute_model":
            step = next(step for step in self._steps if not step.executed)
            step.executed = True
            if result is not None:  # nothing is sampled
                self._apply(step, result, {})
        elif reply.method == "sample_tokens":
            result, generators = result
            self._apply(self._steps[0], result, generators)
        elif reply.repeated:
            self._setup.append((reply.method, reply.payload))
            if reply.method == "compile_or_warm_up_model":
                self._executor._spares.fill()  # the engine has started
        return result

    def _apply(self, step: Step, output: Any, generators: dict[str, Any]) -> None:
        """A step is over."""
        self._steps.remove(step)
        scheduled = step.scheduled
        for request_id in scheduled.finished_req_ids:
            self._live.pop(request_id, None)
        for request_id in scheduled.preempted_req_ids or ():
            if request_id in self._live:
                self._live[request_id].computed = 0
        for new in scheduled.scheduled_new_reqs:
            if new.req_id in self._live:
                self._changes.append(f"a second input of request {new.req_id}")
            self._live[new.req_id] = Live.of(new)
        cached = scheduled.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            live, blocks = self._live[request_id], cached.new_block_ids[i]
            live.computed = cached.num_computed_tokens[i]
            if request_id in cached.resumed_req_ids:
                live.block_ids = _copy(blocks)
            elif blocks is not None:
                for mine, more in zip(live.block_ids, blocks, strict=True):
                    mine.extend(more)
        for request_id, count in scheduled.num_scheduled_tokens.items():
            self._live[request_id].computed += count
        for request_id, index in output.req_id_to_index.items():
            if request_id in self._live and output.sampled_token_ids:
                self._live[request_id].outputs.extend(map(int, output.sampled_token_ids[index]))
        for request_id, state in generators.items():
            if request_id in self._live:
                self._live[request_id].generator = state

    # ---- a rank is lost ----

    def survives(self, error: Error) -> bool:
        """Whether an error of a step means that ranks have to be replaced."""
        return isinstance(error, (RankDied, TimedOut)) or (
            isinstance(error, RankError) and bool(_DEVICE_ERRORS.search(str(error)))
        )

    def obstacles(self) -> list[str]:
        """Why the requests cannot be continued exactly."""
        found = [
            f"vLLM's call {name} changed the ranks, and is not repeated" for name in self._changes
        ]
        for live in self._live.values():
            found += live.obstacles()
        for step in self._steps:
            for new in step.scheduled.scheduled_new_reqs:
                found += Live.of(new).obstacles()
        now = time.monotonic()
        while self._times and self._times[0] < now - self._window:
            self._times.popleft()
        if self._attempts >= self._incidents:
            found.append(f"in this incident the ranks were replaced {self._attempts} times")
        elif not self._attempts and len(self._times) >= self._incidents:
            found.append(f"it is incident {len(self._times) + 1} in {self._window:.0f} s")
        return found

    def replace(self, cause: Error, seen: float) -> None:
        """Replaces the processes of all ranks; the new ones are as before the first request. seen:
        when the loss was."""
        now = time.monotonic()
        if not self._attempts:
            self._times.append(now)
            self.count += 1
            if self.incident:
                self._earlier_pauses += self.incident.pause
            self.incident = Incident(str(cause))
            self.incident.parts["detect"] = now - seen
        self._attempts += 1
        self.stale = True
        self._executor._replace_ranks()
        with self.part("KV"):
            ranks = self._executor._ranks
            for _, payload in self._setup[ranks.prepared :]:
                self._send(payload)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the pause of the present incident."""
        assert self.incident
        begin = time.monotonic()
        try:
            yield
        finally:
            self.incident.parts[name] += time.monotonic() - begin

    def told(self) -> str:
        """How the incident ended, for the log."""
        assert self.incident
        parts = ", ".join(f"{name} {took:.3f}" for name, took in self.incident.parts.items())
        pause = self.incident.pause
        return f"the requests go on after {pause:.3f} s ({parts}); incident {self.count}."

    def idle(self) -> None:
        """The ranks are replaced, and nothing waits for them."""
        self._attempts = 0

    def note(self) -> dict[str, Any]:
        """For `coxswain status`."""
        found: dict[str, Any] = {"incidents": self.count, "pauses_s": 0.0}
        if self.incident:
            found["pauses_s"] = round(self._earlier_pauses + self.incident.pause, 3)
            found["last_incident"] = self.incident.cause.split("\n")[0][:500]
            found["pause_s"] = round(self.incident.pause, 3)
            found["pause_parts_s"] = {
                name: round(took, 3) for name, took in self.incident.parts.items()
            }
        return found

    def warm_up(self, ranks: Any) -> None:
        """Brings spare ranks, which have loaded the model, to where a KV cache is made; made-up
        steps have compiled by then what is compiled at first use."""
        names = [name for name, _ in self._setup]
        count = names.index("initialize_from_config")
        for _, payload in self._setup[:count]:
            self._send(payload, ranks)
        self._send(vllm_worker.pickled((_function(warm_up), (), {}, 0)), ranks)
        ranks.prepared = count

    def restore(self, in_flight: list[Any]) -> None:
        """On the engine's thread: the ranks come to where the lost ones were, and go on."""
        with self.part("replay"):
            self._restore(in_flight)
        self.stale, self._attempts = False, 0

    def _restore(self, in_flight: list[Any]) -> None:
        recomputes, finished, temporary = self._plan()
        states = [
            live.state() for request_id, live in self._live.items() if request_id not in finished
        ]
        states += [
            recompute.live.state()
            for recompute in recomputes
            if recompute.live.new.req_id in temporary
        ]
        self._call(put_states, states)
        limit = self._executor.scheduler_config.max_num_seqs
        for i in range(0, len(recomputes), limit):
            self._recompute(recomputes[i : i + limit])
            # Leaves the batch, so that the next step adds the requests with their generators.
            self._execute(set())
        self._execute(temporary)
        seeded = {
            request_id: live
            for request_id, live in self._live.items()
            if live.seed is not None and request_id not in finished
        }
        self._call(
            put_generators,
            {
                request_id: live.generator
                for request_id, live in seeded.items()
                if live.generator is not None
            },
            {request_id: live.seed for request_id, live in seeded.items()},
        )
        self._forget_blocks(recomputes)
        for step in self._steps:
            if step.executed:
                self._call("execute_model", step.scheduled)
        for reply in in_flight:
            reply.send()

    def _plan(self) -> tuple[list[Recompute], set[str], set[str]]:
        """What is computed again; requests that the ranks need not know any more; and those that
        they must not know yet, since a step in flight brings them."""
        gone: set[str] = set()
        finished: set[str] = set()
        used: set[str] = set()
        for step in self._steps:
            gone |= step.gone - used
            finished |= set(step.scheduled.finished_req_ids) - used
            used |= set(step.scheduled.num_scheduled_tokens)
        recomputes = [
            Recompute(live, live.block_ids, live.computed)
            for request_id, live in self._live.items()
            if live.computed and request_id not in gone
        ]
        temporary: set[str] = set()
        for step in self._steps:
            # Steps in flight whose requests begin with blocks of the prefix cache.
            for new in step.scheduled.scheduled_new_reqs:
                if new.num_computed_tokens:
                    temporary.add(new.req_id)
                    recomputes.append(
                        Recompute(Live.of(new), _copy(new.block_ids), new.num_computed_tokens)
                    )
            cached = step.scheduled.scheduled_cached_reqs
            for i, request_id in enumerate(cached.req_ids):
                if request_id in cached.resumed_req_ids and cached.num_computed_tokens[i]:
                    recomputes.append(
                        Recompute(
                            self._live[request_id],
                            _copy(cached.new_block_ids[i]),
                            cached.num_computed_tokens[i],
                        )
                    )
        return recomputes, finished, temporary

    def _recompute(self, recomputes: list[Recompute]) -> None:
        """Computes KV cache as after a preemption. The last token of a request stays uncomputed,
        so that nothing is sampled."""
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        budget = self._executor.scheduler_config.max_num_batched_tokens
        while any(one.position < one.count for one in recomputes):
            scheduled, cached = SchedulerOutput.make_empty(), CachedRequestData.make_empty()
            left = budget
            for one in recomputes:
                count = min(one.count - one.position, left)
                if not count:
                    continue
                left -= count
                request_id = one.live.new.req_id
                cached.req_ids.append(request_id)
                if one.position == 0:
                    cached.resumed_req_ids.add(request_id)
                cached.new_block_ids.append(None if one.position else _copy(one.block_ids))
                cached.num_computed_tokens.append(one.position)
                cached.num_output_tokens.append(len(one.live.outputs))
                cached.all_token_ids[request_id] = [
                    *one.live.new.prompt_token_ids,
                    *one.live.outputs,
                ]
                scheduled.num_scheduled_tokens[request_id] = count
                one.position += count
            scheduled.scheduled_cached_reqs = cached
            scheduled.total_num_scheduled_tokens = budget - left
            if self._call("execute_model", scheduled) is None:
                self._call("sample_tokens", None)

    def _execute(self, finished: set[str]) -> None:
        """A step of no tokens."""
        from vllm.v1.core.sched.output import SchedulerOutput

        scheduled = SchedulerOutput.make_empty()
        scheduled.finished_req_ids = set(finished)
        self._call("execute_model", scheduled)

    def _forget_blocks(self, recomputes: list[Recompute]) -> None:
        """Takes blocks that were not computed again out of the scheduler's prefix cache."""
        if not self._executor.cache_config.enable_prefix_caching or not _scheduler:
            return
        kept = {block for one in recomputes for ids in one.block_ids for block in ids}
        for step in self._steps:
            used = step.scheduled.num_scheduled_tokens
            tables = [new.block_ids for new in step.scheduled.scheduled_new_reqs]
            tables += [
                table for table in step.scheduled.scheduled_cached_reqs.new_block_ids if table
            ]
            tables += [
                self._live[request_id].block_ids for request_id in used if request_id in self._live
            ]
            kept |= {block for table in tables for ids in table for block in ids}
        manager = _scheduler[0].kv_cache_manager
        manager.evict_blocks(
            {block.block_id for block in manager.block_pool.blocks if block.block_hash is not None}
            - kept
        )

    def _call(self, method: Any, *args: Any) -> Any:
        """Calls the new ranks. Returns the result of the last stage."""
        sent = method if isinstance(method, str) else _function(method)
        rank = self._executor.output_rank
        payload = vllm_worker.pickled((sent, args, {}, rank))
        return pickle.loads(self._send(payload)[rank])

    def _send(self, payload: bytes, ranks: Any = None) -> Any:
        deadline = time.monotonic() + _RESTORE_SECONDS
        return (ranks or self._executor._ranks).submit(payload, deadline).result()


def _function(function: Any) -> bytes:
    return bytes(cloudpickle.dumps(function, protocol=5))


def _check_kv_cache(configs: list[Any]) -> None:
    """Refuses KV caches that are not a function of the tokens before alone, in one table."""
    for config in configs:
        groups = config.kv_cache_groups
        kinds = {type(group.kv_cache_spec).__name__ for group in groups}
        window = any(getattr(group.kv_cache_spec, "sliding_window", None) for group in groups)
        if len(groups) > 1 or kinds - {"FullAttentionSpec"} or window:
            raise Unsupported(
                "on_death 'restart' does not go together with this model's KV cache ("
                f"{', '.join(sorted(kinds))}, {len(groups)} groups)"
            )
