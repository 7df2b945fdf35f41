"""What the schedulers of an SGLang decided in each turn of their loops, in memory that they share.

Every rank plans for itself, and SGLang compares nothing. So each rank writes a record of its turn
before it computes: the forward mode, the requests, how many tokens, what was sampled last. All
ranks turn together, since each turn has a broadcast: records of the same number are compared by
every rank as soon as it has written its own. The last one to write finds all others.

Memory: a nameless file, which the server makes and each rank maps. A rank writes its own region
alone. A reader takes a record only if its checksum is right, so no order of stores matters.
"""

from __future__ import annotations

import array
import mmap
import os
import struct
import time
import zlib
from typing import Any
from collections.abc import Iterator, Sequence

# state: what the rank does; turn; since: monotonic nanoseconds
_STATE = struct.Struct("<QQQ")
_TEXT_SIZE = 4096
_HEADER_SIZE = 2 * _TEXT_SIZE + 128
_FAILURE, _DIVERGENCE = 128, 128 + _TEXT_SIZE
# turn, checksum; mode, requests, tokens of an extend, waiting, ending, ids listed; digests of all
# ids and of the tokens sampled last. The checksum is of all that follows it.
_RECORD = struct.Struct("<QIiIIIIIII")
_CHECKED = 12
#: ids in a record, for texts; the digest has all
IDS = 48
_RECORD_SIZE = _RECORD.size + 4 * IDS
#: records of a rank that are kept
RECORDS = 64
_REGION_SIZE = _HEADER_SIZE + RECORDS * _RECORD_SIZE + 4096 & -4096

STARTING, IDLE, COMPUTING = range(3)
STATES = ("starting", "waits for requests", "computes")
_MODES = {-1: "nothing", 1: "extend", 2: "decode", 3: "mixed", 4: "idle"}


def id_of(rid: str) -> int:
    """A request's number in a record."""
    return zlib.crc32(rid.encode("utf-8", "surrogatepass"))


class Record:
    """A turn of a rank."""

    def __init__(self, data: bytes) -> None:
        self.turn, self.digest, self.mode, self.requests, self.extend, self.waiting, self.ending = (
            _RECORD.unpack_from(data)[:7]
        )
        listed, self.all_ids, self.tokens = _RECORD.unpack_from(data)[7:]
        self.ids = array.array("I", data[_RECORD.size : _RECORD.size + 4 * min(listed, IDS)])

    def mode_name(self) -> str:
        return _MODES.get(self.mode, f"forward mode {self.mode}")


