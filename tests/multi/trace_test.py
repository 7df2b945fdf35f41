#!/usr/bin/python3
"""The flight recorder: coxswain trace, --crash-dir and coxswain postmortem.

Usage: trace_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from groups import Group, field  # pylint: disable=wrong-import-position
from harness import (alive, check, expect, fresh_name, run, skip,  # pylint: disable=wrong-import-position
                     test, wait_until)
from perfetto import CLOCK_MONOTONIC, Trace  # pylint: disable=wrong-import-position

harness.begin(harness.parser(__doc__))
ATTACH = ("named", "sealed")


def prompts(group, *arguments):
    expect(group.generate("--quiet", "27+58=", "3+4=", *arguments), 0)


def trace(*arguments):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace")
        result = expect(run(["trace", *arguments, "-o", path]), 0)
        return Trace(path), result


def summary(*arguments):
    return json.loads(expect(run(["trace", *arguments, "--json"]), 0).out)


def all_have_ended(group):
    """A step that was sent before the last reply was seen may end after the prompts."""
    wait_until(lambda: all(step["ended"] for step in summary("--name", group.name)["steps"]), "the last step's end")


class Crashes:
    """A directory for --crash-dir."""

    def __enter__(self):
        self.path = tempfile.mkdtemp(prefix="cox_crash_")
        return self

    def __exit__(self, *unused):
        shutil.rmtree(self.path)

    def files(self, suffix=".crash"):
        return sorted(os.path.join(self.path, name) for name in os.listdir(self.path)
                      if name.endswith(suffix) and not name.startswith("."))

    def wait_for(self, cause, count=1):
        found = []

        def there():
            found[:] = [path for path in self.files()
                        if "because of: %s" % cause in run(["postmortem", path]).out]
            return len(found) >= count
        wait_until(there, "%d recordings of a %s" % (count, cause))
        return found[-1]


def group(crashes=None, attach="named", **options):
    arguments = ["--attach", attach, *options.pop("arguments", ())]
    if crashes:
        arguments += ["--crash-dir", crashes.path]
    return Group(arguments=arguments, **options)


@test
def test_m18_a_trace_has_each_phase_of_each_rank():
    for attach in ATTACH:
        with group(attach=attach) as one:
            prompts(one)
            found, _ = trace("--name", one.name)
            check(len(found.processes) == 3, "processes: %s" % found.processes)
            names = sorted(name for _, name in found.processes.values())
            check(names == ["coordinator of " + one.name, "rank 0", "rank 1"], names)
            pids = {name: pid for pid, name in found.processes.values()}
            check([pids["rank 0"], pids["rank 1"]] == one.pids, "other pids: %s" % pids)
            for rank in ("rank 0", "rank 1"):
                steps = found.named("MODEL_INFER", rank)
                check(len(steps) >= 3, "%s has %d steps" % (rank, len(steps)))
                check(len(found.named("execute", rank)) >= len(steps), "steps without an execute")
                check(found.named("wait", rank), "%s has no wait in the rank group" % rank)
                check(found.named("MODEL_INIT", rank), "%s has no init" % rank)
            for phase in ("pack", "publish"):
                check(len(found.named(phase)) >= 3, "no phase %s" % phase)
            check(CLOCK_MONOTONIC in found.clocks and 1 in found.clocks, "clocks: %s" % found.clocks)
            one.stop()


@test
def test_m18_flows_lead_from_submit_over_execute_and_reply_to_the_handler():
    with group() as one:
        prompts(one)
        found, _ = trace("--name", one.name)
        whole = 0
        for ends in found.flows.values():
            names = [made["name"].split()[0] for _, made in sorted(ends, key=lambda end: end[1]["begin"])]
            if names != ["MODEL_INFER", "execute", "reply", "MODEL_INFER"]:
                continue
            whole += 1
            check([last for last, _ in ends].count(True) == 1, "a flow ends more than once")
        steps = len(found.named("MODEL_INFER", "rank 0"))
        check(whole >= steps, "%d whole flows of %d steps and 2 ranks" % (whole, steps))
        one.stop()


@test
def test_m18_the_summary_has_the_critical_path():
    with group() as one:
        prompts(one)
        told = summary("--name", one.name)
        steps = [step for step in told["steps"] if step["type"] == "MODEL_INFER" and step["ended"]]
        check(len(steps) >= 3, "steps: %s" % told["steps"])
        for step in steps:
            check(step["status"] == "ok" and step["last_rank"] in (0, 1) and step["critical_rank"] in (0, 1),
                  "a step: %s" % step)
            check(step["critical_phase"] in ("wake", "unpack", "execute", "group", "reply"), "a phase: %s" % step)
            check(step["ranks_us"] > 0 and step["pending_ranks"] == [], "a step: %s" % step)
        check(len(summary("--name", one.name, "--last", "2")["steps"]) <= 4, "--last has no effect")
        one.stop()


@test
def test_m18_a_trace_of_ranks_that_are_all_stuck():
    for attach in ATTACH:
        with group(attach=attach, arguments=("--timeout", "1000")) as one:
            prompts(one)
            all_have_ended(one)
            one.stopped(0)
            one.stopped(1)
            client = harness.start(["generate", "--name", one.name, "--quiet", "1+1="])

            def pending():
                return [step for step in summary("--name", one.name)["steps"]
                        if step["pending_ranks"] == [0, 1] and not step["ended"]]
            wait_until(pending, "a step that waits for both ranks")
            found, _ = trace("--name", one.name)
            check(found.named("MODEL_INFER"), "no steps")
            ranks = summary("--name", one.name)["ranks"]
            check([rank["recorded"] for rank in ranks] == [True, True], ranks)
            for pid in one.pids:
                os.kill(pid, signal.SIGCONT)
            expect(harness.finish(client), 0)
            one.stop()


@test
def test_m18_the_rank_that_is_slow_is_named():
    """A stopped rank: the other one waits for it in the rank group, and is not the one that is named."""
    with group(arguments=("--timeout", "1000")) as one:
        prompts(one)
        one.stopped(1)
        client = harness.start(["generate", "--name", one.name, "--quiet", "1+1="])

        def named():
            return [step for step in summary("--name", one.name)["steps"]
                    if not step["ended"] and step["critical_rank"] == 1]
        wait_until(named, "a step whose critical rank is 1")
        os.kill(one.pids[1], signal.SIGCONT)
        expect(harness.finish(client), 0)
        one.stop()


@test
def test_m18_no_recorder_records_nothing():
    with group(COXSWAIN_TEST_NO_RECORDER="1") as one:
        prompts(one)
        expect(run(["trace", "--name", one.name, "--json"]), 1, "without recorders (COX_RECORDER_NONE)")
        one.stop()


@test
def test_m18_a_death_is_told_with_what_each_rank_did():
    for attach in ATTACH:
        with Crashes() as crashes, group(crashes, attach, arguments=("--on-death", "restart")) as one:
            prompts(one)
            os.kill(one.pids[1], signal.SIGKILL)
            path = crashes.wait_for("death")
            told = expect(run(["postmortem", path]), 0).out
            check(told.count("rank 1 (pid %d) was killed by signal 9 (Killed)" % one.pids[1]) == 1, told)
            check(re.search(r"rank 0 \(pid %d\), alive" % one.pids[0], told), told)
            check("replies to" in told and "submit" in told and "takes MODEL_INFER" in told, told)
            found, _ = trace(path)
            check(found.named("MODEL_INFER", "rank 1"), "what the dead rank did is lost")
            check(os.stat(path).st_mode & 0o777 == 0o600, "others may read it")
            wait_until(lambda: one.status()["healthy"], "the replacement")
            prompts(one)
            found, _ = trace("--name", one.name)
            check(found.named("MODEL_INFER", "rank 1"), "the replacement records nothing")
            one.stop()


@test
def test_m18_a_death_is_told_with_the_request_that_it_ended():
    """Whether the request or the report of the death comes first."""
    for attach in ATTACH:
        with Crashes() as crashes, group(crashes, attach, arguments=("--on-death", "restart")) as one:
            prompts(one)
            all_have_ended(one)
            one.stopped(0)
            one.stopped(1)
            client = harness.start(["generate", "--name", one.name, "--quiet", "27+58="])
            wait_until(lambda: [step for step in summary("--name", one.name)["steps"]
                                if step["pending_ranks"] == [0, 1] and not step["ended"]], "a step")
            os.kill(one.pids[1], signal.SIGKILL)
            told = expect(run(["postmortem", crashes.wait_for("death")]), 0).out
            check(re.search(r"Under way:\n  execute \d+ \(MODEL_INFER\), \d+ bytes, since .*no reply of: .*1", told),
                  told)
            steps = re.findall(r"execute (\d+) \(MODEL_INFER\), ", told)  # as many as were in flight
            check(steps == sorted(set(steps), key=int), "told twice, or not in order: " + told)
            os.kill(one.pids[0], signal.SIGCONT)
            check(harness.finish(client).out == "27+58=85\n", "another text")
            one.stop()


@test
def test_m18_a_process_is_not_blamed_for_steps_before_it():
    """Of a sealed group the records of a dead process go with its memory."""
    for attach in ATTACH:
        with group(attach=attach, arguments=("--on-death", "restart")) as one:
            prompts(one)
            os.kill(one.pids[1], signal.SIGKILL)
            wait_until(lambda: one.status()["restarts"] == 1, "a restart")
            steps = [step for step in summary("--name", one.name)["steps"]
                     if step["status"] == "ok" and step["type"] == "MODEL_INFER"]
            check(len(steps) >= 3, "only %d steps" % len(steps))
            for step in steps:
                check(step["pending_ranks"] == [], "%s" % step)
                check(attach == "named" or step["critical_rank"] != 1, "%s" % step)


@test
def test_m18_a_timeout_is_told_with_the_request_that_was_under_way():
    """And with its bytes, where they are asked for."""
    for contents in ("", ",contents"):
        with Crashes() as crashes, group(arguments=("--timeout", "1", "--crash-dir", crashes.path + contents)) as one:
            prompts(one)
            one.stopped(1)
            harness.finish(harness.start(["generate", "--name", one.name, "--quiet", "1+1="]))
            told = expect(run(["postmortem", crashes.wait_for("timeout")]), 0).out
            check(re.search(r"execute \d+ \(MODEL_INFER\), \d+ bytes, since .*no reply of: .*1", told), told)
            check("stopped by a signal" in told, told)
            check(bool(re.search(r"^    [0-9a-f]{2} [0-9a-f]{2} ", told, re.M)) == bool(contents), told)
            one.process.kill()


@test
def test_m18_a_step_that_no_rank_has_taken_is_in_phase_wake():
    with Crashes() as crashes, group(crashes, arguments=("--timeout", "1")) as one:
        prompts(one)
        all_have_ended(one)
        one.stopped(0)
        one.stopped(1)
        harness.finish(harness.start(["generate", "--name", one.name, "--quiet", "1+1="]))
        told = expect(run(["postmortem", crashes.wait_for("timeout")]), 0).out
        waits = re.findall(r"^MODEL_INFER \d+ has not ended: it waits for rank 0, which is in phase (\w+) since ([\d.]+) s$",
                           told, re.M)
        check(waits and all(phase == "wake" and float(age) > 0.9 for phase, age in waits), told)
        one.process.kill()


@test
def test_m18_a_failed_start_is_told():
    with Crashes() as crashes:
        result = run(["run", "-n", "2", "--name", fresh_name("start"), "--crash-dir", crashes.path,
                      "--", "/bin/sh", "-c", "echo the last words; exit 7"])
        check(result.status != 0, "it has started")
        told = expect(run(["postmortem", crashes.wait_for("start")]), 0).out
        check("the last words" in told, told)
        check(not crashes.files(".ring"), "recorders are left: %s" % crashes.files(".ring"))


@test
def test_m18_the_rings_outlive_the_coordinator():
    for attach in ATTACH:
        with Crashes() as crashes, group(crashes, attach) as one:
            check(len(crashes.files(".ring")) == 3, crashes.files(".ring"))
            prompts(one)
            os.kill(one.process.pid, signal.SIGKILL)
            one.process.communicate()
            wait_until(lambda: not any(alive(pid) for pid in one.pids), "the end of the ranks")
            told = expect(run(["postmortem", "--name", one.name, "--crash-dir", crashes.path]), 0).out
            check("because of: coordinator" in told and "takes MODEL_INFER" in told, told)
            check("rank 1 (pid %d)" % one.pids[1] in told, told)
            run(["clean", one.name])
            # The next group that records there keeps what there is, whatever its name is.
            partial = os.path.join(crashes.path, ".partial.%s.20260101T030000.000000000.death.crash" % one.name)
            with open(partial, "wb"):
                pass
            for name in (one.name, fresh_name("another")) if attach == "named" else (fresh_name("another"),):
                again = harness.start(["run", "-n", "1", "--name", name, "--crash-dir", crashes.path,
                                       "--model", harness.MODEL])
                check(again.stdout.readline(), "it did not start")
                path = crashes.wait_for("coordinator")
                check(os.path.basename(path).startswith(one.name + ".") and path.endswith(".coordinator.crash"), path)
                expect(run(["stop", "--name", name]), 0)
                harness.finish(again)
                check(crashes.files() == [path] and len(os.listdir(crashes.path)) == 1,
                      "left after a clean stop: %s" % os.listdir(crashes.path))
            expect(run(["postmortem", "--name", one.name, "--crash-dir", crashes.path]), 2, "clean stop")


@test
def test_a_process_of_the_user_truncates_the_rings_and_the_group_goes_on():
    for attach in ATTACH:
        with Crashes() as crashes, group(crashes, attach) as one:
            prompts(one)
            for path in crashes.files(".ring"):
                os.truncate(path, 0)
            prompts(one)
            check(one.status()["deaths"] == 0, "a rank has died")
            # A death is told with what each rank did: that is in memory.
            os.kill(one.pids[1], signal.SIGKILL)
            one.process.communicate()
            check(one.process.returncode == 3, "killed, and not ended: %s" % one.process.returncode)
            told = expect(run(["postmortem", crashes.wait_for("death")]), 0).out
            check("takes MODEL_INFER" in told, told)


@test
def test_m18_a_crash_directory_that_cannot_be_written_is_said():
    name = fresh_name("crash")
    expect(run(["run", "-n", "1", "--name", name, "--crash-dir", "/proc/none"]), 1, "/proc/none")
    with tempfile.NamedTemporaryFile() as file:
        expect(run(["run", "-n", "1", "--name", name, "--crash-dir", file.name]), 1, file.name, "--crash-dir")


@test
def test_m18_one_group_of_a_name_records_in_a_directory_of_its_own():
    for attach in ATTACH:
        with Crashes() as crashes, group(crashes, attach) as one:
            rings = crashes.files(".ring")
            command = ["run", "-n", "2", "--attach", attach, "--name", one.name, "--crash-dir", crashes.path]
            check("a live group" in expect(run(command), 1).err, "another reason")
            check(crashes.files(".ring") == rings and not crashes.files(), "the second start changed files")
            prompts(one)
            # A rank that records in memory has no file: those of the others are read all the same.
            os.unlink(os.path.join(crashes.path, one.name + ".rank0.ring"))
            os.kill(one.process.pid, signal.SIGKILL)
            one.process.communicate()
            told = expect(run(["postmortem", "--name", one.name, "--crash-dir", crashes.path]), 0).out
            check("rank 1 (pid %d)" % one.pids[1] in told, told)
            run(["clean", one.name])
            os.chmod(crashes.path, 0o1777)
            expect(run(command), 1, crashes.path, "mode 01777", "nobody else may write")


@test
def test_m18_a_full_disk_stops_no_group():
    with Crashes() as crashes:
        if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k,mode=0700", "tmpfs", crashes.path],
                                               check=False, capture_output=True).returncode:
            skip("a small disk is mounted by root")
        try:
            with group(crashes, arguments=("--on-death", "restart")) as one:
                prompts(one)
                found, _ = trace("--name", one.name)
                check(found.named("MODEL_INFER", "rank 1"), "nothing is recorded in memory")
                os.kill(one.pids[1], signal.SIGKILL)
                wait_until(lambda: one.status()["restarts"] == 1 and one.status()["healthy"], "the replacement")
                prompts(one)
                one.stop()
                told = one.process.communicate()[1]
                check("cannot be written" in told and "No space" in told, told)
            check(not os.listdir(crashes.path), "left: %s" % os.listdir(crashes.path))
        finally:
            subprocess.run(["umount", crashes.path], check=True)


@test
def test_m18_a_full_disk_loses_nothing_of_a_dead_coordinator():
    """Its recording has room once its recorders are removed."""
    with Crashes() as crashes:
        if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1100k,mode=0700", "tmpfs",
                                                crashes.path], check=False, capture_output=True).returncode:
            skip("a small disk is mounted by root")
        try:
            with group(crashes, "sealed") as one:
                check(len(crashes.files(".ring")) == 3, "there was no room for the recorders")
                prompts(one)
                os.kill(one.process.pid, signal.SIGKILL)
                one.process.communicate()
                again = harness.start(["run", "-n", "1", "--name", one.name, "--crash-dir", crashes.path,
                                       "--attach", "sealed", "--model", harness.MODEL])
                check(again.stdout.readline(), "it did not start")
                crashes.wait_for("coordinator")
                expect(run(["stop", "--name", one.name]), 0)
                told = harness.finish(again).err
                check("No space" in told, "the first try had room: %s" % told)
        finally:
            subprocess.run(["umount", crashes.path], check=True)


@test
def test_m18_what_is_no_file_is_not_removed():
    with Crashes() as crashes, group() as one:
        link = os.path.join(crashes.path, "trace")
        os.symlink("/dev/full", link)
        expect(run(["trace", "--name", one.name, "-o", link]), 1, "No space")
        check(os.path.islink(link), "it is removed")
        one.stop()


@test
def test_m18_hostile_bytes_are_errors():
    with Crashes() as crashes, group(crashes) as one:
        prompts(one)
        os.kill(one.process.pid, signal.SIGKILL)
        one.process.communicate()
        wait_until(lambda: not any(alive(pid) for pid in one.pids), "the end of the ranks")
        ring = os.path.join(crashes.path, one.name + ".rank1.ring")
        with open(ring, "r+b") as file:
            whole = file.read()
            for part in (b"\xff" * len(whole), whole[:2048] + b"\xff" * (len(whole) - 2048),
                         whole[:2048] + os.urandom(len(whole) - 2048), whole[:100], b""):
                file.seek(0)
                file.truncate()
                file.write(part)
                file.flush()
                for arguments in (["--json"], []):
                    expect(run(["postmortem", "--name", one.name, "--crash-dir", crashes.path, *arguments]), 0)
        own = os.path.join(crashes.path, one.name + ".coordinator.ring")
        with open(own, "r+b") as file:
            whole = file.read()
            file.seek(2048)
            file.write(os.urandom(len(whole) - 2048))
        expect(run(["postmortem", "--name", one.name, "--crash-dir", crashes.path]), 0)
        with open(own, "wb") as file:
            file.write(b"nothing")
        expect(run(["postmortem", "--name", one.name, "--crash-dir", crashes.path]), 1, "no recorder")
        path = os.path.join(crashes.path, "some.crash")
        for content in (b"", b"COXREC1\n", b"COXREC1\n" + os.urandom(1000), os.urandom(1000),
                        b"COXREC1\n" + field(13, b"\xff")):
            with open(path, "wb") as file:
                file.write(content)
            result = run(["postmortem", path])
            check(result.status in (0, 1) and (result.status == 0 or path in result.err), "a file of any bytes", result)


@test
def test_m18_readers_are_killed_and_the_group_goes_on():
    with group() as one:
        for _ in range(20):
            reader = subprocess.Popen([harness.program("coxswain"), "trace", "--name", one.name, "--json"],
                                      stdout=subprocess.DEVNULL, env=harness.environment())
            reader.kill()
            reader.wait()
        prompts(one)
        check(one.status()["healthy"], "the group is not healthy")
        one.stop()


@test
def test_m18_128_ranks():
    with Crashes() as crashes, Group(128, arguments=("--crash-dir", crashes.path, "--on-death", "wait"),
                                     command=("--", harness.program("example_worker"))) as one:
        told = summary("--name", one.name)
        check(sum(rank["recorded"] for rank in told["ranks"]) == 128, told["problems"])
        check(len(crashes.files(".ring")) == 129, "rings: %d" % len(crashes.files(".ring")))
        os.kill(one.pids[127], signal.SIGKILL)
        path = crashes.wait_for("death")
        check(os.stat(path).st_size <= 64 << 20, "%d bytes" % os.stat(path).st_size)
        check("rank 127 (pid %d), dead" % one.pids[127] in expect(run(["postmortem", path]), 0).out, "its death")
        one.stop()


@test
def test_m18_the_command_line_is_checked():
    expect(run(["trace", "--name", "x"]), 2, "-o FILE")
    expect(run(["trace", "-o", "/tmp/x", "--last", "1", "--seconds", "1"]), 2, "--seconds or --last")
    expect(run(["trace", "a", "b", "--json"]), 2, "is not expected here")
    expect(run(["trace", "/none", "--json"]), 2, "/none")
    expect(run(["postmortem"]), 2, "--name")
    expect(run(["postmortem", "--name", "x"]), 2, "COXSWAIN_CRASH_DIR")


if __name__ == "__main__":
    sys.exit(harness.main())
