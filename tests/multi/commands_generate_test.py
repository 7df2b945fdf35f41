#!/usr/bin/python3
"""What the commands print and count on models/sums: generate, eval, layout, and workers of others.

Usage: commands_generate_test.py BIN_DIR SOURCE_DIR [TEST...]

With COXSWAIN_TEST_ATTACH=sealed in the environment, groups are sealed where a test does not say how they are to be.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
import rights  # pylint: disable=wrong-import-position
from commands_fixture import no_socket_is_left, pids_of, ready, started  # pylint: disable=wrong-import-position
# pylint: disable-next=wrong-import-position
from harness import (LEGACY_WORKER, MODEL, SEALED, TIMEOUT, check, environment, expect, finish,
                     generate, names_with, program, run, skip, start, status_of, sums, temporary,
                     test, wait_until)

harness.begin(harness.parser(__doc__))
# A worker for which any number of ranks works; the reference worker divides a model.
ANY_COUNT = ["--", program("scripted_worker")]
EXAMPLE_WORKER = program("example_worker")


# ---- what works ----


@test
def generate_gives_the_same_text_for_every_number_of_ranks():
    for ranks in (1, 2, 4, 8):
        result = expect(generate("-n", str(ranks), "27+58=", "1+2=", "--", "999+1="), 0, "tokens/s", "channel time")
        check(result.out == "27+58=85\n1+2=3\n999+1=1000\n", "wrong text", result)


@test
def a_worker_has_arguments_or_blanks_in_its_name():
    worker = program("coxswain-worker")
    few = worker + "  --block-count 1  --block-size 4 "
    expect(generate("--worker", few, "--max-tokens", "4", "27+58="), 1, "prompt 1", "blocks")
    link = os.path.join(harness.scratch, "a worker")
    os.symlink(worker, link)
    expect(generate("--worker", link, "27+58="), 0)
    expect(generate("--worker", worker + " -x" * 30, "1+1="), 2, "--worker is '", "at most 29 arguments")
    expect(generate("--worker", " ", "1+1="), 2, "--worker is ' '")


@test
def generate_reports_the_share_of_channel_and_group_in_steps():
    for ranks in (1, 2, 4, 8):
        result = expect(generate("-n", str(ranks), "27+58=", "1+2="), 0)
        told = re.search(r"of the time of steps: channel (\d+\.\d) %(?:, rank group (\d+\.\d) % "
                         r"\((\d+\.\d) % waiting for other ranks\))?$", result.err, re.M)
        check(told and 0 <= float(told[1]) <= 100, "no share of the channel", result)
        check((told[2] is not None) == (ranks > 1), "a group of one", result)
        check(ranks == 1 or 0 < float(told[3]) <= float(told[2]) <= 100, "no share of the rank group", result)
        check(result.out == "27+58=85\n1+2=3\n", "standard output is for text", result)


@test
def generate_gives_the_same_json_for_every_number_of_ranks():
    prompts, _ = sums(40)
    text = "\n".join(prompts) + "\n"
    one = expect(generate("-n", "1", "--json", text=text), 0)
    check(one.out.count("\n") == 40, "expected 40 lines", one)
    for more in ([], ["--temperature", "2", "--seed", "3"]):
        alone = expect(generate("-n", "1", "--json", *more, text=text), 0) if more else one
        for ranks in (2, 4, 8):
            result = expect(generate("-n", str(ranks), "--json", *more, text=text), 0)
            check(result.out == alone.out, "another text on %d ranks, %s" % (ranks, more), result)
            result = expect(harness.generate_on(["-n", str(ranks), "--attach", "sealed"], "--json", *more, text=text), 0)
            check(result.out == alone.out, "another text on %d sealed ranks, %s" % (ranks, more), result)


def random_model(folder, heads, kv_heads, *more):
    script = os.path.join(harness.SOURCE_DIR, "tests", "lib", "reference_llama.py")
    subprocess.run([sys.executable, script, "random", folder, "--hidden", str(heads * 8), "--layers", "2", "--heads", str(heads),
                    "--kv-heads", str(kv_heads), "--ffn", "100", "--vocab", "97", "--seed", "3", *more], check=True)


@test
def g4b_models_are_shared_out_as_their_heads_allow():
    try:
        import numpy  # noqa: F401: only whether it is there
    except ImportError:
        skip("no numpy")
    for heads, kv_heads, good, bad, words in ((9, 3, (1, 3), (2, 4, 8, 9), "use 1 or 3 ranks"),
                                              (15, 5, (1, 5), (2, 3, 4, 8, 15), "use 1 or 5 ranks"),
                                              (12, 4, (1, 2, 4), (3, 8), "use 1, 2 or 4 ranks")):
        with tempfile.TemporaryDirectory() as folder:
            random_model(folder, heads, kv_heads, "--llama3", "8,1,4,16")
            texts = set()
            for ranks in good:
                for more in ([], ["--worker", harness.own_weights()], ["--temperature", "0.8", "--seed", "7"]):
                    result = expect(run(["generate", "-n", str(ranks), "--model", folder, "--tokens", "--max-tokens", "20", *more,
                                         "5 6 7 8 9 10 11", "90 4"]), 0)
                    texts.add((bool(more) and more[0] == "--temperature", result.out))
            check(len(texts) == 2, "not the same on %s ranks: %s" % (good, texts))
            for ranks in bad:
                for command in (["generate", "--tokens", "5"], ["run"]):
                    result = run([*command, "-n", str(ranks), "--model", folder])
                    expect(result, 2, "-n %d: heads" % ranks, "%d slices" % kv_heads, words)
                    check(result.out == "" and result.err.count("\n") == 1, "more than a line", result)


@test
def many_prompts_are_the_same_at_once_and_one_by_one():
    prompts, _ = sums(200)
    text = "\n".join(prompts) + "\n"
    one = expect(generate("-n", "1", text=text), 0)
    check(one.out.count("\n") == 200, "expected 200 lines", one)
    for prompt, line in zip(prompts, one.out.split("\n")):
        check(line.startswith(prompt), "not in order: " + line, one)
    for arguments in (["-n", "4"], ["-n", "4", "--sequences", "1"], ["-n", "2", "--sequences", "5"]):
        other = expect(generate(*arguments, text=text), 0)
        check(other.out == one.out, "another text with %s" % arguments, other)
    for group in (["--depth", "1"], ["--step-tokens", "3"]):
        other = expect(harness.generate_on(group, "--sequences", "7", text=text), 0)
        check(other.out == one.out, "another text with %s" % group, other)


@test
def prompts_come_from_arguments_files_and_standard_input():
    path = temporary("27+58=\r\n1+1=")  # another system's line end, and none at the end
    marked = temporary("\ufeff27+58=\n1+1=\n")  # as some editors begin a file
    for result in (generate("--file", path), generate("--file", marked), generate("-", text="27+58=\n1+1=\n"), generate(text="27+58=\n1+1=\n"),
                   generate("--file", "-", text="27+58=\n1+1=\n"), generate("27+58=", "1+1=")):
        expect(result, 0)
        check(result.out == "27+58=85\n1+1=2\n", "wrong text", result)
    result = expect(generate("--quiet", "1+1="), 0)
    check(result.err == "", "not quiet", result)


@test
def json_and_token_ids():
    result = expect(generate("--json", "27+58=", "1+1="), 0)
    lines = [json.loads(line) for line in result.out.splitlines()]
    check(lines[0] == {"prompt": "27+58=", "text": "85", "tokens": [11, 8, 2], "finish": "stop"}, "wrong JSON", result)
    check(lines[1]["text"] == "2", "wrong JSON", result)
    result = expect(generate("--tokens", "1 5 10 13 8 11 14", "1,4,13,4,14"), 0)
    check(result.out == "1 5 10 13 8 11 14 11 8 2\n1 4 13 4 14 5 2\n", "wrong tokens", result)
    result = expect(generate("--json", "--max-tokens", "1", "27+58="), 0)
    check(json.loads(result.out)["finish"] == "length", "expected the length to end it", result)


@test
def sampling_repeats_with_its_seed():
    arguments = ["--temperature", "5", "--seed", "7", "--max-tokens", "20", "27+58=", "1+1="]
    one = expect(generate("-n", "1", *arguments), 0)
    check(one.out != "27+58=85\n1+1=2\n", "temperature 5 changes nothing", one)
    check(expect(generate("-n", "4", *arguments), 0).out == one.out, "another text on 4 ranks", one)
    arguments[3] = "8"
    check(expect(generate("-n", "1", *arguments), 0).out != one.out, "the same text with another seed", one)
    result = expect(generate("--temperature", "5", "--top-k", "1", "27+58="), 0)
    check(result.out == "27+58=85\n", "the likeliest token alone is greedy", result)


@test
def eval_counts_what_is_right():
    _, text = sums(100)
    result = expect(run(["eval", "-n", "2", "--model", MODEL, "-"], text=text + "1+1=3\n"), 0)
    match = re.match(r"(\d+) of 101 right \((\d+\.\d\d) %\)\n", result.out)
    check(match and 90 <= int(match[1]) <= 100, "wrong count", result)
    check("line 101: 1+1= expected 3, got 2\n" in result.out, "the mismatch is not shown", result)
    result = run(["eval", "--model", MODEL, "--min-accuracy", "60", "-"], text="1+1=2\n1+1=3\n")
    expect(result, 1, "50.00 %")
    expect(run(["eval", "--model", MODEL, "-"], text="1+1\n"), 2, "PROMPT=ANSWER")
    process = start(["run", "-n", "4", "--model", MODEL])
    name = started(process)
    kept = expect(run(["eval", "--name", name, "-"], text=text + "1+1=3\n"), 0)
    check(kept.out == expect(run(["eval", "-n", "4", "--model", MODEL, "-"], text=text + "1+1=3\n"), 0).out,
          "other answers of a group that runs", kept)
    expect(run(["eval", "--name", name, "-n", "4", "-"], text="1+1=2\n"), 2, "leave out -n")
    process.terminate()
    expect(finish(process), 0)


@test
def layout_prints_names_sizes_and_totals():
    before = names_with("")
    result = expect(run(["layout", "-n", "3", "--name", "coxlayout", "--depth", "2", "--size", "transfer.request=1M"]), 0)
    check("region /coxlayout_transfer_request 1048576 frames 2 of 524288\n" in result.out, "no such region", result)
    check("semaphore /coxlayout_execute_request_produce_2 value 2\n" in result.out, "no such semaphore", result)
    check("semaphore /coxlayout_execute_request_consume_2 value 0\n" in result.out, "no such semaphore", result)
    check("semaphore /coxlayout_execute_error_response_produce_0 value 1\n" in result.out, "no such semaphore", result)
    sizes = [int(size) for size in re.findall(r"^region \S+ (\d+)", result.out, re.M)]
    check("total regions %d " % sum(sizes) in result.out, "the total is no sum", result)
    check(len(re.findall(r"^semaphore", result.out, re.M)) == 4 * 4 * 3 + 2, "wrong number of semaphores", result)
    check("free in /dev/shm" in result.out, "nothing about what is free", result)
    check(not names_with("coxlayout"),
          "layout created something: %s" % set(names_with("")).difference(before))
    result = expect(run(["layout", "-n", "8"]), 0)
    total = int(re.search(r"^total regions (\d+)", result.out, re.M)[1])
    check(total < 16 << 20, "8 ranks need more than 16 MiB", result)
    result = expect(run(["layout", "-n", "16", "--legacy-workers"]), 0)
    check("NAME_SERIAL_recover_command_response 8388608 slots of 524288" in result.out, "wrong legacy size", result)
    check("region /NAME_control " in result.out and "SERIAL is another" in result.out, "not told", result)


def page(name):
    with open(os.path.join(os.path.dirname(MODEL), "..", name), encoding="utf-8") as file:
        return file.read()


@test
def test_p6_memory_is_one_figure():
    """Of layout, doctor, the pages, and a group that runs."""
    def mebibytes(pattern, *options):
        return re.search(pattern + r" \d+ \((\S+ MiB)\)", expect(run(["layout", "-n", "8", *options]), 0).out, re.M)[1]
    def takes(rank_count, memory):
        return "a group of %d ranks takes %s" % (rank_count, memory)
    memory = mebibytes("^total of /dev/shm")
    check(takes(8, memory) in run(["doctor", "-n", "8"]).out, "doctor does not say %s" % memory)
    check("| %s for 8 ranks: `coxswain layout -n 8` |" % memory in page("README.md"), "README.md: not %s" % memory)
    operations = page("docs/operations.md")
    check("8 ranks with the defaults take %s and 141 files" % memory in operations, "operations.md: not %s" % memory)
    sealed = mebibytes("^total", "--attach", "sealed")
    check("their memory is memfds, %s for 8 ranks" % sealed in operations, "operations.md: not %s" % sealed)
    four = re.search(r"^total of .* \((\S+ MiB)\)", expect(run(["layout", "-n", "4"]), 0).out, re.M)[1]
    check(takes(4, four) in page("docs/at-3am.md"), "at-3am.md: not %s" % four)
    if SEALED:
        skip("a sealed group has no names whose sizes could be added")
    name = harness.fresh_name("memory")
    process = start(["run", "-n", "8", "--name", name, *ANY_COUNT], env=environment(**harness.KEEP_NAMES))
    check(process.stdout.readline(), "it did not start")
    used = harness.bytes_of(name)
    process.terminate()
    expect(finish(process), 0)
    check("%.2f MiB" % (used / 1048576) == memory, "a group takes %d bytes, not %s" % (used, memory))


@test
def help_and_version():
    result = expect(run(["--version"]), 0)
    check(re.match(r"coxswain \d+\.\d+\.\d+\n", result.out), "odd version", result)
    for arguments in (["--help"], ["generate", "--help"], ["eval", "-h"], ["run", "--help"], ["layout", "--help"],
                      ["clean", "--help"], ["clean", "-h"], ["doctor", "--help"], ["doctor", "-h"]):
        result = expect(run(arguments), 0)
        check(result.out.startswith("Usage: coxswain") and "Exit status" in result.out, "odd help", result)
    expect(run([]), 2, "Usage")


@test
def legacy_workers_generate():
    if not rights.legacy_fits():
        skip("legacy workers")
    # It gets its own flags alone, and every key of the init that it requires.
    words = ["--legacy-workers", "--worker", "%s %s" % (sys.executable, LEGACY_WORKER), "--tokens", "--max-tokens", "5"]
    # Tokens of that worker: (sum of the prompt + replies before) % 97.
    result = expect(generate("-n", "3", *words, "1 5 10", "7 8 14"), 0)
    check(result.out == "1 5 10 16 17 18 19 20\n7 8 14 29 30 31 32 33\n", "wrong tokens", result)
    needs = environment(COX_LEGACY_NEEDS="max_seq_len=99,max_iter_times=63,plugin_params=x")
    expect(generate(*words, "1 5", env=needs), 3, "the configuration has no max_seq_len=99, max_iter_times=63, plugin_params=x")
    expect(generate(*words, "--init", "max_seq_len=99", "--init", "max_iter_times=63", "--init", "plugin_params=x", "1 5", env=needs), 0)
    # One that ends at a flag that is not its own: the words are its.
    expect(generate(*words, "--worker", "%s %s --model x" % (sys.executable, LEGACY_WORKER), "1 5"), 3, "unrecognized arguments: --model x")
    # With split fuse, too, whose rows have to say which positions they compute.
    result = expect(generate("-n", "2", *words, "1 5 10", "7 8 14", env=environment(COX_LEGACY_SPLIT="1")), 0)
    check(result.out == "1 5 10 16 17 18 19 20\n7 8 14 29 30 31 32 33\n", "wrong tokens", result)
    # The reference worker takes their init, too.
    result = expect(generate("-n", "2", "--legacy-workers", "27+58="), 0)
    check(result.out == "27+58=85\n", "another text", result)


@test
def what_cannot_be_seen_in_an_error_is_spelled_out():
    for prompt, shown in (("1\ufeff+1=", "the character 'U+FEFF' at position 2"), ("1\u200b=", "the character 'U+200B'"),
                          ("1\x1b[31m=", "the character U+001B"), ("1\xe9=", "the character '\xe9'")):
        expect(generate(prompt), 2, shown)
    odd = b"\xc3\x1b[31m\xe2\x80\xae"
    for words in ([odd], [b"generate", b"--" + odd], [b"generate", b"--tokens", odd], [b"run", b"--init", odd + b"=1"],
                  [b"generate", b"--model", odd, b"1+1="], [b"status", odd], [b"generate", b"--file", odd]):
        result = subprocess.run([program("coxswain").encode(), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                stdin=subprocess.DEVNULL, env=environment(), check=False, timeout=TIMEOUT)
        check(result.returncode in (1, 2) and b"\xc3" not in result.stderr.replace(b"\\xc3", b""), "%s: %s" % (words, result))
        check(b"\x1b" not in result.stderr and b"\xe2\x80\xae" not in result.stderr, "%s: %s" % (words, result))
        result.stderr.decode("ascii")


@test
def a_start_tells_of_what_a_killed_group_has_left():
    """Of legacy workers: the names of their objects stay as long as the group lives."""
    if not rights.legacy_fits():
        skip("legacy workers")
    name = harness.fresh_name("killed")
    env = environment(COXSWAIN_TEST_LEFTOVERS=name)

    def killed(name):
        process = start(["run", "-n", "2", "--name", name, "--legacy-workers", "--init", "model_id=x", "--", sys.executable, LEGACY_WORKER])
        ready(process, 2)
        pids = harness.children(process.pid)
        process.kill()
        process.communicate()
        wait_until(lambda: not any(harness.alive(pid) for pid in pids), "the end of the workers")
    told = r"coxswain: the group '%s', which was killed, has left \d+ names in /dev/shm: coxswain clean removes them\n"
    result = expect(generate("1+1=", env=env), 0)
    check("was killed" not in result.err, "something is left", result)
    killed(name)
    result = expect(generate("1+1=", env=env), 0)
    check(len(re.findall(told % name, result.err)) == 1, "not told", result)
    check("killed" not in expect(generate("--quiet", "1+1=", env=env), 0).err, "told all the same")
    killed(name + "x")
    check("2 groups, which were killed, have left" in expect(generate("1+1=", env=env), 0).err, "not told of both")
    expect(run(["clean", name, name + "x"]), 0)
    check("killed" not in expect(generate("1+1=", env=env), 0).err, "told of what was removed")


@test
def legacy_workers_say_how_a_prompt_ended():
    """Finish reasons of MindIE-LLM: out of memory was taken for an end of the text."""
    if not rights.legacy_fits():
        skip("legacy workers")

    def finish_of(reason, text=""):
        said = {"COX_LEGACY_STEP_FAULT": "0:3:%d:%s" % (reason, text)} if text else {"COX_LEGACY_FINISH": "3:%d" % reason}
        result = generate("--legacy-workers", "--worker", "%s %s" % (sys.executable, LEGACY_WORKER), "--tokens", "--json", "--max-tokens",
                          "5", "1 5 10", env=environment(**said))
        return result, json.loads(result.out)
    for reason, wanted in ((1, "stop"), (2, "stop"), (3, "stop"), (5, "length"), (6, "length")):
        result, told = finish_of(reason)
        check(result.status == 0 and told["finish"] == wanted and told["tokens"] == [16, 17, 18], "%d: %s" % (reason, told), result)
    for reason, text, words in ((7, "", "the output does not have the structure that was asked for (finish reason 7)"),
                                (9, "no blocks are left", "out of memory (finish reason 9): no blocks are left"),
                                (4, "", "a reason that is unknown here (finish reason 4)"),
                                (-1, "", "a reason that is unknown here (finish reason -1)")):
        result, told = finish_of(reason, text)
        check(result.status == 1 and told["finish"] == "error" and told["tokens"] == [], "%d: %s" % (reason, told), result)
        check(told["error"].endswith("the workers ended the prompt: " + words), told["error"], result)
    # On a group that runs, too, each prompt has its own error.
    name = harness.fresh_name("memory")
    process = start(["run", "--name", name, "--legacy-workers", "--worker", "%s %s" % (sys.executable, LEGACY_WORKER)],
                    env=environment(COX_LEGACY_FINISH="3:9"))
    ready(process, 2)
    result = generate("--name", name, "--tokens", "--json", "--max-tokens", "5", "1 5 10", "7 8 14")
    told = [json.loads(line) for line in result.out.splitlines()]
    check([item["finish"] for item in told] == ["error", "error"] and result.status == 1, "wrong: %s" % told, result)
    result = expect(generate("--name", name, "--tokens", "--max-tokens", "2", "1 5 10"), 0)
    check(result.out == "1 5 10 16 17\n", "wrong tokens", result)
    process.terminate()
    expect(finish(process), 0, "the group ends")


@test
def a_fault_that_a_legacy_rank_reports_fails_its_step():
    """MindIE-LLM's ranks report a fault of their device, and then reply as if every text ended with token 0 there; where
    the fault is not rank 0's, rank 0 replies with tokens that may be wrong. Both were taken for the text."""
    if not rights.legacy_fits():
        skip("legacy workers")
    for fault in ("0:3:1:MIE05E01000B", "1:3:9:MIE05E01000A"):
        result = generate("-n", "2", "--legacy-workers", "--worker", "%s %s" % (sys.executable, LEGACY_WORKER), "--tokens", "--json",
                          "--max-tokens", "5", "1 5 10", env=environment(COX_LEGACY_STEP_FAULT=fault))
        expect(result, 0, "a rank reported a fault: " + fault[6:])
        told = json.loads(result.out)
        # The step is run again from the tokens so far, whose sum is the next one.
        check(told["tokens"] == [16, 17, 49, 50, 51] and told["finish"] == "length", "wrong tokens: %s" % told, result)


