"""A step of inference as columns that numpy and torch view without a copy."""

from __future__ import annotations

import sys
from typing import Any
from collections.abc import Sequence

from .. import _native
from .errors import Invalid, StateError, text_of
from .owned import ALONE

ffi, lib = _native.ffi, _native.lib

# In the order of enum cox_digest.
DIGESTS = ("sequences", "positions", "blocks", "tokens")
FORWARD_TYPES = ("prefill", "decode", "extend", "mixed", "clear", "dummy")

_COLUMNS = ffi.typeof("struct coxpy_columns *")
_SIZES = {"?": 1, "i": 4, "I": 4, "f": 4, "q": 8, "Q": 8}
# In the order of enum coxpy_column; block tables follow.
_NAMES = (
    "ids",
    "seeds",
    "slots",
    "starts",
    "tokens",
    "positions",
    "temperatures",
    "top_ps",
    "top_ks",
    "repetition_penalties",
    "emits",
    "finished",
    "swap_in",
    "swap_out",
    "copies",
)


def _name_of(column: int) -> str:
    """As it is asked for."""
    table = column - len(_NAMES)
    return _NAMES[column] if table < 0 else f"block_table({table})"


class ColumnMemory:
    """Where the columns of a batch are: of one batch at a time, and then of a later one, so that no
    page has to be fetched and cleared."""

    def __init__(self) -> None:
        self.columns: Any = ffi.new(_COLUMNS)
        self._room(0)

    def _room(self, size: int) -> None:
        self.bytes = bytearray(size)
        self._address = ffi.from_buffer(self.bytes)
        self._idle = sys.getrefcount(self.bytes)

    def fill(self, batch: Any) -> Any:
        """Returns where each column lies in `bytes`."""
        columns = self.columns
        while not lib.coxpy_batch_fill(batch, self._address, len(self.bytes), columns):
            self._room(2 * columns.size)
        return columns

    def is_viewed(self) -> bool:
        """A view of it is kept, by itself or by a numpy array."""
        return sys.getrefcount(self.bytes) > self._idle


