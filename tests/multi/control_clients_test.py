#!/usr/bin/python3
"""status, stop and prompts on a running group, as users and as strangers at its control socket.

Usage: control_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
# pylint: disable-next=wrong-import-position
from groups import CANCEL, STATUS, STOP, Group, Stranger, complete, field, frame, parse, varint
from harness import (MODEL, SEALED, TIMEOUT, check, environment, expect, finish, generate,
                     names_with, program, run, skip, start, stop_process, sums, temporary, test,
                     wait_until)

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
        check(all(rank["incarnation"] == 1 for rank in status["ranks"]) and status["instance"] > 0, "wrong: %s" % status)
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
        long = [line for line in result.out.splitlines() if len(line) > 100 and not line.startswith("model ")]
        check(not long, "over 100 columns: %s" % long, result)
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
            check((execute["bulk_replies"] > 0) == bool(arguments), "wrong: %s" % execute)
            if execute["bulk_replies"]:
                check(252 * execute["bulk_replies"] < execute["bulk_reply_bytes"] <= execute["reply_bytes"],
                      "wrong: %s" % execute)
                check(re.search(r"^large payloads, execute: 0 requests of 0 ?B, %d replies of [0-9.]+ ?[KM]?i?B; 0 ?B held$" %
                                execute["bulk_replies"], human.out, re.M), "no line of large payloads", human)
            else:
                check("\nlarge payloads, " not in human.out, "a line of large payloads", human)
            check(execute["bulk_requests"] == execute["bulk_request_bytes"] == execute["bulk_held_bytes"] == 0,
                  "wrong: %s" % execute)
            check(link["bulk_requests"] == link["bulk_replies"] == 0, "wrong: %s" % link)
            expect(group.stop(), 0)
    with Group(2, [*small, "--size", "large-payload=0"]) as group:
        refused = group.generate(text="\n".join(prompts) + "\n")
        check(refused.status == 3 and "a slot holds 252, and there are no blocks" in refused.err, "not refused", refused)
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
            expect(run(["weights", "--name", name, MODEL]), 1, "shares none")
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
        for words in (["stop"], ["recover", "pause"], ["lora", "unload", "a"], ["weights", MODEL], ["link", "a"],
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


# ---- memory ----


@test
def test_clients_have_a_budget_of_memory_for_all_of_them():
    few, many = field(1, b""), 500000  # prompts without anything: 2 bytes of a message, 150 of memory
    large = field(3, few * many + field(2, 1))

    def peak(group):
        return int(re.search(r"^VmHWM:\s+(\d+) kB", harness.read("/proc/%d/status" % group.process.pid), re.M)[1]) >> 10
    with Group(1) as group:
        before = peak(group)
        clients = [Stranger(group.socket_path) for _ in range(24)]
        refused = 0
        for client in clients:
            client.send(large)  # and reads nothing, so that all of it stays there
        for client in clients:
            # Either results come, or that there is no memory; and then the end.
            number, fields = client.reply()
            if number == 4:
                check(b"try again later" in dict(fields)[2], "refused: %s" % fields)
                check(client.ended(), "a refused client goes on")
                refused += 1
        check(16 <= refused < 24, "%d refused" % refused)
        if not harness.program_has("coxswain", b"__asan_init") and not harness.program_has("coxswain", b"__tsan_init"):
            check(peak(group) - before < 512, "%d MiB, %d before" % (peak(group), before))
        # Small requests are served meanwhile, and large ones when the others have gone.
        group.status()
        expect(group.generate("27+58="), 0)
        for client in clients:
            client.close()
        with Stranger(group.socket_path) as stranger:
            stranger.send(large)
            check(stranger.reply()[0] != 4, "the memory did not come back")
        expect(group.stop(), 0)


# ---- a rank that gives commands ----

# The rank starts a process that leaves its process group and session and whose parent has ended.
# It lowers the limit RLIMIT_LOCKS (10) of the coordinator to its own, waits for its commands, one a line, and reports
# how each ended.
MUTINEER = """#!/bin/sh
(coordinator=$PPID setsid sh -c 'exec 3>"$0.told"
    python3 -c "import os, resource as r
r.prlimit(int(os.environ[\\"coordinator\\"]), 10, r.getrlimit(10))" >&3 2>&1 && echo lowered >&3
    while read -r words; do
        {program} $words >&3 2>&1; echo "status $?" >&3
    done <"$0.orders"; echo end >&3' "$0" </dev/null >/dev/null 2>&1 &)
exec {worker} "$@"
"""


@test
def test_a_process_that_a_rank_of_a_sealed_group_started_gives_it_no_commands():
    folder = tempfile.mkdtemp(dir=harness.scratch)
    script = os.path.join(folder, "coxswain-worker") # whose ranks share the weights
    with open(script, "w", encoding="ascii") as file:
        file.write(MUTINEER.format(program=program("coxswain"), worker=program("coxswain-worker")))
    os.chmod(script, 0o700)
    orders, told = script + ".orders", script + ".told"
    os.mkfifo(orders)
    try:
        with Group(1, ["--attach", "sealed", "--worker", script]) as group:
            name = ["--name", group.name]
            with open(orders, "w", encoding="ascii") as file:
                for words in (["weights", *name, MODEL], ["lora", "unload", *name, "a"], ["recover", "restart", "--kill", "--rank", "0", *name],
                              ["role", *name, "prefill"], ["stop", *name], ["status", *name], ["generate", *name, "1+1="]):
                    file.write(" ".join(words) + "\n")
            wait_until(lambda: os.path.exists(told) and harness.read(told).endswith("end\n"), "what the process was told")
            text = harness.read(told)
            check(text.count("is a rank or was started by one") == 7, "not refused: %s" % text)
            check(text.startswith("lowered\n"), "the limit of the coordinator was not lowered: %s" % text)
            check("status 0\n" not in text and text.count("\nstatus ") == 7, "one was served: %s" % text)
            status = group.status()
            check(status["deaths"] == status["restarts"] == 0 and not status["stopping"], "it was served: %s" % status)
            check(status["weights"]["version"] == 1, "other weights: %s" % status["weights"])
            # Who may is served, and named.
            expect(run(["weights", *name, MODEL]), 0)
            stop = start(["stop", *name])
            expect(finish(stop), 0)
            log = finish(group.process).err
            check(re.search(r"weights: ordered by process \d+ \(coxswain\) of user %d\b" % os.geteuid(), log), "not logged: %s" % log)
            check("stop: ordered by process %d (coxswain) of user %d\n" % (stop.pid, os.geteuid()) in log, "not logged: %s" % log)
    finally:
        shutil.rmtree(folder)


@test
def test_a_sealed_group_whose_ranks_could_not_be_told_apart_is_refused():
    for under in (["prlimit", "--locks=0"], harness.without("prlimit64>9=EPERM")):
        expect(run(["run", "-n", "1", "--attach", "sealed"], under=under), 2, "the hard limit RLIMIT_LOCKS (ulimit -Hx) of this process is 0, or")
        # One that has names can be started there.
        with Group(1, ["--attach", "named"], under=under) as group:
            expect(group.stop(), 0)


# ---- stop ----


@test
def test_the_name_of_a_group_is_an_argument_too():
    with Group(1) as one, Group(1) as two:  # without it each command would ask which
        for command in (["status"], ["metrics"], ["link-status"], ["role"], ["role", "prefill"], ["role", "standard"],
                        ["lora", "list"], ["recover", "pause"], ["recover", "start"], ["trace", "--json"],
                        ["weights", MODEL], ["link", two.name], ["unlink", two.name]):
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
def test_m15_stop_ends_a_group_whose_workers_are_all_stuck():
    with Group(2) as group:
        for rank in range(2):
            group.stopped(rank)
        expect(group.stop(), 0)
        group.left_nothing()
        expect(finish(group.process), 0, "the group ends")


@test
def test_m15_status_answers_while_a_stuck_group_ends_and_stop_again_is_no_harm():
    with Group(2) as group:
        group.stopped(0)
        with Stranger(group.socket_path) as stranger, Stranger(group.socket_path) as other:
            stranger.send(STOP)
            check(stranger.reply()[0] == 3, "not done")

            def stopping():
                other.send(STATUS)
                return dict(other.reply()[1]).get(8) == 1
            wait_until(stopping, "a group that stops")
            expect(group.stop(), 0)
            check(stranger.ended(), "the connection outlives the group")
        group.left_nothing()
        check(group.process.wait(timeout=TIMEOUT) == 0, "the second stop killed it")


@test
def test_stop_gives_up_at_its_deadline():
    with Group(1) as group:
        stop_process(group.process.pid)
        told = "process %d, the coordinator, is stopped by a signal" % group.process.pid
        expect(group.stop("--timeout", "0.3"), 3, told)
        expect(run(["status", "--name", group.name, "--timeout", "0.3"]), 1, told)
        group.process.send_signal(signal.SIGCONT)
        expect(group.stop(), 0)
        group.left_nothing()


@test
def test_a_generate_can_be_asked_and_stopped_and_takes_no_prompts():
    prompts, _ = sums(100)
    process = start(["generate", "-n", "2", "--model", MODEL, "--max-tokens", "1", "--sequences", "1"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    name = harness.own_name(process)
    # It cannot end before the check: its output is not read, and the pipe is full long before.
    text = "\n".join(prompts * 200) + "\n"
    feeder = subprocess.Popen(["cat", temporary(text)], stdout=process.stdin)
    process.stdin.close()
    process.stdin = None
    feeder.wait(timeout=TIMEOUT)
    wait_until(lambda: run(["status", "--name", name]).status == 0, "a control socket")
    status = json.loads(expect(run(["status", "--name", name, "--json"]), 0).out)
    check(status["serving"] is None and "coxswain generate" in status["refusal"], "wrong: %s" % status)
    wait_until(lambda: json.loads(run(["status", "--name", name, "--json"]).out)["channels"][0]["completed"] > 5, "steps")
    expect(run(["generate", "--name", name, "--model", MODEL, "1+1="]), 1, "accepts no prompts", "coxswain generate")
    asked = start(["stop", "--name", name])
    result = finish(process)
    check(result.status == 143, "not as by SIGTERM", result)
    expect(finish(asked), 0)


# ---- prompts ----


@test
def test_prompts_on_a_running_group_give_the_same_bytes():
    prompts, _ = sums(60)
    text = "\n".join(prompts) + "\n"
    with Group(2) as group:
        for arguments in ([], ["--json"], ["--max-tokens", "2", "--json"], ["--sequences", "3"], ["--sequences", "1"],
                          ["--temperature", "3", "--seed", "5", "--top-k", "7", "--top-p", "0.9", "--max-tokens", "9"]):
            own = generate(*arguments, text=text)
            other = group.generate(*arguments, text=text)
            check((own.status, own.out) == (other.status, other.out), "other bytes with %s" % arguments, other)
        for arguments in (["--tokens", "1 5 10 13 8 11 14", "1,4,13,4,14"], ["--quiet", "1+1="],
                          ["--tokens", "1", "1 999999", "2"], ["1+1=", "b\xe4d"], ["--max-tokens", "100000", "1+1="],
                          ["--json", "--max-tokens", "100000", "1+1=", "2+2="]):
            own, other = generate(*arguments), group.generate(*arguments)
            check((own.status, own.out) == (other.status, other.out), "other bytes with %s" % arguments, other)
            prefix = "coxswain: prompt"
            errors = [[line for line in result.err.splitlines() if line.startswith(prefix)] for result in (own, other)]
            check(errors[0] == errors[1], "other errors with %s: %s" % (arguments, errors), other)
        check(other.err.count("positions; the model has") == 2, "the refusal is not told per prompt", other)


        def free():  # a connection ends a little after its client
            status = group.status()["serving"]
            return status["free_blocks"] == status["block_count"] and status["clients"] == 0
        wait_until(free, "all is given back")
        expect(group.stop(), 0)


@test
def test_a_group_keeps_what_it_was_started_with():
    with Group(2) as group:
        check(expect(group.generate("--model", MODEL, "1+1="), 0).out == "1+1=2\n", "no")
        other = os.path.join(RUNTIME, "model")
        shutil.copytree(MODEL, other)
        for arguments, part in ((["-n", "2"], "leave out -n,"), (["--legacy-workers"], "leave out --legacy-workers,"),
                                (["--worker", "x"], "leave out --worker,"), (["--init", "k=v"], "leave out --init,"),
                                (["--model", other], "with the model " + MODEL)):
            result = expect(group.generate(*arguments, "1+1="), 2, "'%s'" % group.name, part)
            check(result.out == "", "it ran", result)
        shutil.rmtree(other)
    with Group(1, (), ["--", "sh", "-c", "exec %s --model %s" % (program("coxswain-worker"), MODEL)]) as group:
        expect(group.generate("1+1="), 1, "accepts no prompts", "command of its own")
        check("command of its own" in expect(run(["status"]), 0).out, "status does not tell")


@test
def test_many_clients_share_one_group():
    prompts, _ = sums(160)
    parts = [prompts[i * 20:(i + 1) * 20] for i in range(8)]
    expected = [generate(text="\n".join(part) + "\n").out for part in parts]
    with Group(4) as group:
        clients = [start(["generate", "--name", group.name, "--quiet", *part]) for part in parts]
        results = [finish(client) for client in clients]
        for result, text in zip(results, expected):
            expect(result, 0)
            check(result.out == text, "another text", result)
        status = group.status()["serving"]
        check(status["completed"] == 160 and status["clients"] == 0, "wrong: %s" % status)
        check(status["running"] == status["waiting"] == status["unread"] == 0, "something is left: %s" % status)
        expect(group.stop(), 0)
        group.left_nothing()


LONG = [(index, [1, 5, 10, 13, 8, 11, 14]) for index in range(300)]


def endless(prompts):
    """Prompts that no stop token ends."""
    return complete(prompts, 100000, ())


@test
def test_a_client_that_dies_or_cancels_gives_its_blocks_back():
    with Group(2) as group:
        one, two = Stranger(group.socket_path), Stranger(group.socket_path)
        for stranger in (one, two):
            stranger.send(endless(LONG))
        wait_until(lambda: group.status()["serving"]["free_blocks"] < group.status()["serving"]["block_count"], "steps")
        check(group.status()["serving"]["clients"] == 2, "two clients")
        client = start(["generate", "--name", group.name, "--quiet", "27+58="])
        one.close()
        two.send(CANCEL)
        while two.reply()[0] != 3:  # items that were on their way
            pass
        check(expect(finish(client), 0).out == "27+58=85\n", "another text")

        def free():
            status = group.status()["serving"]
            return status["free_blocks"] == status["block_count"] and status["running"] == 0 and status["clients"] == 1
        wait_until(free, "blocks given back")
        check(group.status()["serving"]["cancelled"] > 0, "nothing counted as cancelled")
        two.send(complete([(7, [1, 5, 10, 13, 8, 11, 14])]))
        number, item = two.reply()
        check(number == 2 and dict(item)[1] == 7, "no answer after a cancel: %s" % item)
        two.close()
        # A real client, killed and interrupted.
        for number, status in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
            before = group.status()["serving"]["cancelled"]
            path = temporary("1 5 10 13 8 11 14\n" * 20000)
            client = start(["generate", "--name", group.name, "--tokens", "--sequences", "1",
                            "--file", path])
            client.stdout.readline()
            client.send_signal(number)
            check(finish(client).status == status, "wrong status")
            wait_until(lambda: group.status()["serving"]["clients"] == 0, "a client that is gone")
            check(group.status()["serving"]["cancelled"] >= before, "less than before")
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "the group does not go on")
        expect(group.stop(), 0)


@test
def test_b21_a_client_that_reads_nothing_delays_no_other():
    with Group(2) as group, Stranger(group.socket_path) as deaf:
        deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.socket.setblocking(False)
        # Some to compute, and many refusals, which fill every buffer soon.
        message = frame(complete(LONG[:3] + [(index, [999999]) for index in range(300)], 3))
        sent = 0
        try:
            while sent < 64 << 20:
                sent += deaf.socket.send(message[sent % len(message):])
        except BlockingIOError:
            pass
        check(sent < 64 << 20, "it takes everything and answers nobody")
        wait_until(lambda: group.status()["serving"]["running"] == group.status()["serving"]["waiting"] == 0, "all done")
        status = group.status()["serving"]
        check(0 < status["unread"] <= 512, "what is unread has no bound: %s" % status)
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "another client is held up")
        # Once it reads, it gets all that it asked for.
        deaf.socket.setblocking(True)
        deaf.socket.settimeout(TIMEOUT)
        for _ in range(sent // len(message) * 303):
            check(deaf.reply()[0] == 2, "no item")
        deaf.close()
        expect(group.stop(), 0)
        group.left_nothing()


@test
def test_p10_garbage_at_the_control_connection_harms_no_other():
    with Group(1) as group:
        good = frame(complete([(1, [1, 5, 10, 13, 8, 11, 14])]))
        for data in (b"\0\0\0\0", b"\xff\xff\xff\xff", frame(b"\xff" * 40), frame(b"\0"), frame(field(9, b"")),
                     frame(field(3, b"")), frame(field(3, field(2, 0))), frame(complete([(1, [1])], 1, range(9))),
                     frame(field(3, field(2, 3) + field(6, -1 & (1 << 64) - 1)))):
            with Stranger(group.socket_path) as stranger:
                stranger.socket.sendall(data)
                number, error = stranger.reply()
                check(number == 4 and dict(error)[1] and dict(error)[2], "no error for %r" % data)
                check(stranger.ended(), "the connection lives on after %r" % data)
        for tokens in ([1, 999999], [1, -5], []):
            with Stranger(group.socket_path) as stranger:
                stranger.send(complete([(3, tokens), (4, [1, 5, 10, 13, 8, 11, 14])]))
                items = {dict(item)[1]: dict(item) for _, item in (stranger.reply(), stranger.reply())}
                check(items[3][2] == 2 and 4 in items[3] and 3 in items[4], "not per prompt: %s" % items)
        # Every bit flipped, and cut off everywhere.
        for bit in range(8 * len(good)):
            if good[bit // 8] ^ 1 << bit % 8 == STOP[0] and bit // 8 == 4:
                continue  # that asks for the end, and gets it
            with Stranger(group.socket_path) as stranger:
                data = bytearray(good)
                data[bit // 8] ^= 1 << bit % 8
                stranger.socket.sendall(bytes(data))
        for size in range(len(good)):
            with Stranger(group.socket_path) as stranger:
                stranger.socket.sendall(good[:size])
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "the group is harmed")
        expect(group.stop(), 0)
        group.left_nothing()


def leave_a_trap(listener, connection):
    """Sends an fd whose last close hangs for an hour: a socket in whose queue one lies that lingers over bytes that nobody reads. Its
    sender ends at once, which does not linger: whoever gets it must not close it before, or the close of the sender is the last, and
    does not hang. Returns the other end, with which that ends."""
    child = os.fork()
    if child == 0:
        try:
            lingers = socket.create_connection(listener.getsockname())
            lingers.setblocking(False)
            try:
                while lingers.send(bytes(65536)):
                    pass
            except BlockingIOError:
                pass
            lingers.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
            outer, inner = socket.socketpair()
            socket.send_fds(outer, [b"x"], [lingers.fileno()])
            socket.send_fds(connection, [b"x"], [inner.fileno()])
            os._exit(0)
        finally:
            os._exit(1)
    end = listener.accept()[0]
    status = os.waitpid(child, 0)[1]
    connection.close()
    check(status == 0, "the trap was not left")
    return end


@test
def test_g1g_status_and_stop_answer_while_closes_hang():
    def client():
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(group.socket_path)
        return stranger

    with Group(1) as group, socket.create_server(("127.0.0.1", 0)) as listener:
        # Else all that the other side sends may find room here, and nothing is left to linger for.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        strangers = [Stranger(group.socket_path) for _ in range(2)]
        # Once, and before the first close hangs: a signal, and so each stop, ends those that do.
        stop_process(group.process.pid)
        ends = [leave_a_trap(listener, stranger.socket) for stranger in strangers]
        ends += [leave_a_trap(listener, client()) for _ in range(2)]
        os.kill(group.process.pid, signal.SIGCONT)
        wait_until(lambda: group.status()["limits"]["closes that hang"]["count"] == 2, "closes that hang at the control socket")
        check(group.status()["limits"]["fds to close"]["count"] > 0, "nothing is to be closed")
        expect(run(["status", "--name", group.name]), 0)
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "the group is harmed")
        expect(group.stop(), 0)
        group.left_nothing()
        for end in ends:
            end.close()


def source(name=b"other", life=5, sequence=1, blocks=(0,), lease=(1 << 64) - 1):
    return (field(1, name) + field(2, life) + field(3, sequence) + field(4, b"".join(varint(b) for b in blocks)) +
            field(5, lease))


@test
def test_p10_m11_made_up_sources_and_groups_harm_no_other():
    with Group(1) as group:
        many = b"\0" * (4 << 20)
        refused = [field(10, b""), field(10, field(1, b"")), field(10, field(1, source(name=b"\x1b[31mno\nname"))),
                   field(10, field(1, source(name=b""))), field(10, field(1, source(name=b"x" * 100000))),
                   field(10, field(1, source(sequence=0))), field(10, field(1, source(sequence=-3))),
                   field(10, field(1, source(blocks=(0, -1)))), field(10, field(1, source(blocks=()))),
                   field(7, b""), field(7, field(1, b"\xff" * 40)), field(7, field(1, b"")),
                   field(7, field(1, field(1, b"x" * (2 << 20)))), field(7, field(2, b"nobody")),
                   field(9, field(1, 7)), field(6, field(1, 77))]
        for message in refused:
            with Stranger(group.socket_path) as stranger:
                stranger.send(message)
                number, error = stranger.reply()
                check(number == 4 and dict(error)[1] and dict(error)[2], "no error for %r" % message[:80])
        # These are possible: their result is reported.
        for made_up, text in ((source(), b"there is no link to other"),
                              (source(blocks=[2147483647] * 9), b"there is no link to other"),
                              (source(lease=0), b"deadline passed"),
                              (field(4, many) + source(), b"blocks are to be pulled: here are")):
            with Stranger(group.socket_path) as stranger:
                stranger.send(field(10, field(1, made_up)))
                number, reply = stranger.reply()
                error = dict(parse(dict(reply)[2]))
                check(number == 8 and text in error[2], "another end of %r: %r" % (made_up[-60:], reply))
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "the group is harmed")
        expect(group.stop(), 0)
        group.left_nothing()


@test
def test_m10_an_order_about_links_waits_for_another_one_no_longer_than_it_may():
    def role(timeout_ms):
        return field(9, field(1, 3) + field(2, timeout_ms))
    with Group(1) as group:
        group.stopped(0)

        def answer(message):
            with Stranger(group.socket_path) as stranger:
                stranger.send(message)
                number, reply = stranger.reply()
                return number == 4 and dict(reply)[2]
        while not answer(role(20)):
            pass  # the worker takes no more
        with Stranger(group.socket_path) as patient:
            patient.send(role(3600000))
            wait_until(lambda: b"another order about links" in answer(role(20)), "an order that waits for another")
        os.kill(group.pids[0], signal.SIGCONT)
        expect(group.stop(), 0)
        group.left_nothing()


# ---- workers that are started by hand ----


class External:
    """A group that waits for its workers."""

    def __init__(self, ranks, *arguments):
        self.ranks = ranks
        self.workers = []
        self.process = start(["run", "--worker", "none", "-n", str(ranks), "--model", MODEL, *arguments])

    def __enter__(self):
        line = self.process.stderr.readline()
        match = re.fullmatch(r"coxswain: waiting for (\d+) workers?: coxswain-worker --socket (\S+)\n", line)
        check(match and int(match[1]) == self.ranks, "it does not say how workers come: " + line)
        self.name = match[2]
        self.socket_path = os.path.join(RUNTIME, "coxswain", self.name + ".sock")
        check(os.path.exists(self.socket_path), "the control socket does not stand yet")
        return self

    def __exit__(self, *unused):
        for process in [self.process] + self.workers:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def worker(self, *arguments):
        """As a person types what the line shows."""
        process = start(["--socket", self.name, *arguments], command="coxswain-worker")
        self.workers.append(process)
        return process

    def logged_on(self, worker):
        """It was let in: it has the group's memory."""
        def mapped():
            check(worker.poll() is None, "the worker has ended")
            with open("/proc/%d/maps" % worker.pid, encoding="ascii") as file:
                return re.search("/dev/shm/|/memfd:", file.read())
        wait_until(mapped, "a worker that was let in")

    def misses(self, ranks):
        """Every client gets these."""
        wait_until(lambda: "not here yet: ranks %s (of %d)\n" % (ranks, self.ranks) in expect(run(
            ["status", "--name", self.name]), 1, "waits for its workers").err, "ranks %s missing" % ranks)

    def left_nothing(self):
        for worker in self.workers:
            try:
                worker.wait(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                check(False, "a worker lives on, in " + harness.sleeps_in(worker.pid))
        check(not os.path.exists(self.socket_path), "the control socket is left")
        check(not names_with(self.name), "left in /dev/shm: %s" % names_with(self.name))


@test
def test_workers_started_by_hand_come_in_any_order_and_serve():
    prompts, _ = sums(20)
    text = "\n".join(prompts) + "\n"
    own = expect(generate("-n", "4", text=text), 0)
    for more in ([], ["--attach", "sealed"], ["--name", harness.fresh_name("hand")]):
        with External(4, *more) as group:
            expect(run(["status", "--name", group.name]), 1, "waits for its workers", "coxswain-worker --socket")
            expect(run(["generate", "--name", group.name, "1+1="]), 1, "waits for its workers",
                   "coxswain-worker --socket %s" % group.name, "not here yet: ranks 0-3 (of 4)")
            # The last rank first; a worker without a rank gets the lowest free one.
            by_rank = {3: group.worker("--local_rank", "3")}
            group.logged_on(by_rank[3])
            group.misses("0-2")
            taken = group.worker("--local_rank", "3")
            err = taken.communicate(timeout=TIMEOUT)[1]
            check(taken.returncode == 1 and "rank 3 of the group '%s' is process %d already" % (
                group.name, by_rank[3].pid) in err, "rank 3 came twice: " + err)
            by_rank[1] = group.worker("--local_rank", "1", "--local_world_size", "4")
            group.logged_on(by_rank[1])
            group.misses("0,2")
            for rank in (0, 2):
                by_rank[rank] = group.worker()
                group.logged_on(by_rank[rank])
            lines = [group.process.stdout.readline().split() for _ in range(6)]
            check(lines[0] == ["name", group.name] and lines[1] == ["socket", group.socket_path], "wrong: %s" % lines)
            check(lines[2:] == [["rank", str(rank), "pid", str(by_rank[rank].pid)] for rank in range(4)], "wrong: %s" % lines)
            one_more = group.worker()
            err = one_more.communicate(timeout=TIMEOUT)[1]
            text_of_it = "coxswain-worker: the coordinator refuses: all 4 ranks of the group '%s' are there" % group.name
            check(one_more.returncode == 1 and err.startswith(text_of_it), "one too many came in: " + err)
            result = expect(run(["generate", "--name", group.name], text=text), 0, "4 ranks")
            check(result.out == own.out, "another text", result)
            expect(run(["stop", "--name", group.name]), 0)
            expect(finish(group.process), 0)
            group.left_nothing()
            check([by_rank[rank].returncode for rank in range(4)] == [0] * 4, "workers do not end in order")


@test
def test_p2_a_worker_that_dies_before_the_others_came_is_named():
    for more in ([], ["--attach", "sealed"]):
        with External(2, *more) as group:
            other, dying = group.worker("--local_rank", "0"), group.worker("--local_rank", "1")
            group.logged_on(dying)
            dying.kill()
            # The other one may be quick enough to make the group complete: then the group has lost a rank.
            expect(finish(group.process), 3, "rank 1", "pid %d" % dying.pid)
            check(other.wait(timeout=TIMEOUT) is not None, "the other one lives on")
            group.left_nothing()
        with External(2, *more) as group:
            dying = group.worker()
            group.logged_on(dying)
            dying.kill()
            expect(finish(group.process), 3, "rank 0", "pid %d" % dying.pid, "before the group was complete")
            group.left_nothing()


@test
def test_a_worker_started_by_hand_ends_at_its_terminal():
    def by_hand(group, interrupt=signal.SIG_DFL):
        worker = start(["--socket", group.name], command="coxswain-worker", stdout=None,
                       preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt))
        group.workers.append(worker)
        group.logged_on(worker)
        return worker

    def has_a_say(worker):
        """It has come as far as to say what SIGINT does, which it does last."""
        with open("/proc/%d/status" % worker.pid, encoding="ascii") as file:
            sets = re.findall(r"^Sig(?:Cgt|Ign):\s+([0-9a-f]+)", file.read(), re.M)
        return any(int(one, 16) & 1 << signal.SIGINT - 1 for one in sets)

    for more in ([], ["--attach", "sealed"]):
        for number in (signal.SIGINT, signal.SIGTERM):
            with External(2, *more) as group:
                worker = by_hand(group)
                wait_until(lambda: has_a_say(worker), "a worker that waits")
                worker.send_signal(number)
                err = worker.communicate(timeout=TIMEOUT)[1]
                check((worker.returncode, err) == (0, ""), "status %d: %s" % (worker.returncode, err))
                expect(finish(group.process), 3, "rank 0 (pid %d) is dead" % worker.pid)
                group.left_nothing()
        # In a shell's background it is ignored, as it was at the start.
        with External(1, *more) as group:
            worker = by_hand(group, signal.SIG_IGN)
            group.process.stdout.readline()
            worker.send_signal(signal.SIGINT)
            check(expect(run(["generate", "--name", group.name, "27+58="]), 0).out == "27+58=85\n", "it has ended")
            expect(run(["stop", "--name", group.name]), 0)
            group.left_nothing()


@test
def test_waiting_for_workers_ends_at_a_stop():
    for more in ([], ["--attach", "sealed"]):
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (None, 143)):
            for come in range(2):
                with External(2, *more) as group:
                    for _ in range(come):
                        group.logged_on(group.worker())
                    if number:
                        group.process.send_signal(number)
                    else:
                        result = expect(run(["stop", "--name", group.name]), 0)
                        check(result.err == "coxswain: the group '%s' has ended\n" % group.name, "not said", result)
                    expect(finish(group.process), status, "ended by signal %d" % (status - 128))
                    group.left_nothing()


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
    for command in ("generate", "eval", "run", "status", "recover", "lora", "role", "link", "unlink", "link-status",
                    "pull-kv", "weights", "stop", "layout", "clean", "doctor", "handle"):
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


