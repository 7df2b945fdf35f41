"""Has the kernel kill processes for want of memory: the OOM killer of a control group."""

import contextlib
import os
import subprocess
import sys
import time

# Fills the group's memory. The kernel kills it last.
HOG = """import os, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
kept = []
while True:
    kept.append(bytes([1]) * 2**20)"""
LIMIT = str(32 << 20)


_PARENTS = {
    "/sys/fs/cgroup/memory": "memory.limit_in_bytes",
    "/sys/fs/cgroup": "memory.max",
}


def _group():
    """A new control group with a limit, or None: there is no right to make one."""
    for parent, limit in _PARENTS.items():
        path = f"{parent}/coxswain_oom_{os.getpid()}"
        with contextlib.suppress(OSError):
            os.mkdir(path)
            try:
                if os.path.exists(f"{path}/{limit}"):
                    _write(f"{path}/{limit}", LIMIT)
                    return path
            except OSError:
                pass
            os.rmdir(path)
    return None


def clear(pid):
    """Removes the group of a process that has called kill."""
    for parent in _PARENTS:
        path = f"{parent}/coxswain_oom_{pid}"
        deadline = time.monotonic() + 5
        while os.path.exists(path) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.rmdir(path)
                return
            time.sleep(0.05)


def _write(path, text):
    with open(path, "w") as file:
        file.write(text)


def kill(pids):
    """Returns when the kernel has killed these processes; False: nobody may do that here."""
    group = _group()
    if group is None:
        return False
    try:
        for pid in pids:
            _write(f"/proc/{pid}/oom_score_adj", "1000")
            _write(f"{group}/cgroup.procs", str(pid))
        hog = subprocess.Popen([sys.executable, "-I", "-S", "-c", HOG, f"{group}/cgroup.procs"])
        deadline = time.monotonic() + 60
        while any(is_alive(pid) for pid in pids):
            assert time.monotonic() < deadline, "the kernel has killed nobody"
            time.sleep(0.005)
        hog.kill()
        hog.wait()
        return True
    finally:
        clear(os.getpid())


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")")[1].split()[0] not in "ZX"
    except OSError:
        return False
