"""Memory of CUDA devices that processes share by its fd, by the CUDA domain of memory/domain."""

# torch and numpy may be missing, and declare no types for some of their functions.
# mypy: disable-error-code="import-not-found,no-untyped-call,no-any-return"
from __future__ import annotations

import functools
import math
import re
from typing import Any

from .. import _native
from .errors import Error, Invalid, Unsupported, check, new_error
from .owned import Owned

ffi, lib = _native.ffi, _native.lib

# The driver; None: the machine's. Tests set another one.
_driver: str | None = None


class Devices(Owned):
    """The CUDA devices of this machine, in the driver's order, which is that of torch. Use `all`:
    a process starts its driver once."""

    def __init__(self) -> None:
        found, err = ffi.new("struct cox_domains **"), new_error()
        driver = _driver.encode() if _driver else ffi.NULL
        check(lib.coxpy_devices_new(driver, found, err), err)
        self._own("CUDA driver", found[0], lib.cox_domains_free)

    @staticmethod
    @functools.cache
    def all() -> Devices:
        return Devices()

    def name(self, number: int) -> str:
        """Of a device, everywhere: `GPU-` and its UUID."""
        found = ffi.new("uint8_t[16]")
        self._call(lib.cox_domain_cuda_uuid, number, found)
        digits = bytes(found).hex()
        parts = digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]
        return f"GPU-{'-'.join(parts)}"


class Device:
    """One of them: "cuda:1", "cuda", or a torch.device."""

    def __init__(self, text: object) -> None:
        found = re.fullmatch(r"cuda(?::(\d{1,3}))?", str(text))
        if not found:
            raise Invalid(f"the device '{text}': expected 'cpu', or 'cuda:' and a number")
        self.number = int(found[1] or 0)
        try:
            self.devices = Devices.all()
            self.name = self.devices.name(self.number)
        except Error as error:
            raise Unsupported(
                f"weights in the memory of cuda:{self.number}, which this machine cannot share: "
                f"{error}"
            ) from None

    def __str__(self) -> str:
        return f"cuda:{self.number}"


class DeviceMemory(Owned):
    """Memory of a device, as this process sees it: as bytes by CUDA's array interface, which torch
    and others take without a copy. It is freed when nothing in Python refers to it."""

    def __init__(self, device: Device, size: int, fd: int | None = None) -> None:
        """fd: memory of another process, for reading. Without it, new memory for writing. Raises
        NoSpace; Corrupt: fd is none; Error."""
        found, err = ffi.new("struct cox_domain_memory **"), new_error()
        native, number = device.devices._use(), device.number
        if fd is None:
            r = lib.coxpy_device_memory_create(native, number, size, found, err)
        else:
            r = lib.coxpy_device_memory_attach(native, number, fd, size, found, err)
        check(r, err)
        self._own("device memory", found[0], lib.coxpy_device_memory_free, device.devices)
        self.device, self.bytes = device, size
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (int(found[0].device_address), False),  # torch takes no True
            "strides": None,
            "version": 3,
        }

    @property
    def fd(self) -> int:
        """Its own, open until it is freed."""
        return int(self._use().fd)

    def read(self, offset: int, size: int) -> bytes:
        """A copy of some bytes."""
        found = ffi.new("uint8_t[]", max(size, 1))
        self._call(lib.cox_domain_copy_from, offset, found, size)
        return bytes(ffi.buffer(found, size))

    def write(self, offset: int, data: Any) -> None:
        """data: a buffer of the host."""
        view = ffi.from_buffer("uint8_t[]", data)
        self._call(lib.cox_domain_copy_to, offset, view, len(view))

    def put(self, offset: int, tensor: Any) -> None:
        """Copies a tensor of torch, of this or another device."""
        import torch

        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        self.flat()[offset : offset + flat.numel()].copy_(flat)

    def flat(self) -> Any:
        """All bytes as a tensor of torch, which keeps this object."""
        import torch

        return torch.as_tensor(self, device=str(self.device))

    def synchronize(self) -> None:
        """Waits until what torch was given for this device is done."""
        import torch

        torch.cuda.synchronize(self.device.number)

    def _check(self, offset: int, size: int) -> None:
        if not 0 <= offset <= self.bytes - size:
            raise ValueError(f"it has {self.bytes} bytes, and no {size} at {offset}")

    def torch_tensor(self, dtype: str, shape: list[int], offset: int) -> Any:
        """The tensor that lies there."""
        import torch

        kind, count = getattr(torch, dtype), math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=kind, device=str(self.device))
        size = count * torch.empty(0, dtype=kind).element_size()
        self._check(offset, size)
        return self.flat()[offset : offset + size].view(kind).view(shape)

    def numpy_array(self, dtype: str, shape: list[int], offset: int) -> DeviceArray:
        """The array that lies there."""
        array = DeviceArray(self, dtype, shape, offset)
        self._check(offset, array.nbytes)
        return array

    def unshare(self) -> None:
        """What is there becomes this process's own, at the same address: it takes as much memory
        again. Raises NoSpace."""
        self._call(lib.cox_domain_cuda_make_private)


class DeviceArray:
    """An array in the memory of a device, for what takes CUDA's array interface."""

    def __init__(self, memory: DeviceMemory, dtype: str, shape: list[int], offset: int) -> None:
        import numpy

        self.dtype, self.shape = numpy.dtype(dtype), tuple(shape)
        self.nbytes = self.dtype.itemsize * math.prod(shape)
        self._memory, self._offset = memory, offset
        address, _ = memory.__cuda_array_interface__["data"]
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (address + offset if self.nbytes else 0, False),
            "strides": None,
            "version": 3,
        }

    def numpy(self) -> Any:
        """A copy of it in the memory of the host."""
        import numpy

        data = self._memory.read(self._offset, self.nbytes) if self.nbytes else b""
        return numpy.frombuffer(data, self.dtype).reshape(self.shape)
