#!/usr/bin/python3
"""What a newcomer and an operator meet in their first hour with the commands: names, stalls, health, where groups are found.

Usage: first_hour_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import fcntl
import json
import os
import pty
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from groups import Group  # pylint: disable=wrong-import-position
from harness import (MODEL, TIMEOUT, check, environment, expect, finish, fresh_name, names_with,  # pylint: disable=wrong-import-position
                     program, run, skip, socket_files, start, sums, temporary, test, wait_until)

harness.begin(harness.parser(__doc__))


class Lines:
    """Standard error of a process, line by line; nothing is lost, as of communicate()."""

    def __init__(self, stream):
        self.stream = stream
        self.seen = ""

    def until(self, *parts):
        """The next line with all parts. A line that never comes ends the test by CTest's timeout."""
        while True:
            line = self.stream.readline()
            check(line, "the end before a line with %s; before that: %s" % (parts, self.seen))
            self.seen += line
            if all(part in line for part in parts):
                return line


# ---- names ----


@test
def a_name_that_does_not_run_says_how_to_start_it():
    name = fresh_name("nobody")
    result = expect(run(["generate", "--name", name, "27+58="]), 2, "no group '%s' is alive" % name,
                    "coxswain run %s starts one" % name)
    check(result.out == "", "it ran", result)
    check(not names_with(name) and not socket_files(), "something was started")


@test
def the_name_is_an_argument_in_front_of_a_command_too():
    name = fresh_name("argument")
    process = start(["run", "-n", "1", name, "--model", MODEL])
    expect(run(["status", name, "--wait", "60"]), 0)
    check(expect(run(["generate", "--name", name, "--quiet", "27+58="]), 0).out == "27+58=85\n", "no prompts")
    expect(run(["stop", name]), 0)
    finish(process)
    expect(run(["run", "-n", "1", name, "--", "/nonexistent", "--name", "x"]), 3, "cannot execute '/nonexistent'")
    for command in ("run", "node"):
        for words, refused in ((["a", "b"], "b"), (["--name", "a", "b", "--", "c"], "b"), (["./worker"], "./worker")):
            expect(run([command, *words]), 2, "'%s' is not expected here: a group has one name, and a command comes "
                   "after --" % refused)
    expect(run(["node", "a"]), 2, "--node is missing")


@test
def a_refusal_names_only_the_option_that_was_given():
    with Group(1) as group:
        for given in (["--worker", "x"], ["-n", "1"], ["--legacy-workers"], ["--init", "k=v"]):
            result = expect(run(["generate", "--name", group.name, *given, "1+1="]), 2, "leave out %s," % given[0])
            named = set(re.findall(r"--[a-z-]+", result.err)) - {given[0], "--help"}
            check(not named, "it names %s too" % named, result)
        # A time limit is for clients, too.
        check(expect(run(["generate", "--name", group.name, "--timeout", "60", "1+1="]), 0).out == "1+1=2\n", "no")
        group.stop()


# ---- workers of one's own ----


@test
def the_example_workers_run_as_their_comments_say():
    """examples/worker.c under run, as README has it, and examples/execute.c under generate."""
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(program("example_worker"), os.path.join(folder, "worker"))
        os.symlink(program("example_execute"), os.path.join(folder, "execute"))
        group = start(["run", "-n", "2", "--", "./worker"], cwd=folder)
        lines = [group.stdout.readline().split()[0] for _ in range(4)]
        check(lines == ["name", "socket", "rank", "rank"], "other lines: %s" % lines)
        group.terminate()
        expect(finish(group), 0, "the group ends")
        for ranks in ("1", "3"):
            result = run(["generate", "-n", ranks, "--worker", "./execute", "--model", MODEL, "--max-tokens", "4", "1234",
                          "8"], cwd=folder)
            expect(result, 0, "rank 0 of %s: a real one would load its part of %s" % (ranks, MODEL))
            check(result.out == "12345678\n89012\n", "another text", result)


@test
def a_folder_that_is_no_model_says_what_one_holds():
    with tempfile.TemporaryDirectory() as folder:
        expect(run(["generate", "--model", folder, "1+1="]), 2, "%s/tokenizer.json does not exist: a model folder has "
               "config.json, model.safetensors" % folder, "--tokens")
        with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as file:
            file.write('{"vocab_size": 10}')
        own = ["generate", "-n", "1", "--model", folder, "--tokens", "--max-tokens", "4"]
        expect(run([*own, "1 2"]), 2, "model_type is missing")
        # The format of the model of another worker is the worker's.
        expect(run([*own, "--worker", program("example_execute"), "1 2"]), 0)


