#!/usr/bin/python3
"""Stacks: coxswain stacks, and what its helper reads of processes that hang in every way.

Usage: stacks_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from groups import Group  # pylint: disable=wrong-import-position
from harness import (check, expect, program, run, skip, state, test,  # pylint: disable=wrong-import-position
                     tasks, wait_until, without)

harness.begin(harness.parser(__doc__))


def has_libdw():
    try:
        ctypes.CDLL("libdw.so.1")
        return True
    except OSError:
        return False


LIBDW = has_libdw()


@contextlib.contextmanager
def target(*words, path=None, under=()):
    command = [*under, path or program("stack_target"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            check(process.stdout.readline() == "ready\n", "the target is not ready")
            wait_until(lambda: "cox-stacks\n" in [harness.read("/proc/%d/task/%s/comm" % (process.pid, tid))
                                                  for tid in tasks(process.pid)], "the thread that writes frames")
            yield process.pid
        finally:
            process.kill()


def helper(pid, under=()):
    """What it writes. Where the machine was too busy for it, which it says, another one is asked."""
    for _ in range(50):
        text = helper_once(pid, under)
        if not any(busy in text for busy in ("got no processor", "did not write them in time", "the time was up")):
            break
    return text


def helper_once(pid, under=(), budget_ms=2000):
    """As a coordinator starts it, which this process is to its targets."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
        listener.listen(8)
        raised = fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, 4)  # sh knows numbers of one digit
        try:
            return subprocess.run(["sh", "-c", 'exec "$@" 3<&%d' % raised, "sh", *under, program("coxswain"),
                                   "__stacks", str(pid), str(budget_ms)], pass_fds=[raised], capture_output=True, text=True,
                                  timeout=60, check=False).stdout
        finally:
            os.close(raised)


def summary(text):
    """The last one counts."""
    return [line for line in text.splitlines() if line.startswith("summary: ")][-1]


def native(text, *names):
    if LIBDW:
        for name in names:
            check(name in text, "%s is not in: %s" % (name, text))


def goes_on(pid):
    """No thread is stopped or traced."""
    for tid in tasks(pid):
        check(state(pid, tid) not in "Tt", "thread %s is stopped" % tid)
    check("TracerPid:\t0\n" in harness.read("/proc/%d/status" % pid), "it is traced")


@test
def a_loop_runs():
    with target("loop") as pid:
        text = helper(pid)
        check(", runn" in summary(text), summary(text))  # running, or runnable without a processor
        native(summary(text), "loop_forever (stack_target.c:")
        goes_on(pid)


@test
def a_lock_of_a_dead_thread():
    with target("lock") as pid:
        text = helper(pid)
        native(summary(text), "called from wait_for_the_dead (stack_target.c:")
        check("asleep in futex" in text, text)
        goes_on(pid)


@test
def a_sleep_in_the_kernel_is_not_disturbed():
    with target("sleep") as pid:
        for _ in range(20):
            text = helper(pid)
            native(summary(text), "called from sleep_in_the_kernel")
            check("asleep in read" in text, text)
        goes_on(pid)


@test
def a_stopped_process_stays_stopped():
    with target("frames") as pid:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(state(pid, tid) == "T" for tid in tasks(pid)), "the stop")
        text = helper(pid)
        check("stopped by a signal" in summary(text), summary(text))
        check("MainThread in inner (inner.py:7) called from outer (outer.py:9)" in summary(text), text)
        wait_until(lambda: all(state(pid, tid) == "T" for tid in tasks(pid)), "the stop, again")
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: state(pid) == "S", "the end of the stop")


@test
def frames_of_an_interpreter_come_first():
    with target("frames") as pid:
        text = helper(pid)
        check(summary(text) == "summary: MainThread in inner (inner.py:7) called from outer (outer.py:9)", text)
        check('File "/srv/inner.py", line 7 in inner' in text, text)
        check("/" not in summary(text), summary(text))


FAKE_TORCH = os.path.join(os.path.dirname(program("coxswain")), "../tests/fake_torch/libtorch_cpu.so")


