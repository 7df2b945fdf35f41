"""How a function becomes the program of a rank: as multiprocessing's "spawn" does it.

A rank is a new interpreter with the flags and the module path of this one. If the function or its
arguments are of the main module, it runs that under the name __mp_main__. Then it calls the
function. What it needs to know lies in a file in memory, which it opens through /proc: a command
line is too short for a long module path.
"""

from __future__ import annotations

import os
import pickle
import runpy
import subprocess
import sys
import types
import weakref
from types import NoneType
from typing import Any
from collections.abc import Callable, Mapping, Sequence

from .errors import Invalid, StateError

MAIN = "__mp_main__"
# Nothing of this package can be imported before the path is set. "" in the path is the working
# directory, which may have a pickle.py.
_RUN = """import sys
sys.path = [entry for entry in sys.path if entry]
import pickle
with open(sys.argv[2], "rb") as file:
    call = pickle.load(file)
del sys.argv[1:3]
sys.path[:] = call["path"]
import coxswain._internal.launch
coxswain._internal.launch.main(call)"""

# What "" in the module path meant when this process began.
try:
    _DIRECTORY = os.getcwd()
except OSError:
    _DIRECTORY = "/"
# How this rank has the main module, while that is being run; else empty.
_preparing: dict[str, str] = {}


class Program:
    """The command of a rank. It is good until it is closed, or this process ends."""

    def __init__(self, command: list[str], call: dict[str, Any] | None = None) -> None:
        self.command = command
        #: Idempotent.
        self.close: Callable[[], object] = lambda: None
        if call is not None:
            fd = os.memfd_create("coxswain program", os.MFD_CLOEXEC)
            self.close = weakref.finalize(self, os.close, fd)
            with open(fd, "wb", closefd=False) as file:
                pickle.dump(call, file)
            self.command = [*command, f"/proc/{os.getpid()}/fd/{fd}"]


def program_of(
    program: Sequence[str] | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str | None] | None = None,
) -> Program:
    """What each rank executes: a command as it is given, or one that calls the function. env: the
    changes of its environment."""
    if not callable(program):
        if isinstance(program, (str, bytes)) or not program:
            raise Invalid(
                "the program of the ranks is a list, as for subprocess: "
                "['python3', 'worker.py']; or a function"
            )
        if args or kwargs:
            raise Invalid("args and kwargs are for a function; a command has its own arguments")
        return Program([os.fspath(part) for part in program])
    main = _main_module()
    pickled, needs_main = _pickled((program, tuple(args), dict(kwargs or {})), bool(main))
    path = [os.path.join(_DIRECTORY, entry) for entry in sys.path]
    if not sys.flags.ignore_environment and (first := (env or {}).get("PYTHONPATH")):
        path = [*first.split(os.pathsep), *path]
    call = {
        "path": path,
        "main": main if needs_main else {},
        "pickled": pickled,
    }
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return Program([sys.executable, *flags, "-c", _RUN, _name_of(program)], call)


def environment_of(env: Mapping[str, str | None]) -> list[bytes]:
    """The changes of the ranks' environment, as the library takes them."""
    if not isinstance(env, Mapping):
        raise Invalid(f"env is {type(env).__name__}; it may be a mapping of names to values")
    changes = []
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, (str, NoneType)):
            raise Invalid(
                f"env has {name!r}: {value!r}; it may have names and values that are str, and None "
                "for a variable to be removed"
            )
        if not name or "=" in name or "\0" in name:
            raise Invalid(f"env has {name!r}, which is no name: it is empty, or has '=' or NUL")
        if value is not None and "\0" in value:
            raise Invalid(f"the value of {name} in env has a NUL: {value!r}")
        changes.append(os.fsencode(name if value is None else f"{name}={value}"))
    return changes


def directory_of(cwd: str | os.PathLike[str]) -> bytes:
    """The path of the ranks' working directory, as the library takes it."""
    if not isinstance(cwd, (str, os.PathLike)):
        raise Invalid(f"cwd is {type(cwd).__name__}; it may be a path")
    path = os.fsencode(cwd)
    if b"\0" in path or not os.path.isdir(path):
        raise Invalid(f"cwd is {os.fspath(cwd)!r}, which is no directory")
    return path


def _name_of(function: Any) -> str:
    """For `ps`."""
    function = getattr(function, "func", function)  # of a partial
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}:{name}"


def _main_module() -> dict[str, str]:
    """How a rank has the main module of this process; empty: not at all."""
    if _preparing:  # sys.modules has the rank's own start then
        return _preparing
    module = sys.modules["__main__"]
    if spec := getattr(module, "__spec__", None):
        if spec.name not in ("__main__", MAIN):  # python -m
            return {"module": spec.name}
    file = getattr(module, "__file__", None)
    if not file:
        return {}
    path = os.path.join(_DIRECTORY, file)
    if spec and os.path.basename(path) == "__main__.py":  # a folder, or an archive
        path = os.path.dirname(path)
    return {"path": path} if os.path.exists(path) else {}


def _pickled(call: Any, has_main: bool) -> tuple[bytes, bool]:
    """By reference where the ranks can import it, else by cloudpickle; and whether the main module
    is needed."""
    reason: Exception
    try:
        pickled = pickle.dumps(call)
        needs_main = b"__main__" in pickled or MAIN.encode() in pickled
        if has_main or not needs_main:
            return pickled, needs_main
        reason = Invalid("the main module of this process is no file that the ranks could run")
    except Exception as error:  # pylint: disable=broad-exception-caught
        reason = error
    remedy = "use a function at the top level of a module, or install cloudpickle"
    try:
        import cloudpickle  # pylint: disable=import-outside-toplevel

        remedy = "cloudpickle was tried as well"
        return cloudpickle.dumps(call), False
    except ImportError:
        pass
    except Exception as error:  # pylint: disable=broad-exception-caught
        reason = error
    raise Invalid(
        f"{_name_of(call[0])} or its arguments cannot be sent to the ranks ({reason}): {remedy}"
    ) from reason


def check_main() -> None:
    """Raises where a rank starts a group while it runs the main module."""
    if _preparing:
        raise StateError(
            "a rank runs this program's main module, which starts the group again: begin that part "
            "with `if __name__ == '__main__':`"
        )


def main(call: dict[str, Any]) -> None:
    """In a rank: calls the function."""
    if call["main"]:
        _run_main(call["main"])
    function, args, kwargs = pickle.loads(call["pickled"])
    function(*args, **kwargs)


def _run_main(how: dict[str, str]) -> None:
    global _preparing  # pylint: disable=global-statement
    module = types.ModuleType(MAIN)
    _preparing = how
    try:
        if "module" in how:
            found = runpy.run_module(how["module"], run_name=MAIN, alter_sys=True)
        else:
            found = runpy.run_path(how["path"], run_name=MAIN)
    finally:
        _preparing = {}
    module.__dict__.update(found)
    sys.modules["__main__"] = sys.modules[MAIN] = module