@test
def p8_prompts_of_a_failed_engine_loop_leave_legacy_ranks():
    """The ranks live on, and clear nothing by themselves: the next prompt's engine loop tells them."""
    if not rights.legacy_fits():
        skip("legacy workers")
    name = harness.fresh_name("held")
    process = start(["run", "-n", "2", "--name", name, "--legacy-workers", "--worker", "%s %s" % (sys.executable, LEGACY_WORKER)],
                    env=environment(COX_LEGACY_HELD="3"))
    started(process)
    pids = pids_of(process, 2)
    result = generate("--name", name, "--tokens", "--max-tokens", "5", "1 5 10", "7 8 14")
    expect(result, 3, "has the token -1")
    for text, wanted in (("1 5 10", "1 5 10 16 17\n"), ("7 8 14", "7 8 14 29 30\n")):
        check(expect(generate("--name", name, "--tokens", "--max-tokens", "2", text), 0).out == wanted, "wrong tokens")
    check([rank["pid"] for rank in status_of(name)["ranks"]] == pids, "ranks were replaced")
    process.terminate()
    result = expect(finish(process), 0)
    held = re.findall(r"held: (.*)", result.err)
    check(len(held) >= 4 and set(held) == {"[]"}, "ranks hold sequences that have ended: %s" % held, result)