@contextlib.contextmanager
def torch_target(says, size="100"):
    """A target that has a PyTorch, whose flight recorder returns this."""
    if not os.path.exists(FAKE_TORCH):
        skip("a build without the fake PyTorch")
    with target("sleep", under=("env", "LD_PRELOAD=" + FAKE_TORCH, "TORCH_FR_BUFFER_SIZE=" + size,
                                "FAKE_TORCH=" + says)) as pid:
        yield pid


COLLECTIVE = ('{"entries":[{"process_group":["0","default_pg"],"collective_seq_id":4711,"state":"started",'
              '"profiling_name":"gloo:all_reduce"}]}')


@test
def what_the_flight_recorder_of_torch_has():
    with torch_target(COLLECTIVE) as pid:
        text = helper(pid)
        check("\ntorch: group 0 (default_pg): entered 4711, waits in all_reduce 4711\n" in text, text)
        check("\n  0 4711 all_reduce " in text, text)
        goes_on(pid)


@test
def a_flight_recorder_that_does_not_answer_is_said():
    with torch_target("hold") as pid:
        for _ in range(2):
            text = helper(pid)
            check("not there: PyTorch's flight recorder did not answer" in text, text)
            native(summary(text), "called from sleep_in_the_kernel")
        goes_on(pid)


@test
def a_flight_recorder_that_lies_is_said():
    for lie in ("x" * 100, '{"entries":[' + "[" * 100000, '{"entries":"' + "\x1b[2J" * 100 + '"}'):
        with torch_target(lie) as pid:
            text = helper(pid)
            check("PyTorch's flight recorder: its dump cannot be read" in text, text)
            check("\x1b" not in text, text)


@test
def a_flight_recorder_is_not_asked_where_it_is_off():
    for variables in (("TORCH_FR_BUFFER_SIZE=0",), ()):
        with target("sleep", under=("env", "-u", "TORCH_NCCL_TRACE_BUFFER_SIZE", "-u", "TORCH_FR_BUFFER_SIZE",
                                    "LD_PRELOAD=" + FAKE_TORCH, "FAKE_TORCH=hold", *variables)) as pid:
            check("cox-torch\n" not in [harness.read("/proc/%d/task/%s/comm" % (pid, tid)) for tid in tasks(pid)],
                  "there is a thread for PyTorch")
            check("PyTorch" not in helper(pid), "PyTorch is spoken of")


