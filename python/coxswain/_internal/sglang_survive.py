"""Requests of an SGLang server that outlive its schedulers.

The tokenizer manager keeps every live request, and its output so far, in rid_to_state. Beside that
stands here what it has sent to the schedulers. After an incident the requests are sent again, with
their outputs, and the schedulers treat them like retracted ones.

Threads: the event loop's, where nothing else is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
from typing import Any

from .sglang_rank import BEGIN, RESUMED

logger = logging.getLogger("coxswain.sglang")

# Of a marker to come back through the detokenizer, in seconds.
_MARKER_SECONDS = 30.0
# Control requests after which new schedulers are like the old ones. Those of _REPEATED are sent
# again: a second answer is ignored.
_REPEATED = (
    *("FlushCacheReqInput", "GetInternalStateReq", "GetWeightsByNameReqInput", "ProfileReq"),
    *("FreezeGCReq", "ConfigureLoggingReq"),
)
_HARMLESS = ("AbortReq", "ShutdownReq", *_REPEATED)
_PAUSES = ("PauseGenerationReqInput", "ContinueGenerationReqInput")


def obstacle(request: Any) -> str:
    """Why a request cannot go on exactly; "": it can."""
    params = request.sampling_params
    for name in ("json_schema", "regex", "ebnf", "structural_tag"):
        if getattr(params, name, None):
            return f"its {name}"
    if (getattr(params, "beam_width", None) or 1) > 1:
        return "its beams"
    # SGLang applies them in the order of a set, which is another one in each process
    penalties = (("frequency_penalty", 0), ("presence_penalty", 0), ("repetition_penalty", 1))
    if sum((getattr(params, name, None) or none) != none for name, none in penalties) > 1:
        return "its two penalties"
    for name in (
        *(
            "mm_inputs",
            "input_embeds",
            "positional_embed_overrides",
            "session_params",
            "session_id",
        ),
        *("lora_id", "custom_logit_processor", "return_logprob", "return_hidden_states"),
        *(
            "return_routed_experts",
            "return_indexer_topk",
            "return_sampling_mask",
            "require_reasoning",
        ),
    ):
        if getattr(request, name, None):
            return f"its {name}"
    return ""


class Requests:
    """Those of a tokenizer manager."""

    def __init__(self, manager: Any, port_args: Any, keeps: bool) -> None:
        """keeps: they outlive schedulers."""
        self.manager = manager
        self._address = (
            port_args.tokenizer_ipc_name
            if manager.server_args.skip_tokenizer_init
            else port_args.detokenizer_ipc_name
        )
        self._keeps = keeps
        #: any thread: set while there are no schedulers
        self.holding = False
        self._held: list[Any] = []
        #: a call after which new schedulers are not like the old ones; "": none
        self.changed = ""
        self._asked: dict[str, Any] = {}
        self._pause: Any = None
        #: any thread: why there will be no schedulers
        self.over: Any = None
        self._marker: asyncio.Event | None = None
        self._outputs = 0
        self._socket: Any = None
        # the states of requests that have failed at the end
        self._ended: list[Any] = []

    # ---- on the way to the schedulers ----

    def sends(self, obj: Any) -> bool:
        """Of each object for the schedulers. Returns whether it is sent now."""
        if self.over:
            self.manager.event_loop.call_soon(self.end_requests, *self.over)
            return False
        if self.holding:
            self._held.append(obj)
            return False
        self._note(obj)
        return True

    def _note(self, obj: Any) -> None:
        name = type(obj).__name__
        if hasattr(obj, "sampling_params"):
            self._keep(obj)
        elif name.startswith("BatchTokenized"):
            for one in obj:
                self._keep(one)
        elif name in _PAUSES:
            self._pause = obj if name == _PAUSES[0] else None
        elif name in _REPEATED:
            self._asked[name] = obj
        elif name in _HARMLESS:
            if getattr(obj, "abort_all", False):
                for state in self.manager.rid_to_state.values():
                    state._coxswain_aborted = True
        elif self._keeps and not self.changed:
            self.changed = name
            logger.warning(
                "Coxswain: after %s new schedulers would not be like these: the next death of one "
                "is the end of the server.",
                name,
            )

    def _keep(self, request: Any) -> None:
        state = self.manager.rid_to_state.get(request.rid)
        if state is not None:
            state._coxswain_request = request

    # ---- on the way back ----

    def comes(self, output: Any) -> None:
        """Of each output."""
        rids = output.rids
        if not rids:
            if self._marker is not None:
                self._marker.set()
            return
        self._outputs += 1
        cached = getattr(output, "cached_tokens", None)
        for i, rid in enumerate(rids):
            state = self.manager.rid_to_state.get(rid)
            if state is not None:
                state._coxswain_cached = cached[i] if cached else 0

    async def _drain(self) -> None:
        """Waits for the outputs of schedulers that have ended, which the detokenizer may still
        have. It takes from its senders in turn: once a marker comes back, and another one with
        nothing between, there are none."""
        import zmq

        if self._socket is None:
            self._socket = zmq.Context.instance().socket(zmq.PUSH)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(self._address)
        quiet = 0
        while quiet < 2:
            before = self._outputs
            self._marker = asyncio.Event()
            _send(self._socket, _marker())
            await asyncio.wait_for(self._marker.wait(), _MARKER_SECONDS)
            quiet = quiet + 1 if self._outputs == before else 0
        self._marker = None

    # ---- after an incident ----

    async def go_on(self, is_current: Any) -> int:
        """Sends all live requests to the new schedulers. is_current(): there is no newer incident.
        Returns how many."""
        await self._drain()
        if not is_current():
            return 0
        manager, count = self.manager, 0
        self._pass(_abort(BEGIN))
        if self._pause is not None:
            self._pass(self._pause)
        for rid, state in list(manager.rid_to_state.items()):
            request = getattr(state, "_coxswain_request", None)
            if request is None or state.finished:
                continue
            reason = obstacle(request)
            if reason:
                self._end_request(
                    rid, f"a scheduler was lost, and this request cannot go on, for {reason}"
                )
                continue
            count += 1
            self._pass(_resumed(request, state))
            if state.abort_sent or getattr(state, "_coxswain_aborted", False):
                self._pass(_abort(rid))
        for obj in self._asked.values():
            self._pass(obj)
        held, self._held = self._held, []
        self.holding = False
        for obj in held:
            manager._dispatch_to_scheduler(obj)
        return count

    def _pass(self, obj: Any) -> None:
        _send(self.manager.send_to_scheduler, obj)

    # ---- at the end ----

    def end_requests(self, text: str) -> None:
        """Every live request fails with a text."""
        self._ended = list(self.manager.rid_to_state.values())
        for rid in list(self.manager.rid_to_state):
            self._end_request(rid, text)

    def _end_request(self, rid: str, text: str) -> None:
        reason = {"type": "abort", "message": text, "status_code": 500}
        reason["err_type"] = "InternalServerError"
        with contextlib.suppress(Exception):
            self.manager._handle_abort_req(_abort(rid, reason))

    def unread(self) -> bool:
        """Whether clients have yet to be given something."""
        return any(state.out_list for state in self._ended)


def _send(socket: Any, obj: Any) -> None:
    from sglang.srt.managers.io_struct import sock_send

    sock_send(socket, obj)


def _abort(rid: str, reason: dict[str, Any] | None = None) -> Any:
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(rid=rid, finished_reason=reason)


def _marker() -> Any:
    """An output of no request."""
    import msgspec
    from sglang.srt.managers.io_struct import BatchTokenIDOutput

    required = [
        field.name for field in msgspec.structs.fields(BatchTokenIDOutput) if field.required
    ]
    return BatchTokenIDOutput(**{"rids": [], **dict.fromkeys(required, [])})


def _resumed(request: Any, state: Any) -> Any:
    """A request as the new schedulers get it."""
    found = copy.copy(request)
    if not hasattr(request, "stream"):
        return _wrapped(found, state)  # of embeddings: it has no output yet
    found.sampling_params = copy.copy(request.sampling_params)
    cached = getattr(state, "_coxswain_cached", None)
    note = [cached or 0, cached is not None, *state.output_ids]
    found.sampling_params.custom_params = {
        **(request.sampling_params.custom_params or {}),
        RESUMED: note,
    }
    return _wrapped(found, state)


def _wrapped(request: Any, state: Any) -> Any:
    request.time_stats = state.time_stats
    request.wrap_pickle_fields()
    return request