def fds_and_threads(pid):
    return len(os.listdir("/proc/%d/fd" % pid)), len(os.listdir("/proc/%d/task" % pid))


@test
def test_b15_connections_leave_no_fd_and_no_thread():
    with Group(1) as group:
        group.generate("1+1=")
        wait_until(lambda: group.status()["serving"]["clients"] == 0, "nobody")
        pid = group.process.pid
        before = fds_and_threads(pid)
        for i in range(100):
            with Stranger(group.socket_path) as stranger:
                if i % 2:
                    stranger.send(STATUS)
                if i % 3 == 0:
                    stranger.send(complete([(1, [1, 5, 10, 13, 8, 11, 14])]))
        wait_until(lambda: fds_and_threads(pid) <= before, "fds and threads given back: %s, %s" % (
            before, fds_and_threads(pid)))
        expect(group.stop(), 0)


@test
def test_connections_have_a_bound_and_status_has_its_place():
    with Group(1) as group:
        clients = [Stranger(group.socket_path) for _ in range(24)]
        for client in clients:
            client.send(endless(LONG[:1]))
        wait_until(lambda: group.status()["serving"]["clients"] == 24, "24 clients")
        with Stranger(group.socket_path) as one_more:
            one_more.send(complete(LONG[:1]))
            number, error = one_more.reply()
            check(number == 4 and b"too many clients" in dict(error)[2], "not refused: %s" % error)
        # A silent connection is closed for a client with a request: most often the first of them, which was silent for longest. Of the
        # connections that were closed before, some may hold their places still: more than one has to go then.
        others = [Stranger(group.socket_path) for _ in range(8)]
        expect(run(["status", "--name", group.name]), 0)
        told = [other for other in others if other.socket in select.select([o.socket for o in others], [], [], TIMEOUT)[0]]
        check(1 <= len(told) < len(others), "%d of them were told" % len(told))
        for other in told:
            number, error = other.reply()
            check(number == 4 and b"asked for nothing" in dict(error)[2], "not told: %s" % error)
            check(other.ended(), "its connection lives on")
        check(group.status()["serving"]["clients"] == 24, "a client had to go")
        for client in clients + others:
            client.close()
        wait_until(lambda: group.status()["serving"]["clients"] == 0, "nobody")
        expect(group.stop(), 0)