# ---- stalls ----


@test
def run_prints_a_pause_a_stop_and_a_death_and_their_ends():
    with Group(2, ("--on-death", "wait")) as group:
        lines = Lines(group.process.stderr)
        expect(run(["recover", "pause", "--name", group.name]), 0)
        lines.until("the group is paused", "coxswain recover start")
        expect(run(["recover", "start", "--name", group.name]), 0)
        lines.until("goes on after a pause of ")
        os.kill(group.pids[1], signal.SIGSTOP)
        lines.until("rank 1 (pid %d) is stopped by signal 19" % group.pids[1], "kill -CONT %d" % group.pids[1])
        os.kill(group.pids[1], signal.SIGCONT)
        lines.until("rank 1 (pid %d) continues" % group.pids[1])
        os.kill(group.pids[0], signal.SIGKILL)
        lines.until("rank 0 (pid %d) was killed by signal 9" % group.pids[0], "coxswain recover restart --rank 0")
        expect(run(["recover", "restart", "--name", group.name]), 0)
        lines.until("rank 0 (pid %d)" % group.pids[0], "replaced by process")
        expect(group.stop(), 0)
        rest = group.process.communicate(timeout=TIMEOUT)[1]
        check("paused" not in rest and "stopped by signal" not in rest, "more than happened: " + rest)


@test
def a_client_says_what_it_waits_for_and_has_a_timeout():
    soon = environment(COXSWAIN_TEST_WATCH_MS="200")  # in a build without tests it is 1 s
    with Group(2) as group:
        expect(run(["recover", "pause", "--name", group.name]), 0)
        client = start(["generate", "--name", group.name, "27+58="], env=soon)
        lines = Lines(client.stderr)
        lines.until("waiting for the group '%s': it is paused" % group.name, "coxswain recover start")
        result = expect(run(["generate", "--name", group.name, "--timeout", "0.5", "1+1="], env=soon), 3,
                        "has not replied for 0.5 s: it is paused")
        check(result.out == "", "it has text", result)
        expect(run(["recover", "start", "--name", group.name]), 0)
        check(client.communicate(timeout=TIMEOUT)[0] == "27+58=85\n" and client.returncode == 0, "another text")
        # Other clients, too; here one that waits for the rank's reply.
        group.stopped(1)
        client = start(["lora", "load", "x", MODEL, "--name", group.name], env=soon)
        Lines(client.stderr).until("waiting for the group '%s': rank 1 (pid %d) is stopped" % (group.name, group.pids[1]))
        os.kill(group.pids[1], signal.SIGCONT)
        client.stdout.read()
        check(client.wait(timeout=TIMEOUT) == 2, "it ended with %s" % client.returncode)
        group.stopped(1)
        client = start(["generate", "--name", group.name, "27+58="], env=soon)
        lines = Lines(client.stderr)
        lines.until("rank 1 (pid %d) is stopped by a signal (kill -CONT %d)" % (group.pids[1], group.pids[1]))
        os.kill(group.pids[1], signal.SIGCONT)
        check(client.communicate(timeout=TIMEOUT)[0] == "27+58=85\n" and client.returncode == 0, "another text")
        expect(group.stop(), 0)


# ---- health ----


def health(name, *arguments):
    result = run(["status", "--name", name, *arguments])
    line = re.search(r"^degraded: (.*)$", result.out, re.M)
    return result.status, line.group(1) if line else None