@test
def a_helper_that_is_told_to_end_leaves_no_child():
    """The child that stops the rank's threads would be this process's, which adopts orphans."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    ended = 0
    with target("threads", "200") as pid, socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
        listener.listen(8)
        for _ in range(1000):
            with subprocess.Popen(["sh", "-c", 'exec "$@" 3<&0', "sh", program("coxswain"), "__stacks", str(pid), "2000"],
                                  stdin=listener, stdout=subprocess.DEVNULL) as process:
                children = "/proc/%d/task/%d/children" % (process.pid, process.pid)
                while process.poll() is None and not harness.read(children):
                    pass
                process.terminate()
            ended += process.returncode == 128 + signal.SIGTERM
            left = [child for child in map(int, harness.read("/proc/self/task/%d/children" % os.getpid()).split()) if child != pid]
            check(not left, "processes %s are left" % left)
            if ended == 5:
                break
    libc.prctl(36, 0)
    check(ended, "no helper had a child when it was told to end")


@test
def two_hundred_threads():
    with target("threads", "200") as pid:
        text = helper(pid)
        check("202 threads" in text, text[:300])
        check(len(re.findall(r"^thread ", text, re.M)) == 202, "not all threads")
        native(text, "one_of_many")
        check(float(re.search(r"stopped for ([\d.]+) ms", text)[1]) <= 1000, text[:200])
        goes_on(pid)


@test
def what_the_time_was_too_short_for_is_said():
    with target("threads", "20") as pid:
        text = helper_once(pid, budget_ms=1)
        check("summary: main thread" in text, text)
        if LIBDW and "got no processor" not in text:
            check(re.search(r"not there: native frames of 2\d threads: the time was up after [\d.]+ s, [\d.]+ s of them "
                            "without a processor", text), text)
        goes_on(pid)


@test
def a_deep_recursion_is_cut():
    with target("recurse", "20000") as pid:
        text = helper(pid)
        native(text, "recurse", " times more", "frames further out are cut")
        goes_on(pid)


@test
def a_stripped_program_has_offsets():
    if not shutil.which("strip"):
        skip("strip is not installed")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "stripped")
        shutil.copy(program("stack_target"), path)
        subprocess.run(["strip", path], check=True)
        with target("sleep", path=path) as pid:
            native(summary(helper(pid)), "called from stripped + 0x")


@test
def a_thread_in_state_d():
    with target("uninterruptible") as pid:
        wait_until(lambda: state(pid) == "D", "state D")
        text = helper(pid)
        check("in the kernel (state D)" in summary(text), summary(text))
        check("threads did not stop within 15 ms" in text, text)
        check("TracerPid:\t0\n" in harness.read("/proc/%d/status" % pid), "it is traced")
        for child in harness.children(pid):
            os.kill(child, signal.SIGKILL)
        wait_until(lambda: state(pid) in "ZX", "the end")


@test
def without_ptrace_the_rank_copies_its_stacks_itself():
    under = without("ptrace=EPERM,process_vm_readv=EPERM")
    with target("lock") as pid:
        text = helper(pid, under=under)
        check("ptrace was refused (Operation not permitted): the rank copied its stacks itself" in text, text)
        native(summary(text), "wait_for_the_dead")
    with target("frames") as pid:
        text = helper(pid, under=under)
        check("MainThread in inner (inner.py:7)" in summary(text), text)


@test
def a_rank_says_nothing_to_another_process_of_the_user():
    """Each can ring; but it does not listen as the coordinator, nor has what the coordinator gave its helper."""
    intruder = """
import mmap, os, socket, struct, sys
pid, link = int(sys.argv[1]), "/memfd:coxswain-stacks (deleted)"
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("")
    listener.listen(8)
    fd = next(fd for fd in os.listdir("/proc/%d/fd" % pid) if os.readlink("/proc/%d/fd/%s" % (pid, fd)) == link)
    with open("/proc/%d/fd/%s" % (pid, fd), "r+b") as file, mmap.mmap(file.fileno(), 64) as bell:
        rings = int.from_bytes(bell[:4], "little") + 1
        bell[:] = struct.pack("<I60s", rings, listener.getsockname()[1:])
        import ctypes
        word = ctypes.c_uint32.from_buffer(bell)
        ctypes.CDLL(None).syscall(202 if os.uname().machine == "x86_64" else 98, ctypes.byref(word), 1, 1)
        listener.settimeout(30)
        connection = listener.accept()[0]
        connection.settimeout(30)
        try:
            connection.sendall(struct.pack("<QII", 0x324b4341545358c0, 1 | 2 | 4, 0))
            print(connection.recv(100))
        except OSError:
            print(b"")
        del word
