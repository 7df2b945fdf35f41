"""A fork server: a process that has imported what ranks need, and forks one where a new interpreter
would import all of it again. coordinator/process/fork_server.c asks it, and has the protocol.

It has one thread, and serves one socket until that ends. It has opened no device: ranks do that. It
refuses where a child would not be as good as a new process, and says why: the rank is then started
as ever.

What a rank has of it: modules, limits, umask, priority, and the processors it may run on. What it
has of its own, as a new process: fds, environment, working directory, signals, process group,
random numbers, and the state of multiprocessing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import itertools
import json
import multiprocessing.context
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import warnings
from typing import Any, NoReturn
from collections.abc import Mapping, Sequence

from . import launch as _launch

_REQUEST = struct.Struct("<III")
_VERSION = 1
# answers, working directory, environment, standard output and error; then those that it inherits
_FD_COUNT = 5
_FD_COUNT_MAX = 128
_ANSWER = struct.Struct("<iii500s")
_REFUSED, _BORN, _READY = 0, 1, 2
# Where a rank has what it inherits; below it has its standard fds, and 3 for the answers.
_ANSWER_FD, _FIRST_FD = 3, 4
_ABOVE = _FIRST_FD + _FD_COUNT_MAX
_PR_SET_PDEATHSIG = 1
# Files in /dev that are no device which a child could not share.
_NO_DEVICES = tuple(
    f"/dev/{name}"
    for name in ("null", "zero", "random", "urandom", "tty", "pts/", "ptmx", "console", "shm/")
)
# How the names of variables begin that libraries read when they are loaded, and not again.
_READ_AT_LOAD = (
    *("LD_", "GLIBC_TUNABLES", "MALLOC_", "TCMALLOC_", "PYTHON"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "TRITON_"),
)


class ForkServer:
    """The coordinator's handle of a fork server. It ends with this process, and with the thread
    that starts it."""

    def __init__(
        self,
        modules: Sequence[str],
        function: str,
        arguments: Sequence[Any] = (),
        *,
        environment: Mapping[str, str] | None = None,
        fork: bool = False,
    ) -> None:
        """modules: that it imports. function: "module:name", which each child calls, with arguments
        that JSON can have. environment: variables that children have beside the coordinator's.
        fork: it is forked from this process, which `obstacle` has found fit for that, and has its
        modules; else it is a new interpreter."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._program: _launch.Program | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reason: str | None = None
        call = {
            "modules": list(modules),
            "function": function,
            "arguments": list(arguments),
            "environment": dict(environment or {}),
            "parent": os.getpid(),
        }
        with theirs:
            if fork:
                sys.stdout.flush()
                sys.stderr.flush()
                with warnings.catch_warnings():  # Python warns of other threads
                    warnings.simplefilter("ignore", DeprecationWarning)
                    self.pid = os.fork()
                if self.pid == 0:
                    _serve_forked(theirs, call)
            else:
                self._program = _launch.program_of(main)
                self._process = subprocess.Popen(
                    [*self._program.command, str(theirs.fileno()), json.dumps(call)],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **call["environment"]},  # type: ignore[dict-item]
                    pass_fds=[theirs.fileno()],
                )
                self.pid = self._process.pid

    def fileno(self) -> int:
        """The socket, for cox_executor_workers.fork_server_fds."""
        return self._socket.fileno()

    def wait(self, timeout: float = 300.0) -> str:
        """Waits until it has imported its modules. Returns "", or why it forks nothing."""
        if self._reason is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                return f"it has not imported its modules within {timeout:.0f} s"
            message = self._socket.recv(4096).decode("utf-8", "replace")
            self._reason = message[1:] if message else "it has ended"
        return self._reason

    def stop(self) -> None:
        """Ends it. Idempotent."""
        self._socket.close()
        if self.pid:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                if self._process:
                    self._process.wait()
                else:
                    os.waitpid(self.pid, 0)
            self.pid = 0


def obstacle(idle: tuple[str, ...] = ()) -> str:
    """Why a child of this process would not be as good as a new one; "": it would be. A thread that
    runs in the moment of the fork may hold a lock, which nobody releases in the child.

    idle: how the names of other threads begin that only wait in the kernel, and whose locks no
    child takes.
    """
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        return f"it has several Python threads: {names}"
    tasks = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            name = file.read().strip()
            if int(task) != os.getpid() and not name.startswith(idle or ("\0",)):
                tasks.append(f"{name} ({task})")
    if tasks:
        return f"libraries have threads in it: {', '.join(tasks)}"
    devices = [
        device
        for device in map(_target_of, _open_fds())
        if device.startswith("/dev/") and not device.startswith(_NO_DEVICES)
    ]
    if devices:
        return f"it has opened {', '.join(devices)}"
    torch = sys.modules.get("torch")
    if torch is not None and (torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()):
        return "it has initialized CUDA"
    return ""


