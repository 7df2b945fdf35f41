"""What `Group.status()` returns: the fields of `coxswain status --json`, by the same names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import _native
from .arguments import NEVER
from .errors import check, new_error, text_of

ffi, lib = _native.ffi, _native.lib

LIVENESS = ("alive", "dead", "left", "absent")
STATES = ("idle", "taken", "running", "replying")
CHANNELS = ("execute", "shared_sync_link", "transfer", "recover_command")


@dataclass(frozen=True)
class RankChannelStatus:
    """What a rank reports of itself on one channel."""

    #: "idle", "taken", "running", "replying"; None: a rank that reports nothing
    state: str | None
    #: of the request that the state is about
    sequence: int
    #: seconds in this state; None: unknown
    age_s: float | None


@dataclass(frozen=True)
class RankStatus:
    """One rank."""

    rank: int
    #: the process that was started
    pid: int
    #: the process that serves: another one behind a wrapper
    serving_pid: int
    incarnation: int
    #: "alive", "dead", "left", "absent"
    liveness: str
    #: by a signal or a debugger
    stopped: bool
    #: why it may not answer now: it has not taken a request that others have, or is frozen; None:
    #: nothing is known
    trouble: str | None
    #: how it ended; None: it lives
    death: str | None
    #: the signal that killed it; 0: none; None: it lives
    signal: int | None
    #: None: it lives, was killed, or the status is unknown
    exit_status: int | None
    #: of its output, newest last: of a dead rank, or of its previous process
    last_lines: str | None
    channels: dict[str, RankChannelStatus]
    deaths: int
    restarts: int
    #: its last failure
    last_error: str | None
    last_error_age_s: float | None
    #: processor time in seconds
    cpu_s: float | None


@dataclass(frozen=True)
class ChannelStatus:
    """One channel of the group."""

    name: str
    published: int
    ended: int
    in_flight: int
    late_ranks: list[int]
    submitted: int
    completed: int
    failed: int
    timeouts: int
    divergences: int
    late_replies: int
    rewakes: int
    wakeups: int
    spins: int
    request_bytes: int
    reply_bytes: int


@dataclass(frozen=True)
class GroupStatus:
    """A group, as its coordinator knows it: no rank takes part in answering."""

    name: str
    attach: str
    rank_count: int
    depth: int
    #: another number in each group that is started
    incarnation: int
    uptime_s: float
    engine_state: str
    stopping: bool
    legacy: bool
    #: of the coordinator
    pid: int
    #: `Group.note`
    note: str | None
    ranks: list[RankStatus]
    channels: list[ChannelStatus]
    deaths: int
    restarts: int
    #: processor time of the coordinator in seconds
    cpu_s: float | None
    #: how long waiters spin, at most, in seconds
    spin_s: float


@dataclass(frozen=True)
class RankStacks:
    """Where one rank is."""

    rank: int
    #: of the process that was read
    pid: int
    #: seconds that it has been at its request; None: it is at none, or that is unknown
    age_s: float | None
    #: one line, without folders: where the thread that serves requests is, and its state
    summary: str
    #: all threads with their states and frames, and what could not be had, with the reason
    text: str


@dataclass(frozen=True)
class Stacks:
    """Where the ranks of a group are, as `coxswain stacks` prints it."""

    #: one sentence about all of them; those that are alone at their place come first
    text: str
    ranks: list[RankStacks]


def _seconds(nanoseconds: int) -> float | None:
    return nanoseconds / 1e9 if nanoseconds else None


def _rank(rank: int, status: Any) -> RankStatus:
    dead = status.liveness == lib.COX_LIVENESS_DEAD
    last_error = text_of(status.last_error)
    channels = {}
    for name, channel in zip(CHANNELS, status.channels, strict=True):
        state = STATES[channel.state] if channel.state < len(STATES) else "unknown"
        channels[name] = RankChannelStatus(
            state if channel.known else None, channel.sequence, _seconds(channel.age_ns)
        )
    return RankStatus(
        rank=rank,
        pid=status.pid,
        serving_pid=status.serving_pid,
        incarnation=status.incarnation,
        liveness=LIVENESS[status.liveness],
        stopped=status.stopped,
        trouble=text_of(status.trouble) or None,
        death=text_of(status.death) or None,
        signal=status.signal if dead else None,
        exit_status=status.exit_status if dead and status.exit_status >= 0 else None,
        last_lines=text_of(status.last_lines) or None,
        channels=channels,
        deaths=status.deaths,
        restarts=status.restarts,
        last_error=last_error or None,
        last_error_age_s=status.last_error_age_ns / 1e9 if last_error else None,
        cpu_s=_seconds(status.cpu_ns),
    )


def _channel(name: str, id_: int, status: Any, rank_count: int) -> ChannelStatus:
    channel = status.channels[id_]
    stats = channel.stats
    late = [r for r in range(rank_count) if channel.late.words[r // 64] >> (r % 64) & 1]
    return ChannelStatus(
        name=name,
        published=channel.published,
        ended=channel.ended,
        in_flight=channel.in_flight,
        late_ranks=late,
        submitted=stats.submitted,
        completed=stats.completed,
        failed=stats.failed,
        timeouts=stats.timeouts,
        divergences=stats.divergences,
        late_replies=stats.late_replies,
        rewakes=stats.rewakes,
        wakeups=stats.wakeups,
        spins=stats.spins,
        request_bytes=stats.request_bytes,
        reply_bytes=stats.reply_bytes,
    )


def of_group(executor: Any) -> Any:
    """The group's own part: struct cox_executor_status."""
    status = ffi.new("struct cox_executor_status *")
    lib.cox_executor_read_status(executor, status, ffi.NULL)
    return status


