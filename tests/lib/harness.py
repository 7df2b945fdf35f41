"""What the tests in Python share: their processes, what these leave, and the loop of the tests.

A script finds this by its own place, so that it runs by hand as well as under CTest:

    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
    import harness

    options = harness.begin(harness.parser(__doc__))  # SCRIPT BIN_DIR SOURCE_DIR [TEST...]

    @harness.test
    def test_...(): ...

    if __name__ == "__main__":
        sys.exit(harness.main())

A script that is one test itself ends with `harness.script(main)` instead.

guard(), which both call, forks. The script goes on in the child; the parent only waits. When the
script has ended, at Ctrl-C or by any signal as well, the parent kills all processes that it has
left. It removes the script's names in /dev/shm and its temporary folder, which holds the files of
tempfile and XDG_RUNTIME_DIR. A process that is left after an orderly end makes the exit status 1.
If the parent is killed, the child does all this and ends.

main() runs the functions with @test in order, and prints a line for each. A test fails by an
exception; check() raises Failure. A test also fails when it leaves a process, an fd, or a name of
a group of this script in /dev/shm. skip() skips it. Exit status 77: all tests were skipped.

Commands are started in one of two ways. start(), run() and finish() give pipes. Process gives
files, for scripts that kill at random: no killed process can leave a pipe open. It needs
begin(..., adopt=True), by which the script becomes the parent of orphans below it: "all processes
are gone" is then "there is no child".

Nothing here needs the rights of root. Waits end after TIMEOUT seconds, or PATIENCE in scripts
that adopt.
"""

import argparse
import atexit
import ctypes
import functools
import gc
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import NoReturn

SOURCE_DIR = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODEL = os.path.join(SOURCE_DIR, "models", "sums")
# For environment(): the names of a group stay in /dev/shm while it lives.
KEEP_NAMES = {"COXSWAIN_TEST_KEEP_NAMES": "1"}
LEGACY_WORKER = os.path.join(SOURCE_DIR, "tests", "legacy", "legacy_worker.py")
SHM = "/dev/shm"
# Groups are sealed where a test does not say how they attach.
SEALED = os.environ.get("COXSWAIN_TEST_ATTACH") == "sealed"
TIMEOUT = 120
PATIENCE = 60

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Failure(AssertionError):
    pass


class Skipped(Exception):
    pass


def check(condition, text, result=None, kind=Failure):
    if not condition:
        if result:
            text += "\n" + result.describe()
        raise kind(text)


def skip(reason) -> NoReturn:
    raise Skipped(reason)


# ---- the life of a script ----

options = argparse.Namespace()
scratch = None  # the temporary folder
_watcher = None  # pid of the parent that guard() has left
_adopting = False


def parser(usage, seed=False):
    """begin() adds the names of tests."""
    made = argparse.ArgumentParser(usage=usage)
    made.add_argument("bin_dir", type=os.path.abspath)
    made.add_argument("source_dir", type=os.path.abspath)
    if seed:
        made.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    return made


def begin(arguments, adopt=False):
    """Once, before anything is started. Returns the options."""
    global _adopting
    arguments.add_argument("tests", nargs="*")
    arguments.parse_intermixed_args(namespace=options)
    guard()
    if adopt:
        _become_subreaper()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        _adopting = True
    if "seed" in options:
        print("seed %d" % options.seed, flush=True)
    return options


def guard():
    global scratch, _watcher
    scratch = tempfile.mkdtemp(prefix="cox_test_")
    os.chmod(scratch, 0o711)  # some tests start a program there as another user
    tempfile.tempdir = scratch
    os.environ["XDG_RUNTIME_DIR"] = os.path.join(scratch, "run")
    os.mkdir(os.environ["XDG_RUNTIME_DIR"], 0o700)
    _become_subreaper()
    sys.stdout.flush()
    _watcher = os.getpid()
    script = os.fork()
    if script:
        _watch(script)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != _watcher:
        os.kill(os.getpid(), signal.SIGTERM)
    atexit.register(_end_unwatched)
    # A script that was killed together with its watcher has left names, and its process id comes again.
    _remove_names(os.getpid())


def _become_subreaper():
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        print("skipped: no subreapers here")
        sys.exit(77)


def _watch(script) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal signals the script as well
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(script, number))
    pid = 0
    while pid != script:
        pid, status = os.wait()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and not _reaped(PATIENCE):
        print("FAILED: processes are left\n" + dump(), flush=True)
        code = 1
    while not _reaped(0.1):
        kill_all(descendants(os.getpid()))
    _remove_files(script)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reaped(patience):
    """Whether all children have ended."""
    end = time.monotonic() + patience
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                if time.monotonic() > end:
                    return False
                time.sleep(0.005)
        except ChildProcessError:
            return True