@test
def a_legacy_rank_that_is_asked_to_end_has_not_replied():
    """SIGTERM makes MindIE-LLM's worker post all its semaphores: the reply before was taken for the one that is awaited, and
    the text had a token twice."""
    if not rights.legacy_fits():
        skip("legacy workers")
    name = harness.fresh_name("asked")
    # Only the first processes hang.
    hangs = temporary("")
    worker = temporary("#!/bin/sh\ntest $2 = 0 -a -e %s && { rm %s; export COX_LEGACY_HANG=0:3; }\nexec %s %s \"$@\"\n" %
                       (hangs, hangs, sys.executable, LEGACY_WORKER), 0o700)
    process = start(["run", "-n", "2", "--name", name, "--legacy-workers", "--on-death", "restart-all", "--worker", worker])
    ready(process, 2)
    rank = status_of(name)["ranks"][0]["pid"]
    asked = start(["generate", "--name", name, "--tokens", "--max-tokens", "5", "1 5 10"])

    def hangs_now():
        execute = status_of(name)["channels"][0]
        return execute["published"] >= 4 and execute["in_flight"]
    wait_until(hangs_now, "the step that hangs")
    os.kill(rank, signal.SIGTERM)
    result = expect(finish(asked), 0)
    check(result.out == "1 5 10 16 17 49 50 51\n", "wrong tokens", result)
    process.terminate()
    expect(finish(process), 0, "the group ends")


