"""The fork servers of coxswain.vllm.Executor: ranks of processes that have imported vLLM.

The engine's own process has imported most of it, so a server is forked from there, where that is
safe, and imports the rest: one for all ranks. OpenMP has read its variables in the engine by then.
Where they differ from rank to rank, a rank of one processor is bound after the fork, which is the
same; ranks of several have servers that are new interpreters, one for each environment.
"""

from __future__ import annotations

import json
import multiprocessing
import re
from typing import Any

from vllm.logger import init_logger

from .. import vllm_worker
from .fork_server import ForkServer, calm, obstacle

logger = init_logger("vllm.coxswain")

# Threads of the engine that a rank has nothing to do with: they wait in epoll_wait, and take locks
# of ZeroMQ's contexts, which pyzmq leaves alone in another process.
_IDLE = ("ZMQbg/",)
_FUNCTION = f"{vllm_worker.__name__}:{vllm_worker.forked.__name__}"


def processor(environment: dict[str, str]) -> int | None:
    """The one to which OpenMP binds a rank; None: there are several, or it is not bound."""
    for name in ("GOMP_CPU_AFFINITY", "OMP_PLACES", "KMP_AFFINITY"):
        found = re.findall(r"\d+(?:-\d+)?", environment.get(name, ""))
        if len(found) == 1 and found[0].isdigit():
            return int(found[0])
    return None


class ForkServers:
    """Those of an engine. They end with it."""

    def __init__(self, config: Any, environments: list[dict[str, str]]) -> None:
        """environments: what each rank's has beside this process's."""
        modules = ["vllm.v1.worker.worker_base", "vllm.model_executor.model_loader"]
        worker_type = config.parallel_config.worker_cls
        if isinstance(worker_type, str):
            modules.insert(0, worker_type.rpartition(".")[0])
        self._servers: dict[str, ForkServer] = {}
        self._keys = [""] * len(environments)
        if self._may_fork_here(environments):
            processors = [processor(one) for one in environments]
            self._servers[""] = ForkServer(
                modules, _FUNCTION, [environments, processors], fork=True
            )
            return
        self._keys = [json.dumps(one, sort_keys=True) for one in environments]
        for key in self._keys:
            if key not in self._servers:
                self._servers[key] = ForkServer(modules, _FUNCTION, environment=json.loads(key))

    @staticmethod
    def _may_fork_here(environments: list[dict[str, str]]) -> bool:
        if multiprocessing.parent_process() is None:
            return False  # the process of vLLM's user, which may have anything in it
        if any(one and processor(one) is None for one in environments):
            return False
        calm()
        reason = obstacle(_IDLE)
        if reason:
            logger.info("The fork server of the ranks is a new interpreter, since %s.", reason)
        return not reason

    def fds(self) -> list[int]:
        """The socket of each rank's, -1: it has none. Waits until they have imported vLLM."""
        for key, server in list(self._servers.items()):
            if reason := server.wait():
                logger.warning("Ranks import vLLM again, since a fork server failed: %s", reason)
                self._servers.pop(key).stop()
        servers = [self._servers.get(key) for key in self._keys]
        return [server.fileno() if server else -1 for server in servers]

    def stop(self) -> None:
        """Ends them. Idempotent."""
        for server in self._servers.values():
            server.stop()
