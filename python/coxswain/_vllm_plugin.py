"""vLLM's plugin hook, the entry point vllm.general_plugins, which vLLM calls in every process.

Pipeline stages: vLLM asks the backend whether it supports them before it has resolved the name
`coxswain.vllm.Executor`, and a name has no such attribute.

Errors of clients: the engine's process tells the API server that it is dead, and not why. The
executor leaves the cause in a file of the first process that has the plugin, without a name, and
the error that the API server makes of it has the cause.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

_NAME = "coxswain.vllm.Executor"
# The path of that file; in the environment, for the processes that this one starts.
_CAUSE = "COXSWAIN_VLLM_CAUSE"


def register() -> None:
    """Idempotent."""
    _resolve_name()
    _explain_death()


def write_cause(text: str) -> None:
    """Leaves why the engine ends."""
    with contextlib.suppress(KeyError, OSError), open(os.environ[_CAUSE], "w") as file:
        file.write(text)


def _explain_death() -> None:
    """Has EngineDeadError end with the cause that the executor has left."""
    from . import _vllm_interface as interface

    error_type = interface.optional("EngineDeadError")
    construct = getattr(error_type, "__init__", None)
    if construct is None or hasattr(construct, "__wrapped__"):
        return
    if _CAUSE not in os.environ:
        os.environ[_CAUSE] = f"/proc/{os.getpid()}/fd/{os.memfd_create('coxswain_vllm_cause')}"

    @functools.wraps(construct)
    def explained(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        with contextlib.suppress(OSError), open(os.environ[_CAUSE], errors="replace") as file:
            if cause := file.read():
                self.args = (f"{self.args[0]} The cause: {cause}", *self.args[1:])

    error_type.__init__ = explained


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
            from .vllm import Executor

            self.distributed_executor_backend = Executor
        return check(self, *args, **kwargs)

    arguments._check_feature_supported = resolved