@test
def legacy_workers_of_a_generate_get_their_init_configuration():
    if not rights.legacy_fits():
        skip("legacy workers")
    worker = temporary("#!/bin/sh\nexec /usr/bin/python3 %s \"$@\"\n" % LEGACY_WORKER, 0o700)
    prompt = ["-n", "2", "--legacy-workers", "--worker", worker, "--tokens", "--max-tokens", "1", "1 5 10"]
    env = environment(COX_LEGACY_NEEDS="rate=0.5,block_size=64")
    expect(generate(*prompt, env=env), 3, "the configuration has no rate=0.5, block_size=64")
    file = temporary('{"rate": 0.5}')
    result = expect(generate("--init", "@" + file, "--init", "block_size=64", *prompt, env=env), 0)
    check(result.out == "1 5 10 16\n", "wrong tokens", result)


@test
def a_worker_without_an_init_callback_just_runs():
    """examples/worker.c, which has nothing to set up."""
    process = start(["run", "-n", "2", "--", EXAMPLE_WORKER])
    ready(process, 2)
    process.terminate()
    expect(finish(process), 0, "the group ends")
    # What cannot be sent to it is not dropped.
    for more in (["--init", "block_size=16"], ["--model", MODEL]):
        result = expect(run(["run", "-n", "2", *more, "--", EXAMPLE_WORKER]), 3, "no init callback", "--model",
                        "'%s'" % ("model" if "--model" in more else "block_size"))
        check(len([line for line in result.err.splitlines() if "no init callback" in line and "coxswain" in line]) == 1,
              "more than one line says so", result)


