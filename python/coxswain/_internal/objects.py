"""Objects as requests and replies: methods of a worker object, which are called by name.

Small plain values, as most messages are, are written and read by native/plain.c. Any other message
is a pickle, what lies outside of it, and one byte that says what it is:

    pickle | buffer | ... | the sizes of these, and how many buffers | kind

Buffers begin at multiples of 64 bytes. Where there are none, the kind follows the pickle. It is
another byte for a request and a reply, so that a process that speaks bytes is told so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import io
import pickle
import struct
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .. import _native
from .errors import Error, Invalid, RankError, StateError

ffi = _native.ffi


def _load_plain() -> Any:
    """The module of plain.c, which is in the file of _native."""
    loader = importlib.machinery.ExtensionFileLoader("coxswain._plain", _native.__file__)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


_plain = _load_plain()
#: dump_plain(value, kind) -> bytes, or None: not plain, or too large.
#: load_plain(message, kind) -> the value, or NotImplemented: no plain message of this kind.
dump_plain, load_plain = _plain.dumps, _plain.loads

# The last byte of a message; as a number of plain ones.
PLAIN_REQUEST, PLAIN_REPLY = b"ab"
# In upper case where buffers follow the pickle.
REQUEST, REPLY = b"q", b"r"
# Of messages with arrays, which are views of them: they have to be in memory that can be written.
REQUEST_WITH_BUFFERS, REPLY_WITH_BUFFERS = REQUEST.upper(), REPLY.upper()
_UPPER = ord("a") - ord("A")

_ALIGNMENT = 64
# Smaller buffers are copied into the pickle.
IN_BAND = 4096
_WORD = struct.Struct("<Q")
_intern = sys.intern
# Of an error: what fits the slot of a reply with all that is beside it.
_TEXT_SIZE, _EXCEPTION_SIZE = 16 << 10, 32 << 10


# ---- messages ----


def _address_of(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


def _start_of(part: Any) -> Any:
    with ffi.from_buffer(part) as memory:
        return ffi.cast("void *", memory)


class Parts:
    """A message of several parts, which the library joins where it sends them."""

    def __init__(self, parts: list[bytes | memoryview]) -> None:
        # Not what from_buffer returns: a memoryview in garbage, as the traceback of an exception
        # that refers to itself has it, is cleared before what has its memory, which then crashes.
        self._parts = parts
        self.vectors = ffi.new("struct iovec[]", [(_start_of(part), len(part)) for part in parts])

    def let_go(self, buffer: Any) -> None:
        """Keeps no reference to what lies in this buffer, which the caller keeps instead."""
        begin = _address_of(_start_of(buffer))
        end = begin + len(buffer)
        self._parts = [
            part
            for part, vector in zip(self._parts, self.vectors, strict=True)
            if not begin <= _address_of(vector.iov_base) < end
        ]


class Message:
    """A reply that was copied, and not unpickled yet."""

    __slots__ = ("memory",)

    def __init__(self, memory: bytes | bytearray | memoryview) -> None:
        self.memory = memory


def dumps(value: Any, kind: bytes) -> bytes | Parts:
    """A message; of arrays outside of the pickle it has views. Raises what pickle raises."""
    buffers: list[memoryview] = []

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < IN_BAND:
            return True
        buffers.append(raw)
        return False

    if "torch" in sys.modules:
        file = io.BytesIO()
        _Pickler(file, 5, buffer_callback=is_in_band).dump(value)
        pickled = file.getvalue()
    else:
        pickled = pickle.dumps(value, 5, buffer_callback=is_in_band)
    if not buffers:
        return pickled + kind
    return Parts(list(_parts(pickled, buffers, kind.upper())))


def _parts(pickled: bytes, buffers: list[memoryview], kind: bytes) -> Iterator[bytes | memoryview]:
    size = 0
    parts: list[bytes | memoryview] = [pickled, *buffers]
    for part in parts:
        if padding := -size % _ALIGNMENT:
            yield bytes(padding)
        yield part
        size += padding + len(part)
    yield struct.pack(f"<{len(buffers) + 2}Q", len(pickled), *map(len, buffers), len(buffers))
    yield kind


class _NoObject(Exception):
    """The bytes are no message of this kind."""


def loads(message: bytes | bytearray | memoryview, kind: bytes) -> Any:
    """The object of a message. Arrays with buffers of their own are views of it: it must be the
    receiver's, and writable. Raises _NoObject."""
    last = message[-1] if message else 0
    if last == kind[0]:
        return pickle.loads(message)
    if last != kind[0] - _UPPER:
        raise _NoObject
    view = memoryview(message)
    end = len(view) - 1 - _WORD.size
    (count,) = _WORD.unpack_from(view, end)
    sizes = struct.unpack_from(f"<{count + 1}Q", view, end - (count + 1) * _WORD.size)
    buffers, at = [], sizes[0]
    for size in sizes[1:]:
        at += -at % _ALIGNMENT
        buffers.append(view[at : at + size])
        at += size
    return pickle.loads(view, buffers=buffers)


