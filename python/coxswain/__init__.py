"""Drives the worker processes ("ranks") of an inference engine, from either side.

A coordinator starts N ranks, sends each request to all of them through shared memory, and gathers
their replies; a rank serves them::

    def work():
        coxswain.serve(lambda data: bytes(data).upper())

    if __name__ == "__main__":
        with coxswain.Group(work, ranks=4) as group:
            print(group.call(b"hello", timeout=5.0))

What to read first:

Group       the ranks of a program or a function; `with` starts and stops them
  call      sends a request and returns the replies; submit and `await` do not wait
  status    how every rank is; restart replaces one
serve       the loop of a rank: a function of each request's bytes, which returns the reply's
Worker      the same with more: inits, steps of inference, orders of the coordinator
RankDied    the death of a rank, with rank, pid and signal. TimedOut: a hang, and what each rank
            does. RankError: an exception in a rank, with its traceback. All are coxswain.Error.
RankGroup   barriers and gathers among the ranks; Pool, Queue and Handle: memory without copies
WeightStore weights that outlive the process that loaded them

Everything public is in `coxswain` itself, `coxswain.vllm` (vLLM's executor) and `coxswain.torch_*`
(a worker that computes with PyTorch). Names with a leading underscore are private.
"""

import sys as _sys

if not getattr(_sys, "_is_gil_enabled", lambda: True)():
    raise ImportError(
        "coxswain does not support free-threaded CPython yet: its locks rely on the GIL. "
        "Use the ordinary build of Python, or PYTHON_GIL=1."
    )

__distribution__ = "coxswain-executor"  # by which _internal/foreign.py knows this file

# ruff: noqa: E402
# pylint: disable=wrong-import-position
from ._internal.batch import Batch
from ._internal.errors import (
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
from ._internal.group import Cluster, Future, Group
from ._internal.handles import Exporter, Handle, Import, Importer
from ._internal.kv import KvBlocks, KvLayout, KvPool, KvTransfer, KvView
from ._internal.memory import (
    Block,
    Message,
    Pool,
    PoolStats,
    Publisher,
    Queue,
    QueueSet,
    Subscriber,
)
from ._internal.ranks import RankGroup
from ._internal.status import (
    ChannelStatus,
    GroupStatus,
    RankChannelStatus,
    RankStacks,
    RankStatus,
    Stacks,
)
from ._internal.weights import Weights, WeightStore
from ._internal.worker import (
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

from ._internal.errors import lib as _lib, text_of as _text_of

__version__: str = _text_of(_lib.cox_version())
del _lib, _text_of

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
    "RankStacks",
    "RankStatus",
    "RemoteGroup",
    "Request",
    "Stacks",
    "Stale",
    "StateError",
    "Subscriber",
    "Taken",
    "TimedOut",
    "TooLarge",
    "Unsupported",
    "VersionMismatch",
    "WeightStore",
    "Weights",
    "Worker",
    "rank",
    "rank_count",
    "serve",
]

# Errors and help() name what is public by where it is imported from.
for _value in [value for name, value in vars().copy().items() if name in __all__]:
    _value.__module__ = __name__
del _value