@test
def workers_of_others_get_their_init_configuration():
    if not rights.legacy_fits():
        skip("legacy workers")
    worker = ["--legacy-workers", "--", sys.executable, LEGACY_WORKER]
    file = temporary('{"model_weight_path": "/w",\n "block_size": 128, "rate": 0.5,\n "speculate": true}\n')
    env = environment(COX_LEGACY_NEEDS="model_weight_path,block_size,rate,speculate")
    expect(run(["run", "-n", "2", *worker], env=env), 3, "exited with status 1",
           "the configuration has no model_id, model_weight_path, rate, speculate")
    worker = ["--init", "model_id=/w", *worker]
    for more in (["--init", "model_weight_path=/w", "--init", "block_size=128", "--init", "rate=a=b",
                  "--init", "speculate=true"], ["--init", "@" + file]):
        process = start(["run", "-n", "2", *more, *worker], env=env)
        ready(process, 2)
        process.terminate()
        expect(finish(process), 0, "the group ends")
    # On top of the file, in any order; the worker gets the values as they are written there.
    env["COX_LEGACY_NEEDS"] = "model_weight_path=/other,block_size=128,rate=0.5,speculate=true,late="
    for more in (["--init", "model_weight_path=/other", "--init", "@" + file, "--init", "late="],
                 ["--init", "@" + file, "--init", "late=", "--init", "model_weight_path=/other"]):
        process = start(["run", "-n", "2", *more, *worker], env=env)
        ready(process, 2)
        process.terminate()
        expect(finish(process), 0, "the group ends")


