"""What arguments of functions mean, and what is wrong with those that mean nothing."""

from __future__ import annotations

import numbers
import re
import time
from typing import TYPE_CHECKING, Any

from .. import _native
from .errors import Invalid

if TYPE_CHECKING:
    from typing_extensions import Buffer as Buffer
else:
    Buffer = Any

ffi = _native.ffi

NEVER = 2**64 - 1
# The names of fields in a format of PEP 3118.
_NAMES = re.compile(r":[^:]*:")
# Codes of it that stand for pointers, to Python objects among them.
_POINTERS = set("OPX&")


def seconds_of(timeout: Any, name: str = "timeout") -> float:
    """A number of seconds, inf among them. Raises TypeError and Invalid, which say `name`."""
    kind = type(timeout)
    if kind is not float and (kind is bool or not isinstance(timeout, numbers.Real)):
        raise TypeError(
            f"{name} is {timeout!r}, of type {type(timeout).__name__}; it may be a number of "
            "seconds, or None"
        )
    seconds = float(timeout)
    if not seconds >= 0:
        raise Invalid(f"{name} is {timeout}; it may be a number of seconds from 0 on, or None")
    return seconds


def deadline_of(timeout: Any) -> int:
    """On time.monotonic_ns(). timeout: seconds from now; None and inf: no limit."""
    if timeout is None:
        return NEVER
    is_plain = type(timeout) is float and timeout >= 0
    nanoseconds = (timeout if is_plain else seconds_of(timeout)) * 1e9
    return time.monotonic_ns() + int(nanoseconds) if nanoseconds < 2**62 else NEVER


def buffer_of(data: Any, what: str, writable: bool = False) -> Any:
    """The memory of a bytes-like object, as cffi has it. Raises TypeError, which begins with
    `what`, for all that another process could not read: also for arrays of Python objects; and
    for what this one cannot write, if it is to be `writable`."""
    if type(data) is bytearray:
        return ffi.from_buffer(data)
    type_name = type(data).__name__
    try:
        with memoryview(data) as view:
            contiguous, codes = view.c_contiguous, view.format
        if len(codes) > 1:
            codes = _NAMES.sub("", codes)
    except (TypeError, BufferError) as error:
        if hasattr(data, "data_ptr"):  # torch: a tensor is no buffer
            raise TypeError(
                f"{what} is a tensor, which is no buffer: pass tensor.numpy(), or "
                "tensor.cpu().numpy() where it is on a device"
            ) from error
        raise TypeError(
            f"{what} is {type_name}; it may be bytes, or any contiguous buffer of plain data"
        ) from error
    except ValueError:  # dates of numpy: no format stands for them
        contiguous, codes = True, ""
    if not _POINTERS.isdisjoint(codes):
        raise TypeError(
            f"{what} is {type_name} of Python objects or pointers, which mean nothing in another "
            "process; it may be bytes, or any contiguous buffer of plain data"
        )
    try:
        if contiguous:
            return ffi.from_buffer(data, require_writable=writable)
    except (TypeError, BufferError, ValueError) as error:
        if writable:
            raise TypeError(f"{what} is {type_name} that is not writable") from error
        # else an array of dates
    raise TypeError(f"{what} is {type_name} and not contiguous; numpy.ascontiguousarray copies it")
