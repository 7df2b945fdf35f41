#!/usr/bin/python3
"""What the machine does to a group that works: its runtime directory goes away, a rank is frozen.

Usage: surroundings_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import os
import re
import shutil
import signal
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from groups import RESTART, Group  # pylint: disable=wrong-import-position
from harness import (MODEL, TIMEOUT, check, environment, expect, run, skip, start, test,
                     wait_until, without)

harness.begin(harness.parser(__doc__))


def renews(attach):
    """logind removes /run/user/UID at logout, cleaners /tmp/coxswain-UID."""
    folder = tempfile.mkdtemp(dir=harness.scratch)
    directory, log = os.path.join(folder, "runtime"), os.path.join(folder, "log")
    env = environment(COXSWAIN_RUNTIME_DIR=directory)

    def told():
        return [line for line in harness.read(log).splitlines() if "control socket" in line]

    def watches():
        fds = "/proc/%d/fd" % process.pid
        return sum("inotify" in os.path.realpath(os.path.join(fds, fd)) for fd in os.listdir(fds))

    def is_found():
        result = run(["status", "--name", "away"], env=env)
        return result.status == 0 and re.search(r"^rank 1 .* incarnation 2 alive", result.out, re.M)

    with open(log, "w", encoding="utf-8") as stream:
        process = start(["run", "-n", "2", "--name", "away", "--attach", attach, "--model", MODEL, *RESTART],
                        env=env, stderr=stream)
    try:
        pid = [process.stdout.readline().split() for _ in range(4)][3][3]
        shutil.rmtree(directory)
        os.kill(int(pid), signal.SIGKILL)
        wait_until(is_found, "a group that is found, and has its rank again")
        expect(run(["generate", "--name", "away", "1+1="], env=env), 0)
        check(len(told()) == 1 and "is made anew" in told()[0], "other lines: %s" % told())
        os.unlink(os.path.join(directory, "away.sock"))
        wait_until(lambda: len(told()) == 2 and "is made anew" in told()[1], "the socket again")
        # A file in the directory's place: nothing can be made there until it is moved away.
        shutil.rmtree(directory)
        with open(directory, "w", encoding="ascii"):
            pass
        wait_until(lambda: len(told()) == 3 and "until it can be made anew" in told()[2], "a failure")
        os.unlink(directory)
        wait_until(lambda: len(told()) == 4 and "is made anew" in told()[3], "the directory again")
        wait_until(lambda: watches() == 1, "one watch, for the socket that is there")
        expect(run(["stop", "--name", "away"], env=env), 0)
        check(process.wait(TIMEOUT) == 0, "another exit status")
        check(not os.listdir(directory), "left: %s" % os.listdir(directory))
    finally:
        process.kill()
        process.communicate()


@test
def a_named_group_outlives_its_runtime_directory():
    renews("named")


@test
def a_sealed_group_outlives_its_runtime_directory():
    renews("sealed")


def maps_weights(pid):
    return "/memfd:cox_weights" in harness.read("/proc/%d/maps" % pid)


def shares_its_weights(attach):
    """A rank takes the weights' fd by pidfd_getfd, which Yama denies to a child, or at the control socket."""
    folder = tempfile.mkdtemp(dir=harness.scratch)
    directory, log = os.path.join(folder, "runtime"), os.path.join(folder, "log")
    env = environment(COXSWAIN_RUNTIME_DIR=directory)
    with open(log, "w", encoding="utf-8") as stream:
        process = start(["run", "-n", "2", "--name", "away", "--attach", attach, "--model", MODEL, *RESTART],
                        under=without("pidfd_getfd=EPERM"), env=env, stderr=stream)
    try:
        pid = int([process.stdout.readline().split() for _ in range(4)][3][3])
        check(maps_weights(pid), "rank 1 has weights of its own")
        shutil.rmtree(directory)
        with open(directory, "w", encoding="ascii"):
            pass
        wait_until(lambda: "until it can be made anew" in harness.read(log), "a directory that is gone for good")
        os.kill(pid, signal.SIGKILL)

        def is_replaced():
            check(process.poll() is None, "the group has ended:\n" + harness.read(log))
            return sum(child != pid and maps_weights(child) for child in harness.children(process.pid)) == 2
        wait_until(is_replaced, "a replacement that has the weights")
        os.unlink(directory)
        wait_until(lambda: run(["status", "--name", "away"], env=env).status == 0, "a group that is found again")
        expect(run(["generate", "--name", "away", "1+1="], env=env), 0)
        expect(run(["stop", "--name", "away"], env=env), 0)
        check(process.wait(TIMEOUT) == 0, "another exit status")
    finally:
        process.kill()
        process.communicate()


