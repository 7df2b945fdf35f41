#!/usr/bin/python3
"""A group that is kept, or ended: signals, terminals, what its workers write, and workers that die.

Usage: commands_run_test.py BIN_DIR SOURCE_DIR [TEST...]

With COXSWAIN_TEST_ATTACH=sealed in the environment, groups are sealed where a test does not say how they are to be.
"""

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from commands_fixture import no_socket_is_left, pids_of, started  # pylint: disable=wrong-import-position
# pylint: disable-next=wrong-import-position
from harness import (MODEL, TIMEOUT, Failure, check, socket_files, environment, expect, finish,
                     generate, names_with, program, run, start, stop_process, sums, temporary, test,
                     wait_until)

harness.begin(harness.parser(__doc__))
# A worker for which any number of ranks works; the reference worker divides a model.
ANY_COUNT = ["--", program("scripted_worker")]


# ---- a group that is kept ----


@test
def run_ends_with_a_signal():
    for number, ranks, more in ((signal.SIGINT, 4, ["--model", MODEL]), (signal.SIGTERM, 4, ["--model", MODEL]),
                                (signal.SIGINT, 3, ANY_COUNT), (signal.SIGTERM, 32, ANY_COUNT)):
        process = start(["run", "-n", str(ranks), *more])
        started(process)
        pids = pids_of(process, ranks)
        process.send_signal(number)
        expect(finish(process), 0, "the group ends")
        for pid in pids:
            check(not os.path.exists("/proc/%d" % pid), "worker %d lives on" % pid)


@test
def a_terminal_that_closes_is_a_signal_like_others():
    name = harness.fresh_name("hup")
    process = start(["run", "-n", "2", "--name", name, "--model", MODEL], env=environment(**harness.KEEP_NAMES))
    started(process)
    process.send_signal(signal.SIGHUP)
    expect(finish(process), 0, "the group ends")
    check(not names_with(name), "left in /dev/shm: %s" % names_with(name))


@test
def a_signal_ends_a_group_that_loads_its_model():
    for twice in (False, True):
        process = start(["run", "-n", "2", "--model", "endless", "--", program("scripted_worker")])
        check("loading" in process.stderr.readline() + process.stderr.readline(), "it does not load")
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        if twice:
            wait_until(lambda: process.send_signal(signal.SIGTERM) or process.poll() is not None, "the second signal")
        result = finish(process)
        took = time.monotonic() - begin
        check(result.status in ((-signal.SIGTERM, -signal.SIGINT) if twice else (130,)), "wrong status", result)
        check(took < 20, "it took %.1f s to end" % took)
        check(not socket_files(), "a socket is left: %s" % socket_files())


@test
def signals_ignored_at_the_start_stay_ignored():
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        process = start(["run", "-n", "1", "--model", MODEL], preexec_fn=lambda number=ignored: signal.signal(
            number, signal.SIG_IGN))
        started(process)
        process.send_signal(ignored)
        other = signal.SIGINT if ignored == signal.SIGTERM else signal.SIGTERM
        process.send_signal(other)  # the first one would be the one that ends it
        expect(finish(process), 0, signal.strsignal(other) + ": the group ends")


@test
def a_key_pressed_at_the_terminal_is_for_the_coordinator_alone():
    # A terminal signals its foreground group; a worker in it would die of it, now and then before the coordinator looks.
    for _ in range(5):
        process = start(["run", "-n", "4", "--model", MODEL], start_new_session=True)
        started(process)
        for pid in pids_of(process, 4):
            check(os.getpgid(pid) == pid, "worker %d is in the group %d" % (pid, os.getpgid(pid)))
        os.killpg(process.pid, signal.SIGINT)
        expect(finish(process), 0, "the group ends")


@test
def run_names_the_worker_that_died():
    name = harness.fresh_name("test")
    for ranks, more in ((4, ["--model", MODEL]), (3, ANY_COUNT)):
        process = start(["run", "-n", str(ranks), "--name", name, *more], env=environment(**harness.KEEP_NAMES))
        check(started(process) == name, "another name")
        pids = pids_of(process, ranks)
        check(names_with(name), "the names are not kept")
        os.kill(pids[1], signal.SIGKILL)
        expect(finish(process), 3, "rank 1", "pid %d" % pids[1], "Killed")
    check(not names_with(name), "left in /dev/shm: %s" % names_with(name))