@test
def a_report_without_a_rank_is_no_rank_s():
    if SEALED:
        skip("a group of legacy workers is never sealed")
    if not rights.legacy_fits():
        skip("legacy workers")
    name = harness.fresh_name("unknown")
    worker = temporary("#!/bin/sh\nexec /usr/bin/python3 %s \"$@\"\n" %
                       LEGACY_WORKER, 0o700)
    process = start(["run", "-n", "2", "--name", name, "--legacy-workers", "--model", MODEL, "--worker", worker],
                    env=environment(COX_LEGACY_FAULT="1:device lost"))
    ready(process, 2)
    status = status_of(name)
    check(status["unknown_rank"] is None, "a report before there was one: %s" % status)
    expect(run(["generate", "--name", name, "--tokens", "--max-tokens", "2", "1 5 10"]), 0)
    wait_until(lambda: status_of(name)["unknown_rank"], "the report")
    status = status_of(name)
    check(status["unknown_rank"]["last_error"] == "it reported: device lost", "wrong: %s" % status)
    check(status["unknown_rank"]["last_error_age_s"] > 0, "no age: %s" % status)
    check([rank["last_error"] for rank in status["ranks"]] == [None, None], "a rank is blamed: %s" % status)
    text = run(["status", "--name", name])
    check(re.search(r"^rank unknown\n  last error, .* ago: it reported: device lost$", text.out, re.M), "not told", text)
    process.terminate()
    result = expect(finish(process), 0, "rank unknown reports: device lost")
    check("rank 0 reports" not in result.err and "rank 4294967295" not in result.err, "a rank is named", result)


if __name__ == "__main__":
    sys.exit(harness.main(no_socket_is_left))