# ---- torch ----


class _Pickler(pickle.Pickler):
    """Where torch is imported: tensors in the memory of the CPU travel as arrays do."""

    def reducer_override(self, value: Any) -> Any:
        # Of a torch that is being imported the types are missing.
        tensor = getattr(sys.modules["torch"], "Tensor", None)
        if type(value) is tensor and not value.__dict__:
            return _reduce_tensor(value)
        return NotImplemented


def _reduce_tensor(tensor: Any) -> Any:
    import torch  # pylint: disable=import-outside-toplevel

    if (
        tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or not tensor.is_leaf
    ):
        return NotImplemented
    flat = tensor.detach().contiguous().reshape(-1)
    try:
        array = flat.view(torch.uint8).numpy()
    except RuntimeError:  # without numpy
        return NotImplemented
    return _tensor_of, (
        pickle.PickleBuffer(array),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.requires_grad,
    )


def _tensor_of(buffer: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch  # pylint: disable=import-outside-toplevel

    if len(memoryview(buffer)):
        tensor = torch.frombuffer(buffer, dtype=dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    return tensor.requires_grad_(requires_grad)


# ---- the coordinator's side ----


def request(name: str, args: Any, kwargs: Any) -> bytes | Parts:
    """A request for a method. Raises TypeError where an argument cannot be pickled."""
    call = name, args, kwargs
    plain: bytes | None = dump_plain(call, PLAIN_REQUEST)
    if plain and type(name) is str:
        return plain
    if not isinstance(name, str):
        raise TypeError(f"the method is {name!r}; it may be the name of one, as a text")
    try:
        return dumps(call, REQUEST)
    except Exception as error:
        raise TypeError(f"an argument of {name} cannot be pickled: {error}") from error


def replies_of(replies: Sequence[Any], ranks: Sequence[int]) -> list[Any]:
    """What these ranks have replied, of each Message its object."""
    found: list[Any] = []
    try:
        for reply in replies:
            found.append(loads(reply.memory, REPLY) if type(reply) is Message else reply)
    except Exception as error:
        rank, size = ranks[len(found)], len(replies[len(found)].memory)
        if isinstance(error, _NoObject):
            text = (
                f"rank {rank} replied with {size} bytes that are no object: its program has to "
                "call coxswain.serve(worker, codec='pickle'), of this version of the package"
            )
            raise _rank_error(text, rank) from None
        text = f"the reply of rank {rank} cannot be unpickled here: {error!r}"
        raise _rank_error(text, rank) from error
    return found


def _rank_error(text: str, rank: int) -> RankError:
    error = RankError(text)
    error.rank = rank
    return error


def raised(error: Error, detail: bytes) -> Exception:
    """What a method has raised, with `error` as its cause; `error` itself where it is unknown.
    detail: of failure."""
    text, pickled = pickle.loads(detail)
    found: Any = None
    why = ""
    if pickled:
        try:
            found = pickle.loads(pickled)
        except Exception as failure:  # pylint: disable=broad-exception-caught
            why = f"\nIt is no exception here: {failure!r}"
    begin = str(error).partition(f"rank {error.rank} failed: ")[0]
    error.args = (f"{begin}rank {error.rank} failed: {text.rstrip()}{why}",)
    if not isinstance(found, Exception):
        return error
    found.__cause__ = error
    return found


# ---- the rank's side ----


class Program:
    """What a rank executes: makes the worker object, and serves its methods."""

    def __init__(self, func: Any) -> None:
        if isinstance(func, types.ModuleType):
            func = functools.partial(importlib.import_module, func.__name__)
        self.func = func  # for _launch._name_of

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        from .worker import serve  # pylint: disable=import-outside-toplevel

        serve(self.func(*args, **kwargs) if callable(self.func) else self.func, codec="pickle")


class Methods:
    """Replies to requests by calling methods of a worker object, or functions of a table."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._is_table = isinstance(worker, Mapping)

    def call(self, request: Any) -> bytes | Parts:
        """The reply to a request: name, args and kwargs of a method."""
        name, args, kwargs = request
        found: Any = None
        if not self._is_table and name[:1] != "_":
            # The cache of a type has the names that are interned.
            found = getattr(self._worker, _intern(name), None)
        result = (found if callable(found) else self._find(name))(*args, **kwargs)
        reply: bytes | None = dump_plain(result, PLAIN_REPLY)
        if reply:
            return reply
        try:
            return dumps(result, REPLY)
        except Exception as error:
            raise TypeError(
                f"the result of {name}, of type {type(result).__name__}, cannot be pickled: {error}"
            ) from error

    def call_pickled(self, message: bytes | bytearray | memoryview) -> bytes | Parts:
        """As call, of a message: the rank's own; arguments and reply may be views of it."""
        return self.call(self._unpickled(message))

    @staticmethod
    def _unpickled(message: bytes | bytearray | memoryview) -> Any:
        try:
            return loads(message, REQUEST)
        except _NoObject:
            raise StateError(
                f"the request is {len(message)} bytes that are no object, and this rank serves "
                "objects: make the group with codec='pickle', and use call_method, of this version "
                "of the package"
            ) from None

    def _find(self, name: str) -> Callable[..., Any]:
        found: Any = None
        if not name.startswith("_"):
            if self._is_table:
                found = self._worker.get(name)
            else:
                found = getattr(self._worker, name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
        what = (
            "begins with an underscore, which is not called from outside"
            if name.startswith("_")
            else "does not exist"
            if found is None
            else f"is {type(found).__name__}, which is not callable"
        )
        names = ", ".join(self._names()) or "nothing"
        raise Invalid(
            f"there is no method {name!r} to call: it {what}; {_name_of(self._worker)} has {names}"
        )

    def _names(self) -> list[str]:
        """What may be called. Properties are not evaluated for that."""
        if self._is_table:
            return sorted(str(name) for name, value in self._worker.items() if callable(value))
        return sorted(
            name
            for name in dir(self._worker)
            if not name.startswith("_") and _is_method(inspect.getattr_static(self._worker, name))
        )


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, classmethod)


def _name_of(worker: Any) -> str:
    if isinstance(worker, Mapping):
        return "the table"
    named = worker if isinstance(worker, (type, types.ModuleType)) else type(worker)
    return str(named.__name__)


def failure(error: BaseException, begin: types.TracebackType | None) -> bytes:
    """For `raised`: the traceback from `begin` on, and the exception, if it can be pickled.

    An exception of this package, or one that ends an interpreter or a generator, stays a text: at
    the coordinator it would be taken for one of its own.
    """
    text = "".join(traceback.format_exception(type(error), error, begin))
    if len(text) > _TEXT_SIZE:
        text = f"{text[: _TEXT_SIZE // 2]}\n...\n{text[-_TEXT_SIZE // 2 :]}"
    text = text.encode("utf-8", "backslashreplace").decode()
    pickled = b""
    if isinstance(error, Exception) and not isinstance(error, (Error, StopIteration)):
        try:
            file = io.BytesIO()
            _ExceptionPickler(file, 5).dump(error)
            if file.tell() <= _EXCEPTION_SIZE:
                pickled = file.getvalue()
        except Exception:  # pylint: disable=broad-exception-caught
            pass  # it stays a text
    return pickle.dumps((text, pickled), 5)


class _ExceptionPickler(pickle.Pickler):
    """Pickles exceptions whose __init__ takes other arguments than `args`, too."""

    def reducer_override(self, value: Any) -> Any:
        kind: Any = type(value)
        if (
            isinstance(value, BaseException)
            and kind.__reduce__ is BaseException.__reduce__
            and kind.__reduce_ex__ is object.__reduce_ex__
            and isinstance(kind.__init__, types.FunctionType)
        ):
            return _exception_of, (kind, value.args), value.__dict__ or None
        return NotImplemented


def _exception_of(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception with these args, by the __init__ of its base that Python itself has."""
    made = kind.__new__(kind, *args)
    for base in kind.__mro__:
        init = vars(base).get("__init__")
        if init and not isinstance(init, types.FunctionType):
            init(made, *args)
            break
    return made
