#!/usr/bin/python3
"""A group as a service: what its service manager is told, its log, and what shells complete.

Usage: as_service_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

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
# pylint: disable-next=wrong-import-position
from harness import (MODEL, TIMEOUT, check, environment, program, read, rest, skip, start, test)

harness.begin(harness.parser(__doc__))
WATCHDOG_USEC = 600000
COMPLETION = os.path.join(harness.SOURCE_DIR, "packaging", "completion")


# ---- the service manager ----


class Manager:
    """The socket that a service manager reads."""

    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(TIMEOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def until(self, part):
        """Reads messages, until one has this part. Returns them all."""
        messages = []
        while True:
            messages.append(self.socket.recv(4096).decode())
            if part in messages[-1]:
                return messages


def run_group(name, manager=None, arguments=(), worker=(), **more):
    if manager:
        more.update(NOTIFY_SOCKET=manager, WATCHDOG_USEC=str(WATCHDOG_USEC))
    words = ["run", "-n", "2", "--name", name, *arguments]
    return start(words + (["--", *worker] if worker else ["--model", MODEL]), env=environment(**more))


def pids_of(process):
    """Of the ranks, when the group is ready; and what was read for that."""
    head = ""
    while "rank 1 pid" not in head:
        line = process.stdout.readline()
        check(line, "the group has ended: " + process.stderr.read() if not line else "")
        head += line
    return [int(pid) for pid in re.findall(r"^rank \d+ pid (\d+)$", head, re.M)], head


def end(process, head, status=0):
    process.terminate()
    result = rest(process, head)
    check(result.status == status, "expected status %d" % status, result)
    return result


@test
def test_the_manager_is_told_when_the_group_is_ready_and_while_it_answers():
    with tempfile.TemporaryDirectory() as folder:
        address = os.path.join(folder, "notify")
        with Manager(address) as manager:
            name = "served%d" % os.getpid()
            process = run_group(name, address, ["--log-format", "text"])
            pids, head = pids_of(process)
            ready = manager.until("READY=1")
            check(len(ready) == 1 and "STATUS=2 ranks" in ready[0], "wrong: %s" % ready)
            check(manager.until("WATCHDOG=1"), "")
            for pid in pids:
                check("NOTIFY_SOCKET" not in read("/proc/%d/environ" % pid), "a worker has the manager's socket")
            # A rank that is stopped: what is fed ends, and begins again.
            os.kill(pids[1], signal.SIGSTOP)
            text = manager.until("rank 1 (pid %d) is stopped" % pids[1])[-1]
            check("WATCHDOG=1" not in text, "it is fed: " + text)
            check("WATCHDOG=1" not in manager.until("is stopped")[-1], "it is fed")
            os.kill(pids[1], signal.SIGCONT)
            manager.until("WATCHDOG=1")
            result = end(process, head)
            check("STATUS=the group ends" in manager.until("STOPPING=1")[-1], "no end")
            check(re.search(r"warning coxswain: the watchdog is not fed: rank 1 .* is stopped", result.err) and
                  "notice coxswain: the watchdog is fed again" in result.err, "no lines", result)


@test
def test_an_abstract_address_and_one_that_is_none():
    address = "\0cox_service_test_%d" % os.getpid()
    with Manager(address) as manager:
        process = run_group("abstract%d" % os.getpid(), "@" + address[1:])
        head = pids_of(process)[1]
        manager.until("READY=1")
        end(process, head)
    process = run_group("nowhere%d" % os.getpid(), "relative")
    result = end(process, pids_of(process)[1])
    check("NOTIFY_SOCKET is 'relative'" in result.err, "no warning", result)


# ---- the log ----

WRITES = ["sh", "-c", "printf 'odd \\033 \\377 \"word\"\\n'; exec \"$0\" \"$@\"", "coxswain-worker"]


def logged(*arguments, **more):
    worker = [*WRITES[:3], program("coxswain-worker"), "--model", MODEL]
    process = run_group("logged%d" % os.getpid(), None, arguments, worker, **more)
    return end(process, pids_of(process)[1]).err.splitlines()


@test
def test_a_line_of_the_log_has_time_and_level():
    events = [json.loads(line) for line in logged("--log-format", "json")]
    for event in events:
        check(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["time"]), "no time: %s" % event)
        check(event["level"] in ("info", "notice", "warning", "error"), "no level: %s" % event)
    written = [event for event in events if event["source"] == "worker"]
    check(sorted(event["rank"] for event in written if event["message"] == 'odd \x1b \ufffd "word"') == [0, 1],
          "what workers write is missing: %s" % events)
    check(any("is ready: 2 ranks" in event["message"] for event in events), "not ready: %s" % events)
    check(any("the group ends" in event["message"] and event["level"] == "notice" for event in events),
          "no end: %s" % events)
    refused = harness.run(["run", "--log-format", "json", "--depth", "0"])
    check(refused.status == 2 and json.loads(refused.err)["level"] == "error", "no error", refused)
    check(harness.run(["run", "--log-format", "xml"]).status == 2, "xml is taken")


@test
def test_a_rank_forges_no_line_of_a_plain_log():
    forged = ["sh", "-c", "printf 'x\\rcoxswain: rank 0 was killed\\033[2K\\302\\233A\\t\\303\\244\\n' >&2; exec \"$0\" \"$@\""]
    process = run_group("forged%d" % os.getpid(), None, [], [*forged, program("coxswain-worker"), "--model", MODEL])
    err = end(process, pids_of(process)[1]).err
    check("[rank 1] x\\rcoxswain: rank 0 was killed\\u001b[2K\\u009bA\t\u00e4\n" in err, "not escaped: %r" % err)
    check(not re.search("[\r\x1b\x9b]", err), "raw control characters: %r" % err)


@test
def test_lines_in_the_journal_have_a_priority():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "journal")
        for stream, expected in (("own", r"<\d>coxswain: "), ("1:2", r"coxswain: ")):
            with open(path, "w", encoding="utf-8") as journal:
                info = os.fstat(journal.fileno())
                value = "%d:%d" % (info.st_dev, info.st_ino) if stream == "own" else stream
                process = start(["run", "-n", "2", "--name", "journal%d" % os.getpid(), "--model", MODEL],
                                stderr=journal, env=environment(JOURNAL_STREAM=value))
                pids_of(process)
                process.terminate()
                process.wait(timeout=TIMEOUT)
            lines = read(path).splitlines()
            check(lines and all(re.match(expected, line) for line in lines), "wrong: %s" % lines)


# ---- completion ----


def completed(*words):
    result = harness.run(["__complete", *words])
    check(result.status == 0, "failed", result)
    return [line.split("\t")[0] for line in result.out.splitlines()]


def bash(words):
    """What bash offers for the last of the words, as it splits them."""
    script = ('. "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); compopt() { :; }; _coxswain; '
              'printf "%s\\n" "${COMPREPLY[@]}"')
    return subprocess.run(["bash", "--norc", "-c", script, "bash", os.path.join(COMPLETION, "coxswain.bash"),
                           program("coxswain"), *words], check=True, capture_output=True, text=True,
                          env=environment()).stdout.split()


def zsh(words):
    script = ('compadd() { while [[ $1 != -a ]]; do shift; done; print -l -- ${(P)2} }; compset() { : }; '
              '_files() { print -- files "$@" }; complete_it() { local -a words; words=("$@"); '
              'local CURRENT=$#words; . $FUNCTION }; complete_it "$@"')
    return subprocess.run(["zsh", "-f", "-c", script, "zsh", program("coxswain"), *words], check=True,
                          capture_output=True, text=True,
                          env=environment(FUNCTION=os.path.join(COMPLETION, "_coxswain"))).stdout.split()


@test
def test_the_program_knows_what_may_stand_where():
    listed = harness.run(["--help"]).out
    for command in completed(""):
        check(re.search(r"\b%s\b" % command, listed), "%s is no command" % command)
        for option in completed(command, "--"):
            check(option in harness.run([command, "--help"]).out, "%s has no %s" % (command, option))
    check(sorted(completed("st")) == ["stacks", "status", "stop"], "no commands")
    check(completed("run", "--attach", "") == ["named", "sealed"], "no values")
    check(completed("run", "--attach", "s") == ["sealed"], "no value")
    check("list" in completed("lora", "") and completed("lora", "list", "") == [], "no words")
    check(completed("lora", "load", "--timeout", "5", "a", "") == [":dirs"], "no folder")
    check(completed("run", "--", "") == [":files"], "no files")
    check(completed("nothing", "") == [] and completed("generate", "--nothing", "") == [], "too much")


@test
def test_shells_complete_names_of_groups_that_run():
    name = "complete%d" % os.getpid()
    process = run_group(name)
    head = pids_of(process)[1]
    try:
        shells = [bash] + ([zsh] if shutil.which("zsh") else [])
        for words in (["status", "--name"], ["status"], ["recover", "pause"], ["lora", "list"]):
            check(completed(*words, "") == [name], "no name: %s" % words)
        for shell in shells:
            check(shell(["status", "--name", "comp"]) == [name], "%s: no name" % shell.__name__)
            check(shell(["stat"]) == ["status"], "%s: no command" % shell.__name__)
            check("--on-death" in shell(["run", "--on"]), "%s: no option" % shell.__name__)
        check(bash(["status", "--name", "=", ""]) == [name] and bash(["status", "--name", "="]) == [name] and
              bash(["status", "--name", "=", "com"]) == [name], "bash: no name after =")
        if zsh in shells:
            check(zsh(["status", "--name=com"]) == [name], "zsh: no name after =")
            check(zsh(["reload", ""]) == ["files", "-/"], "zsh: no folders")
    finally:
        end(process, head)
    check(completed("status", "--name", "") == [], "the name of a group that has ended")
    if not shutil.which("zsh"):
        skip("no zsh here: its part was not tried")


if __name__ == "__main__":
    sys.exit(harness.main())