@test
def a_named_group_without_its_runtime_directory_shares_its_weights_under_yama():
    shares_its_weights("named")


@test
def a_sealed_group_without_its_runtime_directory_shares_its_weights_under_yama():
    shares_its_weights("sealed")


def names_the_rank(hold, release, what):
    """Of two ranks, rank 1 does not take its step; rank 0 waits for it."""
    with Group() as group:
        hold(group.pids[1])
        client = start(["generate", "--name", group.name, "1+1="])
        trouble = r"has not taken execute \d+ since \d\d:\d\d:\d\d UTC"

        def ranks():
            return run(["status", "--name", group.name]).out.replace("\n  ", " ")

        wait_until(lambda: re.search(r"^rank 1 .*" + trouble, ranks(), re.M), "rank 1 in the status")
        out = ranks()
        (degraded,) = [line for line in out.splitlines() if line.startswith("degraded: ")]
        check("rank 1" in degraded and "rank 0" not in degraded and what in degraded, out)
        check(re.search(r"^rank 0 .* alive; execute running", out, re.M), out)
        check(re.search(r"^rank 1 .*" + what, out, re.M), out)
        release(group.pids[1])
        expect(harness.finish(client), 0)
        expect(group.stop(), 0)
        group.process.wait(TIMEOUT)


@test
def a_stopped_rank_is_named_and_no_other():
    names_the_rank(lambda pid: os.kill(pid, signal.SIGSTOP), lambda pid: os.kill(pid, signal.SIGCONT),
                   "stopped by a signal")


def freezes(root, file, frozen, thawed, shows):
    """root: of the control groups; shows: the file and the text of a group that is frozen."""
    folder = os.path.join(root, harness.fresh_name("frozen"))
    try:
        os.mkdir(folder)
    except OSError as error:
        skip("no control groups of this version here: %s" % error)

    def write(name, text):
        with open(os.path.join(folder, name), "w", encoding="ascii") as stream:
            stream.write(text)

    def freeze(pid):
        write("cgroup.procs", str(pid))
        write(file, frozen)
        wait_until(lambda: shows[1] in harness.read(os.path.join(folder, shows[0])), "a frozen rank")

    try:
        names_the_rank(freeze, lambda _: write(file, thawed), "frozen by its control group")
    finally:
        write(file, thawed)
        wait_until(lambda: not harness.read(os.path.join(folder, "cgroup.procs")), "an empty group")
        os.rmdir(folder)


@test
def a_frozen_rank_is_named_and_no_other():
    freezes("/sys/fs/cgroup/freezer", "freezer.state", "FROZEN", "THAWED", ("freezer.state", "FROZEN\n"))


@test
def a_frozen_rank_of_cgroup_v2_is_named_and_no_other():
    # Beside the first version the second has a folder of its own.
    unified = "/sys/fs/cgroup/unified"
    freezes(unified if os.path.isdir(unified) else "/sys/fs/cgroup", "cgroup.freeze", "1", "0",
            ("cgroup.events", "frozen 1\n"))


if __name__ == "__main__":
    sys.exit(harness.main())