def _end_unwatched():
    if os.getppid() != _watcher:
        end_everything()
        _remove_files(os.getpid())


def _remove_names(script):
    for name in own_names(script):
        try:
            os.unlink(os.path.join(SHM, name))
        except OSError:  # of another user, or gone meanwhile
            pass


def _remove_files(script):
    _remove_names(script)
    shutil.rmtree(scratch, ignore_errors=True)


def program(name):
    return os.path.join(options.bin_dir, name)


def program_has(name, word):
    """Whether these bytes are in a program: how it was built."""
    with open(program(name), "rb") as file:
        return word in file.read()


def environment(**more):
    """What a command is started with: nothing of ours, but for more, and the only place for sockets, so that no
    command finds a group of another script."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("COXSWAIN_")}
    if "XDG_RUNTIME_DIR" not in more:
        env["COXSWAIN_RUNTIME_DIR"] = os.path.join(os.environ["XDG_RUNTIME_DIR"], "coxswain")
    # A rank that dies again and again is replaced at once.
    env["COXSWAIN_TEST_BACKOFF_MS"] = "1"
    env.update(more)
    return env


# ---- processes with files ----

running = {}  # of all whose end was not seen: pid to Process; numbers come again
unclosed = []  # Processes, which a failure tells of


class Process:
    """A command whose output goes to files: a killed process can leave no pipe open."""

    def __init__(self, arguments, stdin="/dev/null", **env):
        assert _adopting, "begin() without adopt"
        self.arguments = arguments
        self.files = [tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
                      for _ in range(2)]
        actions = [(os.POSIX_SPAWN_OPEN, 0, stdin, os.O_RDONLY, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, file.fileno(), number + 1)
                    for number, file in enumerate(self.files)]
        self.pid = os.posix_spawn(arguments[0], arguments, environment(**env), file_actions=actions,
                                  setsigmask=[])
        self.status = None  # once it has ended: exit status, or minus the signal
        running[self.pid] = self
        unclosed.append(self)

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

    def finish(self, *expected):
        """Waits for its end with one of these statuses."""
        status = self.wait()
        check(status in expected,
              "status %d, expected %s: %s" % (status, expected, self.describe()))
        return self

    def close(self):
        for file in self.files:
            file.close()
        unclosed.remove(self)

    def describe(self):
        return "%s\nstatus %s\n--- stdout\n%s\n--- stderr\n%s" % (
            " ".join(self.arguments), "none yet" if self.status is None else self.status,
            self.out[-4000:], self.err[-8000:])


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


# ---- processes with pipes ----


class Result:
    def __init__(self, status, out, err, pid):
        self.status, self.out, self.err, self.pid = status, out, err, pid

    def describe(self):
        return "status %s\n--- stdout\n%s\n--- stderr\n%s" % (self.status, self.out, self.err)


def _attach_is_given(arguments, env):
    return any(word in arguments for word in ("--attach", "--legacy-workers")) or KEEP_NAMES.items() <= env.items()


def start(arguments, under=(), command="coxswain", **more):
    """A command with these arguments; under: what stands in front of it."""
    more.setdefault("stdin", subprocess.DEVNULL)
    more.setdefault("stdout", subprocess.PIPE)
    more.setdefault("stderr", subprocess.PIPE)
    more.setdefault("env", environment())
    if SEALED and arguments[:1] == ["run"] and not _attach_is_given(arguments, more["env"]):
        arguments = [arguments[0], "--attach", "sealed", *arguments[1:]]
    return subprocess.Popen([*under, program(command), *arguments], text=True, **more)


def finish(process, text=None):
    try:
        out, err = process.communicate(text, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise Failure("no end after %d s\n%s\n%s" % (TIMEOUT, out, err)) from None
    result = Result(process.returncode, out, err, process.pid)
    left = names_of(str(process.pid))  # it has this name where it is given none
    check(not left, "left in /dev/shm: %s" % left, result)
    return result


def rest(process, head):
    """The result of a process of whose output the head was read. What readline() has buffered is
    part of the rest; finish() does not see it."""
    out, err = process.stdout.read(), process.stderr.read()
    process.wait(timeout=TIMEOUT)
    return Result(process.returncode, head + out, err, process.pid)


def run(arguments, text=None, **more):
    if text is not None:
        more["stdin"] = subprocess.PIPE
    return finish(start(arguments, **more), text)


def expect(result, status, *parts):
    check(result.status == status, "expected status %d" % status, result)
    for part in parts:
        check(part in result.err, "standard error does not speak of '%s'" % part, result)
    return result


def generate(*arguments, **more):
    return run(["generate", "--model", MODEL] + list(arguments), **more)


def own_name(process):
    """Of the group that a generate without --name has started."""
    return "%d_0" % process.pid


def generate_on(options, *arguments, model=MODEL, text=None, **more):
    """Prompts on a group that `run` starts with these options, and that is stopped then. The result is generate's, with
    what both have written on standard error; or that of run, if it does not start."""
    name = fresh_name("on")
    process = start(["run", "--name", name, "--model", model, *options], **more)
    if not process.stdout.readline():
        return finish(process)
    result = run(["generate", "--name", name, *arguments], text=text)
    expect(run(["stop", "--name", name]), 0)
    group = expect(finish(process), 0)
    check(not names_of(name), "left in /dev/shm: %s" % names_of(name), group)
    return Result(result.status, result.out, result.err + group.err, process.pid)


def status_of(name):
    """What status tells of a group, healthy or degraded."""
    result = run(["status", "--name", name, "--json"])
    return json.loads(expect(result, 4 if result.status == 4 else 0).out)


@functools.cache
def own_weights():
    """The reference worker by another name: every rank loads its own part of the model."""
    path = os.path.join(scratch, "own-weights")
    os.symlink(program("coxswain-worker"), path)
    return path


@functools.cache
def undisturbed(*arguments):
    """What one undisturbed rank prints."""
    return expect(run(["generate", "-n", "1", "--quiet", *arguments]), 0).out


def without(calls):
    """In front of a command: as on a kernel that lacks these calls, or under a filter."""
    probe = subprocess.run([program("without"), calls, "true"], stderr=subprocess.PIPE, text=True,
                           timeout=TIMEOUT, check=False)
    if probe.returncode == 77:
        skip("no seccomp filters here")
    check(probe.returncode == 0, probe.stderr)
    return [program("without"), calls]


# ---- waiting, and looking at processes ----


def wait_until(condition, what, patience=None):
    end = time.monotonic() + (patience or (PATIENCE if _adopting else TIMEOUT))
    while not condition():
        check(time.monotonic() < end, "never: " + what)
        if _adopting:
            reap()
        time.sleep(0.002 if _adopting else 0.005)


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        return "(%s)" % error.strerror


def state(pid, task=None):
    """The letter of /proc; X: it is gone."""
    text = read("/proc/%d/task/%s/stat" % (pid, task or pid)).rpartition(") ")[2]
    return text[0] if not text.startswith("(") else "X"


def alive(pid):
    return state(pid) not in "ZX"


def tasks(pid):
    try:
        return sorted(os.listdir("/proc/%d/task" % pid))
    except OSError:
        return []  # it has ended meanwhile


def stop_process(pid):
    """On return none of its threads runs, as one may for a moment after the signal was sent."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(state(pid, task) in "TtX" for task in tasks(pid)),
               "a stopped process")