@test
def test_b21_an_idle_client_with_prompts_is_closed_for_others():
    with Group(1) as group:
        clients = [Stranger(group.socket_path) for _ in range(24)]
        sums_prompt = complete([(1, [1, 5, 10, 13, 8, 11, 14])])
        # What is held for some of them is let go of at the end of its lease, and so are they.
        held_prompt = field(3, field(1, field(1, 1) + field(2, bytes([1, 5, 10, 13, 8, 11, 14]))) + field(2, 1) +
                            field(20, 1000))
        for i, client in enumerate(clients[4:]):
            client.send(held_prompt if i % 2 else sums_prompt)
            number, item = client.reply()
            check(number == 2 and (20 in dict(item)) == i % 2, "no item, or none that is held: %s" % item)
        # These do not even take what they asked for.
        for deaf in clients[:4]:
            deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.socket.setblocking(False)
            message = frame(complete([(index, [999999]) for index in range(300)], 3))
            sent = 0
            try:
                while sent < 64 << 20:
                    sent += deaf.socket.send(message[sent % len(message):])
            except BlockingIOError:
                pass
        wait_until(lambda: group.status()["serving"]["clients"] == 24, "24 clients")
        others = []

        def comes_in():
            other = Stranger(group.socket_path)
            other.send(sums_prompt)
            number, value = other.reply()
            if number == 2:
                others.append(other)
                return True
            check(b"too many clients" in dict(value)[2], "refused: %s" % value)
            other.close()
            return False
        for _ in range(24):
            wait_until(comes_in, "a place for prompts")
        number, error = clients[4].reply()
        check(number == 4 and b"needed the place" in dict(error)[2], "not told: %s" % error)
        # Nothing is left of those either that take nothing, and hear nothing.
        wait_until(lambda: group.status()["serving"]["clients"] == 24, "those who had the places before gone")
        for client in clients + others:
            client.close()
        wait_until(lambda: group.status()["serving"]["clients"] == 0, "nobody")
        expect(group.stop(), 0)


