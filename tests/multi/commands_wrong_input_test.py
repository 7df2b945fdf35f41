#!/usr/bin/python3
"""Wrong input, bad models and calls that a system refuses are named, and nothing is left behind.

Usage: commands_wrong_input_test.py BIN_DIR SOURCE_DIR [TEST...]

With COXSWAIN_TEST_ATTACH=sealed in the environment, groups are sealed where a test does not say how they are to be.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from commands_fixture import no_socket_is_left, started  # pylint: disable=wrong-import-position
# pylint: disable-next=wrong-import-position
from harness import (MODEL, SEALED, check, socket_files, environment, expect, finish, generate,
                     names_with, program, run, start, temporary, test, without)

harness.begin(harness.parser(__doc__))


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


@test
def a_token_id_that_does_not_exist_is_named_before_anything_starts():
    for text in ("99999999", "00000000000000012x", "9" * 40, "-1"):
        result = generate("--tokens", "--file", temporary("3 4 5\n%s\n6 7 8\n" % text))
        expect(result, 2, "prompt 2", "token id", "expected ")
        check(result.out == "", "text that is none", result)


@test
def input_that_cannot_be_read_is_wrong_usage():
    expect(generate("--file", "/"), 2, "/ is a folder")


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
            expect(run(["reload", "--name", name, folder]), 2, folder)
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


if __name__ == "__main__":
    sys.exit(harness.main(no_socket_is_left))
