#!/usr/bin/python3
"""LoRA adapters as users see them: load, unload and list on a running group, and prompts that name one.

Usage: lora_command_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import json
import os
import resource
import shutil
import signal
import struct
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import checkpoints  # pylint: disable=wrong-import-position
import groups  # pylint: disable=wrong-import-position
import harness  # pylint: disable=wrong-import-position
from checkpoints import adapter  # pylint: disable=wrong-import-position
from groups import RESTART, Group  # pylint: disable=wrong-import-position
from harness import (MODEL, TIMEOUT, check, expect, finish, program, prompts_file, rest, run, start,
                     temporary, test, undisturbed, wait_until)

harness.begin(harness.parser(__doc__))
FOLDER = checkpoints.folder()
PROMPT_COUNT = 60
PROMPTS = prompts_file(PROMPT_COUNT)


FOLDERS = {"a": adapter("a"), "b": adapter("b", 8, 2), "zero": adapter("zero", 3, 3, 0.0),
           "strong": checkpoints.strong_adapter()}


SHORT = ["--max-tokens", "6", "--quiet"]


def alone(name):
    """What a group of one rank gives for the prompts, with the adapter or none."""
    if name is None:
        return undisturbed("--model", MODEL, *SHORT, "--file", PROMPTS)
    group = ["-n", "1", "--adapter", "%s=%s" % (name, FOLDERS[name])]
    return expect(harness.generate_on(group, *SHORT, "--lora", name, "--file", PROMPTS), 0).out


def lora(group, *words):
    return run(["lora", *words, "--name", group.name])


def load(group, *names):
    for name in names:
        expect(lora(group, "load", name, FOLDERS[name]), 0)


def adapters(group):
    listed = json.loads(expect(lora(group, "list", "--json"), 0).out)
    return {entry["name"]: (entry["state"], entry["uses"]) for entry in listed["adapters"]}


def generate_start(group, name):
    return start(["generate", "--name", group.name, *SHORT, *(["--lora", name] if name else []),
                  "--file", PROMPTS])


def expect_text(result, name):
    expect(result, 0)
    check(result.out == alone(name), "another text than alone with %s" % name, result)


@test
def test_m13_adapters_give_other_text_and_one_of_zeros_does_not():
    check(alone("a") != alone(None), "the adapter a changes nothing")
    check(alone("b") not in (alone(None), alone("a")), "the adapter b changes nothing")
    check(alone("zero") == alone(None), "an adapter of zeros changes something")


@test
def test_m13_a_group_of_any_size_gives_the_same():
    all_of_them = [word for name, folder in FOLDERS.items() for word in ("--adapter", "%s=%s" % (name, folder))]
    for ranks in (2, 4, 8):
        expect_text(harness.generate_on(["-n", str(ranks), *all_of_them], *SHORT, "--lora", "b", "--file", PROMPTS), "b")


@test
def test_m13_load_list_and_unload_on_a_running_group():
    for ranks in (1, 2, 4):
        with Group(ranks) as group:
            check(expect(lora(group, "list"), 0).out == "", "there is something")
            result = expect(lora(group, "load", "a", FOLDERS["a"]), 0)
            check(result.out == "".join("rank %d: LORA_CMD_SUCCESS\n" % r for r in range(ranks)), "odd output", result)
            load(group, "b")
            result = expect(lora(group, "list"), 0)
            check(result.out == "a loaded 0 %s\nb loaded 0 %s\n" % (FOLDERS["a"], FOLDERS["b"]), "odd list", result)
            for name in ("a", "b", None):
                expect_text(finish(generate_start(group, name)), name)
            result = expect(lora(group, "load", "a", FOLDERS["b"]), 2, "DUPLICATED_LORA_ID")
            check(result.out.count("DUPLICATED_LORA_ID: an adapter of that name") == ranks, "not of all ranks", result)
            result = expect(lora(group, "unload", "a", "--json"), 0)
            answer = json.loads(result.out)
            check(answer["ok"] and answer["error"] is None and [r["status"] for r in answer["ranks"]] == [0] * ranks and
                  [entry["name"] for entry in answer["adapters"]] == ["b"], "odd answer", result)
            expect(lora(group, "unload", "a"), 2, "INVALID_LORA_ID")
            expect(finish(generate_start(group, "a")), 2, "no LoRA adapter 'a' is loaded; there are: b")
            expect_text(finish(generate_start(group, "b")), "b")
            expect(group.stop(), 0)


@test
def test_m13_a_group_starts_with_adapters():
    with Group(2, ["--adapter", "x=" + FOLDERS["b"]]) as group:
        check(adapters(group) == {"x": ("loaded", 0)}, "it is not there: %s" % adapters(group))
        result = run(["generate", "--name", group.name, *SHORT, "--lora", "x", "--file", PROMPTS])
        expect_text(result, "b")
        expect(group.stop(), 0)


@test
def test_m13_what_cannot_be_loaded_is_refused_by_every_rank():
    broken = os.path.join(FOLDER, "broken")
    shutil.copytree(FOLDERS["a"], broken, dirs_exist_ok=True)
    with open(os.path.join(broken, "adapter_model.safetensors"), "r+b") as file:
        file.truncate(100)
    wide = adapter("wide", 65)
    expect(run(["run", "--model", MODEL, "--adapter", "x=" + broken]), 2, "INVALID_LORA_PATH")
    with Group(2) as group:
        for folder, status in ((broken, "INVALID_LORA_PATH"), (FOLDER, "INVALID_LORA_PATH"), (MODEL, "INVALID_LORA_PATH"),
                               (wide, "INVALID_LORA_RANK")):
            result = expect(lora(group, "load", "x", folder), 2, status)
            check(result.out.count(status) == 2, "not of every rank", result)
        check(not adapters(group), "something is left: %s" % adapters(group))
        # A rank that cannot read them says nothing of the files.
        pid = group.status()["ranks"][1]["pid"]
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
        expect(lora(group, "load", "x", FOLDERS["a"]), 3, "rank 1", "Too many open files")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        check(not adapters(group), "something is left: %s" % adapters(group))
        for slot in range(8):
            expect(lora(group, "load", "slot %d" % slot, FOLDERS["zero"]), 0)
        result = expect(lora(group, "load", "b", FOLDERS["b"]), 3, "SLOTS_FULL")
        check(len(adapters(group)) == 8, "another number of adapters: %s" % adapters(group))
        expect(group.stop(), 0)


def changed(name, data=None, config=None):
    """A copy of the adapter a: data gives other bytes for those of its tensors' file, config changes what describes it."""
    folder = shutil.copytree(FOLDERS["a"], os.path.join(FOLDER, name), dirs_exist_ok=True)
    for file, change, binary in (("adapter_model.safetensors", data, True), ("adapter_config.json", config, False)):
        if change:
            path = os.path.join(folder, file)
            with open(path, "rb") as old:
                content = old.read()
            content = change(content) if binary else json.dumps(change(json.loads(content))).encode()
            with open(path, "wb") as new:
                new.write(content)
    return folder