@test
def status_has_the_health_of_a_group_as_its_exit_status():
    name = fresh_name("none")
    expect(run(["status", "--name", name]), 1, "no group '%s' is alive" % name)
    expect(run(["status", "--name", name, "--wait", "0.3"]), 1, "no group '%s' is alive" % name)
    expect(run(["status", "--odd"]), 2)
    with Group(2, ("--on-death", "wait")) as group:
        check(health(group.name) == (0, None), "not healthy")
        told = group.status()
        check(told["healthy"] is True and told["degraded"] is None, "another object: %s" % told)
        expect(run(["recover", "pause", "--name", group.name]), 0)
        check(health(group.name) == (4, "it is paused (coxswain recover start)"), "not paused")
        told = json.loads(expect(run(["status", "--name", group.name, "--json"]), 4).out)
        check(told["ok"] is True and told["healthy"] is False and "paused" in told["degraded"], "another object: %s" % told)
        expect(run(["recover", "start", "--name", group.name]), 0)
        group.stopped(1)
        status, text = health(group.name)
        check(status == 4 and "rank 1 (pid %d) is stopped" % group.pids[1] in text, "not stopped: %s" % text)
        # Waits until it is healthy again, or in vain.
        check(health(group.name, "--wait", "0.3")[0] == 4, "healthy")
        waiting = start(["status", "--name", group.name, "--wait", "60"])
        os.kill(group.pids[1], signal.SIGCONT)
        expect(finish(waiting), 0)
        os.kill(group.pids[0], signal.SIGKILL)
        wait_until(lambda: health(group.name)[0] == 4, "a death")
        text = health(group.name)[1]
        check("rank 0 (pid %d) was killed by signal 9" % group.pids[0] in text and "recover restart --rank 0" in text,
              "another text: %s" % text)
        expect(run(["recover", "restart", "--name", group.name]), 0)
        expect(run(["status", "--name", group.name, "--wait", "60"]), 0)
        expect(group.stop(), 0)


