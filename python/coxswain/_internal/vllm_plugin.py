"""What Coxswain changes in vLLM's processes.

`register` is vLLM's plugin hook, the entry point vllm.general_plugins, which vLLM calls in every
process. Pipeline stages: vLLM asks the backend whether it supports them before it has resolved the
name `coxswain.vllm.Executor`, and a name has no such attribute.

`explain` is for the processes that import coxswain.vllm: the engine's, those that wait for its
start, and those that ask it. The engine tells them that it is dead, and not why. It leaves the
cause in a file of the first of these processes, without a name, and the errors that they raise end
with it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import traceback
from typing import Any
from collections.abc import Callable

from . import vllm_interface as interface
from .errors import Error

_NAME = "coxswain.vllm.Executor"
# The path of that file; in the environment, for the processes that this one starts.
_CAUSE = "COXSWAIN_VLLM_CAUSE"


def register() -> None:
    """Idempotent."""
    _resolve_name()


def text_of(error: BaseException) -> str:
    """An exception as a cause: one that is not of this package begins with its type."""
    if isinstance(error, Error):
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "".join(traceback.format_exception_only(error)).strip()


def write_cause(text: str, for_clients: str | None = None) -> None:
    """Leaves why the engine ends. for_clients: what those of the API server get; None: the same."""
    with contextlib.suppress(KeyError, OSError), open(os.environ[_CAUSE], "w") as file:
        json.dump([text, text if for_clients is None else for_clients], file)


def _read_cause() -> tuple[str, str]:
    """What write_cause was given; "": nothing."""
    with contextlib.suppress(KeyError, OSError, ValueError), open(os.environ[_CAUSE]) as file:
        text, for_clients = json.load(file)
        return text, for_clients
    return "", ""


def explain() -> None:
    """Has the errors of an engine that has failed, or does not start, end with the cause."""
    if _CAUSE not in os.environ:
        os.environ[_CAUSE] = f"/proc/{os.getpid()}/fd/{os.memfd_create('coxswain_vllm_cause')}"
    _wrap("engine", _leaving_cause)
    _wrap("wait_for_start", _explaining_start)
    _wrap("engine_dead", _explaining_death)


def _wrap(name: str, decorator: Callable[[Any], Any]) -> None:
    """Decorates a function of vLLM's, if this version has it."""
    function = interface.optional(name)
    if function is not None:
        interface.replace(name, decorator(function))


def _leaving_cause(construct: Any) -> Any:
    """For the constructor of the engine."""

    @functools.wraps(construct)
    def leaving(*args: Any, **kwargs: Any) -> None:
        try:
            construct(*args, **kwargs)
        except Exception as error:  # pylint: disable=broad-exception-caught
            write_cause(text_of(error))
            raise

    return leaving


def _explaining_start(wait: Any) -> Any:
    """For the function that waits for the engine's start."""

    @functools.wraps(wait)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return wait(*args, **kwargs)
        except RuntimeError as error:
            cause, _ = _read_cause()
            if cause and interface.START_FAILED in str(error):
                error.args = (f"{error}. The cause: {_in_a_line(cause)}",)
            raise

    return explained


def _in_a_line(text: str) -> str:
    """Without the last lines of a rank's output, and those of its traceback, which are indented:
    they stand above this one."""
    text = re.sub(r"; its last lines:.*?(?=; rank \d+ |\nIt was in |\Z)", "", text, flags=re.S)
    return ". ".join(line.rstrip(".") for line in text.splitlines() if not line.startswith(" "))


def _explaining_death(construct: Any) -> Any:
    """For the constructor of EngineDeadError."""

    @functools.wraps(construct)
    def explained(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        cause, for_clients = _read_cause()
        if not cause:
            return
        constant = getattr(self, "CLIENT_MESSAGE", None)
        if constant is None:
            cause = for_clients  # before 0.33 clients get the text of the exception
        else:
            self.CLIENT_MESSAGE = f"{constant} The cause: {for_clients}"
        self.args = (f"{self.args[0]} The cause: {cause}", *self.args[1:])

    return explained


def _resolve_name() -> None:
    """Has the arguments of an engine name the class itself."""
    module = sys.modules.get("vllm.engine.arg_utils")
    arguments = getattr(module, "EngineArgs", None)
    check = getattr(arguments, "_check_feature_supported", None)
    if arguments is None or check is None or hasattr(check, "__wrapped__"):
        return

    @functools.wraps(check)
    def resolved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.distributed_executor_backend == _NAME:
            from ..vllm import Executor

            self.distributed_executor_backend = Executor
        return check(self, *args, **kwargs)

    arguments._check_feature_supported = resolved