def sleeps_in(pid):
    """Where each thread of a process is in the kernel, for a test that waits for it in vain."""
    folders = ["/proc/%d/task/%s/" % (pid, task) for task in tasks(pid)]
    return "; ".join("%s: %s" % (read(folder + "comm").strip(), read(folder + "wchan"))
                     for folder in folders)


def children(pid):
    """In the order in which one thread has forked them."""
    found = []
    for task in tasks(pid):
        words = read("/proc/%d/task/%s/children" % (pid, task))
        found += [int(child) for child in words.split()] if not words.startswith("(") else []
    return found


def descendants(pid):
    found = []
    for child in children(pid):
        found += [child] + descendants(child)
    return found


def kill_all(pids, number=signal.SIGKILL):
    """Returns how many were still there."""
    count = 0
    for pid in pids:
        try:
            os.kill(pid, number)
            count += 1
        except ProcessLookupError:
            pass
    return count


def _below():
    """All that the script has started, orphans too, which go to the watcher."""
    top = _watcher if os.getppid() == _watcher else os.getpid()
    return [pid for pid in descendants(top) if pid != os.getpid()]


def all_gone(patience=PATIENCE):
    """Whether every process that the script has started ends in time."""
    end = time.monotonic() + patience
    while reap() if _adopting else any(alive(pid) for pid in _below()):
        left = end - time.monotonic()
        if left <= 0:
            return False
        if _adopting:
            signal.sigtimedwait([signal.SIGCHLD], left)
        else:
            time.sleep(0.005)
    return True


def end_everything():
    kill_all(_below())
    all_gone()


def dump():
    """The state of everything that is left, as far as it can be seen."""
    lines = []
    for pid in _below():
        lines.append("pid %d: %s" % (pid, read("/proc/%d/cmdline" % pid).replace("\0", " ")))
        for task in tasks(pid):
            folder = "/proc/%d/task/%s/" % (pid, task)
            lines.append("  %s %s state %s in %s" % (task, read(folder + "comm").strip(),
                                                     state(pid, task), read(folder + "wchan")))
            lines += ["    " + line for line in read(folder + "stack").splitlines()]
    return "\n".join(lines)


