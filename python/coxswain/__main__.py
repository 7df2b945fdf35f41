"""`python -m coxswain` is the command `coxswain`."""

import os
import sys

try:
    from _coxswain_command import main
except ImportError:  # pip has not installed this package: the command is a program in PATH
    try:
        os.execvp("coxswain", ["coxswain", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"python -m coxswain: no program coxswain in PATH: {error.strerror}")
main("coxswain")