class Turns:
    """The memory of all ranks of a server, mapped."""

    def __init__(self, rank_count: int, fd: int | None = None) -> None:
        """fd: of the server's, which is now this object's; None: this is the server."""
        self.rank_count = rank_count
        self.fd = os.memfd_create("coxswain_sglang_turns") if fd is None else fd
        size = rank_count * _REGION_SIZE
        if fd is None:
            os.ftruncate(self.fd, size)
        self._memory = mmap.mmap(self.fd, size)

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)

    def clear(self) -> None:
        """Before other ranks start: those of the previous ones have ended."""
        self._memory[:] = bytes(len(self._memory))

    def state(self, rank: int) -> tuple[int, int, float]:
        """What a rank does, its turn, and for how many seconds."""
        state, turn, since = _STATE.unpack_from(self._memory, rank * _REGION_SIZE)
        return state, turn, (time.monotonic_ns() - since) / 1e9 if since else 0.0

    def set_state(self, rank: int, state: int, turn: int) -> None:
        _STATE.pack_into(self._memory, rank * _REGION_SIZE, state, turn, time.monotonic_ns())

    def _set_text(self, rank: int, offset: int, text: str) -> None:
        data = text.encode("utf-8", "replace")[: _TEXT_SIZE - 4]
        begin = rank * _REGION_SIZE + offset
        self._memory[begin + 4 : begin + 4 + len(data)] = data
        struct.pack_into("<I", self._memory, begin, len(data))

    def _text(self, rank: int, offset: int) -> str:
        begin = rank * _REGION_SIZE + offset
        (size,) = struct.unpack_from("<I", self._memory, begin)
        data = self._memory[begin + 4 : begin + 4 + min(size, _TEXT_SIZE - 4)]
        return data.decode("utf-8", "replace")

    def failure(self, rank: int) -> str:
        """The exception of a rank; "": none."""
        return self._text(rank, _FAILURE)

    def set_failure(self, rank: int, text: str) -> None:
        self._set_text(rank, _FAILURE, text)

    def divergence(self) -> str:
        """What a rank has found to differ; "": nothing."""
        found = (self._text(rank, _DIVERGENCE) for rank in range(self.rank_count))
        return next(filter(None, found), "")

    def set_divergence(self, rank: int, text: str) -> None:
        self._set_text(rank, _DIVERGENCE, text)

    @staticmethod
    def _offset(rank: int, turn: int) -> int:
        return rank * _REGION_SIZE + _HEADER_SIZE + turn % RECORDS * _RECORD_SIZE

    def write(self, rank: int, turn: int, batch: Any, waiting: int) -> int:
        """Writes a rank's record of a turn, and returns its digest. batch: SGLang's; None: it
        computes nothing."""
        record = bytearray(_RECORD_SIZE)
        size = _RECORD.size
        if batch is None:
            _RECORD.pack_into(record, 0, turn, 0, -1, 0, 0, waiting, 0, 0, 0, 0)
        else:
            reqs = batch.reqs
            try:
                ids = array.array("I", [req._coxswain_id for req in reqs])
            except AttributeError:
                for req in reqs:
                    req._coxswain_id = id_of(req.rid)
                ids = array.array("I", [req._coxswain_id for req in reqs])
            last = array.array("q", [req.output_ids[-1] for req in reqs if req.output_ids])
            ending = [req for req in reqs if req.to_finish is not None]
            mode = int(batch.forward_mode)
            extend = (batch.extend_num_tokens or 0) if mode != 2 else 0
            listed = ids[:IDS].tobytes()
            _RECORD.pack_into(
                record, 0, turn, 0, mode, len(reqs), extend, waiting, len(ending),
                min(len(reqs), IDS), zlib.crc32(ids), zlib.crc32(last),
            )  # fmt: skip
            record[size : size + len(listed)] = listed
            size += len(listed)
        digest = zlib.crc32(memoryview(record)[_CHECKED:size])
        struct.pack_into("<I", record, 8, digest)
        offset = self._offset(rank, turn)
        self._memory[offset : offset + size] = bytes(record[:size])
        return digest

    def read(self, rank: int, turn: int) -> Record | None:
        """A rank's record of a turn; None: it has none, or writes it now."""
        offset = self._offset(rank, turn)
        data = self._memory[offset : offset + _RECORD_SIZE]
        found, digest, *_ = _RECORD.unpack_from(data)
        listed = _RECORD.unpack_from(data)[7]
        size = _RECORD.size + 4 * min(listed, IDS)
        if not turn or found != turn or zlib.crc32(data[_CHECKED:size]) != digest:
            return None
        return Record(data)

    def others(self, rank: int, turn: int, digest: int) -> bool:
        """Whether a rank differs from another one in a turn: a fast first look."""
        for other in range(self.rank_count):
            if other != rank:
                found, theirs = struct.unpack_from("<QI", self._memory, self._offset(other, turn))
                if found == turn and theirs != digest:
                    return True
        return False


def differences(records: Sequence[Record]) -> Iterator[tuple[str, list[str]]]:
    """In what records differ, and the value of each."""
    for name, values in (
        ("the forward mode", [one.mode_name() for one in records]),
        ("the number of requests", [str(one.requests) for one in records]),
        ("the requests", [f"{one.all_ids:08x}" for one in records]),
        ("the tokens to compute", [str(one.extend) for one in records]),
        ("the requests that wait", [str(one.waiting) for one in records]),
        ("the requests that are aborted", [str(one.ending) for one in records]),
        ("the tokens sampled before", [f"{one.tokens:08x}" for one in records]),
    ):
        if len(set(values)) > 1:
            yield name, values


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _sides(ranks: Sequence[int], values: Sequence[str]) -> str:
    sides: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        sides.setdefault(value, []).append(rank)
    few = sorted(sides.items(), key=lambda side: (len(side[1]), side[1]))
    return ", ".join(f"{_ranks(whose)} {value}" for value, whose in few)


def describe(turns: Turns, turn: int, rids: dict[int, str]) -> str:
    """How the ranks' records of a turn differ; "": they do not, or are not there yet. rids: the
    names of requests, by number."""
    found = {rank: turns.read(rank, turn) for rank in range(turns.rank_count)}
    there = {rank: record for rank, record in found.items() if record is not None}
    ranks, records = list(there), list(there.values())
    said = [f"{name}: {_sides(ranks, values)}" for name, values in differences(records)]
    if not said:
        return ""
    for rank in ranks:
        others = [set(there[other].ids) for other in ranks if other != rank]
        for number in there[rank].ids:
            if not any(number in ids for ids in others):
                said.append(f"rank {rank} alone runs {rids.get(number, f'{number:08x}')}")
    return f"the ranks differ since turn {turn}: {'; '.join(said[:8])}"
