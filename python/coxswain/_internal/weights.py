"""Weights that outlive the process that loaded them: `WeightStore`.

A small process of this user, the holder (`coxswain weights hold`, which the first put starts), has
the memory of each part of a model under a key. program/weights/protocol.h says what it is asked.
The memory is a memfd that nobody can write any more, or memory of a GPU:

    0    b"COXWGTS1"
    8    u64, little-endian: size of what follows
    16   JSON: {"tensors": {NAME: [dtype, shape, offset]}, "library": "torch" or "numpy"}
    ...  the bytes of each tensor, dense, in C order, at its offset, a multiple of 256. Two names
         may have one offset (tied weights).

A process maps it privately, without the right to write: a stray write ends that process by SIGSEGV,
and changes nothing of another one's. `Weights.unshare` gives the right: what is written from then
on is this process's own copy, page by page; in a GPU's memory, all of it at once
(device_memory.py).
"""

# torch and numpy may be missing, and declare no types for some of their functions.
# mypy: disable-error-code="import-not-found,no-untyped-call,no-any-return"
from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .device_memory import Device, DeviceMemory
from .errors import Closed, Corrupt, Denied, Error, Full, Invalid, NoSpace, NotFound, TimedOut

_REQUEST = struct.Struct("<IIQQ8x512s")
_ANSWER = struct.Struct("<IIQ")
_HOST, _CUDA = 0, 3
_GET, _PUT, _DROP, _LIST = 1, 2, 3, 4
# Of enum cox_status; what else the holder answers is a fault of this file.
_FULL, _TAKEN, _EMPTY = 5, 12, 22
_KEY_SIZE = 512
_MAGIC = b"COXWGTS1"
_ALIGNMENT = 256
_FOREVER = 2**64 - 1
_FILE = ".weights.sock"
# For a holder that is being started, and for each answer of one that runs.
_START_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
# The kernel refuses the seal while it has a page of the memory in its hands.
_SEAL_SECONDS = 5.0
# linux/fcntl.h; Python's fcntl has them from 3.12 on under some systems only.
_F_ADD_SEALS, _SEALS = 1033, 0x1 | 0x2 | 0x4 | 0x8
_WRITE_SIZE_MAX = 1 << 30


class _HostMemory:
    """A memfd of weights, mapped."""

    def __init__(self, key: str, fd: int) -> None:
        self.key = key
        self.bytes = os.fstat(fd).st_size
        self._memory = mmap.mmap(fd, self.bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._protect(mmap.PROT_READ)

    def _protect(self, protection: int) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(self.bytes), protection):
            number = ctypes.get_errno()
            raise Denied(f"mprotect of the weights '{self.key}': {os.strerror(number)}")

    def read(self, offset: int, size: int) -> bytes:
        return self._memory[offset : offset + size]

    def torch_tensor(self, dtype: str, shape: list[int], offset: int) -> Any:
        import torch

        kind, count = getattr(torch, dtype), math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(self._memory, dtype=kind, count=count, offset=offset).view(shape)

    def numpy_array(self, dtype: str, shape: list[int], offset: int) -> Any:
        import numpy

        kind = numpy.dtype(dtype)
        array: Any = numpy.frombuffer(self._memory, kind, math.prod(shape), offset)
        array = array.reshape(shape)
        array.flags.writeable = False  # an exception in place of SIGSEGV
        return array

    def unshare(self) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)


class Weights(Mapping[str, Any]):
    """The tensors of a part of a model, mapped from memory that processes share. Keep it for as
    long as they are used: it is what makes this process a user of them.

    A write into one ends the process by SIGSEGV, until `unshare`. (On a GPU, the kernel that writes
    fails, and the process can compute nothing more there.)
    """

    def __init__(
        self,
        key: str,
        memory: _HostMemory | DeviceMemory,
        connection: _Connection | None,
        loaded: bool,
    ) -> None:
        self.key = key
        #: others can map them
        self.held = connection is not None
        #: this process has put them; False: it has mapped what another one has loaded
        self.loaded = loaded
        self._connection = connection
        self._memory = memory
        self.bytes = memory.bytes
        self._tensors = self._read()

    def _read(self) -> dict[str, Any]:
        memory = self._memory
        try:
            if memory.read(0, min(8, self.bytes)) != _MAGIC:
                raise ValueError("it has another beginning")
            (size,) = struct.unpack("<Q", memory.read(8, 8))
            if size > self.bytes - 16:
                raise ValueError("it ends before its list of tensors")
            manifest = json.loads(memory.read(16, size))
            is_torch = manifest["library"] == "torch"
            make = memory.torch_tensor if is_torch else memory.numpy_array
            tensors = manifest["tensors"].items()
            return {name: make(*described) for name, described in tensors}
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RuntimeError,
            struct.error,
        ) as error:
            raise Corrupt(f"the memory of the weights '{self.key}' is none: {error}") from None

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<Weights '{self.key}': {len(self)} tensors, {self.bytes} bytes>"

    def unshare(self) -> None:
        """This process may write the tensors from now on. What it writes becomes its own copy; the
        tensors stay where they are, and no other process sees the change. On a GPU all becomes its
        own copy, at once; raises NoSpace where there is no room for that."""
        self._memory.unshare()

    def close(self) -> None:
        """This process is no user any more. The tensors stay valid. Idempotent."""
        if self._connection:
            self._connection.close()