@test
def status_waits_for_a_group_that_is_not_there_yet_and_for_one_whose_workers_are_absent():
    name = fresh_name("later")
    waiting = start(["status", "--name", name, "--wait", "100"])
    group = start(["run", "-n", "1", "--worker", "none", "--name", name, "--model", MODEL])
    worker = None
    try:
        Lines(group.stderr).until("waiting for 1 worker")
        expect(run(["status", "--name", name]), 1, "waits for its workers")
        check(waiting.poll() is None, "it did not wait")
        worker = start(["--socket", name], command="coxswain-worker", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        expect(finish(waiting), 0)
        expect(run(["stop", "--name", name]), 0)
        expect(finish(group), 0)
        worker.wait(timeout=TIMEOUT)
    finally:
        for process in (waiting, group, worker):
            if process and process.poll() is None:
                process.kill()
                process.communicate()


@test
def status_watches_until_the_group_is_gone():
    with Group(1) as group:
        watch = start(["status", "--name", group.name, "--watch"])
        lines = Lines(watch.stdout)
        for _ in range(2):
            lines.until("group %s " % group.name)
        expect(group.stop(), 0)
        watch.stdout.read()
        check(watch.wait(timeout=TIMEOUT) == 1, "it ended with %s" % watch.returncode)
        check("\033" not in lines.seen, "control characters outside of a terminal")


# ---- at a terminal ----


class Terminal:
    """A pseudo-terminal, and what was written to it."""

    def __init__(self, columns=80):
        self.main, self.end = pty.openpty()
        fcntl.ioctl(self.end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.text = ""

    def take(self):
        """False: every process that had it is gone."""
        if self.end >= 0:
            os.close(self.end)
            self.end = -1
        try:
            part = os.read(self.main, 65536)
        except OSError:
            part = b""
        self.text += part.decode("utf-8", "replace")
        return bool(part)

    def until(self, part):
        while part not in self.text:
            check(self.take(), "the end before %r: %r" % (part, self.text))

    def type(self, text):
        os.write(self.main, text.encode())

    def close(self):
        while self.take():
            pass
        os.close(self.main)
        return self.text


def at_terminal(arguments, streams=("stderr",), columns=80, **more):
    terminal = Terminal(columns)
    process = start(arguments, **dict.fromkeys(streams, terminal.end), **more)
    return terminal, process


BAR = re.compile(r"\r\[[#.]{20}\] (\d+)/(\d+) ([a-z ]+)(, \d+ tokens/s)?(, ETA \d+ s)?\x1b")


@test
def long_work_shows_its_progress_on_a_terminal_alone():
    prompts, lines = sums(150)
    path = temporary("\n".join(prompts) + "\n")
    known = temporary(lines)
    for arguments in (["generate", "-n", "1", "--sequences", "1", "--file", path], ["eval", "-n", "1", known]):
        arguments = [*arguments, "--model", MODEL]
        terminal, process = at_terminal(arguments)
        out = process.stdout.read()
        text = terminal.close()
        check(process.wait(timeout=TIMEOUT) == 0 and out, "status %s: %s" % (process.returncode, text))
        bars = [bar.groups() for bar in BAR.finditer(text)]
        check(any(bar[1:3] == ("150", "prompts") and bar[3] and bar[4] for bar in bars), "no rate, or no ETA: %r" % text)
        # The last one was removed.
        check("\r\x1b[K" in text[text.rindex("/150 prompts"):], "it is left: %r" % text)
        # Nothing where it is no terminal, or not wanted.
        check("[#" not in expect(run(arguments), 0).err, "progress in a file")
        terminal, process = at_terminal([*arguments, "--quiet"])
        process.stdout.read()
        check("[" not in terminal.close(), "it is not quiet")
        process.wait(timeout=TIMEOUT)
    # Both on the terminal, which is narrow: each line of text is a line of its own.
    terminal, process = at_terminal(["generate", "-n", "1", "--sequences", "1", "--file", path, "--model", MODEL], ("stdout", "stderr"), 30)
    text = terminal.close()
    process.wait(timeout=TIMEOUT)
    for prompt in prompts:
        check("\x1b[K%s" % prompt in text or "\n%s" % prompt in text, "not at the start of a line: %s in %r" % (prompt, text))
    check(all(len(bar) < 30 for bar in re.findall(r"\r(\[[#.][^\x1b]*)\x1b", text)), "longer than a row: %r" % text)
    terminal, process = at_terminal(["doctor"])
    process.stdout.read()
    check("/9 checks" in terminal.close(), "no checks")
    process.wait(timeout=TIMEOUT)
    check("ok  " not in run(["doctor", "--quiet"]).out, "it is not quiet")


@test
def a_model_shows_its_progress_on_a_terminal():
    """The small model may be read before its first line is drawn: then the next start shows it."""
    arguments = ["generate", "-n", "1", "--model", MODEL, "1+1="]
    for _ in range(100):
        terminal, process = at_terminal(arguments)
        process.stdout.read()
        text = terminal.close()
        check(process.wait(timeout=TIMEOUT) == 0, "status %s: %s" % (process.returncode, text))
        if any(bar[3] == "layers of the model" for bar in BAR.finditer(text)):
            return
    check(False, "nothing of the model in 100 starts: %r" % text)


@test
def generate_at_a_terminal_is_a_dialog():
    with Group(2) as group:
        for where in (["-n", "2", "--model", MODEL], ["--name", group.name]):
            for last in ("\x04", "\x03"):  # Ctrl-D ends it, Ctrl-C interrupts it
                terminal = Terminal()
                process = start(["generate", *where], stdin=terminal.end, stdout=terminal.end, stderr=terminal.end,
                                preexec_fn=lambda end=terminal.end: controlling(end))
                terminal.until("type a prompt; Ctrl-D ends")
                terminal.until("> ")
                for typed, part in (("27+58=\n", "27+58=85\r\n"), ("*\n", "'*'"), ("\n", ""), ("1+1\x7f1=\n", "1+1=2\r\n")):
                    seen = terminal.text.count("> ")
                    before, terminal.text = terminal.text, ""
                    terminal.type(typed)
                    terminal.until("\n")
                    terminal.until(part)
                    terminal.until("> ")
                    check(seen, before)
                terminal.type(last)
                text = terminal.close()
                status = process.wait(timeout=TIMEOUT)
                check(status == (0 if last == "\x04" else 130), "status %s: %s" % (status, text))
        expect(group.stop(), 0)
    # A prompt that is not typed: nothing changes.
    check(expect(run(["generate", "--model", MODEL], text="1+1=\n"), 0).out == "1+1=2\n", "another text")


def controlling(end):
    """So that Ctrl-C typed there is a signal."""
    os.setsid()
    fcntl.ioctl(end, termios.TIOCSCTTY, 0)


COMMANDS = ("generate", "eval", "run", "status", "recover", "stop", "lora", "reload", "role", "link", "unlink", "link-status",
            "pull-kv", "doctor", "layout", "clean", "handle")


@test
def help_is_grouped_has_examples_and_fits_80_columns():
    top = expect(run(["--help"]), 0).out
    check(expect(run(["help"]), 0).out == expect(run(["-h"]), 0).out == top, "another help")
    check(all("\n%s\n  " % title in top for title in ("Prompts:", "A group that stays:", "This machine:", "Examples:")), top)
    for command in COMMANDS:
        check(re.search("^  %s +[a-z]" % command, top, re.M), "no line of %s: %s" % (command, top))
        told = expect(run([command, "--help"]), 0).out
        check(expect(run(["help", command]), 0).out == told, "help %s is another text" % command)
        check("\nExamples:\n  coxswain %s" % command in told or "| coxswain %s" % command in told, "no example: %s" % told)
        for line in (top + told).splitlines():
            check(len(line) <= 80, "%d columns of %s: %s" % (len(line), command, line))
    expect(run(["help", "bogus"]), 2, "'bogus' is no command")
    # Limits are stated where an option has them.
    told = expect(run(["help", "generate"]), 0).out
    told += expect(run(["help", "run"]), 0).out
    for part in ("1 to 128", "1 to 32", "1 to 4096", "at most 128 bytes", "0 to 100"):
        check(part in " ".join(told.split()), "no limit '%s': %s" % (part, told))
    version = expect(run(["--version"]), 0).out
    check(re.match(r"coxswain \d+\.\d+\.\d+\n", version), "odd version: %s" % version)
    for part in ("protobuf-c ", "jansson ", "features: named and sealed groups", "limits: 128 ranks, depth 32"):
        check(part in version, "no '%s': %s" % (part, version))
    check(all(len(line) <= 80 for line in version.splitlines()), version)


# ---- what is full ----


@test
def what_is_full_names_its_remedy():
    under = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o "$0" tmpfs /dev/shm && exec "$@"']
    for options in ("size=1m", "nr_inodes=20"):
        if subprocess.run([*under, options, "true"], stderr=subprocess.DEVNULL, timeout=TIMEOUT, check=False).returncode:
            break  # no mounting here
        expect(run(["run", "--attach", "named", "--model", MODEL], under=[*under, options]), 1, "/dev/shm",
               "--attach sealed", "mount -o remount,")
        expect(harness.generate_on(["--attach", "sealed"], "1+1=", under=[*under, options]), 0)

    def limited(count):
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))
    expect(run(["generate", "-n", "4", "--model", MODEL, "1+1="], preexec_fn=limited(14)), 1, "ulimit -n 52")
    # A thread's stack is as large as the limit: too small a one ended in a SIGSEGV.
    def stack(size):
        return lambda: resource.setrlimit(resource.RLIMIT_STACK, (size, resource.RLIM_INFINITY))
    for words in (["generate", "--model", MODEL, "1+1="], ["status"], ["--version"]):
        expect(run(words, preexec_fn=stack(65536)), 1, "the stack of a thread may have 64 KiB", "ulimit -s 8192")
    expect(run(["--version"], command="coxswain-worker", preexec_fn=stack(65536)), 1, "the stack of a thread may have 64 KiB")
    for size in (256 << 10, 8 << 30, resource.RLIM_INFINITY):
        expect(run(["generate", "-n", "2", "--model", MODEL, "27+58="], preexec_fn=stack(size)), 0)
    with Group(1) as group:
        result = run(["status", "--socket", group.socket_path], preexec_fn=limited(4))
        expect(result, 1, "Too many open files", "ulimit -n")
        group.stop()


