"""The commands of pip's bin folder: each becomes the program of its name in the package's folder.

A module beside the package, so that a command does not import the package.
"""

import os
import sys
from typing import NoReturn


def _folder() -> str:
    """The folder of the programs, which is in the package's. An editable install has the package in
    two folders, and only the import system knows the other one."""
    folder = os.path.join(os.path.dirname(__file__), "coxswain", "bin")
    if not os.path.isdir(folder):
        from importlib.util import find_spec

        spec = find_spec("coxswain")
        for package in (spec and spec.submodule_search_locations) or ():
            if os.path.isdir(os.path.join(package, "bin")):
                return os.path.join(package, "bin")
    return folder


def main(command: str = "") -> NoReturn:
    command = command or os.path.basename(sys.argv[0])
    folder = _folder()
    program = os.path.join(folder, command)
    try:
        os.execv(program, [program, *sys.argv[1:]])
    except OSError as error:
        why = f"{program}: {error.strerror}"
    try:
        with open(os.path.join(folder, "missing"), encoding="utf-8") as file:
            packages = file.read().strip()
        why = (
            "coxswain-executor was compiled here without its commands, since libraries were "
            f"missing. Install them (Debian: apt-get install {packages}), and then: "
            "pip install --force-reinstall --no-cache-dir --no-deps coxswain-executor"
        )
    except OSError:
        pass
    sys.exit(f"{command}: {why}")
