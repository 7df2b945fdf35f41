"""Drives the worker processes ("ranks") of an inference engine, from either side.

A coordinator starts N ranks, sends each request to all of them through shared memory, and gathers
their replies::

    with coxswain.Group(["python3", "worker.py"], ranks=4) as group:
        replies = group.call(b"...", timeout=5.0)

A rank serves::

    coxswain.serve(lambda data: bytes(data).upper())

The death of a rank is RankDied with rank, pid and signal, a hang is TimedOut and says what each
rank does, and an exception in a rank is RankError with its traceback.
"""

import sys as _sys

if not getattr(_sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "coxswain does not support free-threaded CPython yet: its locks rely on the GIL. "
        "Use the ordinary build of Python, or PYTHON_GIL=1."
    )

# pylint: disable=wrong-import-position
from ._batch import Batch
from ._errors import (
    Aborted,
    Busy,
    Closed,
    Corrupt,
    Deadlock,
    Denied,
    Diverged,
    Empty,
    Error,
    ExecFailed,
    Full,
    Invalid,
    Late,
    LateRank,
    NoSpace,
    NotFound,
    PeerDead,
    RankDied,
    RankError,
    Stale,
    StateError,
    Taken,
    TimedOut,
    TooLarge,
    Unsupported,
    VersionMismatch,
)
from ._group import Cluster, Future, Group
from ._handles import Exporter, Handle, Import, Importer
from ._kv import KvBlocks, KvLayout, KvPool, KvTransfer, KvView
from ._memory import Block, Message, Pool, PoolStats, Publisher, Queue, QueueSet, Subscriber
from ._ranks import RankGroup
from ._status import ChannelStatus, GroupStatus, RankChannelStatus, RankStatus
from ._worker import (
    InitRequest,
    InitResult,
    LinkRequest,
    LinkState,
    LoraRequest,
    Pull,
    PullRequest,
    PullResult,
    RemoteGroup,
    Request,
    Worker,
    rank,
    rank_count,
    serve,
)

from ._errors import lib as _lib, text_of as _text_of

__version__: str = _text_of(_lib.cox_version())

__all__ = [
    "Aborted",
    "Batch",
    "Block",
    "Busy",
    "ChannelStatus",
    "Closed",
    "Cluster",
    "Corrupt",
    "Deadlock",
    "Denied",
    "Diverged",
    "Empty",
    "Error",
    "ExecFailed",
    "Exporter",
    "Full",
    "Future",
    "Group",
    "GroupStatus",
    "Handle",
    "Import",
    "Importer",
    "InitRequest",
    "InitResult",
    "Invalid",
    "KvBlocks",
    "KvLayout",
    "KvPool",
    "KvTransfer",
    "KvView",
    "Late",
    "LateRank",
    "LinkRequest",
    "LinkState",
    "LoraRequest",
    "Message",
    "NoSpace",
    "NotFound",
    "PeerDead",
    "Pool",
    "PoolStats",
    "Publisher",
    "Pull",
    "PullRequest",
    "PullResult",
    "Queue",
    "QueueSet",
    "RankChannelStatus",
    "RankDied",
    "RankError",
    "RankGroup",
    "RankStatus",
    "RemoteGroup",
    "Request",
    "Stale",
    "StateError",
    "Subscriber",
    "Taken",
    "TimedOut",
    "TooLarge",
    "Unsupported",
    "VersionMismatch",
    "Worker",
    "rank",
    "rank_count",
    "serve",
]
