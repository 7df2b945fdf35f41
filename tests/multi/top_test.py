#!/usr/bin/python3
"""coxswain top: as text, and on a terminal that tmux stands in for.

Usage: top_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from harness import (MODEL, TIMEOUT, check, environment, expect, finish, fresh_name, program, run, skip, start,  # pylint: disable=wrong-import-position
                     stop_process, test, wait_until)

harness.begin(harness.parser(__doc__))
HEADING = "RANK STATE AGE SEQUENCE STEPS/S P50 P99 WAIT CPU MEMORY DEATHS GROUP"
ROW = re.compile(r" *(\d+) (\S+) +(\S+) +(\d+) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+) +(\S+) +(\d+)  (\S+)$")


class Group:
    """One that runs, with the pids of its ranks."""

    def __init__(self, count=2, *arguments):
        self.name = fresh_name("top")
        self.process = start(["run", "--name", self.name, "-n", str(count), "--model", MODEL, *arguments])
        self.pids = {}
        while len(self.pids) < count:
            words = self.process.stdout.readline().split()
            check(words, "the group did not start: %s" % (words or self.process.stderr.read()))
            if words[0] == "rank":
                self.pids[int(words[1])] = int(words[3])

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        run(["stop", "--name", self.name])
        finish(self.process)


def rows_of(text):
    """The ranks that a picture shows, in their order: dicts by column."""
    lines = text.splitlines()
    at = [i for i, line in enumerate(lines) if line.split() == HEADING.split()]
    check(len(at) == 1, "no heading in: %s" % text)
    found = [ROW.match(line) for line in lines[at[0] + 1:]]
    return [dict(zip(HEADING.lower().split(), match.groups())) for match in found if match]


def first_row(sort, name):
    """Of a group, sorted so; {}: it did not reply in time."""
    return (rows_of(run(["top", "--once", "--interval", "0.1", "--sort", sort, name]).out) or [{}])[0]


class Terminal:
    """A terminal of tmux, with a server of its own, in which a command runs."""

    def __init__(self, *arguments, columns=100, lines=20):
        if not shutil.which("tmux"):
            skip("no tmux here (sh tools/packages test installs it)")
        self.socket = os.path.join(tempfile.mkdtemp(), "tmux")
        command = [program("coxswain"), *arguments]
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(lines),
                  " ".join("'%s'" % word for word in command) + "; echo ended with $?; read line")

    def tmux(self, *arguments):
        done = subprocess.run(["tmux", "-S", self.socket, *arguments], capture_output=True, text=True,
                              env=environment(TERM="xterm"), timeout=TIMEOUT, check=False)
        check(done.returncode == 0, "tmux %s: %s" % (arguments, done.stderr))
        return done.stdout

    def picture(self, *options):
        return self.tmux("capture-pane", "-p", *options)

    def type(self, key):
        self.tmux("send-keys", key)

    def resize(self, columns, lines):
        self.tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def shows(self, condition, what):
        """Waits for a picture of which condition is true."""
        last = []

        def look():
            last[:] = [self.picture()]
            try:
                return condition(last[0])
            except (harness.Failure, IndexError):  # not all of it is there yet
                return False
        try:
            wait_until(look, what)
        except harness.Failure as failure:
            raise harness.Failure("%s; the terminal has: %s" % (failure, last[0])) from None
        return last[0]

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        def ended():
            return subprocess.run(["tmux", "-S", self.socket, "kill-server"], capture_output=True,
                                  timeout=TIMEOUT, check=False).returncode != 0
        wait_until(ended, "the end of tmux")
        shutil.rmtree(os.path.dirname(self.socket))


@test
def test_m18_once_prints_text_without_a_terminal():
    with Group(2, "--on-death", "wait") as group, Group(1) as other:
        expect(run(["generate", "--name", group.name, "27+58="]), 0)
        printed = expect(run(["top", "--once", "--interval", "0.2", group.name, other.name]), 0).out
        check("%s: 2 ranks, normal" % group.name in printed.replace("NORMAL", "normal"), printed)
        rows = rows_of(printed)
        check([(row["group"], row["rank"]) for row in rows] ==
              [(group.name, "0"), (group.name, "1"), (other.name, "0")], printed)
        for row in rows[:2]:
            check(row["state"] == "idle" and int(row["sequence"]) > 0 and row["deaths"] == "0", printed)
            check(row["steps/s"] == "0.0" and row["cpu"].endswith("%") and row["memory"].endswith("iB"), printed)
            check(row["p50"][-1] == "s" and row["p99"][-1] == "s" and row["wait"] == "0%", printed)
        check(rows[2]["p50"] == "-" and rows[2]["wait"] == "-", printed)
        # All groups of the user, sorted.
        memory = rows_of(expect(run(["top", "--once", "--interval", "0.2", "--sort", "memory"]), 0).out)
        check({(row["group"], row["rank"]) for row in rows} <= {(row["group"], row["rank"]) for row in memory}, "%s" % memory)
        # A rank that is stopped comes first, and one that is dead.
        os.kill(group.pids[1], signal.SIGSTOP)
        wait_until(lambda: first_row("state", group.name).get("state") == "stopped", "a stopped rank on top")
        os.kill(group.pids[1], signal.SIGKILL)

        def dead():
            first = first_row("deaths", group.name)
            return first.get("rank") == "1" and first["state"] == "dead" and first["deaths"] == "1"
        wait_until(dead, "a dead rank on top")


@test
def test_m18_wrong_use_of_top_is_refused_in_words():
    nobody = fresh_name("nobody")
    gone = run(["top", "--once", "--interval", "0.1", nobody])
    check(gone.status == 1 and not gone.out and "coxswain: no group '%s' is alive" % nobody in gone.err, "%s" % (gone,))
    expect(run(["top", nobody]), 2, "no terminal: --once prints once")
    expect(run(["top", "--once", "--sort", "colour"]), 2, "--sort is 'colour': expected rank, state, steps")
    expect(run(["top", "--once", "--interval", "0.01"]), 2, "--interval is 0.01: at least 0.1")
    expect(run(["top", "--once", "a/b"]), 2, "the group name 'a/b' has a '/'")
    empty = environment(COXSWAIN_RUNTIME_DIR=os.path.join(tempfile.gettempdir(), fresh_name("empty")))
    expect(run(["top", "--once"], env=empty), 1, "no group of this user is alive", "looked for control sockets in")


@test
def test_a_stopped_coordinator_is_told_once_as_status_tells_it():
    with Group(1) as group:
        stop_process(group.process.pid)
        once = expect(run(["top", "--once", "--interval", "0.1", group.name]), 1)
        os.kill(group.process.pid, signal.SIGCONT)
        told = (r"coxswain: the group '%s': \S+\.sock: no whole reply came in time: process %d, the coordinator, is stopped by a signal\n" %
                (group.name, group.process.pid))
        check(once.out == "" and re.fullmatch(told, once.err), "another text", once)


@test
def test_m18_a_terminal_shows_rows_sorts_them_and_is_resized():
    with Group(2, "--on-death", "wait") as group, Terminal("top", "--interval", "0.2", group.name) as terminal:
        terminal.shows(lambda text: len(rows_of(text)) == 2, "two ranks")
        picture = terminal.shows(lambda text: "q quit  ? keys  sorted by rank*" in text, "the keys")
        check(picture.splitlines()[0].startswith("%s: 2 ranks, NORMAL, healthy, " % group.name), picture)
        expect(run(["generate", "--name", group.name, "27+58="]), 0)
        terminal.shows(lambda text: rows_of(text)[0]["p50"] != "-", "times of steps")
        terminal.type("s")
        terminal.shows(lambda text: "sorted by state*" in text, "another order")
        os.kill(group.pids[1], signal.SIGSTOP)
        terminal.shows(lambda text: [row["rank"] for row in rows_of(text)] == ["1", "0"]
                       and rows_of(text)[0]["state"] == "stopped"
                       and ", degraded, " in text, "the stopped rank on top")
        coloured = [line for line in terminal.picture("-e").splitlines() if "\033[33m" in line]
        check(len(coloured) == 2 and group.name in coloured[0] and " stopped " in coloured[1], "%s" % coloured)
        terminal.type("s")
        terminal.shows(lambda text: "sorted by state^" in text and rows_of(text)[0]["rank"] == "0", "the other way round")
        os.kill(group.pids[1], signal.SIGCONT)
        terminal.resize(30, 10)
        terminal.shows(lambda text: "30 x 10 is too small: at lea" in text, "what is too small")
        terminal.resize(60, 6)
        terminal.shows(lambda text: "RANK STATE" in text and "q quit" in text and "too small" not in text, "rows again")
        check("q quit  ? keys  sorted by state^" in terminal.picture(), "the keys do not fit 60 columns")
        terminal.resize(100, 20)
        terminal.shows(lambda text: len(rows_of(text)) == 2, "all columns")
        terminal.type("?")
        terminal.shows(lambda text: "  w  sort by wait" in text and "RANK STATE" not in text, "the keys, explained")
        terminal.type("K")
        terminal.shows(lambda text: "%s: ranks 0-1: " % group.name in text and "RANK STATE" not in text, "the stacks")
        terminal.type("x")
        terminal.shows(lambda text: len(rows_of(text)) == 2, "rows again")
        os.kill(group.pids[1], signal.SIGKILL)
        terminal.shows(lambda text: any(row["state"] == "dead" for row in rows_of(text)), "a dead rank")
        coloured = [line for line in terminal.picture("-e").splitlines() if "\033[31m" in line]
        check(len(coloured) == 1 and " dead " in coloured[0], "%s" % coloured)
        terminal.type("q")
        terminal.shows(lambda text: "ended with 0" in text and "RANK STATE" not in text, "the end")


@test
def test_m18_a_group_that_dies_and_one_that_comes():
    with Terminal("top", "--interval", "0.2") as terminal:
        terminal.shows(lambda text: "RANK STATE" in text, "a heading without groups")
        with Group() as group:
            terminal.shows(lambda text: sum(row["group"] == group.name for row in rows_of(text)) == 2, "a new group")
            group.process.kill()
            group.process.wait()
            picture = terminal.shows(lambda text: "%s: no " % group.name in text
                                     or "%s: the group" % group.name in text, "that it is gone")
            check(not any(row["group"] == group.name for row in rows_of(picture)), picture)
        terminal.type("C-c")
        terminal.shows(lambda text: "ended with 130" in text, "the end by a signal")


@test
def test_m18_128_ranks():
    name = fresh_name("many")
    process = start(["run", "--name", name, "-n", "128", "--", program("scripted_worker")],
                    stderr=subprocess.DEVNULL)
    try:
        count = 0
        while count < 128:
            line = process.stdout.readline()
            check(line, "the group did not start")
            count += line.startswith("rank ")
        rows = rows_of(expect(run(["top", "--once", "--interval", "0.2", name]), 0).out)
        check([row["rank"] for row in rows] == [str(rank) for rank in range(128)], "%s" % rows)
        printed = expect(run(["metrics", "--name", name]), 0).out
        check(len(re.findall(r'^coxswain_rank_up\{rank="\d+"\} 1$', printed, re.MULTILINE)) == 128, "not all ranks")
        with Terminal("top", "--interval", "0.2", name, lines=12) as terminal:
            terminal.shows(lambda text: rows_of(text)[0]["rank"] == "0", "the first ranks")
            for _ in range(40):
                terminal.type("NPage")
            terminal.shows(lambda text: rows_of(text)[-1]["rank"] == "127", "the last rank")
    finally:
        run(["stop", "--name", name])
        finish(process)


if __name__ == "__main__":
    sys.exit(harness.main())
