"""How a function becomes the program of a rank."""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any
from collections.abc import Callable, Sequence

from ._errors import Invalid

_MAIN = "__coxswain_main__"
_RUN = "import coxswain._launch; coxswain._launch.main()"


def command_of(program: Sequence[str] | Callable[[], Any]) -> list[str]:
    """The command that each rank executes: as given, or one that calls the function."""
    if not callable(program):
        if isinstance(program, (str, bytes)) or not program:
            raise Invalid(
                "the program of the ranks is a list, as for subprocess: "
                "['python3', 'worker.py']; or a function"
            )
        return [os.fspath(part) for part in program]
    name = getattr(program, "__qualname__", "")
    module = getattr(program, "__module__", None)
    if not module or not name or "<" in name:
        raise Invalid(
            f"{program!r} has no place that the ranks can import it from: use a function "
            "at the top level of a module"
        )
    call: dict[str, Any] = {"module": module, "name": name, "path": sys.path}
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        if not file:
            raise Invalid(
                f"the ranks cannot import {name} from an interactive session: put it into a module"
            )
        call["file"] = os.path.abspath(file)
    return [sys.executable, "-c", _RUN, json.dumps(call)]


def main() -> None:
    """In a rank: imports the function and calls it."""
    call = json.loads(sys.argv.pop(1))
    sys.path[:] = call["path"]
    if "file" in call:
        namespace: Any = runpy.run_path(call["file"], run_name=_MAIN)
        first, *rest = call["name"].split(".")
        function = namespace[first]
    else:
        import importlib  # pylint: disable=import-outside-toplevel

        function, rest = importlib.import_module(call["module"]), call["name"].split(".")
    for part in rest:
        function = getattr(function, part)
    function()