# ---- names ----

_numbers = itertools.count(1)


def fresh_name(stem):
    """Of a group; own_names() finds what is left of it."""
    return "cox%s.%d.%d" % (stem, os.getpid(), next(_numbers))


def names_with(*parts):
    """What is in /dev/shm with one of the parts in its name; other tests may run beside this."""
    return sorted(name for name in os.listdir(SHM) if any(part in name for part in parts))


def names(prefix):
    """Of groups whose name starts with this."""
    return sorted(name for name in os.listdir(SHM) if name.startswith((prefix, "sem." + prefix)))


def names_of(group):
    """Of exactly this group."""
    return names(group + "_")


def own_names(script=None):
    """Of groups whose name starts with coxWORD.PID, the process id of the script."""
    own = re.compile(r"(sem\.)?cox[a-z]+\.%d[._]" % (script or os.getpid()))
    return sorted(name for name in os.listdir(SHM) if own.match(name))


def bytes_of(group):
    total = 0
    for name in names_of(group):
        try:
            total += os.stat(os.path.join(SHM, name)).st_blocks * 512
        except FileNotFoundError:
            pass
    return total


def socket_files():
    """Sockets of groups, alive or dead; no other script has this folder."""
    try:
        return sorted(os.listdir(socket_of("")))
    except FileNotFoundError:
        return []


def socket_of(name):
    return os.path.join(os.environ["XDG_RUNTIME_DIR"], "coxswain", name)


def count_fds():
    return len(os.listdir("/proc/self/fd"))


# ---- files ----


def temporary(text, mode=0o600):
    """The path of a file with this text."""
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write(text)
    os.chmod(file.name, mode)
    return file.name


def sums(count=None):
    """Prompts of the shipped model, and the lines that should come out."""
    with open(os.path.join(MODEL, "heldout.txt"), encoding="ascii") as file:
        lines = file.read().splitlines()[:count]
    return [line[:line.index("=") + 1] for line in lines], "".join(line + "\n" for line in lines)


def prompts_of(count):
    """So many, again from the first where there are no more."""
    return list(itertools.islice(itertools.cycle(sums()[0]), count))


@functools.cache
def prompts_file(count):
    return temporary("".join(prompt + "\n" for prompt in prompts_of(count)))


# ---- tests ----

_tests = []


def test(function):
    _tests.append(function)
    return function


def _left_behind(fds):
    """Of the test that has just ended, in words."""
    gc.collect()  # pipes of processes in exceptions that were caught
    if not all_gone():
        return "processes are left"
    if count_fds() > fds:
        return "%d fds before, %d after" % (fds, count_fds())
    if own_names():
        return "left in /dev/shm: %s" % own_names()
    return ""


def _clean_up():
    """So that the next test meets nothing of one that has failed."""
    end_everything()
    for process in unclosed[:]:
        process.close()
    for name in own_names():
        os.unlink(os.path.join(SHM, name))
    for socket_path in socket_files():
        os.unlink(socket_of(socket_path))


def describe():
    return "\n".join(process.describe() for process in unclosed)


def main(after_each=lambda: None, tell=describe):
    """Runs the tests, or those that were named. after_each checks more; tell gives text about a
    failure. A test may return a dict of what it has counted. Returns the exit status."""
    unknown = set(options.tests) - {function.__name__ for function in _tests}
    if unknown:
        sys.exit("no such tests: %s" % ", ".join(sorted(unknown)))
    failed = passed = 0
    for function in _tests:
        if options.tests and function.__name__ not in options.tests:
            continue
        begin_time, fds = time.monotonic(), count_fds()
        try:
            counters = function()
            after_each()
            left = _left_behind(fds)
            check(not left, left)
            verdict = "ok" + "".join("; %s %s" % item for item in sorted((counters or {}).items()))
            passed += 1
        except Skipped as reason:
            verdict = "skipped: %s" % reason
        except Exception as error:  # pylint: disable=broad-except
            failed += 1
            how = "" if "seed" not in options else " with --seed %d" % options.seed
            what = str(error) if isinstance(error, Failure) else traceback.format_exc()
            verdict = "\n".join(filter(None, ["FAILED%s: %s" % (how, what), tell(), dump()]))
            _clean_up()
        seconds = time.monotonic() - begin_time
        print("%s (%.1f s) %s" % (function.__name__, seconds, verdict), flush=True)
    return 1 if failed else 0 if passed else 77


def script(function) -> NoReturn:
    """The exit status of a script is what its one function returns."""
    guard()
    try:
        status = function()
    except Skipped as reason:
        print("skipped: %s" % reason)
        status = 77
    except Failure as failure:
        print("FAILED: %s" % failure)
        status = 1
    sys.exit(status)
