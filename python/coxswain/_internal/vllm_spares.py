"""Ranks that have loaded the model and stand by for the next incident of coxswain.vllm.Executor.

    none --fill--> starting --ready--> waiting --take--> none
     ^                |                   |
     +---- fails -----+------- dies ------+

A thread starts them while the engine computes; there is one set at a time. After FAILURES in a row
no others are started until an incident. They die with the engine.
"""

from __future__ import annotations

import threading
from typing import Any
from collections.abc import Callable

from vllm.logger import init_logger

from .errors import Closed

logger = init_logger("vllm.coxswain")

KINDS = ("none", "hot")
FAILURES = 3


class Spares:
    """The set that stands by. Any thread."""

    def __init__(self, kind: str, make: Callable[[], Any], changed: Callable[[], object]) -> None:
        """make() -> Ranks, whose prepare() makes them ready. changed(): after a change of state."""
        self._kind, self._make, self._changed = kind, make, changed
        # Protects what follows, and tells its changes.
        self._lock = threading.Condition()
        self._ranks: Any = None
        #: they wait for an incident
        self.ready = False
        # in a row
        self._failures = 0
        # a thread is in take: if it gets none, it starts others itself
        self._taking = False
        self._ended = False
        self._thread: threading.Thread | None = None

    def __str__(self) -> str:
        if self._kind == "none":
            return "none"
        state = "none" if self._failures < FAILURES else "given up"
        if self._ranks:
            state = "waiting" if self.ready else "starting"
        return f"{self._kind}, {state}"

    def fill(self) -> None:
        """Begins to start a set, unless there is one."""
        with self._lock:
            full = self._ranks or self._failures >= FAILURES or self._taking
            if self._kind == "none" or full or self._ended:
                return
            self._ranks = self._make()
            self._run(self._prepare, self._ranks)
        self._changed()

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        self._thread = threading.Thread(
            target=function, args=args, name="coxswain-spare", daemon=True
        )
        self._thread.start()

    def _prepare(self, ranks: Any) -> None:
        try:
            ranks.prepare()
            with self._lock:
                # Of a death from now on `died` is told; of one before nobody was.
                if set(ranks.liveness()) != {"alive"}:
                    raise Closed("a rank has died")
                self.ready = True
                self._lock.notify_all()
        except Exception as error:  # pylint: disable=broad-exception-caught
            self._failed(ranks, str(error))
            return
        logger.info("Spare ranks wait: %s.", self)
        self._changed()

    def _failed(self, ranks: Any, cause: str) -> None:
        ranks.stop(kill=True)
        with self._lock:
            if self._ended:
                return
            self._ranks, self.ready = None, False
            self._failures += 1
            again = "" if self._failures < FAILURES else "; no others are started until an incident"
            text = "Spare ranks failed (%d in a row%s): %s"
            logger.error(text, self._failures, again, cause.split("\n")[0])
            self._lock.notify_all()
        self._changed()
        self.fill()

    def died(self, ranks: Any, cause: str) -> None:
        """A rank has died; `ranks` may be none of these. Does not block."""
        with self._lock:
            if self._ranks is ranks and self.ready:  # else the thread that waits for it sees it
                self.ready = False
                self._run(self._failed, ranks, cause)

    def take(self) -> Any:
        """The set, which becomes the caller's; waits for one that is being started. None: there is
        none."""
        with self._lock:
            self._taking = True
            while self._ranks and not self.ready and not self._ended:
                self._lock.wait()
            self._taking = False
            ranks = self._ranks if self.ready and not self._ended else None
            if ranks:
                self._ranks, self.ready = None, False
            self._failures = 0
            return ranks

    def stop(self) -> None:
        """Ends them. Idempotent."""
        with self._lock:
            self._ended = True
            ranks, thread = self._ranks, self._thread
            self._lock.notify_all()
        if ranks:
            ranks.stop(kill=True)
        if thread and thread is not threading.current_thread():
            thread.join()