class _Tensors:
    """What is put: where each tensor lies in the memory, and its bytes."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors
        kinds = {_library_of(name, tensor) for name, tensor in tensors.items()}
        if len(kinds) > 1:
            raise Invalid("tensors of torch and arrays of numpy cannot be put together")
        self.library = kinds.pop() if kinds else "numpy"
        described: dict[str, list[Any]] = {}
        # Tied weights are one tensor under several names.
        offsets: dict[tuple[Any, ...], int] = {}
        end = 0
        for name, tensor in tensors.items():
            dtype, size, identity = self._describe(name, tensor)
            if identity not in offsets:
                offsets[identity] = end
                end += -(-size // _ALIGNMENT) * _ALIGNMENT
            described[name] = [dtype, list(tensor.shape), offsets[identity]]
        self._described, self._end = described, end

    def _describe(self, name: str, tensor: Any) -> tuple[str, int, tuple[Any, ...]]:
        if self.library == "torch":
            dtype = str(tensor.dtype).removeprefix("torch.")
            place: Any = tensor.data_ptr() or name
            strides: Any = tensor.stride()
        else:
            if tensor.dtype.hasobject:
                raise Invalid(f"'{name}' has Python objects: expected an array of numbers")
            dtype, strides = tensor.dtype.str, tensor.strides
            place = tensor.__array_interface__["data"][0] or name
        size = tensor.nbytes
        identity = (place, strides, tuple(tensor.shape), dtype) if size else (name,)
        return dtype, size, identity

    def head(self) -> tuple[bytes, int]:
        """The bytes before the first tensor, and the size of the whole memory."""
        # The offsets count from the end of the head, whose size depends on how long they are.
        begin = 0
        while True:
            tensors = {
                name: [dtype, shape, begin + offset]
                for name, (dtype, shape, offset) in self._described.items()
            }
            text = json.dumps({"library": self.library, "tensors": tensors}).encode()
            needed = -(-(16 + len(text)) // mmap.PAGESIZE) * mmap.PAGESIZE
            if needed <= begin:
                self._begin = begin
                return _MAGIC + struct.pack("<Q", len(text)) + text, begin + max(self._end, 1)
            begin = needed

    def write(
        self, put: Callable[[int, Any], object], written: Callable[[str], object] | None
    ) -> None:
        """put(offset, tensor) copies one."""
        done: set[int] = set()
        for name in list(self.tensors):
            tensor = self.tensors[name]
            offset = self._begin + self._described[name][2]
            if offset not in done and tensor.nbytes:
                put(offset, tensor)
                done.add(offset)
            del tensor
            if written:
                written(name)

    def bytes_of(self, tensor: Any) -> memoryview:
        """In the memory of the host."""
        if self.library == "torch":
            import torch

            flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            return memoryview(flat.numpy().data)
        import numpy

        return memoryview(numpy.ascontiguousarray(tensor).reshape(-1).view(numpy.uint8).data)


def _library_of(name: str, tensor: Any) -> str:
    module = type(tensor).__module__.partition(".")[0]
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "untyped_storage"):
        return "torch"
    if hasattr(tensor, "__array_interface__"):
        return "numpy"
    raise Invalid(
        f"'{name}' is a {module}.{type(tensor).__qualname__}: expected a tensor of torch or an "
        "array of numpy"
    )


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data[:_WRITE_SIZE_MAX], offset)
        data, offset = data[count:], offset + count


def _seal(fd: int) -> None:
    deadline = time.monotonic() + _SEAL_SECONDS
    while True:
        try:
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                raise
        time.sleep(0.001)


class WeightStore:
    """Weights of models that outlive the process that loaded them, on this machine::

        store = coxswain.WeightStore(keep=600)
        key = store.key("/srv/model", shard=rank, shards=4, dtype="bfloat16")
        weights = store.get(key)
        if weights is None:  # nobody has them: this process loads
            weights = store.put(key, load(rank))
        model.load_state_dict(weights, assign=True)

    They stay for `keep` seconds after their last user has ended; None: until `drop`, or
    `coxswain weights drop`. Only processes of the same user reach them. Where the process that
    holds them dies, its users go on, and the next one loads.

    device: where they are, "cpu" or "cuda:N". Tensors of torch are copied there by put, and mapped
    there by get. Arrays of numpy come back from a GPU as objects with `__cuda_array_interface__`.
    """

    def __init__(self, keep: float | None = 60.0, device: object = "cpu") -> None:
        """Raises Invalid; Unsupported: this machine cannot share the memory of that device."""
        if keep is not None and not 0 <= keep < 1e12:
            raise Invalid(f"keep is {keep}: expected seconds, 0 or more, or None")
        self._keep_ms = _FOREVER if keep is None else int(keep * 1000)
        self._device = None if str(device) == "cpu" else Device(device)
        # Of a key that this process was told to load, until it puts it.
        self._loading: dict[str, _Connection] = {}

    @staticmethod
    def key(
        model: str | os.PathLike[str],
        *,
        revision: str | None = None,
        shard: int = 0,
        shards: int = 1,
        dtype: str = "",
        quantization: str | None = None,
        more: object = None,
    ) -> str:
        """Names a part of a model so that nothing stale is mapped. `model`: a folder, whose files
        count with name, size, time of change and inode; or another name, with a `revision` that
        says which. `more`: whatever else changes the tensors, as JSON."""
        name = os.fspath(model)
        files: list[Any] = []
        if os.path.isdir(name):
            name = os.path.realpath(name)
            for entry in sorted(os.scandir(name), key=lambda one: one.name):
                status = entry.stat()  # of what a link leads to
                if not entry.is_dir():
                    times = (status.st_mtime_ns, status.st_ctime_ns)
                    files.append((entry.name, status.st_size, *times, status.st_dev, status.st_ino))
        elif revision is None:
            raise Invalid(f"{name} is no folder: a revision has to say which weights it names")
        facts = [name, revision, shard, shards, dtype, quantization, files, more]
        digest = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]
        words = [name, revision, f"{shard + 1}/{shards}", dtype, quantization]
        text = " ".join(word for word in words if word)
        return f"{text.encode()[-_KEY_SIZE + 80 :].decode(errors='ignore')} {digest}"

    def _full(self, key: str) -> str:
        """The key of the holder: of a GPU, its name belongs to it."""
        if self._device is None or key.endswith(self._device.name):
            return key
        return f"{key} {self._device.name}"

    def get(self, key: str, timeout: float | None = 300.0) -> Weights | None:
        """The weights of the key. None: nobody has them, and this process is to load and `put`
        them; until then others that ask wait for it. Waits for another process that loads them,
        for `timeout` seconds at most; raises TimedOut."""
        key = self._full(key)
        with contextlib.ExitStack() as undo:
            connection = undo.enter_context(_Connection())
            answer = connection.ask(_GET, key, self._keep_ms, timeout=timeout)
            if answer.status == _EMPTY:
                self._loading[key] = connection
                undo.pop_all()
                return None
            _check(answer.status, key)
            weights = self._map(key, answer, connection, loaded=False)
            undo.pop_all()
            return weights

    def put(
        self,
        key: str,
        tensors: Mapping[str, Any],
        written: Callable[[str], object] | None = None,
    ) -> Weights:
        """Copies the tensors into memory that all share, and returns them as they lie there.
        written(name) is called when a tensor has been copied: it can be freed. If another process
        has put the same key meanwhile, its weights are returned. Where no holder can be reached,
        they are nobody else's, and `held` is False. Raises NoSpace."""
        key = self._full(key)
        with contextlib.ExitStack() as undo:
            connection = self._loading.pop(key, None)
            if connection:
                undo.enter_context(connection)
            made = self._make(key, tensors, written)
            undo.callback(os.close, made.fd)
            for _ in range(3):
                try:
                    connection = connection or undo.enter_context(_Connection())
                    status = connection.ask(_PUT, key, self._keep_ms, put=made).status
                    if status == _TAKEN and (weights := self.get(key)):
                        return weights
                except (Closed, NotFound):  # the holder has died since: another one
                    connection = None
                    continue
                if status == _TAKEN:  # dropped meanwhile
                    connection = undo.enter_context(self._loading.pop(key))
                    continue
                _check(status, key)
                break
            else:
                connection = None
            own = made._replace(fd=os.dup(made.fd))
            weights = self._map(key, own, connection, loaded=True)
            undo.pop_all()
            os.close(made.fd)
            return weights

    def _make(
        self, key: str, tensors: Mapping[str, Any], written: Callable[[str], object] | None
    ) -> _Answer:
        """Memory with these tensors."""
        parts = _Tensors(tensors)
        if self._device is None:
            return _make_on_host(key, parts, written)
        return _make_on_device(self._device, key, parts, written)

    def _map(
        self, key: str, answer: _Answer, connection: _Connection | None, loaded: bool
    ) -> Weights:
        """Closes the answer's fd."""
        if answer.fd < 0:
            raise Corrupt(f"the holder of weights sent no memory of '{key}'")
        try:
            if (answer.memory == _HOST) != (self._device is None):
                raise Corrupt(f"the weights '{key}' are in the memory of another kind of device")
            memory: _HostMemory | DeviceMemory
            if self._device is None:
                memory = _HostMemory(key, answer.fd)
            else:
                memory = DeviceMemory(self._device, answer.number, answer.fd)
            return Weights(key, memory, connection, loaded)
        finally:
            os.close(answer.fd)

    def give_up(self, key: str) -> None:
        """This process does not put the weights that `get` has told it to load: another one that
        waits for them loads them. Idempotent."""
        connection = self._loading.pop(self._full(key), None)
        if connection:
            connection.close()

    def held(self, key: str) -> int:
        """How many bytes others have put under the key; 0: nobody has them."""
        rows = [row for row in self.list() if row["key"] == self._full(key)]
        return sum(row["bytes"] for row in rows)

    def drop(self, key: str | None = None) -> int:
        """Forgets the weights of the key, or all; returns how many. Who has them keeps them."""
        try:
            connection = _Connection(start=False)
        except NotFound:
            return 0
        with connection:
            answer = connection.ask(_DROP, self._full(key) if key else "")
            _check(answer.status, key or "all")
            return answer.number

    def list(self) -> list[dict[str, Any]]:
        """What is held, as `coxswain weights list --json` prints it: of each its key, bytes, users,
        memory, keep_s, left_s, age_s and loading."""
        try:
            connection = _Connection(start=False)
        except NotFound:
            return []
        with connection:
            answer = connection.ask(_LIST, "")
            _check(answer.status, "list")
            with open(answer.fd, "rb") as file:
                file.seek(0)
                return json.load(file)


