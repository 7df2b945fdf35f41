"""SGLang with Coxswain: deaths and hangs by rank, ranks that diverge, requests that outlive ranks.

::

    COXSWAIN_SGLANG='{"on_death": "restart"}' sglang serve --model-path MODEL --tp 2

`register` is SGLang's plugin hook, the entry point sglang.srt.plugins, which SGLang calls in its
server and in every scheduler. Without the variable it does nothing. What it needs of SGLang stands
in sglang_interface.py and is checked at start.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import sys
from typing import Any
from collections.abc import Callable

from ._internal import sglang_interface as _interface, sglang_rank as _rank
from ._internal.errors import Invalid, Unsupported
from ._internal.sglang_server import Server
from ._internal.sglang_survive import Requests

logger = logging.getLogger("coxswain.sglang")

#: The variable that switches it on: "1", or JSON of the fields of Options.
VARIABLE = "COXSWAIN_SGLANG"


@dataclasses.dataclass
class Options:
    """What COXSWAIN_SGLANG may have."""

    #: for `coxswain status --name`; None: it is made up, and logged
    name: str | None = None
    #: "fail": the loss of a scheduler ends the server. "restart": the schedulers are replaced, and
    #: the requests go on. None: "restart" where the server's configuration allows it
    on_death: str | None = None
    #: names of settings that "restart" was not tried with, and that are allowed all the same
    untried: tuple[str, ...] = ()
    #: with "restart": how often in `window` seconds, before the server ends
    incidents: int = 10
    window: float = 600.0
    #: with "restart": later schedulers are forked from processes that have imported SGLang
    fork_server: bool = True
    #: after so many seconds in a turn a rank is told to hang
    hang: float = 60.0
    #: clients get the whole cause of the server's end; False: which rank failed and how, without
    #: pids and lines of this host
    tell_clients: bool = True

    @classmethod
    def read(cls) -> Options | None:
        """Of the environment. None: it is off. Raises Invalid."""
        given = os.environ.get(VARIABLE, "").strip()
        if given in ("", "0"):
            return None
        try:
            fields = {} if given == "1" else json.loads(given)
            options = cls(**fields)
        except (ValueError, TypeError) as error:
            names = ", ".join(field.name for field in dataclasses.fields(cls))
            raise Invalid(
                f"{VARIABLE} is {given!r}; it may be 1, or JSON with {names} ({error})"
            ) from error
        if isinstance(options.untried, str):
            raise Invalid("untried is a string; it may be a list of names")
        if options.on_death not in (None, "fail", "restart"):
            raise Invalid(f"on_death is {options.on_death!r}; it may be 'fail' or 'restart'")
        return options


_servers: list[Server] = []


def register() -> None:
    """SGLang's plugin hook."""
    options = Options.read()
    if options is None:
        return
    if _rank.taken() is not None:
        names, hooks = _interface.RANK, _RANK_HOOKS
    elif multiprocessing.parent_process() is None or "sglang.srt.entrypoints.engine" in sys.modules:
        names, hooks = _interface.SERVER + _interface.RANK, _SERVER_HOOKS
    else:
        return  # the detokenizer, and others that are no concern of ours
    if said := _interface.unfit(names):
        logger.error("%s.", said)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in hooks.items():
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)


# ---- hooks of the server: (the original, its arguments) ----


def _launch(original: Any, cls: Any, *args: Any, **more: Any) -> Any:
    """Engine._launch_scheduler_processes."""
    options = Options.read()
    server_args = args[0]
    if options is None or (server_args.dp_size or 1) > 1 or (server_args.nnodes or 1) > 1:
        if options is not None and options.on_death == "restart":
            raise Unsupported("Coxswain's on_death 'restart' needs dp_size 1 and nnodes 1")
        logger.warning("Coxswain: a server with dp_size or nnodes above 1 runs without it.")
        return original(cls, *args, **more)
    server = Server(options, lambda *args, **more: original(cls, *args, **more), args, more)
    _servers.append(server)
    return server.start()


def _scheduler_died(original: Any, *args: Any) -> Any:
    """_scheduler_died_error."""
    error = original(*args)
    said = "; ".join(filter(None, (server.dead_at_start() for server in _servers)))
    return RuntimeError(f"{error} {said}") if said else error


