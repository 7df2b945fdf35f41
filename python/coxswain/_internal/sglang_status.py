"""A group without requests, by which `coxswain status`, `stacks`, ... find an SGLang server.

Its ranks are the schedulers: each attaches, and says nothing more. A group is of one set of
schedulers; the next set has another one of the same name.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import Any
from collections.abc import Callable

from .errors import Error
from .group import Group
from .status import Stacks
from .worker import Worker

logger = logging.getLogger("coxswain.sglang")

# For the control socket of a new group to be there, in seconds.
_SOCKET_SECONDS = 5.0
_NAMES = ("COXSWAIN_SOCKET", "RANK", "WORLD_SIZE")


class Status:
    """The server's side. Threads: that which starts schedulers, but for `set` and
    `stacks`."""

    def __init__(self, name: str, rank_count: int, on_stop: Callable[[str], object]) -> None:
        """on_stop: `coxswain stop` has come."""
        self.name = name
        self._rank_count, self._on_stop = rank_count, on_stop
        self._group: Group | None = None
        self._note: dict[str, Any] = {"incidents": 0}

    def start(self) -> None:
        """Before schedulers start. Ends the group of the ones before."""
        self.stop()
        self._group = group = Group(
            ranks=self._rank_count,
            external=True,
            attach="sealed",
            name=self.name,
            timeout=None,
            on_line=None,
            on_rank_death=lambda *_: None,
            on_stop=self._on_stop,
        )

        def run() -> None:
            try:
                group.start()
                self._tell()
            except Error as error:
                if self._group is group:
                    logger.warning("Coxswain: `coxswain status` has no group: %s", error)

        threading.Thread(target=run, name="coxswain-sglang-status", daemon=True).start()
        group._waiting.wait(_SOCKET_SECONDS)

    def stop(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.stop()

    def stacks(self) -> Stacks | None:
        """Any thread: where the schedulers are. None: it cannot be had, which is logged."""
        group = self._group
        try:
            return group.stacks() if group is not None else None
        except Error as error:
            logger.warning("Coxswain: there are no stacks: %s", error)
            return None

    def set(self, **note: Any) -> None:
        """Any thread: what status shows beside the ranks."""
        self._note.update(note)
        self._tell()

    def _tell(self) -> None:
        try:
            if self._group is not None:
                self._group.note = json.dumps(self._note)[:4000]
        except Error:
            pass  # it has not started, or has ended


def attach(name: str, rank: int, rank_count: int) -> Worker | None:
    """The scheduler's side. The result is kept as long as the process."""
    before = {key: os.environ.get(key) for key in _NAMES}
    os.environ.update(zip(_NAMES, (name, str(rank), str(rank_count)), strict=True))
    try:
        return Worker().attach()
    except Error as error:
        logger.warning("Coxswain: `coxswain status` does not have rank %d: %s", rank, error)
        return None
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
