"""Runs a command; when it ends, or a signal ends this process, everything that it started ends too.

Usage: supervised.py COMMAND...

This process adopts the orphans among its descendants, so that none gets away by leaving its process
group. At SIGINT, SIGTERM or SIGHUP all of them get SIGTERM, and SIGKILL GRACE seconds later. Then
the names in /dev/shm that carry the process id of one of them are removed.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEADLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 3
NOBODY = 65534  # some tests run as this user
PR_SET_CHILD_SUBREAPER = 36
started = time.time()


class Ended(BaseException):
    def __init__(self, number):
        self.number = number


def descendants():
    """Process ids of all descendants, parents before children."""
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open("/proc/%s/stat" % entry, "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def send(pid, number):
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def end_descendants():
    """Returns the process ids of those that were there."""
    asked = set()
    begin = time.monotonic()
    while time.monotonic() < begin + GRACE + 30:
        reap()
        living = descendants()
        if not living:
            break
        for pid in living:
            if time.monotonic() > begin + GRACE:
                send(pid, signal.SIGKILL)
            elif pid not in asked:
                send(pid, signal.SIGTERM)
                send(pid, signal.SIGCONT)  # a stopped process takes no other signal
        asked.update(living)
        time.sleep(0.05)
    else:
        print("still there: %s" % " ".join(map(str, descendants())), file=sys.stderr)
    return asked


def remove_names(pids):
    """Removes what these processes left in /dev/shm. Tests put a process id into every name."""
    try:
        entries = list(os.scandir("/dev/shm"))
    except OSError:
        return
    for entry in entries:
        try:
            info = entry.stat(follow_symlinks=False)
            ours = pids.intersection(map(int, re.findall(r"\d+", entry.name)))
            if ours and info.st_uid in (os.getuid(), NOBODY) and info.st_ctime >= started - 1:
                os.unlink(entry.path)
        except OSError:
            pass


def run(command, own_group=True, stdout=None, **environment):
    """Returns the exit status of `command`, once it and all its descendants have ended."""
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=stdout,
        stdin=subprocess.DEVNULL if own_group else None,
        # A terminal's Ctrl-C comes to this process alone, which ends the others in order.
        preexec_fn=os.setpgrp if own_group else None)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == process.pid:
            break
    process.returncode = os.waitstatus_to_exitcode(status)
    stray = end_descendants()
    if stray:
        print("%s left processes, which were ended: %s" % (
            command[0], " ".join(map(str, sorted(stray)))), file=sys.stderr)
    return process.returncode


def supervise(main):
    """Runs main() and exits with what it returns, or by the signal that ended it."""
    seen = []

    def at_signal(number, _frame):
        seen.append(number)
        if len(seen) == 1:  # what more come change nothing
            raise Ended(number)

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in DEADLY:
        signal.signal(number, at_signal)
    try:
        status = main()
    except Ended as ended:
        remove_names(end_descendants())
        print("ended by %s, with all that was started" % signal.Signals(ended.number).name,
              file=sys.stderr)
        signal.signal(ended.number, signal.SIG_DFL)
        os.kill(os.getpid(), ended.number)
        status = 128 + ended.number
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    supervise(lambda: run(sys.argv[1:]))