def calm() -> None:
    """Ends the threads of libraries that end theirs before a fork, as OpenBLAS does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def main() -> None:
    """The program of a server that is a new interpreter."""
    _serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))


def _serve_forked(connection: socket.socket, call: dict[str, Any]) -> NoReturn:
    """In a child of the coordinator: nothing of it is used again but its modules."""
    try:
        atexit._clear()
        _forget_multiprocessing()
        gc.freeze()  # or objects close fds, which are others by then
        _close_all_but({0, 1, 2, connection.fileno()})
        _serve(connection, call)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _serve(connection: socket.socket, call: dict[str, Any]) -> NoReturn:
    _end_with(call["parent"])
    os.setpgid(0, 0)  # keys pressed at the terminal signal the coordinator only
    _reset_signals()
    before = dict(os.environ)
    reason = ""
    try:
        for module in call["modules"]:
            importlib.import_module(module)
        module, _, name = call["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        calm()
        reason = obstacle()
    except Exception as error:  # pylint: disable=broad-exception-caught
        reason, function = f"{type(error).__name__}: {error}", None
    _set_title("coxswain fork server")
    gc.collect()
    gc.freeze()  # so that pages stay shared
    server = _Server(connection, call, before, reason, function)
    with contextlib.suppress(OSError):
        connection.send(b" " + reason.encode())
        while server.serve():
            pass
    os._exit(0)


class _Server:
    def __init__(
        self,
        connection: socket.socket,
        call: dict[str, Any],
        before: dict[str, str],
        reason: str,
        function: Any,
    ) -> None:
        self.connection, self.reason, self.function = connection, reason, function
        self.arguments = call["arguments"]
        self.parent = call["parent"]
        after = dict(os.environ)
        #: what the imports have changed, and what children have beside the coordinator's
        self.changes: dict[str, str | None] = {
            **{
                name: after.get(name)
                for name in {*before, *after}
                if before.get(name) != after.get(name)
            },
            **call["environment"],
        }
        #: the environment in which libraries were loaded
        self.loaded = before

    def serve(self) -> bool:
        """Serves a request. False: the coordinator has ended."""
        message, fds, _, _ = socket.recv_fds(self.connection, 64, _FD_COUNT_MAX)
        if not message:
            return False
        version, rank, fd_count = _REQUEST.unpack(message)
        if version != _VERSION or len(fds) != _FD_COUNT + fd_count:
            return False
        with open(fds[2], "rb", closefd=False) as file:
            file.seek(0)
            environment = _environment_of(file.read())
        reason = self.reason or self.obstacle(environment, {*fds})
        if reason:
            _answer(fds[0], _REFUSED, text=reason)
        else:
            sys.stdout.flush()
            sys.stderr.flush()
            try:
                pid = os.fork()
            except OSError as error:
                _answer(fds[0], _REFUSED, text=str(error))
                pid = -1
            if pid == 0:
                self.fork(fds, environment)
        for fd in fds:
            os.close(fd)
        if not reason and pid > 0:
            os.waitpid(pid, 0)
        return True

    def obstacle(self, environment: dict[str, str], fds: set[int]) -> str:
        """As obstacle, for this request."""
        if unknown := _open_fds() - {0, 1, 2, self.connection.fileno()} - fds:
            return f"its libraries have opened files, fds {sorted(unknown)}"
        changed = sorted(
            name
            for name in {*environment, *self.loaded}
            if name.startswith(_READ_AT_LOAD)
            and name not in self.changes
            and environment.get(name) != self.loaded.get(name)
        )
        if changed:
            return f"its libraries were loaded with other values of {', '.join(changed)}"
        return obstacle()

    def fork(self, fds: list[int], environment: dict[str, str]) -> NoReturn:
        """Between server and rank: has the rank as its child, and ends, so that the coordinator
        becomes its parent."""
        pid, own = -1, os.getpid()
        try:
            pid = os.fork()
            if pid:
                _answer(fds[0], _BORN, pid, own)
        except OSError as error:
            _answer(fds[0], _REFUSED, text=str(error))
        if pid == 0:
            self.run(fds, environment, own)
        os._exit(0)

    def run(self, fds: list[int], environment: dict[str, str], between: int) -> NoReturn:
        """The rank."""
        try:
            fds[0] = fcntl.fcntl(fds[0], fcntl.F_DUPFD_CLOEXEC, _ABOVE)  # also for an error below
            await_end(between)
            _end_with(self.parent)
            os.setpgid(0, 0)
            os.fchdir(fds[1])
            _arrange_fds(fds)
            fds[0] = _ANSWER_FD
            self.connection.detach()
            _reset_signals()
            _set_environment({**environment, **self.changes})
            _forget_multiprocessing()
            renew_random_numbers()
            _renew_streams()
            if reason := obstacle():
                raise RuntimeError(reason)  # a library has noticed the fork
            _set_title(f"coxswain rank {environment['COXSWAIN_RANK']}")
            sys.argv[:] = ["-c"]
            _answer(_ANSWER_FD, _READY, os.getpid(), between)
            if not os.read(_ANSWER_FD, 1):
                os._exit(127)  # the coordinator has given up
            os.close(_ANSWER_FD)
        except BaseException as error:
            _answer(fds[0], _REFUSED, text=f"{type(error).__name__}: {error}")
            os._exit(127)
        _exit(self.function, self.arguments)


def _exit(function: Any, arguments: list[Any]) -> NoReturn:
    """Calls the function, and ends as an interpreter does."""
    status = 0
    try:
        function(*arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 0xFF)


def _answer(fd: int, kind: int, pid: int = 0, parent: int = 0, text: str = "") -> None:
    """The other side may have given up."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as answers:
        answers.send(_ANSWER.pack(kind, pid, parent, text.encode()[:499]), socket.MSG_NOSIGNAL)


