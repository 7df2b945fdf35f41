#!/usr/bin/python3
"""status of a running group, the names by which commands find it, and what they print.

Usage: control_status_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import json
import os
import re
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from groups import RESTART, Group, Stranger, complete  # pylint: disable=wrong-import-position
# pylint: disable-next=wrong-import-position
from harness import (MODEL, SEALED, TIMEOUT, check, expect, finish, program, run, skip, start, sums,
                     test, wait_until)

harness.begin(harness.parser(__doc__))
RUNTIME = os.environ["XDG_RUNTIME_DIR"]


# ---- status ----


@test
def test_p3_status_reports_the_state_of_every_rank():
    with Group(4) as group:
        for arguments in (["--name", group.name], ["--socket", group.socket_path], []):
            result = expect(run(["status", *arguments]), 0)
            check(result.out.startswith("group %s (pid %d)" % (group.name, group.process.pid)), "no head", result)
            check(MODEL in result.out, "no model", result)
            for rank, pid in enumerate(group.pids):
                line = re.search(r"^rank %d pid %d incarnation 1 alive; execute idle \d+ for" % (rank, pid), result.out, re.M)
                check(line, "no line of rank %d" % rank, result)
        status = group.status()
        check(status["rank_count"] == 4 and status["depth"] == 4 and
              status["attach"] == ("sealed" if SEALED else "named"), "wrong: %s" % status)
        check([rank["pid"] for rank in status["ranks"]] == group.pids, "wrong pids: %s" % status)
        check(all(rank["liveness"] == "alive" and not rank["stopped"] for rank in status["ranks"]), "wrong: %s" % status)
        check(all(rank["incarnation"] == 1 for rank in status["ranks"]) and status["incarnation"] > 0, "wrong: %s" % status)
        check(status["serving"]["free_blocks"] == status["serving"]["block_count"] > 0, "wrong: %s" % status)
        check(list(status["limits"]) == ["socket connections", "fd store owners", "fd store entries", "fds to close",
                                         "closes that hang", "control connections", "clients with prompts"],
              "other limits: %s" % status["limits"])
        for limit in status["limits"].values():
            check(0 <= limit["count"] <= limit["max"] > 0, "wrong: %s" % status["limits"])
        check(re.search(r"control connections \d+ of 32\b", result.out), "no limits", result)
        check([c["name"] for c in status["channels"]] == ["execute", "shared_sync_link", "transfer", "recover_command"],
              "wrong: %s" % status)
        check(status["deaths"] == status["restarts"] == 0, "wrong: %s" % status)
        for rank in status["ranks"]:
            check(rank["deaths"] == rank["restarts"] == 0 and rank["last_lines"] is None, "wrong: %s" % rank)
            check(rank["last_error"] is None and rank["last_error_age_s"] is None, "wrong: %s" % rank)
        expect(group.stop(), 0)
        group.left_nothing()


def no_long_line(result):
    long = [line for line in result.out.splitlines() if len(line) > 100 and not line.startswith("model ")]
    check(not long, "over 100 columns: %s" % long, result)


@test
def test_p3_status_reports_within_100_columns():
    # The incarnation is a random number. One of 9 digits, every fifth, makes a part end in column 100 here.
    for _ in range(50):
        with Group(2) as group:
            no_long_line(expect(run(["status"]), 0))
            digits = len(str(group.status()["incarnation"]))
            expect(group.stop(), 0)
        if digits == 9:
            break


@test
def test_p3_status_reports_counters_bytes_and_times_of_what_was_generated():
    with Group(2) as group:
        prompts, _ = sums(20)
        begin = time.monotonic()
        expect(group.generate(text="\n".join(prompts) + "\n"), 0)
        elapsed = time.monotonic() - begin + 60  # init came before

        def quiet():  # the last handler may be running still
            execute = group.status()["channels"][0]
            return execute["ended"] == execute["submitted"] and execute["phases"]["total"]["count"] == execute["completed"]
        wait_until(quiet, "the end of the last request")
        execute, link, *_ = group.status()["channels"]
        # A cleanup has no reply.
        check(execute["submitted"] >= execute["completed"] > 3 and execute["failed"] == 0, "wrong: %s" % execute)
        check(execute["request_bytes"] > execute["submitted"], "too few bytes: %s" % execute)
        check(execute["reply_bytes"] > 2 * execute["completed"], "too few bytes: %s" % execute)
        check(list(execute["phases"]) == ["queue", "ranks", "handler", "total"], "wrong: %s" % execute)
        for name, phase in execute["phases"].items():
            check(phase["count"] == execute["completed"], "wrong: %s" % execute)
            check(0 < phase["p50_s"] <= phase["p99_s"] < elapsed, "%s: %s" % (name, execute))
            check(phase["p50_s"] <= execute["phases"]["total"]["p50_s"], "%s: %s" % (name, execute))
        check(link["request_bytes"] == link["reply_bytes"] == 0, "wrong: %s" % link)
        check(all(phase == {"count": 0, "p50_s": None, "p99_s": None, "sum_s": None, "below": []} for phase in link["phases"].values()),
              "wrong: %s" % link)
        result = expect(run(["status"]), 0)
        size, time_ = r" +[0-9.]+([KMGTPE]i)?B", r" +[0-9.]+[num]?s/[0-9.]+[num]?s"
        check(re.search("^p50/p99 +sent +received +queue +ranks +handler +total$", result.out, re.M), "no head", result)
        check(re.search("^execute%s%s$" % (2 * size, 4 * time_), result.out, re.M), "no times", result)
        check(len(re.findall("^shared_sync_link ", result.out, re.M)) == 1, "an unused channel has times", result)
        check("deaths 0, restarts 0\n" in result.out, "no counts", result)
        check(re.search(r"^waits, execute: \d+ woken, \d+ ended by spinning$", result.out, re.M), "no waits", result)
        no_long_line(result)
        expect(group.stop(), 0)


@test
def test_p3_status_reports_processor_time_and_how_waits_ended():
    spun = []
    for spin in ("off", "auto", "max"):
        with Group(1, ["--spin", spin]) as group:
            before = group.status()
            expect(group.generate("27+58="), 0)
            status = group.status()
            execute = status["channels"][0]
            human = expect(run(["status"]), 0)
            seconds = r"cpu [0-9.]+ s"
            check(re.search(r"(, |^  )%s, deaths|(, |^  )%s,$" % (seconds, seconds), human.out, re.M), "no cpu of the group", human)
            check(re.search(r"^ *rank 0 (.*\n)*?.*%s$" % seconds, human.out, re.M), "no cpu of the rank", human)
            # Both grow, and are what the processes themselves are charged with, or more by now.
            check(0 < before["cpu_s"] <= status["cpu_s"], "wrong: %s" % status)
            check(0 < before["ranks"][0]["cpu_s"] < status["ranks"][0]["cpu_s"], "wrong: %s" % status)
            for used, pid in (status["cpu_s"], status["pid"]), (status["ranks"][0]["cpu_s"], group.pids[0]):
                check(used <= time.clock_gettime(~pid << 3 | 2), "of another process: %s" % status)
            spun.append(status["spin_s"])
            check(("spins for " if spun[-1] else "blocks at once") in human.out, "no spin", human)
            check(spun[-1] > 0 or execute["spins"] == 0, "spins without leave: %s" % status)
            check(execute["wakeups"] + execute["spins"] > 0, "nothing was waited for: %s" % execute)
            group.stopped(0)  # what does nothing uses nothing
            check(group.status()["ranks"][0]["stopped"], "a stop that is not told")

            def used():  # what its threads used on their way out of the processor is booked a little later
                return group.status()["ranks"][0]["cpu_s"]
            wait_until(lambda: used() == used(), "a stopped rank that does not use the processor")
            os.kill(group.pids[0], signal.SIGCONT)
    # Off looks never; the others do where one rank and the coordinator have a processor each.
    check(spun in ([0, 0, 0], [0, 1e-4, 2e-3]), "other budgets: %s" % spun)


@test
def test_m3_p3_status_reports_large_payloads():
    prompts, _ = sums(200)
    results = []
    small = ["--size", "execute.reply=2K"]
    for arguments in ([], small):
        with Group(2, arguments) as group:
            result = expect(group.generate(text="\n".join(prompts) + "\n"), 0)
            execute, link, *_ = group.status()["channels"]
            human = expect(run(["status"]), 0)
            results.append(result.out)
            check((execute["large_replies"] > 0) == bool(arguments), "wrong: %s" % execute)
            if execute["large_replies"]:
                check(252 * execute["large_replies"] < execute["large_reply_bytes"] <= execute["reply_bytes"],
                      "wrong: %s" % execute)
                check(re.search(r"^large payloads, execute: 0 requests of 0 ?B, %d replies of [0-9.]+ ?[KM]?i?B; 0 ?B held$" %
                                execute["large_replies"], human.out, re.M), "no line of large payloads", human)
            else:
                check("\nlarge payloads, " not in human.out, "a line of large payloads", human)
            check(execute["large_requests"] == execute["large_request_bytes"] == execute["large_held_bytes"] == 0,
                  "wrong: %s" % execute)
            check(link["large_requests"] == link["large_replies"] == 0, "wrong: %s" % link)
            expect(group.stop(), 0)
    with Group(2, [*small, "--size", "large-payload=0"]) as group:
        refused = group.generate(text="\n".join(prompts) + "\n")
        check(refused.status == 3 and "a slot holds 252, and there are no large payloads" in refused.err, "not refused", refused)
        expect(group.stop(), 0)
    check(results[0] == results[1], "another text")


@test
def test_p3_status_replies_while_every_worker_is_stuck_and_names_late_ranks():
    with Group(2, ["--timeout", "1"]) as group:
        for rank in range(2):
            group.stopped(rank)
        client = start(["generate", "--name", group.name, "27+58="])
        wait_until(lambda: group.status()["channels"][0]["timeouts"] > 0, "a timeout")
        status = group.status()
        check(all(rank["stopped"] and rank["liveness"] == "alive" for rank in status["ranks"]), "not stopped: %s" % status)
        check(status["channels"][0]["late_ranks"] == [0, 1], "nobody is late: %s" % status)
        result = expect(run(["status"]), 4)
        check(result.out.count("alive, stopped by a signal") == 2, "not told", result)
        for pid in group.pids:
            os.kill(pid, signal.SIGCONT)
        # What was late is dropped and counted, and the client gets its answer, or hears of the failure.
        result = finish(client)
        check(result.status in (0, 3), "odd status", result)
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "the group does not go on")
        check(group.status()["channels"][0]["late_replies"] > 0, "no late reply is counted")


@test
def test_p2_status_reports_a_dead_worker_while_the_others_keep_the_group_up():
    # The coordinator ends with its worker, in bounded time; one that waits for a stuck worker can be asked meanwhile.
    with Group(2) as group:
        group.stopped(0)
        os.kill(group.pids[1], signal.SIGKILL)
        told = []

        def dead():
            result = run(["status", "--name", group.name, "--json"])
            if result.status == 4:
                status = json.loads(result.out)
                if status["ranks"][1]["liveness"] == "dead":
                    told.append(status)
            return told or group.process.poll() is not None
        wait_until(dead, "a death")
        check(told, "the group was gone before it told")
        check("killed by signal 9" in told[0]["ranks"][1]["death"], "no cause: %s" % told[0])
        check(told[0]["ranks"][1]["deaths"] == told[0]["deaths"] == 1, "not counted: %s" % told[0])
        check(told[0]["ranks"][1]["last_error"] == told[0]["ranks"][1]["death"], "another error: %s" % told[0])
        check(told[0]["ranks"][0]["deaths"] == told[0]["restarts"] == 0, "odd counts: %s" % told[0])
        check(told[0]["ranks"][0]["liveness"] == "alive" and told[0]["ranks"][0]["stopped"], "wrong: %s" % told[0])
        expect(finish(group.process), 3, "rank 1", "Killed")
        group.left_nothing()


@test
def test_m10_link_status_says_which_rank_cannot_reply():
    with Group(2, ["--on-death", "wait"]) as group:
        os.kill(group.pids[1], signal.SIGKILL)
        wait_until(lambda: group.status()["ranks"][1]["liveness"] == "dead", "a death")
        expect(run(["link-status", "--name", group.name]), 3, "rank 1", "killed by signal 9")
        expect(group.stop(), 0)


@test
def test_p10_last_words_of_odd_bytes_are_text_for_people_and_programs():
    odd = 'printf "\\033[31mred \\377\\376\\302\\205 \\t\\"quoted\\" \\303\\244 \\355\\240\\200\\nlast\\001\\n" >&2; exec "$0"'
    command = ["--", "sh", "-c", odd, program("scripted_worker")]
    with Group(2, (), command) as group:
        group.stopped(0)
        os.kill(group.pids[1], signal.SIGKILL)
        told = {}

        def dead():
            for how in ((), ("--json",)):
                told[how] = run(["status", "--name", group.name, *how])
            return group.process.poll() is not None or "killed by signal 9" in told[()].out and (
                "killed by signal 9" in told["--json",].out)
        wait_until(dead, "a death")
        result = expect(told["--json",], 4)
        lines = json.loads(result.out)["ranks"][1]["last_lines"]
        check(lines == '?[31mred ???? \t"quoted" \u00e4 ???\nlast?', "other last words: %r" % lines)
        result = expect(told[()], 4)
        check('\n  | ?[31mred ???? \t"quoted" \u00e4 ???\n  | last?\n' in result.out, "other last words", result)
        check(group.process.wait(timeout=TIMEOUT) == 3, "another end")  # what it shows of its workers is no text
        group.left_nothing()


@test
def test_p3_status_reports_what_became_of_a_rank_that_was_replaced():
    command = ["--", "sh", "-c", "echo blocked; exec $0", program("scripted_worker")]
    with Group(2, RESTART, command) as group:
        check("wrote last" not in expect(run(["status"]), 0).out, "last words of a rank that lives")
        os.kill(group.pids[1], signal.SIGKILL)
        wait_until(lambda: "incarnation 2 alive" in run(["status"]).out, "a replacement")
        result = expect(run(["status"]), 0)
        check(re.search(r"; deaths 1, restarts 1\n  last error, .* ago: rank 1 \(pid %d\) was killed by signal 9 \(Killed\)\n"
                        r"  the process before it wrote last:\n  \| blocked\n" % group.pids[1], result.out), "not told", result)
        status = group.status()
        for told in (status, status["ranks"][1]):
            check((told["deaths"], told["restarts"]) == (1, 1), "not counted: %s" % told)
        check(status["ranks"][1]["last_lines"] == "blocked" and not status["legacy"], "wrong: %s" % status)
        expect(group.stop(), 0)


@test
def test_p3_a_group_that_loads_its_model_answers_every_command():
    name = harness.fresh_name("loads")
    process = start(["run", "-n", "2", "--name", name, "--model", "endless", "--",
                     program("scripted_worker")])
    try:
        check("loading" in process.stderr.readline() + process.stderr.readline(), "it does not load")
        for _ in range(3):  # a thread of the coordinator finds on its stack what the one before it has left there
            status = json.loads(expect(run(["status", "--name", name, "--json"]), 4).out)
            check(status["degraded"].startswith("it is being started"), "another reason: %s" % status)
            check(status["engine_state"] == "INIT" and status["channels"][0]["in_flight"] == 1, "wrong: %s" % status)
            expect(run(["generate", "--name", name, "1+1="]), 1, "accepts no prompts")
            for command in ("pause", "reinit", "start", "clear", "restart"):
                expect(run(["recover", command, "--name", name]), 1, "still being initialized")
            for words in (["lora", "list"], ["lora", "load", "x", MODEL], ["lora", "unload", "x"]):
                expect(run([*words, "--name", name]), 1, "still being initialized")
            expect(run(["reload", "--name", name, MODEL]), 1, "shares none")
            for words in (["link-status"], ["role", "prefill"], ["link", "other"], ["unlink", "other"]):
                result = run([words[0], "--name", name, *words[1:]])
                check(result.status in (1, 2) and "coxswain: " in result.err, "no words of %s" % words, result)
            expect(run(["status", "--name", name]), 4)
        check(process.poll() is None, "it has ended")
        expect(run(["stop", "--name", name]), 0)
        expect(finish(process), 143, "ended by signal 15")
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@test
def test_p3_status_reports_which_ranks_have_not_attached_while_a_group_is_started():
    name = harness.fresh_name("half")
    script = 'case $COXSWAIN_RANK in 1|3) exec sleep 1000;; esac; exec %s --model %s' % (
        program("coxswain-worker"), MODEL)
    for more in ([], ["--attach", "sealed"]):
        process = start(["run", "-n", "4", "--name", name, *more, "--", "sh", "-c", script])
        told = "the group is still being started; not attached yet: ranks 1,3 (of 4)\n"
        try:
            wait_until(lambda: run(["status", "--name", name]).err.endswith(told), "two ranks missing")
            expect(run(["status", "--name", name, "--json"]), 1, told)
            expect(run(["generate", "--name", name, "1+1="]), 1, told)
            expect(run(["stop", "--name", name]), 0)
            expect(finish(process), 143)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()


@test
def test_wrong_names_and_several_groups():
    expect(run(["status"]), 1, "no group of this user is alive", "--socket")
    expect(run(["stop"]), 2, "no group of this user is alive")
    expect(run(["status", "--name", "coxnobody"]), 1, "no group 'coxnobody' is alive")
    expect(run(["stop", "--name", "coxnobody"]), 2, "no group 'coxnobody' is alive")
    expect(run(["status", "--socket", os.path.join(RUNTIME, "x.sock")]), 1)
    expect(run(["status", "--name", "a", "--socket", "b"]), 2, "either")
    expect(run(["status", "--name", "a/b"]), 2, "position 2")
    expect(run(["status", "coxnobody"]), 1, "no group 'coxnobody' is alive")
    expect(run(["status", "coxnobody", "--wait", "0.3"]), 1, "no group 'coxnobody' is alive")
    expect(run(["status", "coxnobody", "surplus"]), 2, "'surplus' is not expected here")
    for option in (["--name", "a"], ["--socket", "/a"]):
        expect(run(["status", *option, "b"]), 2, "'b' is not expected here: %s says which group" % option[0])
    expect(run(["list"]), 1, "no group of this user is alive")
    expect(run(["status", "--odd"]), 2, "--odd")
    expect(run(["stop", "--timeout", "never"]), 2, "--timeout")
    with Group(1) as one, Group(1) as two:
        for command in ("status", "stop"):
            result = expect(run([command]), 2, one.name, two.name, "--name")
            check(result.out == "", "it chose one", result)
        check(two.status()["name"] == two.name and one.status()["name"] == one.name, "the wrong group")
        expect(run(["status", "--name", "coxnobody"]), 1, "'coxnobody' is alive (alive: ", one.name, two.name)
        # The socket of a long name has another one.
        long = start(["run", "-n", "1", "--name", "coxlong" * 18, "--model", MODEL])
        try:
            check(long.stdout.readline() == "name %s\n" % ("coxlong" * 18), "another name")
            socket_path = long.stdout.readline().split()[1]
            expect(run(["status"]), 2, "3 groups are alive", "--socket %s" % socket_path)
            expect(run(["stop", "--socket", socket_path]), 0)
            expect(finish(long), 0)
        finally:
            if long.poll() is None:
                long.kill()
                long.communicate()
        expect(one.stop(), 0)
        one.left_nothing()
        check(json.loads(expect(run(["status", "--json"]), 0).out)["name"] == two.name, "the other one is left")
        # What changes a group is not for whichever happens to be alive.
        for words in (["stop"], ["recover", "pause"], ["lora", "unload", "a"], ["reload", MODEL], ["link", "a"],
                      ["unlink", "a"], ["role", "decode"]):
            result = expect(run(words), 2, "this changes a group, so say which: --name %s is the only" % two.name)
            check(result.out == "", "it went on", result)
        for words in (["lora", "list"], ["role"], ["link-status"]):
            expect(run(words), 0)
        check(two.status()["engine_state"] == "NORMAL", "changed")
        result = expect(run(["recover", "pause", "--name", two.name]), 0)
        check(result.err == "coxswain: the group '%s' is paused\n" % two.name, "not said", result)
        # What a killed one leaves is no group.
        two.process.kill()
        two.process.wait()
        expect(run(["status"]), 1, "no group of this user is alive", "--socket")


@test
def test_the_name_of_a_group_is_an_argument_too():
    with Group(1) as one, Group(1) as two:  # without it each command would ask which
        for command in (["status"], ["metrics"], ["link-status"], ["role"], ["role", "prefill"], ["role", "standard"],
                        ["lora", "list"], ["recover", "pause"], ["recover", "start"], ["trace", "--json"],
                        ["reload", MODEL], ["link", two.name], ["unlink", two.name]):
            expect(run([*command, one.name]), 0)
        expect(run(["pull-kv", one.name, "--from", two.name, "--hold", "7"]), 2, "has no KV lease of sequence 7")
        lines = expect(run(["list"]), 0).out.splitlines()
        check(sorted(line.split(":")[0] for line in lines) == sorted([one.name, two.name]), "other groups: %s" % lines)
        check(all(": 1 rank, NORMAL, healthy, up " in line for line in lines), "another state: %s" % lines)
        two.stopped(0)
        stopped = "rank 0 (pid %d) is stopped by a signal" % two.pids[0]

        def is_told():
            told = [line for line in run(["list"]).out.splitlines() if stopped in line]
            return told and told[0].startswith(two.name) and ", degraded, " in told[0]
        wait_until(is_told, "what keeps a group from working")
        expect(run(["stop", one.name]), 0, one.name)
        check(run(["list"]).out.startswith(two.name), "the other one ended")
        expect(two.stop(), 0)


@test
def test_every_command_prints_its_reply_as_json():
    with Group(2) as group:
        name = ["--name", group.name, "--json"]
        def told(command, *arguments, status=0):
            return json.loads(expect(run([command, *arguments, *name]), status).out)
        status = told("status")
        check(status["ok"] is True and status["error"] is None and status["uptime_s"] > 0, "no status", status)
        check(set(status["ranks"][0]["channels"]) == {c["name"] for c in status["channels"]}, "channels by name", status)
        check(status["channels"][0]["phases"]["total"]["p50_s"] is None or
              status["channels"][0]["phases"]["total"]["count"], "a time of nothing", status)
        paused = told("recover", "pause")
        check(paused["command"] == "pause" and paused["ok"] is True and paused["engine_state"], "not paused", paused)
        check([(r["rank"], r["result"]) for r in paused["ranks"]] == [(0, 0), (1, 0)], "not every rank", paused)
        for rank in told("recover", "start")["ranks"]:
            check(rank["result"] == 0, "a rank failed", rank)
        check(told("link-status")["links"] == [], "links of nobody")
        check(told("role")["role"] == "standard", "another role")
        check(told("role", "decode") == {"role": "decode", "ok": True, "error": None}, "not switched")
        check(told("lora", "list")["adapters"] == [], "adapters of nobody")
        refused = told("link", "coxnobody", status=2)
        check(refused["ok"] is False and "no group 'coxnobody' is alive" in refused["error"], "no reason", refused)
        check(told("stop") == {"process_ends": True, "ok": True, "error": None}, "not stopped")
    gone = json.loads(expect(run(["status", "--name", "coxnobody", "--json"]), 1, "coxnobody").out)
    check(gone["ok"] is False and gone["name"] is None and gone["ranks"] == [], "a status of nobody", gone)


@test
def test_a_command_line_that_is_wrong_is_explained():
    for arguments, part in ((["stop", "--odd"], "--odd is no option of this command"),
                            (["stop", "--name"], "--name needs a value"),
                            (["stop", "--json=yes"], "--json takes no value"),
                            (["stop", "x", "y"], "'y' is not expected here"),
                            (["stop", "--timeout", "0"], "--timeout is '0'"),
                            (["stop", "--name", "a", "--socket", "/b"], "either a --name or a --socket")):
        check(expect(run(arguments), 2, part, "coxswain stop --help").out == "", "output for wrong input")
    for arguments, part in ((["stauts"], "did you mean 'status'?"), (["stpo"], "did you mean 'stop'?"),
                            (["lniks"], "did you mean 'link'?"), (["post"], "did you mean 'postmortem'?"),
                            (["status", "--wacth"], "did you mean --watch?"), (["stop", "--nmae=x"], "did you mean --name?")):
        check(expect(run(arguments), 2, part).out == "", "output for wrong input")
    check("did you mean" not in run(["frobnicate"]).err, "something was found")
    expect(run(["postmortem", ""]), 2, "of what? A FILE")
    for command in ("generate", "eval", "run", "status", "recover", "lora", "role", "link", "unlink", "link-status",
                    "pull-kv", "reload", "stop", "layout", "clean", "doctor", "handle"):
        for flag in ("--help", "-h"):
            text = expect(run([command, flag]), 0).out
            check(text.startswith("Usage: coxswain %s " % command) and "Exit status: 0 ok" in text, "odd help", text)
            check(max(map(len, text.split("\n"))) <= 100, "lines of help too long", text)


@test
def test_a_socket_by_its_name_has_to_be_there():
    def worker(*arguments):
        return run(arguments, command="coxswain-worker")
    for arguments in (["--help"], ["-h"], ["--socket", "x", "--help"]):
        result = expect(worker(*arguments), 0)
        check(result.out.startswith("Usage: coxswain-worker") and "Exit status" in result.out, "odd help", result)
    for arguments, parts in (([], ["not given, which group, which rank, how many ranks; ", "--socket", "--help"]),
                             (["--local_rank", "1"], ["not given, which group, how many ranks; "]),
                             (["-x"], ["--help"]), (["--socket"], ["--socket needs a value"]),
                             (["--socket", ""], ["--socket: expected the path of a socket"]),
                             (["--socket", "x", "--odd"], ["--odd"]), (["--socket", "x", "more"], ["'more'", "--help"]),
                             (["--socket", "x", "--local_rank", "-1"], ["--local_rank is '-1'", "0 to 127"]),
                             (["--socket", "x", "--local_rank", "128"], ["--local_rank is '128'", "0 to 127"]),
                             (["--socket", "x", "--local_world_size", "0"], ["--local_world_size is '0'", "1 to 128"]),
                             (["--socket", "x", "--block-count", "-5"], ["--block-count is '-5'"]),
                             (["--socket", "x", "--model", "/x" * 3000], ["--model", "under 4096"])):
        check(expect(worker(*arguments), 2, *parts).out == "", "output for wrong input")
    with open("/dev/full", "w", encoding="ascii") as full:
        expect(run(["--help"], command="coxswain-worker", stdout=full), 1,
               "cannot write to standard output: No space left")
    for other, part in ((os.path.abspath(__file__), "is no socket"), (RUNTIME, "is no socket")):
        expect(worker("--socket", other), 1, part)
        for command in ("status", "stop"):
            expect(run([command, "--socket", other]), 1, part)
    expect(worker("--socket", "coxnobody"), 1, "no control socket is at %s" % os.path.join(RUNTIME, "coxswain", "coxnobody.sock"))
    expect(worker("--socket", "cox nobody"), 1, "position 4")
    expect(worker("--socket", os.path.join(RUNTIME, "x.sock")), 1, "no control socket is at %s" % os.path.join(RUNTIME, "x.sock"))
    expect(run(["run", "--worker", "none", "--", "true"]), 2, "--worker none starts no worker: 'true' is not executed")
    with Group(1) as group:
        expect(worker("--socket", group.name), 1, "starts its workers itself")
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "the group is harmed")


def goes_to_sleep(pid):
    """Until nothing moves for ten looks in a row; polling of any kind would move something for ever."""
    if harness.program_has("coxswain", b"__tsan_init"):
        skip("ThreadSanitizer has a thread of its own, which never sleeps for long")

    def used():
        total = {"cpu": int(100 * time.clock_gettime(~pid << 3 | 2))}
        for task in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/status" % (pid, task), encoding="ascii") as file:
                total[task] = int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", file.read(), re.M)[1])
        return total
    quiet = 0
    before = used()
    end = time.monotonic() + TIMEOUT
    while quiet < 10:
        check(time.monotonic() < end, "it never sleeps")
        time.sleep(0.1)  # the time that nothing happens in is what is looked at
        now = used()
        quiet = quiet + 1 if now == before else 0
        before = now


@test
def test_p5_a_group_that_serves_and_has_nothing_to_do_sleeps():
    with Group(1) as group:
        with Stranger(group.socket_path) as stranger:
            stranger.send(complete([(1, [1, 5, 10, 13, 8, 11, 14])]))
            stranger.reply()
            goes_to_sleep(group.process.pid)
        expect(group.stop(), 0)


@test
def test_p5_a_group_with_a_dead_rank_and_one_that_has_closed_its_output_sleeps():
    script = '[ $COXSWAIN_RANK = 1 ] && exec "$0" >/dev/null 2>&1; exec "$0"'
    with Group(3, ["--on-death", "wait"], ["--", "sh", "-c", script, program("scripted_worker")]) as group:
        os.kill(group.pids[0], signal.SIGKILL)
        wait_until(lambda: group.status()["deaths"] == 1, "a death")
        goes_to_sleep(group.process.pid)
        expect(group.stop(), 0)


if __name__ == "__main__":
    sys.exit(harness.main())