def _wait_for_ready(original: Any, readers: Any, processes: Any) -> Any:
    """_wait_for_scheduler_ready: also of schedulers that are forked."""
    forked = filter(None, (server.forked_by(processes) for server in _servers))
    return original(readers, next(forked, processes))


def _watchdog_start(original: Any, watchdog: Any) -> Any:
    """SubprocessWatchdog.start."""
    if not any(server.watchdog_starts(watchdog) for server in _servers):
        original(watchdog)


def _watchdog_stop(original: Any, watchdog: Any) -> Any:
    """SubprocessWatchdog.stop."""
    server = getattr(watchdog, "_coxswain", None)
    if server is None:
        return original(watchdog)
    return server.watchdog_stops()


def _kill_process_tree(original: Any, parent_pid: Any, *args: Any, **more: Any) -> Any:
    """kill_process_tree: of this process, it is the end, and no death is news."""
    if parent_pid in (None, os.getpid()):
        for server in _servers:
            server.expect_end()
    return original(parent_pid, *args, **more)


def _new_manager(original: Any, manager: Any, server_args: Any, port_args: Any, *args: Any) -> Any:
    """TokenizerManager.__init__."""
    original(manager, server_args, port_args, *args)
    missing = [name for name in _interface.MANAGER if not hasattr(manager, name)]
    if missing:
        logger.error("coxswain does not fit this SGLang: no %s.", ", ".join(missing))
        return
    for server in _servers:
        if server.port_args is port_args:
            server.requests = manager._coxswain = Requests(manager, port_args, server.restarts)


def _dispatch(original: Any, manager: Any, obj: Any) -> Any:
    """TokenizerManager._dispatch_to_scheduler."""
    requests = getattr(manager, "_coxswain", None)
    if requests is None or requests.sends(obj):
        return original(manager, obj)
    return None


async def _nothing() -> None:
    return


def _async_dispatch(original: Any, manager: Any, obj: Any) -> Any:
    """TokenizerManager._async_dispatch_to_scheduler."""
    requests = getattr(manager, "_coxswain", None)
    if requests is None or requests.sends(obj):
        return original(manager, obj)
    return _nothing()


def _output(original: Any, manager: Any, output: Any) -> Any:
    """TokenizerManager._handle_batch_output."""
    requests = getattr(manager, "_coxswain", None)
    if requests is not None:
        requests.comes(output)
    return original(manager, output)


def _loads(_: Any, name: str) -> str:
    """load_snapshot.shm_path_for."""
    return os.environ.get(_rank.LOADS) or str(_(name))


_SERVER_HOOKS: dict[str, Callable[..., Any]] = {
    "entrypoints.engine.Engine._launch_scheduler_processes": _launch,
    "entrypoints.engine._scheduler_died_error": _scheduler_died,
    "entrypoints.engine._wait_for_scheduler_ready": _wait_for_ready,
    "utils.watchdog.SubprocessWatchdog.start": _watchdog_start,
    "utils.watchdog.SubprocessWatchdog.stop": _watchdog_stop,
    "utils.common.kill_process_tree": _kill_process_tree,
    "managers.tokenizer_manager.TokenizerManager.__init__": _new_manager,
    "managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler": _dispatch,
    "managers.tokenizer_manager.TokenizerManager._async_dispatch_to_scheduler": _async_dispatch,
    "managers.tokenizer_manager.TokenizerManager._handle_batch_output": _output,
    "managers.load_snapshot.shm_path_for": _loads,
}

_SCHEDULER = "managers.scheduler.Scheduler"
_RECEIVER = "managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
_SAMPLING = "sampling.sampling_batch_info.SamplingBatchInfo"
_RANK_HOOKS: dict[str, Callable[..., Any]] = {
    f"{_SCHEDULER}.run_event_loop": _rank.run_event_loop,
    f"{_SCHEDULER}.get_next_batch_to_run": _rank.get_next_batch_to_run,
    f"{_SCHEDULER}._create_generation_req": _rank.create_generation_req,
    f"{_SCHEDULER}._abort_on_queued_limit": _rank.abort_on_queued_limit,
    f"{_RECEIVER}.recv_requests": _rank.recv_requests,
    f"{_SAMPLING}.from_schedule_batch": _rank.from_schedule_batch,
    "managers.load_snapshot.shm_path_for": _loads,
}