@test
def test_b21_orders_that_wait_leave_room_for_status_and_stop():
    with Group(1) as group:
        group.stopped(0)
        pause = field(5, field(1, 0) + field(4, 600000))
        waiting = [Stranger(group.socket_path) for _ in range(24)]
        for stranger in waiting:
            stranger.send(pause)
        # All of them wait, for the rank or for each other: the next one may not.
        refused = []

        def one_is_refused():
            with Stranger(group.socket_path) as one_more:
                one_more.send(pause)
                readable = select.select([one_more.socket], [], [], 0.2)[0]
                refused.extend([one_more.reply()] if readable else [])
            return refused
        wait_until(one_is_refused, "one order too many")
        check(refused[0][0] == 4 and b"too many orders" in dict(refused[0][1])[2], "not refused: %s" % refused)
        check(group.status()["ranks"][0]["stopped"], "it is not stopped")
        expect(group.stop(), 0)
        for stranger in waiting:
            stranger.close()
        expect(finish(group.process), 0, "the group ends")
        group.left_nothing()


@test
def test_a24_b2_a_stopped_coordinator_is_reported_and_a_paused_group_waited_for():
    path = temporary("27+58=\n" * 50000)
    soon = environment(COXSWAIN_TEST_WATCH_MS="500")  # in a build without tests it is 10 s
    with Group(1) as group, Group(1) as paused:
        expect(run(["recover", "pause", "--name", paused.name]), 0)
        waiting = start(["generate", "--name", paused.name, "27+58="], env=soon)
        wait_until(lambda: paused.status()["serving"]["clients"] == 1, "a client that waits")
        client = start(["generate", "--name", group.name, "--file", path], env=soon)
        check(client.stdout.readline() == "27+58=85\n", "no text")
        group.process.send_signal(signal.SIGSTOP)
        try:
            result = expect(finish(client), 3, "does not reply: it is stopped, or stuck")
            check(set(result.out.splitlines()) <= {"27+58=85"}, "another text", result)
        finally:
            group.process.send_signal(signal.SIGCONT)
        # That took several checks; the other group, which replies, was not suspected.
        check(waiting.poll() is None, "it did not wait")
        expect(run(["recover", "start", "--name", paused.name]), 0)
        check(expect(finish(waiting), 0).out == "27+58=85\n", "another text")
        expect(paused.stop(), 0)
        expect(group.stop(), 0)


