#!/usr/bin/python3
"""The commands as a user runs them: real processes on models/sums, right and wrong input, and nothing left behind.

Usage: commands_test.py BIN_DIR harness.SOURCE_DIR [TEST...]

With COXSWAIN_TEST_ATTACH=sealed in the environment, groups are sealed where a test does not say how they are to be.
"""

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
import rights  # pylint: disable=wrong-import-position
from harness import (LEGACY_WORKER, MODEL, SEALED, TIMEOUT, Failure, Result, check, socket_files,
                     environment, expect, finish, generate, names_of, names_with, program, run,
                     skip, start, status_of, stop_process, sums, temporary, test, wait_until,
                     without)

harness.begin(harness.parser(__doc__))
COXSWAIN = program("coxswain")
# A worker for which any number of ranks works; the reference worker divides a model.
ANY_COUNT = ["--", program("scripted_worker")]
EXAMPLE_WORKER = program("example_worker")


def is_sanitized():
    return any(harness.program_has("coxswain", b"__%s_init" % kind) for kind in (b"asan", b"tsan"))


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


@test
def ranks_that_do_not_divide_the_model_are_refused():
    for command in (["generate"], ["eval"], ["run"]):
        more = [] if command == ["run"] else ["-"]
        for ranks in ("3", "5", "6", "7", "9", "16", "128"):
            # Before anything is started, and once.
            result = run([*command, "-n", ranks, "--model", MODEL, *more], text="1+1=2\n" if command == ["eval"] else "1+1=\n")
            expect(result, 2, "coxswain: %s: -n %s: heads" % (command[0], ranks), "8 slices", "use 1, 2, 4 or 8")
            check(result.out == "" and result.err.count("\n") == 1 and len(result.err) < 200, "more than a line", result)
    # A worker that does not exist is asked for; each rank of the reference worker reports it.
    worker = program("coxswain-worker")
    for name in ("wrapper", "coxswain-worker"):
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(worker, os.path.join(folder, name))
            result = generate("-n", "3", "--worker", os.path.join(folder, name), "1+1=")
            expect(result, 2, "-n 3: heads", "8 slices", "use 1, 2, 4 or 8")
    result = run(["run", "-n", "3", "--model", MODEL, "--", worker])
    expect(result, 2, "rank ", "-n 3: heads", "8 slices", "use 1, 2, 4 or 8")


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
        result = generate("--legacy-workers", "--worker", "%s %s" % (sys.executable, LEGACY_WORKER), "--tokens", "--json", "--max-tokens",
                          "5", "1 5 10", env=environment(COX_LEGACY_FINISH="3:%d%s" % (reason, text)))
        return result, json.loads(result.out)
    for reason, wanted in ((1, "stop"), (2, "stop"), (3, "stop"), (5, "length"), (6, "length")):
        result, told = finish_of(reason)
        check(result.status == 0 and told["finish"] == wanted and told["tokens"] == [16, 17, 18], "%d: %s" % (reason, told), result)
    for reason, text, words in ((7, "", "the output does not have the structure that was asked for (finish reason 7)"),
                                (9, ":no blocks are left", "out of memory (finish reason 9): no blocks are left"),
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


def ready(process, ranks):
    """The group is there, and its init has succeeded."""
    name = started(process)
    pids_of(process, ranks)
    return name


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
    expect(run(["run", "-n", "2", *worker], env=env), 3, "rank 0: init failed",
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


# ---- a group that is kept ----


def started(process):
    """The name that run prints; the pids are next."""
    name, socket_path = process.stdout.readline().split(), process.stdout.readline().split()
    check(name and name[0] == "name", "no name was printed")
    check(socket_path and socket_path[0] == "socket", "no control socket was printed")
    return name[1]


def pids_of(process, ranks):
    return [int(process.stdout.readline().split()[3]) for _ in range(ranks)]


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
def a_token_id_that_does_not_exist_is_named_before_anything_starts():
    for text in ("99999999", "00000000000000012x", "9" * 40, "-1"):
        result = generate("--tokens", "--file", temporary("3 4 5\n%s\n6 7 8\n" % text))
        expect(result, 2, "prompt 2", "token id", "expected ")
        check(result.out == "", "text that is none", result)


@test
def input_that_cannot_be_read_is_wrong_usage():
    expect(generate("--file", "/"), 2, "/ is a folder")


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
            line = process.stderr.readline() + process.stderr.readline()  # that it is stopped, and the retry
            os.kill(pid, signal.SIGCONT)
            result = finish(process)
            out.seek(0)
            result.out, result.err = out.read(), line + result.err
            expect(result, 0, "a step failed and is retried", "rank %d" % rank, "steps were run again")
            check(result.out == expected, "another text", result)


@test
def a_worker_that_stays_silent_is_named():
    process = start(["generate", "--model", MODEL, "-n", "2", "--sequences", "1", "--timeout", "0.3", "--file",
                     temporary("1+1=\n" * 100000)])
    check(process.stdout.readline() == "1+1=2\n", "no text")
    stop_process(workers_of(process, 2)[1])
    expect(finish(process), 3, "rank 1")


# ---- what does not ----


def spoil_json(name, key, value):
    def spoil(folder):
        path = os.path.join(folder, name)
        with open(path, encoding="utf-8") as file:
            root = json.load(file)
        root[key] = value
        with open(path, "w", encoding="utf-8") as file:
            json.dump(root, file)
    return spoil


def replace_with(name, content):
    def spoil(folder):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
    return spoil


def link_to_itself(folder):
    os.unlink(os.path.join(folder, "config.json"))
    os.symlink("config.json", os.path.join(folder, "config.json"))


BAD_MODELS = {
    "no config": lambda folder: os.unlink(os.path.join(folder, "config.json")),
    "no JSON": replace_with("config.json", b"{"),
    "a value": spoil_json("config.json", "num_hidden_layers", -1),
    "a config of 2 MiB": replace_with("config.json", b"{}" + b" " * (2 << 20)),
    "a loop of links": link_to_itself,
    "no weights": lambda folder: os.unlink(os.path.join(folder, "model.safetensors")),
    "no safetensors": replace_with("model.safetensors", b"\xff" * 1000),
    "half the weights": lambda folder: os.truncate(os.path.join(folder, "model.safetensors"), 1 << 20),
}


@test
def a_bad_model_is_wrong_input_whichever_process_reads_it_first():
    worker = program("coxswain-worker")
    with tempfile.TemporaryDirectory() as parent:
        for kind, spoil in BAD_MODELS.items():
            folder = os.path.join(parent, kind.replace(" ", "-"))
            shutil.copytree(MODEL, folder)
            os.chmod(folder, 0o700)
            spoil(folder)
            model = ["-n", "2", "--model", folder]
            ranks_read = ["--worker", harness.own_weights(), *model]
            for command in (["generate", *model, "1+1="], ["generate", *ranks_read, "1+1="],
                            ["eval", *model, os.path.join(MODEL, "heldout.txt")],
                            ["eval", *ranks_read, os.path.join(MODEL, "heldout.txt")],
                            ["run", *model], ["run", *ranks_read], ["run", *model, "--", worker],
                            ["run", "-n", "2", "--", worker, "--model", folder]):
                result = expect(run(command), 2, folder)
                check(not socket_files(), "%s: a socket is left" % kind, result)


@test
def a_bad_model_for_a_group_that_runs_is_wrong_input():
    process = start(["run", "-n", "2", "--model", MODEL])
    name = started(process)
    with tempfile.TemporaryDirectory() as parent:
        for kind, spoil in BAD_MODELS.items():
            folder = os.path.join(parent, kind.replace(" ", "-"))
            shutil.copytree(MODEL, folder)
            spoil(folder)
            expect(run(["weights", "--name", name, folder]), 2, folder)
    process.terminate()
    expect(finish(process), 0)


@test
def wrong_input_is_named():
    empty = temporary("")
    gap = temporary("1+1=\n\n2+2=\n")
    broken = tempfile.mkdtemp()
    with open(os.path.join(broken, "tokenizer.json"), "w", encoding="ascii") as file:
        file.write('{"model": {"type": "BPE"')
    cases = [
        (["generate", "--model", "/nonexistent", "1+1="], 2, "/nonexistent"),
        (["generate", "--model", broken, "1+1="], 2, "not valid JSON"),
        (["generate", "--model", MODEL, "1+1=", "2*3="], 2, "prompt 2", "'*'", "position 2"),
        (["generate", "--model", MODEL, "--tokens", "1 x"], 2, "prompt 1", "'x'"),
        (["generate", "--model", MODEL, "--file", empty], 2, "is empty"),
        (["generate", "--model", MODEL, "--file", gap], 2, "line 2"),
        (["generate", "--model", MODEL, "--file", "/nonexistent"], 2, "/nonexistent does not exist"),
        (["generate", "--model", MODEL, "--file", empty, "1+1="], 2, "not both"),
        (["generate", "--model", MODEL], 2, "standard input is empty"),
        (["generate", "-n", "0", "1+1="], 2, "1 to 128"),
        (["generate", "-n", "129", "1+1="], 2, "1 to 128"),
        (["generate", "-n", "two", "1+1="], 2, "1 to 128"),
        (["generate", "-n"], 2, "needs a value"),
        (["generate", "--max-tokens", "0", "1+1="], 2, "--max-tokens"),
        (["generate", "--temperature", "hot", "1+1="], 2, "--temperature"),
        (["generate", "--top-p", "1.5", "1+1="], 2, "--top-p"),
        (["run", "--depth", "33"], 2, "1 to 32"),
        (["run", "--legacy-workers", "--depth", "2"], 2, "depth 1"),
        (["run", "--spin", "full"], 2, "--spin is 'full': expected off, auto or max"),
        (["run", "--spin", ""], 2, "--spin is '': expected off, auto or max"),
        (["run", "--spin"], 2, "--spin needs a value"),
        (["generate", "--depth", "2", "1+1="], 2, "--depth is no option of this command"),
        (["generate", "--lora", "x", "1+1="], 2, "--name", "coxswain run --adapter x=DIR"),
        (["generate", "--init", "key", "1+1="], 2, "--init is 'key': expected KEY=VALUE or @FILE"),
        (["generate", "--init", "model=x", "1+1="], 2, "'model'", "--model DIR"),
        (["run", "--size", "large-payload=1X"], 2, "--size large-payload is '1X'", "K, M or G"),
        (["run", "--size", "large-payload=0M"], 2, "--size large-payload is '0M'", "K, M or G"),
        (["run", "--size", "large-payload"], 2, "--size is 'large-payload'", "CHANNEL.request=BYTES"),
        (["run", "--size"], 2, "--size needs a value"),
        (["run", "--crash-dir", ",contents"], 2, "--crash-dir is ',contents'", "expected a directory"),
        (["run", "--no-large-payloads"], 2, "--no-large-payloads is no option of this command"),
        (["run", "--init", "key"], 2, "--init is 'key': expected KEY=VALUE or @FILE"),
        (["run", "--init", "=value"], 2, "expected KEY=VALUE"),
        (["run", "--init"], 2, "--init needs a value"),
        (["run", "--init", "k=1", "--init", "k=2"], 2, "--init names 'k' twice"),
        (["run", "--init", b"k=caf\xe9"], 2, "--init k: the byte 0xe9 at offset 5 is no UTF-8"),
        (["run", "--init", "model=x", "--model", MODEL], 2, "'model'", "--model DIR"),
        (["run", "--init-file", "x"], 2, "--init-file is no option of this command"),
        (["run", "--init", "@"], 2, "--init is '@': expected KEY=VALUE or @FILE"),
        (["run", "--init", "@/nonexistent"], 2, "/nonexistent does not exist"),
        (["run", "--init", "@" + tempfile.gettempdir()], 2, "is not a regular file"),
        (["run", "--init", "@" + temporary("{}"), "--init", "@x"], 2, "there is a file already"),
        (["run", "--init", "@" + temporary('{"a": 1,\n "b" 2}')], 2, "line 2", "not valid JSON"),
        (["run", "--init", "@" + temporary('{"a": 1,\n\n "a": 2}')], 2, "line 3", "duplicate"),
        (["run", "--init", "@" + temporary('{"a": 123456789012345678901}')], 2, "line 1", "too big integer"),
        (["run", "--init", "@" + temporary("[1]")], 2, "line 1", "expected an object"),
        (["run", "--init", "@" + temporary('{"a:": "x\\"}{:",\n "b":\n 1,\n "c": [1, {"d": 2}]}')], 2,
         "line 4: 'c' is an array", "expected a string, a number, true or false"),
        (["run", "--init", "@" + temporary('{"a": {"b": 1},\n"c": null}')], 2, "line 1: 'a' is an object"),
        (["run", "--init", "@" + temporary('{"a": 1,\n"c": null}')], 2, "line 2: 'c' is null"),
        (["run", "--init", "@" + temporary('{"": 1}')], 2, "line 1: a key without a name"),
        (["generate", "--bogus"], 2, "--bogus"),
        (["generate", "-y"], 2, "-y"),
        (["generate", "--name", "a/b", "1+1="], 2, "'/' at position 2"),
        (["run", "--name", "x" * 129], 2, "at most 128"),
        (["run", "--name", ".x"], 2, "starts with a dot"),
        (["layout", "--size", "execute.request=1"], 2, "at least"),
        (["layout", "--size", "no.request=1M"], 2, "CHANNEL.request=BYTES"),
        (["layout", "--size", "execute=1M"], 2, "CHANNEL.request=BYTES"),
        (["layout", "--size", "execute.reply=1X"], 2, "K, M or G"),
        (["layout", "more"], 2, "'more'"),
        (["layout", "-n", "17", "--legacy-workers"], 2, "16"),
        (["bogus"], 2, "'bogus'"),
        (["eval"], 2, "one FILE"),
        (["clean", "--bogus"], 2, "--bogus", "coxswain clean --help"),
        (["clean", "a/b"], 2, "'/' at position 2"),
        (["clean", ".x"], 2, "starts with a dot"),
        (["doctor", "--bogus"], 2, "--bogus", "coxswain doctor --help"),
        (["doctor", "more"], 2, "'more'"),
        (["doctor", "-n", "129"], 2, "1 to 128"),
        (["doctor", "-n", "2x"], 2, "1 to 128"),
        (["doctor", "-n"], 2, "-n"),
    ]
    for arguments, status, *parts in cases:
        result = expect(run(arguments), status, *parts)
        check(result.out == "", "output for wrong input", result)
    os.unlink(os.path.join(broken, "tokenizer.json"))
    os.rmdir(broken)


@test
def a_cluster_file_that_is_wrong_is_named_with_line_and_member():
    right = {"servers": ["tls://127.0.0.1:1"], "certificates": "x", "nodes": [{"name": "a", "ranks": 2}]}
    lead, agent = ["run", "--name", "big"], ["node", "--name", "big", "--node", "a"]

    def file(**changes):
        changed = {key: value for key, value in {**right, **changes}.items() if value is not None}
        return temporary("{\n%s}\n" % ",\n".join('"%s": %s' % (key, json.dumps(value)) for key, value in changed.items()))
    nodes = ("line 4: 'nodes': expected nodes, as in [{\"name\": \"a\", \"ranks\": 4}]",)
    either = ("expected either 'certificates', the directory that coxswain-certificates has made, or", "'insecure_loopback'")
    cases = [("/nonexistent", "--cluster: /nonexistent does not exist"),
             (temporary('{\n"servers" 1}'), "line 2, column ", "not valid JSON"),
             (temporary("[]"), "line 1: expected an object"),
             (file(nodes=None), "'nodes' is missing: expected nodes, as in"),
             (file(servers=None), "'servers' is missing: expected NATS servers, as in [\"tls://nats1:4222\"]"),
             (file(servers="tls://a:1"), "line 2: 'servers': expected NATS servers"),
             (file(servers=["a:1"]), "line 2: 'servers': expected NATS servers"),
             (file(certificates=""), "line 3: 'certificates': expected the directory"),
             (file(certificates=None), *either), (file(insecure_loopback=True), *either),
             (file(insecure_loopback=1), "line 5: 'insecure_loopback': expected true or false"),
             (file(lead_gace=3), "line 5: 'lead_gace' is no member of a cluster file: did you mean 'lead_grace'?"),
             (file(lead_grace=3, dead_after="1"), "line 6: 'dead_after': expected a number of seconds"),
             (file(suspect_after=0), "line 5: 'suspect_after': expected a number of seconds"),
             (file(lead_listen="here"), "line 5: 'lead_listen': expected \"HOST:PORT\""),
             (file(nodes=[{"name": "a", "ranks": 2}, {"name": "a", "ranks": 2}]), "line 4: nodes: node a is named twice"),
             (file(nodes=[{"name": "a", "ranks": 0}]), "line 4: nodes: 'a:0' is no NAME:RANKS")]
    cases += [(file(nodes=odd), *nodes) for odd in (
        [], "a:2", [{"name": "a"}], [{"name": "a", "ranks": "2"}], [{"name": "a:1,b", "ranks": 2}],
        [{"name": "a", "ranks": 2, "listen": 7}], [{"name": "a", "ranks": 2, "rank": 7}])]
    for path, *parts in cases:
        for command in (lead, agent):
            result = expect(run([*command, "--cluster", path]), 2, *parts)
            check(path in result.err and result.err.count("\n") == 1, "not the file, or more than a line", result)
    expect(run([*lead, "-n", "3", "--cluster", file()]), 2, "has 2 ranks, -n says 3")
    expect(run([*lead, "--cluster", file(), "--worker", "x"]), 2, "leave out --legacy-workers and --worker")
    expect(run([*lead, "--cluster", file(), "--", "x"]), 2, "workers are started by coxswain node: give 'x' to it")
    expect(run(["run", "--cluster", file()]), 2, "--cluster: --name is missing")
    expect(run(agent), 2, "--cluster is missing")
    expect(run(["node", "--name", "big", "--node", "b", "--cluster", file()]), 2, "line 4: no node is named 'b'", "there are a:2")


@test
def a_prompt_that_does_not_fit_spoils_no_other():
    result = generate("--max-tokens", "60", "1+1=", "100+100=", "2+2=")
    # 64 positions: 5 tokens and 60 fit, 9 and 60 do not.
    expect(result, 1, "prompt 2", "the model has 64")
    check(result.out == "1+1=2\n100+100=\n2+2=4\n", "wrong text", result)
    result = expect(generate("100+100="), 0)  # without --max-tokens it is shortened
    check(result.out == "100+100=200\n", "wrong text", result)


@test
def workers_that_are_none_are_named():
    expect(generate("--worker", "/nonexistent/worker", "1+1="), 3, "/nonexistent/worker", "No such file")
    expect(generate("--worker", "/bin/false", "1+1="), 3, "exited with status 1")
    expect(generate("--worker", "/bin/true", "1+1="), 3, "exited with status 0")
    expect(generate("1+1=", env=environment(COXSWAIN_WORKER="/nonexistent/w")), 3, "/nonexistent/w")
    begin = time.monotonic()
    expect(run(["run", "-n", "2", "--start-timeout", "0.3", "--", "sh", "-c", "exec sleep 1000"]), 3,
           "did not attach in time")
    check(time.monotonic() - begin < 30, "a worker that never attaches was waited for too long")
    expect(run(["run", "--", "sh", "-c", "echo last words; exit 7"]), 3, "status 7", "last words")
    # The worker is alive, and refuses: its text arrives.
    worker = program("coxswain-worker")
    result = run(["run", "--", worker, "--model", "/nonexistent"])
    expect(result, 2, "/nonexistent")


@test
def test_b15_a_worker_has_only_its_standard_fds_also_without_close_range():
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]  # more than one read of their list tells
    try:
        for under in ([], without("close_range=ENOSYS"), without("close_range=EPERM")):
            result = expect(run(["run", "-n", "1", "--", "sh", "-c", "exec ls /proc/self/fd >&2"], under=under,
                                pass_fds=fds), 3, "status 0")
            seen = re.findall(r"^\[rank 0\] (\d+)$", result.err, re.M)
            own = ["4", "5", "6", "7", "8"] if SEALED else []  # 3: the folder it lists
            check(seen == ["0", "1", "2", "3", *own], "the worker had more: %s" % seen, result)
    finally:
        for fd in fds:
            os.close(fd)
    expect(generate("-n", "2", "1+1=", under=without("close_range=ENOSYS")), 0)


@test
def what_has_a_fallback_is_not_needed_and_hints_are_none():
    """A seccomp profile answers EPERM, an older kernel ENOSYS."""
    for calls in ("pidfd_open=EPERM", "pidfd_open=ENOSYS", "madvise=EPERM", "futex_waitv=EPERM,pidfd_getfd=EPERM"):
        result = expect(generate("-n", "2", "1+1=", under=without(calls)), 0)
        check(result.out == "1+1=2\n", "another text without %s" % calls, result)


@test
def closed_and_full_output_is_an_error():
    with open("/dev/full", "w", encoding="ascii") as full:
        expect(generate("1+1=", stdout=full), 1, "cannot write to standard output", "No space left")
        expect(run(["layout"], stdout=full), 1, "cannot write to standard output")
        expect(run(["--help"], stdout=full), 1, "cannot write to standard output")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        expect(generate("--file", temporary("1+1=\n" * 1000), stdout=writer), 1, "Broken pipe")
    finally:
        os.close(writer)
    closed = run(["generate", "--model", MODEL, "1+1="], under=["sh", "-c", 'exec "$@" >&-', "sh"])
    expect(closed, 1, "cannot write to standard output")


@test
def a_name_in_use_is_refused():
    name = harness.fresh_name("taken")
    process = start(["run", "-n", "1", "--name", name, "--model", MODEL], env=environment(**harness.KEEP_NAMES))
    started(process)
    expect(run(["run", "-n", "1", "--name", name, "--model", MODEL]), 1, name)
    process.terminate()
    expect(finish(process), 0)
    check(not names_with(name), "left in /dev/shm: %s" % names_with(name))


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
def process_1_of_a_container_reaps_orphans_and_passes_signals_on():
    under = ["unshare", *([] if os.geteuid() == 0 else ["-r"]), "-pf", "--mount-proc"]
    if subprocess.run([*under, "true"], stderr=subprocess.DEVNULL, timeout=TIMEOUT, check=False).returncode:
        skip("no PID namespace of its own")
    with tempfile.TemporaryDirectory() as folder:
        # Its parent ends at once, so process 1 is what it becomes a child of.
        worker = temporary("#!/bin/sh\nfor i in 1 2 3 4 5; do (sh -c 'echo $PPID > %s/$$' &); done\nexec '%s' \"$@\"\n" %
                           (folder, program("coxswain-worker")), 0o700)
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
    count = int(re.search(r"sealed (\d+)" if SEALED else r"ranks takes (\d+)", told).group(1))
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
    """The control socket keeps two fds of each rank's memory for the others, and a share of what the coordinator may open is for them."""
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
    check(failed > 5, "only %d starts failed" % failed)


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


def no_socket_is_left():
    check(not socket_files(), "left in the runtime directory: %s" % socket_files())


if __name__ == "__main__":
    sys.exit(harness.main(no_socket_is_left))
