#!/usr/bin/python3
"""clean removes what dead groups left, and doctor tells before a start what it would lack.

Usage: commands_doctor_test.py BIN_DIR SOURCE_DIR [TEST...]

With COXSWAIN_TEST_ATTACH=sealed in the environment, groups are sealed where a test does not say how they are to be.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
import rights  # pylint: disable=wrong-import-position
from commands_fixture import no_socket_is_left, pids_of, started  # pylint: disable=wrong-import-position
# pylint: disable-next=wrong-import-position
from harness import (MODEL, SEALED, TIMEOUT, Result, check, socket_files, environment, expect,
                     finish, generate, names_of, program, run, skip, start, temporary, test,
                     wait_until, without)

harness.begin(harness.parser(__doc__))
COXSWAIN = program("coxswain")
# A worker for which any number of ranks works; the reference worker divides a model.
ANY_COUNT = ["--", program("scripted_worker")]


def is_sanitized():
    return any(harness.program_has("coxswain", b"__%s_init" % kind) for kind in (b"asan", b"tsan"))


# ---- what dead groups leave ----


def killed_while_its_worker_never_attaches(name, ranks):
    """A group that has all its names: its workers tell by being started. All of them, so that no child is left that
    still holds the lock on its way into its program."""
    process = start(["run", "-n", str(ranks), "--name", name, "--", "sh", "-c",
                     "echo started >&2; exec sleep 1000"])
    for _ in range(ranks):
        line = process.stderr.readline()
        check("started" in line, "no worker was started: " + line)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=TIMEOUT)
    return process


@test
def clean_removes_what_a_killed_coordinator_left():
    for ranks in (1, 3):
        name = harness.fresh_name("clean")
        killed_while_its_worker_never_attaches(name, ranks)
        left = names_of(name)
        # Four two-way channels with two regions and four semaphores a rank, the error channel, the control region, the
        # rank group. Sealed: nothing.
        check(len(left) == (0 if SEALED else 4 * (2 + 4 * ranks) + 3 + 1 + 1), "not all names were there: %s" % left)
        check(socket_files() == [name + ".sock"], "not its socket: %s" % socket_files())
        result = expect(run(["clean", name]), 0)
        told = "" if SEALED else "removed %s: %d names\n" % (name, len(left))
        # Whoever has removed a socket does not say that there was nothing.
        check(result.out == told + "removed 1 socket without a listener\n", "wrong number", result)
        check(not socket_files(), "sockets: %s" % socket_files())
        check(not names_of(name), "left in /dev/shm: %s" % names_of(name))
        result = expect(run(["clean", name]), 0)
        check(result.out == "nothing to remove of %s\n" % name, "removed again", result)
    killed_while_its_worker_never_attaches(name, 1)
    result = expect(run(["clean", "coxnone"]), 0)
    check(result.out == "removed 1 socket without a listener\n", "nothing, in one breath with a socket", result)
    expect(run(["clean", name]), 0)


@test
def m16_p7_what_a_dead_group_left_is_no_obstacle():
    name = harness.fresh_name("dead")
    killed_while_its_worker_never_attaches(name, 2)
    process = start(["run", "-n", "4", "--name", name, *ANY_COUNT])
    check(started(process) == name, "another name")
    pids_of(process, 4)
    check(not names_of(name), "left in /dev/shm: %s" % names_of(name))
    process.send_signal(signal.SIGTERM)
    expect(finish(process), 0)


@test
def p7_b53_leftovers_give_their_space_to_the_next_start():
    """In a /dev/shm that holds one group but not two. A live one keeps its name where there is no space for a second."""
    needed = int(re.search(r"total of /dev/shm (\d+) ", run(["layout", "-n", "2"]).out)[1])
    script = """
        name() { exec "$0" run -n 2 --name full --attach named -- "$@"; }
        name sh -c 'exec sleep 1000' &
        while [ $(ls /dev/shm | wc -l) -lt 40 ] && kill -0 $!; do sleep 0.01; done
        kill -9 $!
        wait $!
        name "$1" >/dev/null &
        until "$0" status --name full >/dev/null 2>&1; do kill -0 $! || exit 4; sleep 0.01; done
        (name "$1")
        "$0" stop --name full || exit 6
        wait $!
    """
    under = on_tmpfs("mode=1777,size=%d" % (needed * 3 // 2))
    result = finish(subprocess.Popen([*under, "sh", "-c", script, COXSWAIN, program("scripted_worker")], text=True,
                                     stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                     env=environment(**harness.KEEP_NAMES)))
    expect(result, 0, "taken by a live group")


@test
def clean_of_everything_leaves_alone_what_another_cleans():
    """In a /dev/shm of its own; another process holds the lock of a dead group."""
    script = """
        mount -t tmpfs -o mode=1777 tmpfs /dev/shm || exit 77
        "$0" run -n 1 --name busy -- sh -c 'exec sleep 1000' &
        while [ ! -e /dev/shm/busy_control ] && kill -0 $!; do sleep 0.01; done
        kill -9 $!
        wait $!
        exec 9<>/dev/shm/busy_control
        flock 9
        "$0" clean
    """
    command = ["unshare"] + ([] if os.geteuid() == 0 else ["-r"]) + ["-m", "sh", "-c", script, COXSWAIN]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT,
                             env=environment())
    if process.returncode == 77 or "unshare" in process.stderr:
        skip("no /dev/shm of its own")
    result = Result(process.returncode, process.stdout, process.stderr, 0)
    check(result.status == 0, "a failure", result)
    check(re.match(r"kept busy: process \d+ of the group 'busy' is dead, but process \d+ holds its lock", result.out),
          "not told", result)


@test
def m16_process_1_of_a_container_reaps_orphans_and_passes_signals_on():
    under = ["unshare", *([] if os.geteuid() == 0 else ["-r"]), "-pf", "--mount-proc"]
    if subprocess.run([*under, "true"], stderr=subprocess.DEVNULL, timeout=TIMEOUT, check=False).returncode:
        skip("no PID namespace of its own")
    # The worker itself, or a shell that starts it and stays.
    for command in ("exec '%s' \"$@\"", "'%s' \"$@\"; exit 0"):
        with tempfile.TemporaryDirectory() as folder:
            # Its parent ends at once, so process 1 is what it becomes a child of.
            worker = temporary("#!/bin/sh\nfor i in 1 2 3 4 5; do (sh -c 'echo $PPID > %s/$$' &); done\n%s\n" %
                               (folder, command % program("coxswain-worker")), 0o700)
            process = start(["run", "-n", "1", "--worker", worker, "--model", MODEL], under=under)
            started(process)
            harness.wait_until(lambda: len(os.listdir(folder)) == 5, "the worker has left nothing behind")
            [first] = harness.children(process.pid)
            harness.wait_until(lambda: len(harness.children(first)) == 1, "process 1 reaps no orphans")
            os.kill(first, signal.SIGTERM)
            expect(finish(process), 0, "the group ends")


@test
def clean_reports_what_is_wrong_with_the_runtime_directory():
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, "coxswain"))
        os.chmod(os.path.join(folder, "coxswain"), 0o755)
        result = run(["clean", "coxnone"], env=environment(XDG_RUNTIME_DIR=folder))
        expect(result, 1, "coxswain has mode 0755", "chmod 700")
        check(result.out == "nothing to remove of coxnone\n", "something else", result)
        os.rmdir(os.path.join(folder, "coxswain"))
        expect(run(["clean", "coxnone"], env=environment(XDG_RUNTIME_DIR=folder)), 0)
        check(not os.listdir(folder), "a folder was made")


@test
def clean_does_not_touch_a_live_group():
    name = harness.fresh_name("live")
    dead = harness.fresh_name("dead")
    process = start(["run", "-n", "2", "--name", name, "--model", MODEL], env=environment(**harness.KEEP_NAMES))
    started(process)
    pids = pids_of(process, 2)
    before = names_of(name)
    result = expect(run(["clean", name]), 1, name, "taken by a live group of process %d" % process.pid)
    check(result.out == "", "removed something", result)
    # A live one and a dead one: the first decides the exit status, the second is still removed.
    killed_while_its_worker_never_attaches(dead, 1)
    check(SEALED or names_of(dead), "nothing was left")
    result = expect(run(["clean", name, dead]), 1, "taken by a live group")
    check(SEALED or "removed %s: 29 names\n" % dead in result.out, "not removed", result)
    check("removed 1 socket without a listener\n" in result.out, "no socket removed", result)
    check(socket_files() == [name + ".sock"], "sockets: %s" % socket_files())
    check(not names_of(dead), "left in /dev/shm: %s" % names_of(dead))
    check(names_of(name) == before, "names of a live group are gone")
    for pid in pids:
        check(os.path.exists("/proc/%d" % pid), "worker %d is gone" % pid)
    process.terminate()
    expect(finish(process), 0)
    check(not names_of(name), "left in /dev/shm: %s" % names_of(name))


def findings(*arguments, status=None, **options):
    """What doctor says: by the name of each finding, its mark and everything said about it."""
    result = run(["doctor", *arguments], **options)
    found = {}
    for line in result.out.splitlines():
        match = re.match(r"(ok  |note|BAD )  (\S.*?)  +(\S.*)", line)
        if match:
            name = match.group(2)
            check(name not in found, "two findings on " + name, result)
            found[name] = [match.group(1).strip(), match.group(3), ""]
        else:
            check(re.match(r" {28} -> \S", line), "no finding: " + line, result)
            found[name][2] = line.strip()
    bad = [name for name, (mark, _, _) in found.items() if mark == "BAD"]
    check(result.status == (1 if bad else 0), "the exit status does not follow the findings", result)
    check(status is None or result.status == status, "expected status %s" % status, result)
    check(result.err == "", "something on standard error", result)
    for name, (mark, _, advice) in found.items():
        check((mark == "ok") == (advice == ""), "advice does not follow the mark: " + name, result)
    return found


def found_mark(found, name, mark, *parts):
    check(name in found, "no finding on %s: %s" % (name, found))
    check(found[name][0] == mark, "%s: expected %s: %s" % (name, mark, found[name]))
    for part in parts:
        check(part in " ".join(found[name]), "%s does not speak of '%s': %s" % (name, part, found[name]))


@test
def doctor_prints_its_findings():
    found = findings(status=0)  # else this machine is no place for a group
    wanted = ["/dev/shm", "files there", "size of a file", "unnamed files there", "sealed memory", "children by pidfd",
              "pidfd_open", "close_range", "futex_waitv", "runtime directory", "socket peers", "futex, read-only", "ptrace scope", "pidfd_getfd", "open files", "processes",
              "locked memory", "memory", "cgroup memory limit", "cgroup process limit", "cgroup CPU quota",
              "monotonic clock", "processors"]
    check(sorted(found) == sorted(wanted), "other findings: %s" % sorted(found))


@test
def doctor_checks_the_runtime_directory():
    with tempfile.TemporaryDirectory() as folder:
        inside = os.path.join(folder, "coxswain")

        def found(mark, *parts, **options):
            found_mark(findings(env=environment(XDG_RUNTIME_DIR=folder), **options), "runtime directory", mark, *parts)
            # Groups start all the same.
            result = generate("1+1=", env=environment(XDG_RUNTIME_DIR=folder), **options)
            check(result.status == 0, "doctor says " + mark, result)
            check(("no control socket" in result.err) == (mark == "note"), "doctor says " + mark, result)

        found_mark(findings(env=environment(XDG_RUNTIME_DIR=folder)), "runtime directory", "ok", inside)
        check(not os.listdir(folder), "doctor makes a folder")
        found("ok", inside)
        check(os.listdir(folder) == ["coxswain"] and not os.listdir(inside), "left in %s" % folder)
        os.chmod(inside, 0o755)
        found("note", "mode 0755", "chmod 700")
        os.rmdir(inside)
        os.symlink("/tmp", inside)
        found("note", "is a link", "set COXSWAIN_RUNTIME_DIR")
        os.unlink(inside)
        if rights.can_switch_user():
            os.mkdir(inside, 0o700)
            os.chown(inside, 65534, 65534)
            found("note", "belongs to user 65534, expected 0", "COXSWAIN_RUNTIME_DIR")
            os.rmdir(inside)
        outer = folder
        folder = os.path.join(outer, "none")
        found("note", "cannot be made in " + folder, "unset it")
        # Nor where there can be none.
        folder = os.path.join(outer, "loop")
        os.symlink("loop", folder)
        found("note", "loop")
        folder = os.path.join(outer, "a" * 300)
        found("note", "a" * 300)
        folder = outer + "/." * 2500
        found("note", "expected less than 4096")
        folder = os.path.join(outer, "file")
        with open(folder, "w", encoding="ascii"):
            found("note", "file/coxswain")


@test
def doctor_finds_a_folder_that_it_may_not_make():
    if not rights.can_switch_user():
        skip("no other user")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        result = run(["doctor"], env=environment(XDG_RUNTIME_DIR=folder), user=65534, group=65534,
                     extra_groups=[])
        words = r"^note  runtime directory +coxswain cannot be made in %s: Permission denied" % folder
        check(re.search(words, result.out, re.M), "not told", result)


@test
def test_b15_doctor_counts_the_fds_of_a_group():
    def limit(count):
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))

    def group(ranks, count):
        """A group without a model that may open so many."""
        process = start(["run", "-n", str(ranks), *ANY_COUNT], preexec_fn=limit(count - weights))
        if process.stdout.readline():  # else it ends by itself
            process.terminate()
        return finish(process)

    for ranks in (1, 32, 2, 128, 8):
        if not SEALED and rights.free_shm() < ranks << 20:
            print("skipped: %d ranks: /dev/shm is too small" % ranks)
            continue
        told = findings("-n", str(ranks))["open files"][1]
        weights = int(re.search(r"with (\d+) for a model's weights", told).group(1))
        count = int(re.search(r"sealed (\d+)" if SEALED else r"ranks takes (\d+)", told).group(1))
        expect(group(ranks, count), 0)
        if ranks <= 8:
            expect(generate("-n", str(ranks), "1+1=", preexec_fn=limit(count)), 0)
        # Sealed ranks may have to exchange fds over the control socket; here they do not.
        less = 3 * ranks + 1 if SEALED else 1
        if not SEALED:
            found_mark(findings("-n", str(ranks), preexec_fn=limit(count)), "open files", "ok")
            found_mark(findings("-n", str(ranks), preexec_fn=limit(count - 1)), "open files", "BAD", "ulimit -n")
        result = group(ranks, count - less)
        check(result.status != 0, "doctor asks for more than a group needs", result)
        check(re.search(r"may have \d+ files open, a coordinator of %d ranks needs \d+: ulimit -n \d+" % ranks, result.err),
              "not told what is wanting", result)
    if SEALED:
        return
    # Eight ranks were not asked for: smaller groups start.
    found_mark(findings(status=0, preexec_fn=limit(count - 1)), "open files", "note", "ulimit -n")


@test
def a_start_without_enough_fds_says_so_however_few_there_are():
    told = findings("-n", "4")["open files"][1]
    count = int(re.search(r"ranks takes (\d+)", told).group(1))
    failed = 0
    for have in range(12, count):
        result = generate("-n", "4", "1+1=", preexec_fn=lambda have=have: resource.setrlimit(
            resource.RLIMIT_NOFILE, (have, have)))
        if result.status == 0:
            continue
        failed += 1
        check(result.status in (1, 3) and "signal 0" not in result.err, "odd end with %d" % have, result)
        check("may have %d files open, a coordinator of 4 ranks needs %d: ulimit -n %d" % (have, count, count) in result.err,
              "with %d not told what is wanting" % have, result)
    check(failed > 10, "only %d starts failed" % failed)


@test
def a_sealed_start_that_has_fds_by_the_socket_alone_says_how_many_it_needs():
    """The control socket keeps two fds of each rank's memory for the others, and a share of what the coordinator may open is for
    them. What has no place there is opened by /proc, so that fewer files are enough here."""
    ranks, denied = 8, without("pidfd_getfd=EPERM")
    told = findings("-n", str(ranks))["open files"][1]
    count = int(re.search(r"sealed (\d+)", told).group(1))

    def at_most(have):
        process = start(["run", "--attach", "sealed", "-n", str(ranks), "--model", MODEL], under=denied,
                        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (have, have)))
        if process.stdout.readline():
            process.terminate()
        return finish(process)

    expect(at_most(count), 0)
    # Down to where the control socket has places for all but one of them.
    failed = 0
    for have in range(4 * (2 * ranks + 1) - 1, count, 3):
        result = at_most(have)
        if result.status:
            failed += 1
            check("may have %d files open, a coordinator of %d ranks needs %d: ulimit -n %d" % (have, ranks, count, count)
                  in result.err, "with %d not told what is wanting" % have, result)
    check(failed > 3, "only %d starts failed" % failed)


@test
def doctor_counts_the_threads_of_a_group():
    if is_sanitized():
        skip("sanitizers have threads of their own")
    for ranks in (1, 4):
        told = int(re.search(r"ranks has (\d+)", findings("-n", str(ranks))["processes"][1]).group(1))
        process = start(["run", "-n", str(ranks), "--model", MODEL])
        started(process)
        pids = [process.pid] + pids_of(process, ranks)
        # A thread that has been joined may be listed for a moment.
        wait_until(lambda: sum(len(os.listdir("/proc/%d/task" % pid)) for pid in pids) == told,
                   "the %d threads of %d ranks that doctor tells" % (told, ranks))
        process.terminate()
        expect(finish(process), 0)


@test
def doctor_tries_what_a_group_needs():
    sanitized = "ASAN_OPTIONS" in os.environ  # the sanitizer's own start needs sched_getaffinity
    for calls, name, mark, *parts in [
            ("pidfd_open=EPERM", "pidfd_open", "note", "seccomp"),
            ("pidfd_open=ENOSYS", "pidfd_open", "note", "Linux 5.3"),
            ("waitid=EINVAL", "children by pidfd", "BAD", "Linux 5.4"),
            ("waitid=EPERM", "children by pidfd", "BAD", "seccomp"),
            ("linkat=EPERM", "unnamed files there", "BAD", "linkat"),
            ("close_range=ENOSYS", "close_range", "note", "Linux 5.9"),
            ("close_range=EPERM", "close_range", "note", "seccomp"),
            ("memfd_create=EPERM", "sealed memory", "BAD", "seccomp"),
            ("futex<128=EPERM", "futex, read-only", "BAD", "seccomp"),  # between processes
            ("getsockopt=EPERM", "socket peers", "note", "seccomp"),
            ("bind=EPERM", "runtime directory", "note", "a socket in", "COXSWAIN_RUNTIME_DIR"),
            ("futex_waitv=ENOSYS", "futex_waitv", "note", "Linux 5.16"),
            ("futex_waitv=EPERM", "futex_waitv", "note", "seccomp"),
            ("pidfd_getfd=ENOSYS", "pidfd_getfd", "note", "Linux 5.6"),
            ("pidfd_getfd=EPERM", "pidfd_getfd", "note", "SYS_PTRACE"),
            ("sched_getaffinity<129=EINVAL", "processors", "ok", "%d of " % len(os.sched_getaffinity(0))),
            ("sched_getaffinity=EPERM", "processors", "note", "unknown")]:
        if sanitized and calls.startswith("sched_getaffinity"):
            continue
        found_mark(findings(under=without(calls)), name, mark, *parts)
        # BAD is said of what keeps a group from starting, and of nothing else; without waitid it starts, but no worker
        # can be reaped; and without futexes it is the C library that ends the process.
        if calls.startswith(("waitid", "futex<")):
            continue
        result = generate("-n", "2", "1+1=", under=without(calls))
        check((result.status == 0) == (mark != "BAD"), "%s is %s, but" % (calls, mark), result)


@test
def doctor_tries_pidfd_getfd_on_another_process():
    if not rights.can_switch_user():
        skip("no other user")
    # A program that its user cannot read is not to be looked into by other processes of that user, only by itself.
    folder = tempfile.mkdtemp()
    program = os.path.join(folder, "coxswain")
    try:
        os.chmod(folder, 0o755)
        with open(COXSWAIN, "rb") as source, open(program, "wb") as copy:
            copy.write(source.read())
        os.chmod(program, 0o711)
        result = subprocess.run([program, "doctor"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                                timeout=TIMEOUT, user=65534, group=65534, extra_groups=[], check=False)
    finally:
        os.unlink(program)
        os.rmdir(folder)
    check(re.search(r"^note  pidfd_getfd +Operation not permitted\n +-> ", result.stdout, re.M), result.stdout)


def on_tmpfs(options):
    """In front of a command: with a /dev/shm of its own."""
    under = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o "$0" tmpfs /dev/shm && exec "$@"', options]
    if subprocess.run([*under, "true"], stderr=subprocess.DEVNULL, timeout=TIMEOUT, check=False).returncode:
        skip("no mounting here")
    return under


@test
def test_p10_a_sealed_group_serves_where_nothing_can_have_a_name():
    """Whatever it makes at any time, of weights, KV caches and the rank group, too, is in memory without a name."""
    under = on_tmpfs("ro")
    expect(generate("1+1=", under=under), 1, "/dev/shm", "Read-only")
    for more in ([], ["--worker", harness.own_weights()]):
        result = harness.generate_on(["--attach", "sealed", "-n", "4", *more], "27+58=", under=under)
        check(expect(result, 0).out == "27+58=85\n", "another text with %s" % more, result)


@test
def p6_b51_a_start_that_finds_too_little_shared_memory_says_how_much():
    under = on_tmpfs("size=1m,mode=1777")
    command = ["run", "-n", "8", "--attach", "named"]
    needed = re.search(r"total of /dev/shm (\d+) ", run(["layout", "-n", "8"]).out)[1]
    expect(run([*command, *ANY_COUNT], under=under), 1, "needs %s bytes of /dev/shm, 1048576 are free" % needed)
    # Smaller regions fit.
    sizes = ["--size=%s.%s=16K" % (channel, side) for side in ("request", "reply")
             for channel in ("execute", "shared_sync_link", "transfer", "recover_command")]
    process = start([*command, *sizes, *ANY_COUNT], under=under, env=environment(COXSWAIN_TEST_NO_RECORDER="1"))
    started(process)
    pids_of(process, 8)
    process.send_signal(signal.SIGTERM)
    expect(finish(process), 0)


@test
def test_p6_doctor_and_start_agree_on_shared_memory():
    if SEALED:
        skip("sealed groups are not in /dev/shm")
    for options, name, mark, marked_asked, *parts in [
            ("size=1m", "/dev/shm", "BAD", "BAD", "1.0 of 1.0 MiB free", "10.87 MiB", "--shm-size"),
            ("size=8m", "/dev/shm", "note", "BAD", "8.0 of 8.0 MiB free"),
            ("size=16m", "/dev/shm", "ok", "ok", "16.0 of 16.0 MiB free"),
            ("size=0", "/dev/shm", "ok", "ok", "no limit"),
            ("nr_inodes=20", "files there", "BAD", "BAD", "19", "141", "nr_inodes="),
            ("nr_inodes=100", "files there", "note", "BAD", "99"),
            ("nr_inodes=0", "files there", "ok", "ok", "no limit")]:
        under = on_tmpfs(options)
        found_mark(findings(under=under), name, mark, *parts)
        found_mark(findings("-n", "8", under=under), name, marked_asked, *parts)
        result = generate("-n", "8", "1+1=", under=under)
        check((result.status == 0) == (marked_asked == "ok"), "doctor said %s of %s" % (marked_asked, options), result)
        check(result.status == 0 or "/dev/shm, " in result.err, "another reason", result)
        if mark == "note":
            expect(generate("-n", "1", "1+1=", under=under), 0)


@test
def test_p6_doctor_and_start_agree_on_the_size_of_files():
    if SEALED:
        skip("the regions of named groups are meant")
    def limit(size):
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    size = region = int(re.search(r"largest region has (\d+)", findings()["size of a file"][1]).group(1))
    found_mark(findings(), "size of a file", "ok")
    found_mark(findings(preexec_fn=limit(size)), "size of a file", "note", "KV cache", "ulimit -f")
    process = start(["run", "-n", "2", *ANY_COUNT], preexec_fn=limit(size))
    check(process.stdout.readline(), "the regions do not fit")
    process.terminate()
    expect(finish(process), 0)
    # A rank's KV cache is one file.
    result = expect(generate("1+1=", preexec_fn=limit(size)), 3, "KV cache", "ulimit -f")
    size = int(re.search(r"KV cache: .*: (\d+) bytes of memory are needed", result.err).group(1))
    expect(generate("1+1=", preexec_fn=limit(size - 1)), 3, "KV cache", str(size), str(size - 1), "ulimit -f")
    # The weights of a model are one file for each version.
    quiet = expect(generate("1+1=", "--quiet", preexec_fn=limit(size)), 0)
    check(quiet.err == "", "it speaks of something", quiet)
    # Ranks that may have what the coordinator may not load by themselves.
    worker = os.path.join(tempfile.mkdtemp(), "coxswain-worker")
    os.rename(temporary("#!/bin/sh\nulimit -S -f unlimited\nexec '%s' \"$@\"\n" % program("coxswain-worker"), 0o700), worker)
    less = os.path.getsize(os.path.join(MODEL, "model.safetensors")) - 4096
    expect(harness.generate_on(["--depth", "1", "--attach", "sealed", "--worker", worker], "1+1=", preexec_fn=limit(less)), 0,
           "every rank loads its own part of the model", "ulimit -f")
    size = region
    found_mark(findings(preexec_fn=limit(size - 1)), "size of a file", "BAD", str(size), str(size - 1), "ulimit -f")
    expect(generate("1+1=", preexec_fn=limit(size - 1)), 1, str(size), str(size - 1), "ulimit -f")


if __name__ == "__main__":
    sys.exit(harness.main(no_socket_is_left))