class _Answer(NamedTuple):
    """What the holder answers; and memory that it is given."""

    status: int
    #: _HOST or _CUDA
    memory: int
    #: bytes of the memory, or how many were dropped
    number: int
    #: -1: none
    fd: int


class _Connection:
    """To this user's holder. `with` closes it."""

    def __init__(self, start: bool = True) -> None:
        """start: a holder is started if there is none; else NotFound."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        places = _places()
        try:
            if self._connect(places):
                return
            if not start:
                raise NotFound("no holder of weights runs for this user")
            _start_holder()
            deadline = time.monotonic() + _START_SECONDS
            while not self._connect(places):
                if time.monotonic() >= deadline:
                    raise NotFound(
                        f"the holder of weights has not started within {_START_SECONDS:.0f} s: try "
                        "`coxswain weights hold` on a terminal, which says why"
                    )
                time.sleep(0.002)
        except BaseException:
            self._socket.close()
            raise

    def _connect(self, places: list[str]) -> bool:
        for place in places:
            try:
                # Another user's is passed over, as where groups are looked for. One that the
                # environment names is meant.
                if len(places) > 1 and os.stat(place).st_uid != os.geteuid():
                    continue
                # The path of a folder may be longer than an address.
                folder = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    self._socket.connect(f"/proc/self/fd/{folder}/{_FILE}")
                finally:
                    os.close(folder)
            except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
                continue
            except PermissionError:
                raise Denied(f"{place} is another user's: expected one's own") from None
            self._check_peer(place)
            return True
        return False

    def _check_peer(self, place: str) -> None:
        size = struct.calcsize("3i")
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        _, user, _ = struct.unpack("3i", credentials)
        if user not in (os.geteuid(), 0):
            raise Denied(f"{place}/{_FILE} is of user {user}: expected {os.geteuid()} or 0")

    def ask(
        self,
        op: int,
        key: str,
        keep_ms: int = 0,
        put: _Answer | None = None,
        timeout: float | None = _ANSWER_SECONDS,
    ) -> _Answer:
        name = key.encode()
        if len(name) > _KEY_SIZE or b"\0" in name or (not name and op in (_GET, _PUT)):
            raise Invalid(f"a key has 1 to {_KEY_SIZE} bytes, and no zero: {key[:80]!r}")
        memory, size = (put.memory, put.number) if put and put.memory != _HOST else (0, 0)
        request = _REQUEST.pack(op, memory, keep_ms, size, name)
        self._socket.settimeout(timeout)
        try:
            sent = socket.send_fds(self._socket, [request], [put.fd] if put else [])
            self._socket.sendall(request[sent:])
            answer, fds, _, _ = socket.recv_fds(
                self._socket, _ANSWER.size, 1, socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
            )
        except TimeoutError:
            raise TimedOut(
                f"no answer about the weights '{key}' within {timeout} s: another process loads "
                "them, or the holder hangs (coxswain weights)"
            ) from None
        except ConnectionError:
            raise Closed("the holder of weights has ended") from None
        if len(answer) < _ANSWER.size:
            for one in fds:
                os.close(one)
            raise Closed("the holder of weights has ended")
        status, memory, number = _ANSWER.unpack(answer)
        return _Answer(status, memory, number, fds[0] if fds else -1)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _places() -> list[str]:
    """Where a holder may listen: as for the sockets of groups (channel/socket/runtime_dir.h)."""
    if own := os.environ.get("COXSWAIN_RUNTIME_DIR"):
        return [own]
    user = os.geteuid()
    login = os.environ.get("XDG_RUNTIME_DIR", "")
    first = [f"{login}/coxswain"] if login.startswith("/") else []
    return [*first, f"/run/user/{user}/coxswain", "/run/coxswain", f"/tmp/coxswain-{user}"]


def _start_holder() -> None:
    """It belongs to nobody: the process that starts it may end, or be killed with its group."""
    command = _command()
    environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    script = '"$0" weights hold </dev/null >/dev/null 2>&1 &'
    subprocess.run(
        ["/bin/sh", "-c", script, command],
        check=False,
        env=environment,
        cwd="/",
        start_new_session=True,
    )


def _command() -> str:
    with contextlib.suppress(ImportError):
        from _coxswain_command import _folder

        program = os.path.join(_folder(), "coxswain")
        if os.access(program, os.X_OK):
            return program
    found = shutil.which("coxswain")
    if not found:
        raise NotFound("there is no command coxswain, which holds weights: expected it in PATH")
    return found


def _check(status: int, key: str) -> None:
    if status == 0:
        return
    if status == _FULL:
        raise Full("the holder has no room for more weights: coxswain weights drop KEY")
    raise Error(f"the holder of weights refused '{key}': status {status}")


def _make_on_host(key: str, parts: _Tensors, written: Callable[[str], object] | None) -> _Answer:
    """Sealed memory."""
    head, size = parts.head()
    fd = os.memfd_create("cox_weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            raise NoSpace(f"{size} bytes for the weights '{key}': {error.strerror}") from None
        _write(fd, memoryview(head), 0)
        parts.write(lambda offset, tensor: _write(fd, parts.bytes_of(tensor), offset), written)
        _seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return _Answer(0, _HOST, size, fd)


def _make_on_device(
    device: Device, key: str, parts: _Tensors, written: Callable[[str], object] | None
) -> _Answer:
    """Memory of a GPU, of which this process keeps no mapping."""
    head, size = parts.head()
    try:
        with DeviceMemory(device, size) as memory:
            memory.write(0, head)
            if parts.library == "torch":
                parts.write(memory.put, written)
                memory.synchronize()
            else:
                parts.write(
                    lambda offset, tensor: memory.write(offset, parts.bytes_of(tensor)), written
                )
            return _Answer(0, _CUDA, size, os.dup(memory.fd))
    except NoSpace as error:
        raise NoSpace(f"{size} bytes on {device} for the weights '{key}': {error}") from None
