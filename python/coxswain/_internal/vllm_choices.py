"""What each rank of vLLM chooses for a step, and which rank has chosen otherwise.

Ranks get the same step, and each decides by itself how to run it: padding, graph or eager, kind of
attention, passes of a drafter. Ranks of one tensor parallel group that decide differently wait for
each other in a collective, or add up what does not belong together.

A rank writes its choices before the model runs, so that they can be read while it hangs: into a
page of its own, a memfd that the engine maps. The engine compares the pages when a step has its
replies, and reads them when it fails. No step is sent, and none has a byte more, for that.

    page   0  64 records of 64 bytes; that of request s is number s modulo 64
        4096  32 texts of 128 bytes: a checksum, by which records name a text; UTF-8, then zeros

The first word of a record is its request; 0: it is being written. A page has one writer. If a rank
dies its page stays, as long as the engine maps it. Nothing here raises in a step: what cannot be
recorded is not compared, and a line of the log says so once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
import zlib
from typing import Any
from collections.abc import Callable, Sequence

from . import vllm_interface as interface

_RECORD = struct.Struct("<Q10I")
_RECORD_SIZE = 64
_RECORD_COUNT = 64  # more than can be in flight
_TEXT_SIZE = 128
_TEXT_COUNT = 32
_TEXTS = _RECORD_SIZE * _RECORD_COUNT
_PAGE_SIZE = _TEXTS + _TEXT_SIZE * _TEXT_COUNT
_SEQUENCE = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
# This vLLM does not tell it, or the pass has none.
_UNKNOWN = 0xFFFFFFFF

#: The fields of a record in words; a text is named by its checksum.
FIELDS: tuple[str | dict[int, str], ...] = (
    "{} padded tokens",
    "{} padded requests",
    {0: "no CUDA graph", 1: "piecewise CUDA graphs", 2: "a full CUDA graph"},
    {0: "queries of any length", 1: "queries of one length"},
    "{} LoRA adapters",
    "{} microbatches",
    "attention {text}",
    "KV cache {text}",
    "{} more passes",
    "{} tokens in these",
)
#: Arguments of vLLM's hook, whose lack is told.
ARGUMENTS = ("num_tokens", "cudagraph_runtime_mode", "batch_descriptor", "attn_metadata")


def _number(value: Any) -> int:
    return _UNKNOWN if value is None else min(int(value), _UNKNOWN - 1)


class Choices:
    """The page of this rank. Its methods are called on the thread that runs the model."""

    def __init__(self, log: Callable[[str], object]) -> None:
        """log(text): of what is not compared."""
        fd = os.memfd_create("coxswain_vllm_choices", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _PAGE_SIZE)
        # A mapping of the engine's would end it with SIGBUS where the file were shorter.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        weakref.finalize(self, os.close, fd)
        self._page = mmap.mmap(fd, _PAGE_SIZE)
        self._log = log
        #: for the engine, as long as this process lives
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        # Checksums of texts, by what they describe, and of those in the page.
        self._texts: dict[Any, int] = {}
        self._entries: list[int] = []
        self._describe_layout: Callable[[], str] = str
        self._layout: int | None = None
        # Of the present request; 0: nothing is recorded.
        self._sequence = 0
        self._first: tuple[int, ...] = ()
        self._more, self._more_tokens = 0, 0
        self._checked = self._given_up = False

    def install(self, describe_layout: Callable[[], str]) -> None:
        """Has vLLM tell what it chooses. describe_layout(): of the KV cache."""
        self._describe_layout = describe_layout
        told = interface.optional("tell_platform")
        if told is None:
            self._give_up("it does not tell its platform of a forward pass")
            return

        def tell(*args: Any, **kwargs: Any) -> Any:
            if self._sequence:
                self._hear(kwargs)
            return told(*args, **kwargs)

        interface.replace("tell_platform", tell)
        # The V2 runner replays a full graph without a word to the platform. V1 has not loaded this.
        if not interface.is_loaded("replay"):
            return
        replay = interface.optional("replay")

        def run(manager: Any, descriptor: Any) -> Any:
            if self._sequence:
                self._hear_replay(descriptor)
            return replay(manager, descriptor)

        interface.replace("replay", run)

    def begin(self, sequence: int) -> None:
        """A request begins."""
        self._sequence = 0 if self._given_up else sequence
        self._first, self._more, self._more_tokens = (), 0, 0

    def layout_changes(self) -> None:
        """The KV cache is another one from now on."""
        self._layout = None

    def _hear(self, told: dict[str, Any]) -> None:
        """vLLM is about to run the model, a drafter, or another part."""
        if not self._checked:
            self._checked = True
            if missing := [name for name in ARGUMENTS if name not in told]:
                self._log(f"vLLM does not tell {', '.join(missing)}: not compared between ranks.")
        tokens, metadata = told.get("num_tokens"), told.get("attn_metadata")
        if tokens is None or metadata is None:
            return  # an encoder, of which ranks may have different parts, or a dummy
        try:
            self._record(
                tokens,
                told.get("cudagraph_runtime_mode"),
                told.get("batch_descriptor"),
                len(told.get("ubatch_slices") or (0,)),
                self._attention(metadata),
            )
        except Exception as error:  # pylint: disable=broad-exception-caught
            self._give_up(repr(error))

    def _hear_replay(self, descriptor: Any) -> None:
        try:
            slices = getattr(descriptor, "num_ubatches", None)
            self._record(descriptor.num_tokens, descriptor.cg_mode, descriptor, slices, _UNKNOWN)
        except Exception as error:  # pylint: disable=broad-exception-caught
            self._give_up(repr(error))

    def _give_up(self, why: str) -> None:
        self._sequence, self._given_up = 0, True
        self._log(f"What ranks choose in a step is not compared with this vLLM: {why}.")

    def _record(
        self, tokens: int, mode: Any, descriptor: Any, slices: int | None, attention: int
    ) -> None:
        """The first pass of a request is told whole, of others their number and tokens."""
        if self._first:
            self._more += 1
            self._more_tokens += tokens
        else:
            if self._layout is None:
                self._layout = self._text("layout", self._describe_layout())
            self._first = (
                tokens,
                _number(getattr(descriptor, "num_reqs", None)),
                _number(getattr(mode, "value", None)),
                _number(getattr(descriptor, "uniform", None)),
                _number(getattr(descriptor, "num_active_loras", None)),
                _number(slices),
                attention,
                self._layout,
            )
        at = self._sequence % _RECORD_COUNT * _RECORD_SIZE
        _RECORD.pack_into(self._page, at, 0, *self._first, self._more, self._more_tokens)
        _SEQUENCE.pack_into(self._page, at, self._sequence)

    def _attention(self, metadata: Any) -> int:
        """The kinds of attention: of each layer, with microbatches those of the first."""
        layers = metadata[0] if isinstance(metadata, list) else metadata
        if not isinstance(layers, dict):
            layers = {"": layers}
        kinds = frozenset(map(type, layers.values()))
        if kinds not in self._texts:
            return self._text(kinds, ", ".join(sorted(kind.__name__ for kind in kinds)))
        return self._texts[kinds]

    def _text(self, key: Any, text: str) -> int:
        """The checksum of a text, by which the engine finds it."""
        checksum = min(zlib.crc32(text.encode()), _UNKNOWN - 1)
        if checksum not in self._entries and len(self._entries) < _TEXT_COUNT:
            at = _TEXTS + len(self._entries) * _TEXT_SIZE
            self._entries.append(checksum)
            size = _TEXT_SIZE - _CHECKSUM.size
            content = text.encode()[:size].ljust(size, b"\0")
            self._page[at : at + _TEXT_SIZE] = _CHECKSUM.pack(checksum) + content
        self._texts[key] = checksum
        return checksum


class Comparison:
    """The pages of all ranks, in the engine. One thread at a time."""

    def __init__(self, paths: Sequence[str], size: int) -> None:
        """paths: of the ranks. size: of a tensor parallel group, whose ranks are compared. Raises
        OSError where a page cannot be opened."""
        self._size = size
        #: the first request since which ranks have chosen otherwise; 0: they choose alike
        self.since = 0
        #: who has chosen what; "": they choose alike
        self.text = ""
        self._pages = []
        for path in paths:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._pages.append(mmap.mmap(fd, _PAGE_SIZE, prot=mmap.PROT_READ))
            finally:
                os.close(fd)

    def check(self, sequence: int) -> bool:
        """Compares what ranks have chosen in a request that has ended. True: from now on they
        choose otherwise, or alike again."""
        at = sequence % _RECORD_COUNT * _RECORD_SIZE
        end = at + _RECORD.size
        first = self._pages[0][at:end]
        if not first.startswith(_SEQUENCE.pack(sequence)):
            return False  # it has run no model
        before = self.since
        for page in self._pages:
            if page[at:end] != first:
                self.text = self.differences(sequence)
                self.since = (before or sequence) if self.text else 0
                return bool(before) != bool(self.since)
        self.since, self.text = 0, ""
        return before != 0

    def differences(self, sequence: int) -> str:
        """Who has chosen otherwise in a request, also in one that has not ended; "": nobody."""
        at = sequence % _RECORD_COUNT * _RECORD_SIZE
        said = []
        for first in range(0, len(self._pages), self._size):
            found = {}
            for rank in range(first, min(first + self._size, len(self._pages))):
                of, *values = _RECORD.unpack(self._pages[rank][at : at + _RECORD.size])
                if of == sequence:  # else it has not begun, or is no step
                    found[rank] = values
            if text := self._say(found):
                said.append(text)
        return "; ".join(said)

    def _say(self, found: dict[int, list[int]]) -> str:
        """ "rank 3 runs 512 padded tokens where ranks 0-2 run 384 padded tokens"."""
        fields = [i for i, _ in enumerate(FIELDS) if len({one[i] for one in found.values()}) > 1]
        if not fields:
            return ""
        sides: dict[tuple[int, ...], list[int]] = {}
        for rank, values in found.items():
            sides.setdefault(tuple(values[i] for i in fields), []).append(rank)
        # The most come last: who differs from them is meant.
        said = []
        for side, ranks in sorted(sides.items(), key=lambda one: (len(one[1]), one[1])):
            words = (self._word(i, v, ranks[0]) for i, v in zip(fields, side, strict=True))
            verb = "runs" if len(ranks) == 1 else "run"
            said.append(f"{_ranks(ranks)} {verb} {', '.join(words)}")
        return f"{' and '.join(said[:-1])} where {said[-1]}"

    def _word(self, field: int, value: int, rank: int) -> str:
        word = FIELDS[field]
        if isinstance(word, dict):
            return word.get(value, f"graphs or queries of kind {value}")
        if "{text}" in word:
            return word.format(text=self._text(value, rank))
        return word.format("unknown" if value == _UNKNOWN else value)

    def _text(self, checksum: int, rank: int) -> str:
        for at in range(_TEXTS, _PAGE_SIZE, _TEXT_SIZE):
            entry = self._pages[rank][at : at + _TEXT_SIZE]
            if _CHECKSUM.unpack_from(entry)[0] == checksum:
                text = entry[_CHECKSUM.size :].rstrip(b"\0").decode(errors="replace")
                return text or "unknown"
        return f"unknown ({checksum:08x})"


def _ranks(ranks: list[int]) -> str:
    """ "rank 1", or "ranks 0-2, 5"; ascending."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"


def describe_layout(worker: Any) -> str:
    """The KV cache of a worker: what its layout is called, and its tensors."""
    name = getattr(worker.vllm_config.cache_config, "kv_cache_layout", None)
    caches = getattr(worker.model_runner, "kv_caches", None) or []
    kinds: dict[str, int] = {}
    for cache in caches.values() if isinstance(caches, dict) else caches:
        for tensor in cache if isinstance(cache, (list, tuple)) else (cache,):
            if hasattr(tensor, "stride"):
                kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
                kind += f" by {tensor.stride()}"
                kinds[kind] = kinds.get(kind, 0) + 1
    tensors = [f"{count} x {kind}" for kind, count in kinds.items()]
    return " ".join(([str(name)] if name else []) + [", ".join(tensors)])