"""
    with target("frames") as pid:
        for _ in range(3):
            result = subprocess.run([sys.executable, "-c", intruder, str(pid)], capture_output=True, text=True,
                                    timeout=60, check=False)
            check(result.stdout == "b''\n", result.stdout + result.stderr)
        text = helper(pid)
        check("MainThread in inner (inner.py:7)" in summary(text), text)


@test
def a_process_that_is_no_rank():
    with subprocess.Popen(["sleep", "100"]) as process:
        text = helper(process.pid)
        process.kill()
        check("it is no worker of this release" in text, text)


@test
def another_pid_namespace():
    under = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*under, "true"], capture_output=True, check=False).returncode:
        skip("no PID namespace can be made here")
    with target("sleep") as pid:
        result = subprocess.run([*under, program("coxswain"), "__stacks", str(pid), "1000"], capture_output=True,
                                text=True, check=False)
        check("there is no such process in this PID namespace" in result.stdout, result.stdout)


@test
def the_command_shows_all_ranks_or_one():
    with Group(ranks=2) as group:
        text = expect(run(["stacks", group.name]), 0).out
        for rank, pid in enumerate(group.pids):
            check("rank %d (pid %d)" % (rank, pid) in text, text)
        native(text, "a thread of Coxswain that waits for work")
        check(not LIBDW or "semaphores_wait" in text or "futexes_wait" in text, text)  # named, sealed
        one = json.loads(expect(run(["stacks", "--name", group.name, "--rank", "1", "--json"]), 0).out)
        check([rank["rank"] for rank in one["ranks"]] == [1], one)
        check("the group has no such rank" in run(["stacks", group.name, "--rank", "5"]).err, "another text")
        expect(group.stop(), 0)


@test
def a_hang_tells_where_each_rank_stands():
    with tempfile.TemporaryDirectory() as crashes, \
            Group(ranks=4, arguments=("--timeout", "1", "--crash-dir", crashes)) as group:
        group.stopped(1)
        result = group.generate("--quiet", "27+58=")
        check(result.status != 0, "it did not fail")
        wait_until(lambda: any(".timeout." in name for name in os.listdir(crashes)), "the recording")
        path = os.path.join(crashes, next(name for name in os.listdir(crashes) if ".timeout." in name))
        text = expect(run(["postmortem", path]), 0).out
        check("where the ranks stood: rank" in text and "stopped by a signal" in text, text)
        for rank in range(4):
            check("Stacks of rank %d:" % rank in text, text)
        told = group.status()["stacks"]
        check(told["text"].startswith("rank"), told)
        os.kill(group.pids[1], signal.SIGCONT)
        expect(group.stop(), 0)
        err = harness.finish(group.process).err
        check("a dead coordinator" not in err, "nobody has died: " + err)


def read_all(fd):
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 1 << 16).decode()
    return ""


@test
def all_frames_are_for_logs_and_a_line_for_a_terminal():
    terminal, end = os.openpty()
    reader, writer = os.pipe()
    try:
        for fd, path in ((terminal, os.ttyname(end)), (reader, "/proc/%d/fd/%d" % (os.getpid(), writer))):
            with Group(ranks=2, arguments=("--timeout", "1"),
                       under=("sh", "-c", 'exec "$@" 2>%s' % path, "sh")) as group:
                group.stopped(1)
                check(group.generate("--quiet", "27+58=").status != 0, "it did not fail")
                text = ""

                def has(what):
                    nonlocal text
                    text += read_all(fd)  # pylint: disable=cell-var-from-loop
                    return what in text

                wait_until(lambda: has("where the ranks stand: "), "the line")
                if fd == reader:
                    wait_until(lambda: has("stacks of rank 1: "), "the frames")
                os.kill(group.pids[1], signal.SIGCONT)
                expect(group.stop(), 0)
                has("")
                check(("stacks of rank" in text) == (fd == reader), text)
    finally:
        for fd in (terminal, end, reader, writer):
            os.close(fd)


@test
def a_dead_rank_has_its_last_lines():
    with Group(ranks=2, arguments=("--on-death", "wait")) as group:
        os.kill(group.pids[1], signal.SIGKILL)
        wait_until(lambda: group.status()["ranks"][1]["liveness"] == "dead", "the death")
        text = expect(run(["stacks", group.name, "--rank", "1"]), 0).out
        check("rank 1 (pid %d) was killed by signal 9" % group.pids[1] in text, text)
        expect(group.stop(), 0)


@test
def one_variable_turns_it_off():
    expect(run(["run", "--model", harness.MODEL], env=harness.environment(COXSWAIN_STACKS="no")), 2,
           "COXSWAIN_STACKS is 'no': expected on or off")
    with Group(ranks=2, arguments=("--timeout", "1"), COXSWAIN_STACKS="off") as group:
        group.stopped(1)
        result = group.generate("--quiet", "27+58=")
        check(result.status != 0 and "stacks:" not in result.err, result.err)
        check(group.status()["stacks"] is None, "there are stacks")
        os.kill(group.pids[1], signal.SIGCONT)
        expect(group.stop(), 0)


harness.main()