# ---- exit statuses ----


@test
def wrong_input_is_status_2_whoever_finds_it():
    """As the help says: 2 for wrong usage or input, also where a rank or a running group finds it."""
    nowhere, empty = "/nonexistent", tempfile.mkdtemp()
    of_its_own = ["--model", MODEL, "1+1="]
    for arguments in (["generate", "--lora", "x", *of_its_own], ["run", "--adapter", "x=" + nowhere, "--model", MODEL],
                      ["run", "--adapter", "x=" + empty, "--model", MODEL], ["run", "--model", nowhere], ["run", "--model", empty],
                      ["generate", "--model", nowhere, "1+1="], ["generate", "--model", empty, "1+1="],
                      ["eval", "--model", empty, temporary("1+1=2\n")], ["eval", "--model", MODEL, nowhere]):
        check(expect(run(arguments), 2).out == "", "output of %s" % arguments)
    with Group(2) as group:
        for arguments in (["generate", "--lora", "x", "1+1="], ["lora", "load", "x", nowhere], ["lora", "load", "x", empty],
                          ["lora", "unload", "x"], ["reload", nowhere], ["reload", empty], ["recover", "restart", "--rank", "7"],
                          ["unlink", "nobody"], ["link", "nobody"]):
            expect(run([*arguments, "--name", group.name]), 2)
        expect(group.stop(), 0)
    os.rmdir(empty)