def read(executor: Any, rank_count: int, pid: int, note: str = "") -> GroupStatus:
    """Reads the status of an executor, which the caller keeps alive."""
    status = ffi.new("struct cox_executor_status *")
    ranks = ffi.new("struct cox_rank_status[]", rank_count)
    lib.cox_executor_read_status(executor, status, ranks)
    return GroupStatus(
        name=text_of(status.name),
        attach=text_of(status.attach),
        rank_count=rank_count,
        depth=status.depth,
        incarnation=status.incarnation,
        uptime_s=status.uptime_ns / 1e9,
        engine_state=text_of(status.engine_state),
        stopping=status.stopping,
        legacy=status.legacy,
        pid=pid,
        note=note or None,
        ranks=[_rank(rank, ranks[rank]) for rank in range(rank_count)],
        channels=[_channel(name, i, status, rank_count) for i, name in enumerate(CHANNELS)],
        deaths=status.deaths,
        restarts=status.restarts,
        cpu_s=_seconds(status.cpu_ns),
        spin_s=status.spin_ns / 1e9,
    )


def read_stacks(executor: Any, ranks: Sequence[int] | None) -> Stacks:
    """Reads the stacks of an executor, which the caller keeps alive."""
    asked = ffi.NULL
    if ranks is not None:
        asked = ffi.new("struct cox_rank_set *")
        for rank in ranks:
            asked.words[rank // 64] |= 1 << (rank % 64)
    read_ = ffi.new("struct cox_stacks **")
    check(lib.cox_executor_stacks(executor, asked, NEVER, read_), new_error())
    try:
        stacks = read_[0]
        return Stacks(
            text=text_of(stacks.paragraph),
            ranks=[
                RankStacks(
                    rank=one.rank,
                    pid=one.pid,
                    age_s=_seconds(one.age_ns),
                    summary=text_of(one.summary),
                    text=text_of(one.text),
                )
                for one in stacks.ranks[0 : stacks.count]
            ],
        )
    finally:
        lib.cox_stacks_free(read_[0])