@test
def test_clients_hear_of_a_group_that_ends():
    with Group(2) as group:
        path = temporary("1 5 10 13 8 11 14\n" * 50000)
        for end, status, part in ((lambda: os.kill(group.pids[1], signal.SIGKILL), 3, "Killed"),):
            client = start(["generate", "--name", group.name, "--tokens", "--json", "--file", path],
                           stdout=open(os.path.join(RUNTIME, "out"), "w", encoding="ascii"))
            wait_until(lambda: os.path.getsize(os.path.join(RUNTIME, "out")) > 0, "a line")
            end()
            _, err = client.communicate(timeout=TIMEOUT)
            check(client.returncode == status and part in err, "status %d: %s" % (client.returncode, err))
            with open(os.path.join(RUNTIME, "out"), encoding="ascii") as file:
                lines = [json.loads(line) for line in file]
            check(len(lines) == 50000 and lines[-1]["finish"] == "error", "not every prompt is told of")
        expect(finish(group.process), 3)
    with Group(2) as group:
        client = start(["generate", "--name", group.name, "--tokens", "--file", path], stdout=subprocess.PIPE)
        client.stdout.readline()
        expect(group.stop(), 0)
        result = finish(client)
        told = ("(coxswain stop)", "is ending", "has ended")
        check(result.status == 1 and any(part in result.err for part in told), "not told", result)
    with Group(2) as group:
        client = start(["generate", "--name", group.name, "--tokens", "--file", path], stdout=subprocess.PIPE)
        client.stdout.readline()
        group.process.kill()
        group.process.wait()
        expect(finish(client), 1, "has ended")


@test
def test_p5_a_group_that_serves_and_has_nothing_to_do_sleeps():
    if harness.program_has("coxswain", b"__tsan_init"):
        skip("ThreadSanitizer has a thread of its own, which never sleeps for long")
    with Group(1) as group:
        with Stranger(group.socket_path) as stranger:
            stranger.send(complete([(1, [1, 5, 10, 13, 8, 11, 14])]))
            stranger.reply()

            def switches():
                total = {}
                for task in os.listdir("/proc/%d/task" % group.process.pid):
                    with open("/proc/%d/task/%s/status" % (group.process.pid, task), encoding="ascii") as file:
                        total[task] = int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", file.read(), re.M)[1])
                return total
            # Until nothing moves for ten looks in a row; polling of any kind would move something for ever.
            quiet = 0
            before = switches()
            end = time.monotonic() + TIMEOUT
            while quiet < 10:
                check(time.monotonic() < end, "it never sleeps")
                time.sleep(0.1)  # the time that nothing happens in is what is looked at
                now = switches()
                quiet = quiet + 1 if now == before else 0
                before = now
        expect(group.stop(), 0)


if __name__ == "__main__":
    sys.exit(harness.main())
