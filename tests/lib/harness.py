"""What is left of processes and names: children that are started, orphans that become ours, names in /dev/shm, sockets
in a folder for them that is this script's.

The script that imports this is the subreaper of all it started: a process whose parent was killed becomes its child,
so that "all processes are gone" is "there is no child".
"""

import atexit
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time

SHM = "/dev/shm"
# Whatever takes longer is called lost.
PATIENCE = 60

PR_SET_CHILD_SUBREAPER = 36
running = {}  # of all whose end was not seen: pid to process; numbers come again


class Failure(Exception):
    pass


def begin():
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.exit(77)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="cox_doors_")
    atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"])


def environment(**more):
    env = {key: value for key, value in os.environ.items() if not key.startswith("COXSWAIN_")}
    env.update(more)
    return env


class Process:
    """A command whose output goes to files: nobody who is killed can leave a pipe open."""

    def __init__(self, arguments, stdin="/dev/null", **env):
        self.arguments = arguments
        self.files = [tempfile.TemporaryFile("w+", prefix="cox_chaos_", encoding="utf-8", errors="replace")
                      for _ in range(2)]
        actions = [(os.POSIX_SPAWN_OPEN, 0, stdin, os.O_RDONLY, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, file.fileno(), number + 1) for number, file in enumerate(self.files)]
        self.pid = os.posix_spawn(arguments[0], arguments, environment(**env), file_actions=actions, setsigmask=[])
        self.status = None  # once it has ended: exit status, or minus the signal
        running[self.pid] = self

    @property
    def ended(self):
        return self.status is not None

    def text(self, number):
        size = os.fstat(self.files[number].fileno()).st_size
        return os.pread(self.files[number].fileno(), size, 0).decode("utf-8", "replace")

    @property
    def out(self):
        return self.text(0)

    @property
    def err(self):
        return self.text(1)

    def kill(self, number):
        """False: it has ended already."""
        reap()
        if self.ended:
            return False
        os.kill(self.pid, number)
        return True

    def wait(self, patience=PATIENCE):
        end = time.monotonic() + patience
        while not self.ended:
            reap()
            left = end - time.monotonic()
            if not self.ended and left <= 0:
                raise Failure("no end after %d s" % patience)
            if not self.ended:
                signal.sigtimedwait([signal.SIGCHLD], left)
        return self.status

    def close(self):
        for file in self.files:
            file.close()

    def describe(self):
        return "%s\nstatus %s\n--- stdout\n%s\n--- stderr\n%s" % (
            " ".join(self.arguments), "none yet" if self.status is None else self.status, self.out[-4000:], self.err[-8000:])


def reap():
    """False: there is no child any more."""
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            process = running.pop(pid, None)
            if process:  # not one whose parent has died, of which it is enough that it is gone
                process.status = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return False


def all_gone(patience=PATIENCE):
    end = time.monotonic() + patience
    while reap():
        left = end - time.monotonic()
        if left <= 0:
            return False
        signal.sigtimedwait([signal.SIGCHLD], left)
    return True


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        return "(%s)" % error.strerror


def children(pid):
    found = []
    try:
        for task in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/children" % (pid, task), encoding="ascii") as file:
                found += [int(child) for child in file.read().split()]
    except OSError:
        pass  # it has ended meanwhile
    return found


def descendants(pid):
    found = []
    for child in children(pid):
        found += [child] + descendants(child)
    return found


def dump():
    """The state of everything that is left, as far as it can be seen."""
    lines = []
    for pid in descendants(os.getpid()):
        lines.append("pid %d: %s" % (pid, read("/proc/%d/cmdline" % pid).replace("\0", " ")))
        try:
            tasks = os.listdir("/proc/%d/task" % pid)
        except OSError:
            tasks = []
        for task in tasks:
            folder = "/proc/%d/task/%s/" % (pid, task)
            lines.append("  %s %s state %s in %s" % (task, read(folder + "comm").strip(),
                                                     read(folder + "stat").rpartition(")")[2][1:2],
                                                     read(folder + "wchan")))
            lines += ["    " + line for line in read(folder + "stack").splitlines()]
    return "\n".join(lines)


def end_everything():
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    all_gone()


def names(prefix):
    """Of groups whose name starts with this."""
    return sorted(name for name in os.listdir(SHM) if name.startswith((prefix, "sem." + prefix)))


def names_of(group):
    """Of exactly this group."""
    return names(group + "_")


def doors():
    """Sockets of groups, alive or dead."""
    try:
        return sorted(os.listdir(os.path.join(os.environ["XDG_RUNTIME_DIR"], "coxswain")))
    except FileNotFoundError:
        return []


def bytes_of(group):
    total = 0
    for name in names_of(group):
        try:
            total += os.stat(os.path.join(SHM, name)).st_blocks * 512
        except FileNotFoundError:
            pass
    return total


def count_fds():
    return len(os.listdir("/proc/self/fd"))


def run_tests(tests, seed, describe, prefix):
    """Runs them in order; describe tells, for a failure, what was going on. Names that a failed test left are removed.
    Returns the exit status."""
    failed = 0
    for function in tests:
        begin_time = time.monotonic()
        fds = count_fds()
        try:
            counters = function()
            if not all_gone():
                raise Failure("processes are left")
            if count_fds() > fds:
                raise Failure("%d fds before, %d after" % (fds, count_fds()))
            verdict = "ok" + "".join("; %s %s" % (name, count) for name, count in sorted((counters or {}).items()))
        except Failure as failure:
            failed += 1
            verdict = "FAILED with --seed %s: %s\n%s\n%s" % (seed, str(failure)[:2000], describe(), dump())
            end_everything()
            for name in names(prefix):
                os.unlink(os.path.join(SHM, name))
            for door in doors():
                os.unlink(os.path.join(os.environ["XDG_RUNTIME_DIR"], "coxswain", door))
        print("%s (%.1f s) %s" % (function.__name__, time.monotonic() - begin_time, verdict), flush=True)
    return 1 if failed else 0