# ---- where groups are found ----


def run_in(name, **variables):
    """A group whose socket is where these variables say, and nothing else; no COXSWAIN_RUNTIME_DIR of the harness."""
    return start(["run", "-n", "1", "--name", name, "--model", MODEL], env=variables_only(**variables))


def variables_only(**variables):
    env = {key: value for key, value in os.environ.items() if key != "XDG_RUNTIME_DIR" and not key.startswith("COXSWAIN_")}
    env.update(variables)
    return env


def ends(group):
    group.terminate()
    expect(finish(group), 0)


@test
def a_group_is_found_from_a_login_and_from_a_service():
    uid = os.geteuid()
    login, own = os.path.join(harness.scratch, "login"), os.path.join(harness.scratch, "own")
    for folder in (login, own):
        os.mkdir(folder, 0o700)
    places = "/run/user/%d/coxswain, /run/coxswain, /tmp/coxswain-%d" % (uid, uid)
    nobody = fresh_name("nobody")
    # What was looked at is in the error, in order.
    expect(run(["status", "--name", nobody], env=variables_only()), 1,
           "no process of this user listens under that name in %s\n" % places)
    expect(run(["status", "--name", nobody], env=variables_only(XDG_RUNTIME_DIR=login)), 1,
           "in %s/coxswain, %s\n" % (login, places))
    for words in (["status", "--name", nobody], ["status"]):
        result = expect(run(words, env=variables_only(XDG_RUNTIME_DIR=login, COXSWAIN_RUNTIME_DIR=own)), 1, " in %s\n" % own)
        check(places not in result.err, "more places than that one", result)
    expect(run(["--socket", nobody], command="coxswain-worker", env=variables_only()), 1, "looked in %s)" % places)
    expect(run(["status"], env=variables_only(COXSWAIN_RUNTIME_DIR="own")), 2, "COXSWAIN_RUNTIME_DIR is 'own'")
    # Started without a login, asked for in one.
    service = fresh_name("service")
    group = run_in(service)
    check(group.stdout.readline() == "name %s\n" % service, "no name")
    path = group.stdout.readline().split()[1]
    try:
        check(path == "/tmp/coxswain-%d/%s.sock" % (uid, service), "another socket: %s" % path)
        group.stdout.readline()
        expect(run(["status", "--name", service], env=variables_only(XDG_RUNTIME_DIR=login)), 0)
        # What a killed group has left in an earlier place is passed by.
        os.mkdir(os.path.join(login, "coxswain"), 0o700)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(os.path.join(login, "coxswain", service + ".sock"))
        expect(run(["generate", "--name", service, "1+1="], env=variables_only(XDG_RUNTIME_DIR=login)), 0)
        expect(run(["status", "--name", service], env=variables_only(COXSWAIN_RUNTIME_DIR=own)), 1)
    finally:
        ends(group)
    # The variable's own place, for both sides, and with no name.
    group = run_in(fresh_name("own"), COXSWAIN_RUNTIME_DIR=own, XDG_RUNTIME_DIR=login)
    group.stdout.readline()
    check(os.path.dirname(group.stdout.readline().split()[1]) == own, "another place")
    group.stdout.readline()
    expect(run(["status"], env=variables_only(COXSWAIN_RUNTIME_DIR=own)), 0)
    ends(group)


@test
def root_reaches_the_group_of_a_user_by_its_socket_alone():
    if os.geteuid() != 0:
        skip("only root is another user")
    folder = os.path.join(harness.scratch, "user")
    os.mkdir(folder, 0o700)
    os.chown(folder, 65534, 65534)
    name = fresh_name("user")
    group = start(["run", "-n", "1", "--name", name, "--", program("example_worker")], user=65534, group=65534,
                  extra_groups=[], env=variables_only(COXSWAIN_RUNTIME_DIR=folder))
    group.stdout.readline()
    path = group.stdout.readline().split()[1]
    group.stdout.readline()
    expect(run(["status", "--name", name], env=variables_only(COXSWAIN_RUNTIME_DIR=folder)), 1, "user 65534")
    check(name in expect(run(["status", "--socket", path]), 0).out, "another group")
    expect(run(["stop", "--socket", path]), 0)
    expect(finish(group), 0)


if __name__ == "__main__":
    sys.exit(harness.main())