class Batch:
    """One step: rows, each a sequence that computes some tokens.

    The columns are memoryviews of the rank's own memory: `numpy.asarray(batch.tokens)`,
    `torch.frombuffer(batch.tokens, dtype=torch.int32)`. They end with the step: an attribute that
    is asked for afterwards raises StateError, and a step whose handler kept a view fails.
    """

    def __init__(self, native: Any, memory: ColumnMemory) -> None:
        """memory: the batch's alone until it ends."""
        self._native = native
        self._memory = memory
        self._columns = columns = memory.fill(native)
        self._row_count: int = columns.row_count
        self._token_count: int = columns.token_count
        # typeshed knows formats of casts as literals only.
        self._whole: Any = memoryview(memory.bytes)
        self._views: dict[int, memoryview] = {}
        self._digests: dict[int, int] = {}

    def _view(
        self, column: int, format_: str, count: int, shape: Sequence[int] | None = None
    ) -> memoryview:
        view = self._views.get(column)
        if view is None:
            if self._native is None:
                raise StateError(
                    f"batch.{_name_of(column)}: the step is over; copy what outlives it"
                )
            start = self._columns.offsets[column]
            part = self._whole[start : start + count * _SIZES[format_]]
            view = part.cast(format_, shape) if shape and count else part.cast(format_)
            self._views[column] = view
        return view

    def _step(self) -> Any:
        if self._native is None:
            raise StateError("the step is over; copy what outlives it")
        return self._native

    @property
    def sequence(self) -> int:
        """The number of the request on its channel."""
        return int(self._step().sequence)

    @property
    def forward_type(self) -> str:
        """ "prefill", "decode", "extend", "mixed", "clear", or "dummy": no rows, the ranks compute
        together nevertheless."""
        return FORWARD_TYPES[self._step().forward_type]

    def set_digest(self, name: str, value: int) -> None:
        """Sets what the ranks are compared by, in place of what the package computes of the batch
        itself: for ranks that know better what they must agree on.

        name: "sequences", "positions", "blocks" or "tokens".
        value: 64 bits, of this step alone; 0: this rank is not compared in it.

        Ranks that differ fail the step with `Diverged`.
        """
        self._step()
        if name not in DIGESTS:
            raise Invalid(f"a digest is one of {', '.join(DIGESTS)}, not {name!r}")
        if not 0 <= value < 1 << 64:
            raise Invalid(f"a digest is a number of 64 bits, not {value}")
        self._digests[DIGESTS.index(name)] = value

    @property
    def row_count(self) -> int:
        """The number of rows."""
        return self._row_count

    @property
    def ids(self) -> memoryview:
        """int64 per row: the sequence, as the coordinator numbers it."""
        return self._view(lib.COXPY_IDS, "q", self._row_count)

    @property
    def slots(self) -> memoryview:
        """uint32 per row: a small number that the sequence keeps while it lives."""
        return self._view(lib.COXPY_SLOTS, "I", self._row_count)

    @property
    def starts(self) -> memoryview:
        """int32, rows + 1: row i computes tokens[starts[i]:starts[i + 1]]."""
        return self._view(lib.COXPY_STARTS, "i", self._row_count + 1)

    @property
    def tokens(self) -> memoryview:
        """int32 per token to compute."""
        return self._view(lib.COXPY_TOKENS, "i", self._token_count)

    @property
    def positions(self) -> memoryview:
        """int32 per token to compute: its position in the sequence, from 0."""
        return self._view(lib.COXPY_POSITIONS, "i", self._token_count)

    @property
    def emits(self) -> memoryview:
        """bool per row: whether to sample the token that follows its last one."""
        return self._view(lib.COXPY_EMITS, "?", self._row_count)

    @property
    def temperatures(self) -> memoryview:
        """float32 per row; 0: greedy."""
        return self._view(lib.COXPY_TEMPERATURES, "f", self._row_count)

    @property
    def top_ps(self) -> memoryview:
        """float32 per row; 1: off."""
        return self._view(lib.COXPY_TOP_PS, "f", self._row_count)

    @property
    def top_ks(self) -> memoryview:
        """int32 per row; 0: off."""
        return self._view(lib.COXPY_TOP_KS, "i", self._row_count)

    @property
    def repetition_penalties(self) -> memoryview:
        """float32 per row; 1: off."""
        return self._view(lib.COXPY_PENALTIES, "f", self._row_count)

    @property
    def seeds(self) -> memoryview:
        """uint64 per row: the draw at a position is a function of the two."""
        return self._view(lib.COXPY_SEEDS, "Q", self._row_count)

    @property
    def table_count(self) -> int:
        """Block tables per row, one per manager of the KV cache."""
        return int(self._step().table_count)

    def block_table(self, table: int = 0) -> memoryview:
        """int32, rows x width: ids of KV blocks in order of position, -1 behind the last."""
        count = self._step().table_count
        if not 0 <= table < count:
            raise IndexError(f"block table {table} of {count}")
        width, rows = self._columns.table_widths[table], self._row_count
        return self._view(lib.COXPY_TABLES + table, "i", rows * width, (rows, width))

    def history(self, row: int) -> list[int]:
        """All tokens of the row's sequence, from position 0 up to the last one to compute. A
        copy."""
        found = self._step().rows[self._row(row)]
        return ffi.unpack(found.tokens, found.position + found.token_count)  # type: ignore[no-any-return]

    def lora(self, row: int) -> str | None:
        """The adapter of the row; None: none."""
        return text_of(self._step().rows[self._row(row)].lora_id) or None

    def _row(self, row: int) -> int:
        if not 0 <= row < self.row_count:
            raise IndexError(f"row {row} of {self.row_count}")
        return row

    @property
    def finished(self) -> memoryview:
        """uint32: slots of sequences that ended since the last step."""
        return self._view(lib.COXPY_FINISHED, "I", self._step().finished_count)

    def _pairs(self, column: int, count: int) -> memoryview:
        return self._view(column, "i", 2 * count, (count, 2))

    @property
    def swap_in(self) -> memoryview:
        """int32, n x 2: blocks to copy from swap space, before the rows; (from, to)."""
        return self._pairs(lib.COXPY_SWAP_IN, self._step().swap_in_count)

    @property
    def swap_out(self) -> memoryview:
        """int32, n x 2: blocks to copy to swap space, first of all."""
        return self._pairs(lib.COXPY_SWAP_OUT, self._step().swap_out_count)

    @property
    def copies(self) -> memoryview:
        """int32, n x 2: blocks to copy to others, after swap_in."""
        return self._pairs(lib.COXPY_COPY, self._step().copy_count)

    @property
    def weights_version(self) -> int:
        """Of the weights that all ranks compute with; 0: the coordinator shares none."""
        return int(self._step().weights_version)

    @property
    def cancelled(self) -> bool:
        """The reply has no reader any more: raise Aborted, or return soon."""
        return bool(lib.cox_batch_cancelled(self._step()))

    @property
    def void_through(self) -> int:
        """Steps up to this number were cancelled: the epoch for RankGroup.align."""
        return int(lib.cox_batch_void_through(self._step()))

    def _end(self) -> str | None:
        """Ends the step. Returns what somebody keeps a view of, or None."""
        self._native = None
        kept = None
        views, self._views = self._views, {}
        while views:
            column, view = views.popitem()
            # torch keeps the view itself, without an export of it: its memory has to stay then.
            if sys.getrefcount(view) > ALONE:
                kept = f"batch.{_name_of(column)}"
                continue
            try:
                view.release()
            except BufferError:
                kept = f"batch.{_name_of(column)}"
        self._whole.release()
        # A numpy array holds the memory through a view of its own.
        if kept is None and self._memory.is_viewed():
            kept = "a column of the batch"
        return kept
