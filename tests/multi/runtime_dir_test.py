#!/usr/bin/python3
"""Where control sockets are: the directory, names, what dead groups left, two starts at once, other users.

Usage: runtime_dir_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import os
import signal
import socket
import stat
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from harness import check, environment, expect, finish, program, run, skip, start, test  # pylint: disable=wrong-import-position
from rights import OTHER_USER, can_switch_user  # pylint: disable=wrong-import-position

harness.begin(harness.parser(__doc__))
AS_NOBODY = {"user": OTHER_USER, "group": OTHER_USER, "extra_groups": []}


def fresh():
    """The path of a directory that is not there, in one of its own."""
    folder = os.path.join(harness.scratch, harness.fresh_name("dir"))
    os.mkdir(folder, 0o711)
    return os.path.join(folder, "run")


def made(mode=0o700):
    path = fresh()
    os.mkdir(path)
    os.chmod(path, mode)
    return path


def words(name):
    return ["run", "-n", "1", "--name", name, "--attach", "sealed", "--", program("scripted_worker")]


def begin(path, name="test", **more):
    """A group that serves, and its socket."""
    process = start(words(name), env=more.pop("env", None) or environment(COXSWAIN_RUNTIME_DIR=path), **more)
    lines = [process.stdout.readline().split() for _ in range(3)]
    if not lines[2]:
        raise harness.Failure(finish(process).describe())
    return process, lines[1][1]


def end(process):
    process.terminate()
    expect(finish(process), 0)


def kill(process):
    process.kill()
    finish(process)


def works(path, name="test", **more):
    process, socket_path = begin(path, name, **more)
    expect(run(["status", "--socket", socket_path]), 0)
    fds = "/proc/%d/fd" % process.pid  # the directory's one is all that is kept of the start
    kept = sum(os.path.realpath(os.path.join(fds, fd)) == os.path.realpath(path) for fd in os.listdir(fds))
    check(kept == 1, "%d fds of the directory" % kept)
    end(process)


def refused(path, *parts, name="test", status=1, **more):
    return expect(run(words(name), env=environment(COXSWAIN_RUNTIME_DIR=path), **more), status, *parts)


def clean(path):
    return run(["clean"], env=environment(COXSWAIN_RUNTIME_DIR=path))


def mode_of(path):
    return stat.S_IMODE(os.stat(path).st_mode)


# ---- the directory ----


@test
def test_b9_a_runtime_directory_that_lets_others_in_is_refused():
    path = made()
    for mode in (0o755, 0o750, 0o701, 0o770, 0o1777, 0o710):
        os.chmod(path, mode)
        refused(path, "has mode %04o, expected 0700" % mode)
        expect(clean(path), 1, "expected 0700")
        check(mode_of(path) == mode, "changed: it may belong to another program")
    os.chmod(path, 0o700)
    works(path)
    link = path + "_link"
    os.symlink(path, link)
    refused(link, "is a link or a file, expected a folder")
    os.unlink(link)
    with open(link, "w", encoding="ascii"):
        refused(link, "is a link or a file, expected a folder", "export COXSWAIN_RUNTIME_DIR=")
    refused(os.path.join(path, "not", "there"), "is not there, nor can it be made", "XDG_RUNTIME_DIR", status=2)
    refused("not/absolute", "COXSWAIN_RUNTIME_DIR is 'not/absolute'", status=2)
    if can_switch_user():
        os.chown(path, OTHER_USER, -1)
        refused(path, "belongs to user 65534, expected 0", "export COXSWAIN_RUNTIME_DIR=")


@test
def test_b45_an_odd_umask_takes_nothing_away():
    path = fresh()
    for who in ({}, AS_NOBODY) if can_switch_user() else ({},):  # nobody is whom modes concern
        os.chown(os.path.dirname(path), who.get("user", -1), -1)
        for mask in (0, 0o022, 0o777, 0o200, 0o700):
            process, socket_path = begin(path, umask=mask, **who)
            check((mode_of(path), mode_of(socket_path)) == (0o700, 0o600), "wrong modes: %04o %04o" % (
                mode_of(path), mode_of(socket_path)))
            expect(run(["status", "--socket", socket_path], **who), 0)
            end(process)
            check(not os.listdir(path), "left: %s" % os.listdir(path))
            os.rmdir(path)
    os.mkdir(path, 0)  # a death between the making of the directory and its mode
    works(path)
    check(mode_of(path) == 0o700, "another mode")


@test
def test_the_default_runtime_directory_is_the_same_for_both_sides():
    own, other = made(), "/tmp/coxswain-%d" % os.geteuid()
    name = harness.fresh_name("default")
    for login, expected in ((own, own + "/coxswain"), (None, other), ("", other), ("not/absolute", other)):
        env = environment(XDG_RUNTIME_DIR=login or "")
        if login is None:
            del env["XDG_RUNTIME_DIR"]
        process, socket_path = begin(None, name, env=env)
        check(socket_path == "%s/%s.sock" % (expected, name), "another place: %s" % socket_path)
        expect(run(["status", "--name", name], env=env), 0)
        end(process)


@test
def test_a22_k19_long_paths_and_names_work():
    path = made()
    for _ in range(15):
        path = os.path.join(path, "d" * 200)
        os.mkdir(path, 0o700)
    env = environment(COXSWAIN_RUNTIME_DIR=path)
    for length in (1, 47, 48, 49, 70, 76, 77, 78, 79, 80, 127, 128):
        name = "n" * length
        process, socket_path = begin(path, name)
        expect(run(["status", "--name", name], env=env), 0)
        if length == 128:  # another long name is another socket
            other, other_path = begin(path, name[1:] + "m")
            check(other_path != socket_path, "the same socket")
            end(other)
            # Nor is the short one a control socket's whose group has that very name.
            short = os.path.basename(socket_path)[:-len(".sock")]
            check(len(short) < 128, "not short: %s" % short)
            refused(path, "position", name=short, status=2)
        end(process)
    for name in ("", "a/b", ".a", "..", "a b"):
        refused(path, name=name, status=2)
    refused(path + "/" * (4095 - len(path)), "expected less than 4096")


# ---- names ----


@test
def test_a22_b4_a_dead_groups_socket_is_no_obstacle():
    path = made()
    socket_path = os.path.join(path, "test.sock")

    def left():
        process, _ = begin(path)
        kill(process)
        check(os.listdir(path) == ["test.sock"], "left: %s" % os.listdir(path))

    expect(run(["status", "--socket", socket_path]), 1, "no control socket is at")
    left()
    expect(run(["status", "--socket", socket_path]), 1, "the coordinator is dead")
    for name in ("test", "another"):
        works(path, name)
        check(not os.listdir(path), "left: %s" % os.listdir(path))
        left()
    process, _ = begin(path)  # swept, and there again
    expect(clean(path), 0)
    check(os.listdir(path) == ["test.sock"], "not left alone: %s" % os.listdir(path))
    kill(process)
    expect(clean(path), 0)
    check(not os.listdir(path), "left: %s" % os.listdir(path))
    os.rmdir(path)
    expect(clean(path), 0)


@test
def test_b9_a_live_name_is_taken():
    path = made()
    process, _ = begin(path)
    refused(path, "process %d listens" % process.pid)
    works(path, "other")
    harness.stop_process(process.pid)  # that is no death
    refused(path, "process %d listens" % process.pid)
    process.send_signal(signal.SIGCONT)
    kill(process)
    works(path)


@test
def test_something_else_at_the_name_is_left_alone():
    path = made()
    at = os.path.join(path, "test.sock")
    for make, remove in ((lambda: open(at, "w", encoding="ascii").close(), os.unlink),
                         (lambda: os.symlink("/nowhere", at), os.unlink), (lambda: os.mkdir(at), os.rmdir)):
        make()
        refused(path, "is in the way")
        expect(clean(path), 0)
        remove(at)
    new = os.path.join(path, "starting.new")
    with open(new, "w", encoding="ascii"):
        refused(path, "starting.new is in the way: expected nothing there; move it")
    os.unlink(new)
    # A socket without a control socket's name may belong to another program.
    with socket.socket(socket.AF_UNIX) as mine:
        mine.bind(os.path.join(path, "mine.socket"))
    works(path)
    check(os.listdir(path) == ["mine.socket"], "left: %s" % os.listdir(path))
    # As a start leaves it that was killed between two steps, when a child of a fork has its socket.
    with socket.socket(socket.AF_UNIX) as forked:
        forked.bind(new)
        forked.listen()
        works(path)
    check(os.listdir(path) == ["mine.socket"], "left: %s" % os.listdir(path))


@test
def test_b10_only_its_own_socket_is_removed_at_the_end():
    path = made()
    first, socket_path = begin(path)
    harness.stop_process(first.pid)  # or it would make it anew
    os.unlink(socket_path)  # by a cleaner that knows no better
    second, again = begin(path)
    check(again == socket_path, "another path")
    first.send_signal(signal.SIGCONT)
    end(first)
    expect(run(["status", "--socket", socket_path]), 0)
    end(second)
    check(not os.listdir(path), "left: %s" % os.listdir(path))


@test
def test_b4_b54_of_eight_starts_at_once_one_wins():
    for round_ in range(6):  # in a directory that is not there yet, or that has the socket of a dead group
        path = fresh() if round_ % 2 else made()
        if round_ % 2 == 0:
            kill(begin(path)[0])
        starts = [start(words("test"), env=environment(COXSWAIN_RUNTIME_DIR=path)) for _ in range(8)]
        won = [process for process in starts if process.stdout.readline()]
        for process in starts:
            if process not in won:
                expect(finish(process), 1, "listens")
        check(len(won) == 1, "%d have won" % len(won))
        end(won[0])
        check(not os.listdir(path), "left: %s" % os.listdir(path))


# ---- other users ----


@test
def test_b9_b28_another_user_does_not_come_in():
    if not can_switch_user():
        skip("no other user here")
    path = made()
    process, socket_path = begin(path)

    def nobody_visits(part):
        expect(run(["status", "--socket", socket_path], **AS_NOBODY), 1, part)

    nobody_visits("ermission denied")  # the directory's mode
    os.chmod(path, 0o711)  # even if another process opens it
    nobody_visits("ermission denied")  # the socket's
    os.chmod(socket_path, 0o666)
    nobody_visits("user 65534 may not come in: expected 0")
    os.chmod(path, 0o700)
    end(process)


@test
def test_variables_of_another_user_are_named():
    """As su and runuser leave them."""
    if not can_switch_user():
        skip("no other user here")
    path = made()
    for variable, value in (("XDG_RUNTIME_DIR", path), ("COXSWAIN_RUNTIME_DIR", path + "/inner")):
        env = environment(**{"XDG_RUNTIME_DIR": "", variable: value})
        for command in (words("test"), ["status", "--name", "test"]):
            expect(run(command, env=env, **AS_NOBODY), 1, variable, "unset it")


@test
def test_b9_a_squatted_socket_is_not_entered():
    """Whatever its name and the file's owner: the process that listens counts."""
    if not can_switch_user():
        skip("no other user here")
    path = made()
    os.chown(path, OTHER_USER, OTHER_USER)
    process, socket_path = begin(path, **AS_NOBODY)
    worker = ["--socket", socket_path]
    expect(run(worker, command="coxswain-worker"), 1, "belongs to user 65534: expected 0 or 0")
    os.chown(socket_path, 0, 0)
    expect(run(worker, command="coxswain-worker"), 1, "process %d of user 65534 listens" % process.pid)
    kill(process)


if __name__ == "__main__":
    sys.exit(harness.main())
