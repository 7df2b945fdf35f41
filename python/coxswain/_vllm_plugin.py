"""vLLM's plugin hook: `--distributed-executor-backend coxswain.vllm.Executor` with pipeline stages.

vLLM asks the backend whether it supports stages before it has resolved the backend's name, and a
name has no such attribute. vLLM calls the entry point vllm.general_plugins in every process.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_NAME = "coxswain.vllm.Executor"


def register() -> None:
    """Has the arguments of an engine name the class itself. Idempotent."""
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