def with_number(tensor, index, number):
    def change(content):
        size = struct.unpack("<Q", content[:8])[0]
        begin, end = json.loads(content[8:8 + size])["base_model.model.model.layers.%s.weight" % tensor]["data_offsets"]
        at = 8 + size + (end if index < 0 else begin) + 4 * index
        return content[:at] + struct.pack("<f", number) + content[at + 4:]
    return change


def all_numbers(number):
    def change(content):
        size = struct.unpack("<Q", content[:8])[0]
        return content[:8 + size] + struct.pack("<f", number) * ((len(content) - 8 - size) // 4)
    return change


@test
def test_m13_every_rank_says_what_is_wrong_with_an_adapter_and_none_keeps_it():
    missing = changed("no tensors")
    os.unlink(os.path.join(missing, "adapter_model.safetensors"))
    nan = float("nan")
    cases = [
        (missing, "INVALID_LORA_PATH", "adapter_model.safetensors does not exist"),
        (changed("cut in the data", lambda data: data[:-4]), "INVALID_LORA_PATH", "is the file complete?"),
        (changed("cut in the header", lambda data: data[:200]), "INVALID_LORA_PATH", "complete?"),
        (changed("empty", lambda data: b""), "INVALID_LORA_PATH", "has 0 bytes"),
        (changed("whole numbers", lambda data: data.replace(b'"F32"', b'"I32"')), "INVALID_LORA_PATH", "has dtype I32"),
        (changed("no number", with_number("0.self_attn.q_proj.lora_A", 5, nan)), "INVALID_LORA_PATH", "is not finite"),
        (changed("infinity", with_number("3.self_attn.o_proj.lora_B", -1, float("inf"))), "INVALID_LORA_PATH", "is not finite"),
        (changed("too large", all_numbers(3e38)), "INVALID_LORA_PATH", "allowed: up to 1e+06"),
        (changed("one too large", with_number("0.self_attn.q_proj.lora_A", 5, -1.1e6)), "INVALID_LORA_PATH",
         "the numbers of A reach 1.1e+06"),
        (changed("too large together", all_numbers(1001)), "INVALID_LORA_PATH", "and 1.002e+06 with the scale"),
        (changed("no alpha", config=lambda c: {k: v for k, v in c.items() if k != "lora_alpha"}), "INVALID_LORA_PATH",
         "lora_alpha is not a number"),
        (changed("no rank", config=lambda c: {k: v for k, v in c.items() if k != "r"}), "INVALID_LORA_RANK", "r is not an integer"),
        (changed("another rank", config=lambda c: {**c, "r": 8}), "INVALID_LORA_RANK", "has rank 4; adapter_config.json says 8"),
        (adapter("of a wider model", hidden_size=256), "INVALID_LORA_PATH", "has the shape"),
        (adapter("of a model of more layers", num_hidden_layers=5), "INVALID_LORA_PATH", "tensors; target_modules and the model imply"),
        (adapter("of a model of fewer layers", num_hidden_layers=3), "INVALID_LORA_PATH", "has no tensor"),
        (adapter("of a model of more heads", num_attention_heads=16, head_dim=8), "INVALID_LORA_PATH", "has the shape"),
    ]
    for ranks in (1, 2, 4):
        with Group(ranks) as group:
            load(group, "a")
            for folder, status, words in cases:
                result = expect(lora(group, "load", "x", folder), 2, status, words)
                lines = result.out.splitlines()
                check(len(lines) == ranks and all(line.startswith("rank %d: %s: " % (rank, status)) and words in line
                                                  for rank, line in enumerate(lines)), "not of every rank", result)
            check(adapters(group) == {"a": ("loaded", 0)}, "something is left: %s" % adapters(group))
            # With a name and in a folder that have blanks.
            expect(lora(group, "load", "x y", shutil.copytree(FOLDERS["b"], os.path.join(FOLDER, "x  y %d" % ranks))), 0)
            result = run(["generate", "--name", group.name, *SHORT, "--lora", "x y", "--file",
                          PROMPTS])
            expect_text(result, "b")
            expect_text(finish(generate_start(group, "a")), "a")
            expect(group.stop(), 0)


@test
def test_m13_what_one_rank_alone_finds_wrong_no_rank_keeps():
    """The last rows of a query's B are those of the last rank."""
    folder = changed("a number of the last rank", with_number("1.self_attn.q_proj.lora_B", -1, float("nan")))
    for ranks in (2, 4):
        with Group(ranks) as group:
            result = expect(lora(group, "load", "x", folder), 2, "rank %d says INVALID_LORA_PATH" % (ranks - 1), "is not finite")
            lines = result.out.splitlines()
            check(lines[:-1] == ["rank %d: LORA_CMD_SUCCESS" % rank for rank in range(ranks - 1)] and
                  lines[-1].startswith("rank %d: INVALID_LORA_PATH: " % (ranks - 1)), "odd ranks", result)
            check(not adapters(group), "something is left: %s" % adapters(group))
            result = expect(lora(group, "unload", "x"), 2)
            check(result.out.count("INVALID_LORA_ID: no adapter of that name") == ranks, "a rank has it", result)
            expect(group.stop(), 0)


@test
def test_m13_an_adapter_of_large_numbers_spoils_no_other_prompt():
    """In the same steps. Its own texts make no sense."""
    folder = changed("large", all_numbers(1000))
    for ranks in (1, 2, 4):
        with Group(ranks) as group:
            load(group, "a")
            expect(lora(group, "load", "large", folder), 0)
            expect(run(["recover", "pause", "--name", group.name]), 0)
            running = [(generate_start(group, name), name) for name in ("large", None, "a")]

            def all_are_there(g=group):
                serving = g.status()["serving"]
                return serving["waiting"] + serving["running"] == 3 * PROMPT_COUNT
            wait_until(all_are_there, "all prompts")
            expect(run(["recover", "start", "--name", group.name]), 0)
            expect(finish(running[0][0]), 0)
            for process, name in running[1:]:
                expect_text(finish(process), name)
            expect(group.stop(), 0)


@test
def test_m13_prompts_of_all_adapters_share_a_group():
    with Group(2) as group:
        load(group, "a", "b", "zero")
        running = [(generate_start(group, name), name) for name in ("a", None, "b", "zero", "a", "b")]
        for process, name in running:
            expect_text(finish(process), name)
        expect(group.stop(), 0)


@test
def test_m13_adapters_come_and_go_while_prompts_run():
    with Group(2) as group:
        load(group, "a")
        running = [generate_start(group, "a") for _ in range(3)]
        for _ in range(5):
            load(group, "b")
            expect(lora(group, "unload", "b"), 0)
        for process in running:
            expect_text(finish(process), "a")
        expect(group.stop(), 0)


@test
def test_m13_unload_waits_for_prompts():
    with Group(2) as group:
        load(group, "a", "b")
        expect(run(["recover", "pause", "--name", group.name]), 0)
        process = generate_start(group, "a")
        wait_until(lambda: adapters(group)["a"][1] > 0, "prompts that use the adapter")
        expect(lora(group, "unload", "a", "--timeout", "0.2"), 1, "still in use by %d prompts" % adapters(group)["a"][1])
        check(adapters(group)["a"][0] == "loaded", "it is not loaded any more")
        unload = start(["lora", "unload", "a", "--name", group.name])
        wait_until(lambda: adapters(group)["a"][0] == "unloading", "an unload that waits")
        expect(finish(generate_start(group, "a")), 1, "the LoRA adapter 'a' is being unloaded")
        check(unload.poll() is None, "it has not waited")
        expect(run(["recover", "start", "--name", group.name]), 0)
        expect_text(finish(process), "a")
        expect(finish(unload), 0)
        check(adapters(group) == {"b": ("loaded", 0)}, "another list: %s" % adapters(group))
        expect(group.stop(), 0)


@test
def test_m13_a_group_that_stops_does_not_wait_for_an_unload():
    with Group(2) as group:
        load(group, "a")
        expect(run(["recover", "pause", "--name", group.name]), 0)
        process = generate_start(group, "a")
        wait_until(lambda: adapters(group)["a"][1] > 0, "prompts that use the adapter")
        unload = start(["lora", "unload", "a", "--name", group.name])
        wait_until(lambda: adapters(group)["a"][0] == "unloading", "an unload that waits")
        begin = time.monotonic()
        expect(group.stop(), 0)
        finish(unload)  # the prompts are cancelled: it may still have been unloaded
        check(time.monotonic() - begin < 30, "it has waited")  # its own timeout is 60 s
        check(finish(process).status != 0, "it was completed")
        group.process.communicate(timeout=TIMEOUT)
        group.left_nothing()


@test
def test_m13_p8_replaced_ranks_have_the_adapters_again():
    with Group(2, RESTART) as group:
        load(group, "a", "b")
        for rank in (1, 0):
            running = [(generate_start(group, name), name) for name in ("a", "b", None)]
            pid = group.status()["ranks"][rank]["pid"]
            os.kill(pid, signal.SIGKILL)
            for process, name in running:
                expect_text(finish(process), name)
            wait_until(lambda r=rank, p=pid: group.status()["ranks"][r]["pid"] != p and
                       group.status()["ranks"][r]["liveness"] == "alive", "a new rank")
            expect_text(finish(generate_start(group, "a")), "a")
            check(adapters(group) == {"a": ("loaded", 0), "b": ("loaded", 0)}, "another list: %s" % adapters(group))
        expect(group.stop(), 0)


@test
def test_m13_p8_a_rank_that_dies_in_a_load_is_replaced_and_ranks_agree():
    if not harness.program_has("coxswain-worker", b"lora.read"):
        harness.skip("this build has no fault points")
    for point in ("lora.read", "lora.loaded"):
        worker = temporary("#!/bin/sh\nCOXSWAIN_FAULT=%s:kill:1:2 COXSWAIN_FAULT_INCARNATION=1 exec %s \"$@\"\n" % (
            point, program("coxswain-worker")), 0o700)
        with Group(2, ["--worker", worker, *RESTART]) as group:
            load(group, "a")
            process = generate_start(group, "a")
            expect(lora(group, "load", "b", FOLDERS["b"]), 3, "rank 1", "killed by signal 9")
            expect_text(finish(process), "a")
            wait_until(lambda: adapters(group) == {"a": ("loaded", 0)}, "ranks that agree")
            expect_text(finish(generate_start(group, "a")), "a")
            load(group, "b")
            expect_text(finish(generate_start(group, "b")), "b")
            expect(group.stop(), 0)


@test
def test_m13_what_makes_no_sense_is_refused():
    folder = FOLDERS["a"]
    for arguments, words in ((["lora"], "say what"), (["lora", "drop"], "'drop' is no LoRA operation"),
                             (["lora", "load", "a"], "an adapter's name and its folder"),
                             (["lora", "unload"], "an adapter's name"), (["lora", "list", "a", "b"], "'b'"),
                             (["lora", "load", "a", "/nonexistent"], "'/nonexistent' does not exist"),
                             (["lora", "list", "--name", "x", "--socket", "y"], "either a --name or a --socket"),
                             (["run", "--adapter", "=x"], "expected NAME=DIR"),
                             (["run", "--adapter", "a=" + folder, "--adapter", "a=" + folder], "twice"),
                             (["run", "--adapter", "a=/nonexistent"], "does not exist"),
                             (["generate", "--model", MODEL, "--lora", "a", "1+1="], "--adapter a=DIR"),
                             (["run", "--adapter", "a"], "expected NAME=DIR")):
        expect(run(arguments), 2, words)
    expect(run(["lora", "list", "--name", "nobody.is.here"]), 2, "nobody.is.here")
    result = expect(run(["lora", "--help"]), 0)
    check(result.out.startswith("Usage: coxswain lora") and "Exit status" in result.out, "odd help", result)
    with Group(2) as group:
        result = expect(lora(group, "load", "x" * 129, folder), 2, "1 to 128 bytes")
        check(result.out == "", "lines of ranks that nobody has asked", result)
        harness.stop_process(group.process.pid)
        begin = time.monotonic()
        expect(lora(group, "list", "--timeout", "1"), 3, "in time")
        check(time.monotonic() - begin < 15, "the deadline is not kept")
        os.kill(group.process.pid, signal.SIGCONT)
        expect(group.stop(), 0)


def split(a, b, name, *arguments):
    return groups.split(a, b, *SHORT, *(["--lora", name] if name else []), "--file", PROMPTS,
                        *arguments)


def split_start(a, b, name):
    return start(["generate", "--prefill", a.name, "--decode", b.name, *SHORT, "--lora", name,
                  "--file", PROMPTS])


@test
def test_m13_prefill_and_decode_with_an_adapter_give_the_text_of_one_group():
    pairs = zip(alone("strong").splitlines(), alone(None).splitlines())
    check(sum(strong != plain for strong, plain in pairs) > PROMPT_COUNT // 2, "the strong adapter is none")
    for ranks in (1, 2, 4):
        with groups.prefill(ranks=ranks) as a, groups.decode(ranks=ranks) as b:
            load(a, "a", "strong", "zero")
            load(b, "zero", "strong", "a")  # in another order: other slots of the ranks
            for name in ("a", "strong", None, "zero"):
                expect_text(split(a, b, name), name)
            now = groups.transfer(b)
            check(now["succeeded"] == 4 * PROMPT_COUNT and now["recomputed"] == 0, "not pulled: %s" % now)
            at_once = [split_start(a, b, name) for name in ("a", "strong")]
            for client, name in zip(at_once, ("a", "strong")):
                expect_text(finish(client), name)
            for group in (a, b):
                check(set(adapters(group).values()) == {("loaded", 0)}, "still used: %s" % adapters(group))
            groups.all_is_given_back(a, b)
            groups.stop(a, b)


@test
def test_m13_prefill_and_decode_of_which_one_has_no_such_adapter():
    with groups.prefill() as a, groups.decode() as b:
        load(a, "a", "b")
        load(b, "b")
        for lacking, name in ((b, "a"), (a, "c")):
            result = expect(split(a, b, name), 2, "the group '%s': no LoRA adapter '%s' is loaded; there are:" %
                            (lacking.name, name))
            check(all(line.endswith("=") for line in result.out.splitlines()), "prompts are answered", result)
        groups.all_is_given_back(a, b)
        expect(lora(a, "unload", "a"), 0)
        load(b, "a")
        expect(split(a, b, "a"), 2, "the group '%s': no LoRA adapter 'a' is loaded; there are: b" % a.name)
        load(a, "a")
        expect_text(split(a, b, "a"), "a")
        groups.all_is_given_back(a, b)
        groups.stop(a, b)


@test
def test_m13_prefill_and_decode_whose_ranks_are_replaced_keep_the_adapter():
    with groups.prefill(*RESTART) as a, groups.decode(*RESTART) as b:
        load(a, "strong")
        load(b, "strong")
        for group in (a, b, a):
            client = split_start(a, b, "strong")
            head = client.stdout.readline()
            incarnation = group.status()["ranks"][1]["incarnation"]
            os.kill(group.status()["ranks"][1]["pid"], signal.SIGKILL)
            expect_text(rest(client, head), "strong")
            wait_until(lambda g=group, n=incarnation: g.status()["ranks"][1]["incarnation"] > n and
                       not g.status()["recovery"]["doing"], "a replacement")
            expect_text(split(a, b, "strong"), "strong")
        groups.all_is_given_back(a, b)
        groups.stop(a, b)


if __name__ == "__main__":
    sys.exit(harness.main())
