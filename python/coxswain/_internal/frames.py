"""What a worker writes of its Python frames when somebody asks for its stacks.

faulthandler has a handler that writes the frames of all threads without the GIL. It is registered
for a signal, taken from there, and called by a thread of the library as a function: no signal is
sent.
"""

from __future__ import annotations

import atexit
import faulthandler
import os

from coxswain._native import lib

_registered = False


def register() -> None:
    """Once in a process. Where it cannot be done, stacks have native frames alone."""
    global _registered
    if _registered:
        return
    number = lib.coxpy_frames_signal()
    if not number:
        return
    fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    faulthandler.register(number, file=fd, all_threads=True, chain=False)
    if lib.coxpy_frames_take(number, fd):
        _registered = True
        # The interpreter frees what the handler reads.
        atexit.register(lib.coxpy_frames_end)
    else:
        os.close(fd)
