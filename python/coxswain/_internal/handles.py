"""File descriptors as 64 bytes, with which another process opens the same object."""

from __future__ import annotations

import os
from typing import Any, Literal

from .. import _native
from .arguments import Buffer, deadline_of
from .errors import Invalid, check, new_error
from .owned import Mapped, Owned, check_peer

ffi, lib = _native.ffi, _native.lib

SocketPath = str | os.PathLike[str] | None


def _path(socket: SocketPath) -> Any:
    return ffi.NULL if socket is None else ffi.new("char[]", os.fsencode(socket))


def _bytes_as(type_: str, what: str, data: Buffer) -> Any:
    """A struct of C with these bytes."""
    found = ffi.new(f"{type_} *")
    raw, size = bytes(data), ffi.sizeof(type_)
    if len(raw) != size:
        raise Invalid(f"{what} has {size} bytes, not {len(raw)}")
    ffi.memmove(found, raw, size)
    return found


class Handle:
    """An fd of a process as 64 bytes, `bytes(handle)`, which may be copied in any way.

    `Handle(data)` reads them: raises Corrupt and VersionMismatch. A handle is a name, not a
    permission. Its bytes choose which fd of which process `open` copies: take handles only from
    processes that may choose.
    """

    __slots__ = ("_handle", "_info")

    def __init__(self, data: Buffer) -> None:
        self._handle = _bytes_as("struct cox_handle", "a handle", data)
        self._info = ffi.new("struct cox_handle_info *")
        err = new_error()
        check(lib.cox_handle_parse(self._handle, self._info, err), err)

    @property
    def pid(self) -> int:
        """Of the process that exports it."""
        return int(self._info.pid)

    @property
    def size(self) -> int:
        """Bytes that can be mapped; 0: it is not memory."""
        return int(self._info.size)

    @property
    def offset(self) -> int:
        """Where these bytes begin in the object."""
        return int(self._info.offset)

    @property
    def is_memory(self) -> bool:
        """Whether it can be mapped."""
        return bool(self._info.kind == lib.COX_HANDLE_MEMORY)

    def open(self, socket: SocketPath = None, timeout: float | None = 1.0) -> int:
        """An fd of the same object, which the caller closes.

        socket: the path of a control socket that has it, where the kernel does not allow the copy.
        timeout: seconds, at the socket. Raises PeerDead, NotFound, Denied, Unsupported, TimedOut.
        """
        err = new_error()
        found = ffi.new("int *", -1)
        check_peer(
            lib.cox_handle_open(self._handle, _path(socket), deadline_of(timeout), found, err), err
        )
        return int(found[0])

    def __bytes__(self) -> bytes:
        return bytes(ffi.buffer(self._handle))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and bytes(self) == bytes(other)

    def __hash__(self) -> int:
        return hash(bytes(self))

    def __repr__(self) -> str:
        return f"<coxswain.Handle of process {self.pid}, {self.size} bytes>"


class Exporter(Owned):
    """Makes handles of this process's fds. They can be opened until put, close, or the process's
    end.

    socket: the path of a control socket that keeps the fds too. ptrace_policy: where the kernel's
    Yama allows only ancestors to copy fds, the process that may as well, or "any": each of this
    user.
    """

    def __init__(
        self, socket: SocketPath = None, ptrace_policy: int | Literal["any"] | None = None
    ) -> None:
        path = _path(socket)
        options = ffi.new("struct cox_exporter_options *", {"socket_path": path})
        if ptrace_policy == "any":
            options.ptrace_policy = lib.COX_PTRACE_ANY
        elif ptrace_policy is not None:
            options.ptrace_policy, options.ptrace_pid = lib.COX_PTRACE_PROCESS, ptrace_policy
        options.size = ffi.sizeof("struct cox_exporter_options")
        found, err = ffi.new("struct cox_exporter **"), new_error()
        check_peer(lib.cox_exporter_new(options, found, err), err)
        self._own("exporter", found[0], lib.cox_exporter_free)

    def export(self, fd: int, offset: int = 0, size: int = 0) -> Handle:
        """A handle for the bytes from offset on; size 0: to the end, if it is memory. fd stays the
        caller's, who may close it. Raises Invalid: no fd, or a range outside the object."""
        found = ffi.new("struct cox_handle *")
        self._call(lib.cox_exporter_export, fd, offset, size, found)
        return Handle(ffi.buffer(found))

    def put(self, handle: Handle) -> None:
        """Ends an export; fds that were opened stay. Raises NotFound."""
        self._call(lambda native, err: lib.cox_exporter_put(native, handle._handle))


class Import(Mapped):
    """An open handle, mapped if it is memory. Made by `Importer.open`."""

    def __init__(self) -> None:
        raise TypeError("use Importer.open")

    @property
    def fd(self) -> int:
        """The importer's; open until close."""
        self._use()
        return self._fd

    @property
    def writable(self) -> bool:
        """Whether `memory` can be written."""
        return self._writable

    def _set_up(self, importer: Importer, native: Any) -> None:
        importing = importer._use()
        self._fd, self._size = int(native.fd), int(native.size)
        self._writable = bool(native.writable)
        # Without a mapping any address serves, of no bytes.
        base = native.base if native.base else native
        self._own(
            "import",
            ffi.cast("uint8_t *", base),
            lambda _: lib.cox_importer_close(importing, native),
            importer,
        )


class Importer(Owned):
    """Opens and maps handles of other processes. A handle that is open is not opened twice.

    socket: the path of a control socket, where the kernel does not allow the copy.
    """

    def __init__(self, socket: SocketPath = None) -> None:
        path = _path(socket)
        options = ffi.new("struct cox_importer_options *", {"socket_path": path})
        options.size = ffi.sizeof("struct cox_importer_options")
        found, err = ffi.new("struct cox_importer **"), new_error()
        check(lib.cox_importer_new(options, found, err), err)
        self._own("importer", found[0], lib.cox_importer_free)

    def open(self, handle: Handle, write: bool = False) -> Import:
        """Opens and maps it, for reading, or for reading and writing. Raises as `Handle.open`, and
        Denied: the fd or a seal does not allow it. What is not memory is opened only, and its
        `memory` is empty."""
        flags = lib.COX_IMPORT_FD
        if handle.is_memory and handle.size:
            flags = lib.COX_IMPORT_WRITE if write else lib.COX_IMPORT_READ
        found = ffi.new("const struct cox_import **")
        self._call(lib.cox_importer_open, handle._handle, flags, found)
        opened = Import.__new__(Import)
        opened._set_up(self, found[0])
        return opened