def _set_title(title: str) -> None:
    """What `ps` shows, where setproctitle is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("setproctitle").setproctitle(title)


def _end_with(parent: int) -> None:
    """Has this process end with its parent, which has this pid unless it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)


def await_end(pid: int) -> None:
    """Returns when the parent, which had this pid, has ended."""
    while os.getppid() == pid:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            if os.getppid() == pid:  # so it is the parent's
                select.select([pidfd], [], [])
            os.close(pidfd)


def _environment_of(block: bytes) -> dict[str, str]:
    variables = (os.fsdecode(variable) for variable in block.split(b"\0") if b"=" in variable)
    return dict(variable.split("=", 1) for variable in variables)


def _set_environment(environment: dict[str, str | None]) -> None:
    """In Python and in C."""
    for name in [name for name in os.environ if environment.get(name) is None]:
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if value is not None})


def _open_fds() -> set[int]:
    # without the one by which they were listed
    return {fd for fd in map(int, os.listdir("/proc/self/fd")) if _target_of(fd)}


def _target_of(fd: int) -> str:
    """What is open; "": nothing."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _close_all_but(kept: set[int]) -> None:
    for fd in _open_fds() - kept:
        with contextlib.suppress(OSError):
            os.close(fd)


def _arrange_fds(fds: list[int]) -> None:
    """0 from /dev/null, 1, 2, 3 for the answers, from 4 on what it inherits, and no others."""
    answers, _, _, *streams = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for fd in fds)
    null = fcntl.fcntl(os.open(os.devnull, os.O_RDONLY), fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    os.dup2(null, 0)
    os.dup2(answers, _ANSWER_FD, inheritable=False)
    for i, fd in enumerate(streams):
        os.dup2(fd, i + 1 if i < 2 else _FIRST_FD + i - 2)
    os.closerange(_FIRST_FD + len(streams) - 2, 1 << 20)


def _reset_signals() -> None:
    """As in a new interpreter, except what libraries have set behind Python's back."""
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            if signal.getsignal(number) is not None:
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _forget_multiprocessing() -> None:
    """This process was started by none of it, and has its resource tracker yet to start."""
    process: Any = multiprocessing.process
    # The type of a main process is gone in one that multiprocessing has started.
    process._current_process = current = process.BaseProcess.__new__(process.BaseProcess)
    key = process.AuthenticationString(os.urandom(32))
    vars(current).update(
        _identity=(),
        _name="MainProcess",
        _parent_pid=None,
        _popen=None,
        _closed=False,
        _config={"authkey": key, "semprefix": "/mp"},
    )
    process._parent_process = None
    process._process_counter = itertools.count(1)
    process._children = set()
    default: Any = multiprocessing.context._default_context
    default._actual_context = None
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.util._run_after_forkers()  # type: ignore[attr-defined]
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None


def _renew_streams() -> None:
    """Those of fds 0, 1 and 2, which are a null device and pipes now."""
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
    sys.stderr.reconfigure(  # type: ignore[union-attr]
        line_buffering=not sys.stderr.write_through  # type: ignore[union-attr]
    )


def renew_random_numbers() -> None:
    """random's and OpenSSL's renew themselves. torch's begin with the same seed in each process."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