@test
def run_shows_what_workers_write():
    script = "echo to be heard; echo loud >&2; exec %s --model %s" % (
        program("coxswain-worker"), MODEL)
    process = start(["run", "-n", "2", "--", "sh", "-c", script])
    started(process)
    pids_of(process, 2)
    process.terminate()
    expect(finish(process), 0, "[rank 0] to be heard", "[rank 1] to be heard", "[rank 1] loud")


def talkative(lines, then):
    """A worker that prints many lines while it starts. The command, and a file that is there once they are printed."""
    done = temporary("")
    os.unlink(done)
    script = ('i=0; while [ $i -lt %d ]; do echo "line $i ..............................................."; '
              'i=$((i+1)); done; : > %s; %s' % (lines, done, then))
    return ["--", "sh", "-c", script], done


def waiting(stream):
    """Bytes in a pipe."""
    return struct.unpack("i", fcntl.ioctl(stream, termios.FIONREAD, b"\0" * 4))[0]


def seconds_to_end_unread(killed):
    """Of a group whose standard error is full, and never read."""
    command, done = talkative(3000, "exec %s --model %s" % (program("coxswain-worker"), MODEL))
    process = start(["run", "-n", "2"] + command)
    started(process)
    pids = pids_of(process, 2)
    wait_until(lambda: waiting(process.stderr) > 60000 and os.path.exists(done), "a full pipe")
    begin = time.monotonic()
    if killed:
        os.kill(pids[1], signal.SIGKILL)
    else:
        process.send_signal(signal.SIGTERM)
    try:
        status = process.wait(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise Failure("it never ends") from None
    took = time.monotonic() - begin
    process.communicate()
    check(status == (3 if killed else 0), "exit status %d" % status)
    return took


@test
def nobody_reads_standard_error_and_the_group_ends_all_the_same():
    for killed in (False, True):
        tries = []  # one may be slow on a busy machine; a wait of the product is in each
        while not tries or tries[-1] >= 6 and len(tries) < 3:
            tries.append(seconds_to_end_unread(killed))
        check(tries[-1] < 6, "it took %s s to end" % tries)


@test
def nobody_reads_standard_output_either_and_the_group_serves_and_ends():
    """As in a container whose log pipe is full: both are one pipe."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b"x" * fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ))
        name = harness.fresh_name("unread")
        process = start(["run", "-n", "2", "--name", name, "--model", MODEL], stdout=writer, stderr=writer)
        harness.wait_until(lambda: run(["status", "--name", name]).status == 0, "a group that serves")
        check(expect(run(["generate", "--name", name, "1+1="]), 0).out == "1+1=2\n", "another text")
        process.send_signal(signal.SIGTERM)
        check(process.wait(timeout=TIMEOUT) == 0, "another exit status")
        # A command that is inside a write of its result.
        process = start(["generate", "-n", "1", "--model", MODEL, "1+1="], stdout=writer, stderr=subprocess.DEVNULL)
        harness.wait_until(lambda: "pipe_write" in harness.sleeps_in(process.pid), "a full standard output")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # 20 s later the first one would count again
        check(-process.wait(timeout=TIMEOUT) in (signal.SIGTERM, signal.SIGINT), "another exit status")
    finally:
        os.close(reader)
        os.close(writer)


@test
def no_line_is_lost_unsaid():
    # A reader that keeps up gets everything, in order, and what came of it last.
    command, done = talkative(3000, "exit 7")
    result = expect(run(["run", "-n", "1"] + command), 3, "status 7")
    lines = re.findall(r"^\[rank 0\] line (\d+) \.+$", result.err, re.M)
    check(lines == [str(i) for i in range(3000)], "not all lines, or not in order", result)
    check(result.err.rindex("[rank 0]") < result.err.index("status 7"), "the end is not told last", result)
    # A late one gets the number of missed lines, and their place.
    command, done = talkative(20000, "exec sleep 1000")
    process = start(["run", "-n", "1"] + command)
    wait_until(lambda: os.path.exists(done), "all lines")
    process.terminate()
    result = finish(process)
    lost = [int(count) for count in re.findall(r"^coxswain: (\d+) lines are lost", result.err, re.M)]
    lines = [int(i) for i in re.findall(r"^\[rank 0\] line (\d+) \.+$", result.err, re.M)]
    check(lost and len(lines) + sum(lost) == 20000, "%d lines, %s lost" % (len(lines), lost), result)
    check(lines == sorted(lines), "not in order", result)


@test
def generate_is_interrupted():
    # A worker that takes its time: the step in flight is not waited for.
    for number, words in ((signal.SIGINT, "signal 2 (Interrupt)"), (signal.SIGTERM, "signal 15 (Terminated)")):
        process = start(["generate", "--model", MODEL, "--quiet", "--sequences", "1", "--file",
                         temporary("1+1=\n" * 100000)])
        check(process.stdout.readline() == "1+1=2\n", "no text")
        process.send_signal(number)
        expect(finish(process), 128 + number, words)


def workers_of(process, ranks):
    """Pids, in order of rank: forked one after the other by one of the threads."""
    workers = harness.children(process.pid)
    check(len(workers) == ranks, "expected %d workers, not %s" % (ranks, workers))
    return workers


@test
def generate_names_the_worker_that_died():
    process = start(["generate", "--model", MODEL, "-n", "2", "--sequences", "1", "--file",
                     temporary("1+1=\n" * 100000)])
    check(process.stdout.readline() == "1+1=2\n", "no text")
    pid = workers_of(process, 2)[-1]
    os.kill(pid, signal.SIGKILL)
    result = expect(finish(process), 3, "rank ", "pid %d" % pid, "Killed")
    check(result.out.replace("1+1=2\n", "") == "", "text that is none", result)


@test
def every_prompt_gets_an_error_when_a_worker_dies():
    # The first takes long, so that those behind it are done and wait for their turn to be printed.
    path = temporary("7 8 9\n" + "3 4 5\n" * 200)
    process = start(["generate", "--model", MODEL, "-n", "2", "--tokens", "--json", "--sequences", "8", "--file", path])
    lines = [process.stdout.readline()]
    os.kill(workers_of(process, 2)[-1], signal.SIGKILL)
    result = expect(finish(process), 3, "Killed")
    lines += result.out.splitlines()
    rows = [json.loads(line) for line in lines]
    check([row["prompt"] for row in rows] == ["7 8 9"] + ["3 4 5"] * 200, "not each prompt once, in order", result)
    done = [row for row in rows if row["finish"] != "error"]
    check(all(row["tokens"] for row in done) and len(done) < len(rows), "%d are done" % len(done), result)


@test
def run_without_an_output_says_so_at_once():
    with open("/dev/full", "w", encoding="ascii") as full:
        expect(finish(start(["run", "--model", MODEL], stdout=full)), 1, "cannot write to standard output",
               "No space left")


@test
def a_step_that_is_late_is_run_again_and_the_text_is_the_same():
    prompts, _ = sums(300)
    path = temporary("\n".join(prompts) + "\n")
    expected = expect(generate("-n", "1", "--file", path), 0).out
    for rank in (0, 1):
        with tempfile.TemporaryFile("w+", encoding="ascii") as out:
            process = start(["generate", "--model", MODEL, "-n", "2", "--sequences", "4", "--timeout", "0.5", "--file",
                             path], stdout=out)
            wait_until(lambda: os.fstat(out.fileno()).st_size > 0, "text")
            pid = workers_of(process, 2)[rank]
            stop_process(pid)
            begin = line = process.stderr.readline()  # that it is stopped; then the stacks, and the retry
            while line and "is retried" not in line:
                line = process.stderr.readline()
                begin += line
            os.kill(pid, signal.SIGCONT)
            result = finish(process)
            out.seek(0)
            result.out, result.err = out.read(), begin + result.err
            expect(result, 0, "a step failed and is retried", "rank %d" % rank, "steps were run again")
            check(result.out == expected, "another text", result)


@test
def a_worker_that_stays_silent_is_named():
    process = start(["generate", "--model", MODEL, "-n", "2", "--sequences", "1", "--timeout", "0.3", "--file",
                     temporary("1+1=\n" * 100000)])
    check(process.stdout.readline() == "1+1=2\n", "no text")
    stop_process(workers_of(process, 2)[1])
    expect(finish(process), 3, "rank 1")


if __name__ == "__main__":
    sys.exit(harness.main(no_socket_is_left))
