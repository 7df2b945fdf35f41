"""Ranks that stand by for the next incident of coxswain.vllm.Executor.

    none --fill--> starting --ready--> waiting --take--> none
                    |    ^                |
                    |    +----- dies -----+
                    +--fails FAILURES times in a row--> given up

A thread starts them, at low priority, while the engine computes; there is one set at a time. It
dies with the engine like any other rank.
"""

from __future__ import annotations

import threading
from typing import Any
from collections.abc import Callable

from vllm.logger import init_logger

logger = init_logger("vllm.coxswain")

#: "warm": they have imported vLLM. "hot": they have loaded the model, too
KINDS = ("none", "warm", "hot")
#: in a row
FAILURES = 3


class Spares:
    """The set that stands by. Any thread."""

    def __init__(
        self, kind: str, make: Callable[[], Any], changed: Callable[[], object] = lambda: None
    ) -> None:
        """make() -> Ranks, whose prepare() makes them ready. changed(): after a change of state."""
        self.kind = kind
        self._make, self._changed = make, changed
        # Protects what follows, and tells its changes.
        self._lock = threading.Condition()
        self._state = "none"
        self._failures = 0
        self._ranks: Any = None
        self._thread: threading.Thread | None = None
        #: a thread waits in take
        self._wanted = False
        self._ended = False

    def __str__(self) -> str:
        return self.kind if self.kind == "none" else f"{self.kind}, {self._state}"

    @property
    def ready(self) -> bool:
        """A set waits for an incident."""
        return self._state == "waiting"

    def fill(self) -> None:
        """Begins to start a set, unless there is one."""
        with self._lock:
            if self.kind == "none" or self._ended or self._state != "none":
                return
            self._begin()
        self._changed()

    def _begin(self, failed: tuple[Any, str] | None = None) -> None:
        """With the lock. failed: ranks that have waited until now, and why."""
        self._state = "starting"
        self._thread = threading.Thread(
            target=self._prepare, args=(failed,), name="coxswain-spare", daemon=True
        )
        self._thread.start()

    def _prepare(self, failed: tuple[Any, str] | None) -> None:
        if failed and not self._goes_on(*failed):
            return
        while True:
            with self._lock:
                if self._ended:
                    return
                ranks = self._ranks = self._make()
            try:
                ranks.prepare(self.kind)
                with self._lock:
                    # A death is told to `died` from now on, and nobody was told of one before.
                    whole = set(ranks.liveness()) == {"alive"}
                    if whole:
                        self._state = "waiting"
                        self._lock.notify_all()
                if whole:
                    logger.info("Spare ranks wait: %s.", self)
                    self._changed()
                    return
                cause = "a rank has died"
            except Exception as error:  # pylint: disable=broad-exception-caught
                cause = str(error)
            if not self._goes_on(ranks, cause):
                return

    def _goes_on(self, ranks: Any, cause: str) -> bool:
        """Spare ranks have failed. True: others are to be started."""
        ranks.stop(kill=True)
        with self._lock:
            if self._ended:
                return False
            self._ranks = None
            self._failures += 1
            again = self._failures < FAILURES
            logger.error(
                "Spare ranks failed (%d in a row%s): %s",
                self._failures,
                "" if again else "; no others are started until an incident",
                cause.split("\n")[0],
            )
            if self._wanted or not again:
                self._state = "none" if again else "given up"
                again = False
                self._lock.notify_all()
        self._changed()
        return again

    def died(self, ranks: Any, cause: str) -> None:
        """A rank has died; `ranks` may be none of these. Does not block."""
        with self._lock:
            if self._ranks is not ranks or self._state != "waiting":
                return  # else the thread that waits for it sees it
            self._state = "starting"
            self._begin((ranks, cause))

    def take(self) -> Any:
        """The set, which becomes the caller's; waits for one that is being started. None: there is
        none."""
        with self._lock:
            if self._ranks:
                self._ranks.hurry()
            self._wanted = True
            while self._state == "starting" and not self._ended:
                self._lock.wait()
            self._wanted = False
            if self._ended:
                return None
            if self._state == "given up":
                self._state = "none"
            self._failures = 0
            ranks, self._ranks = self._ranks, None
            if ranks:
                self._state = "none"
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
