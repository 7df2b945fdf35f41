#!/usr/bin/python3
"""The model's weights, loaded once for all ranks, and other ones in their place while the group serves.

Usage: weights_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import json
import os
import resource
import shutil
import signal
import sys

import numpy

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import checkpoints  # pylint: disable=wrong-import-position
import groups  # pylint: disable=wrong-import-position
import harness  # pylint: disable=wrong-import-position
from checkpoints import read_model, write_model  # pylint: disable=wrong-import-position
from groups import RESTART, Group  # pylint: disable=wrong-import-position
from harness import (MODEL, TIMEOUT, check, environment, expect, finish, prompts_file, prompts_of,
                     rest, run, skip, start, test, undisturbed, wait_until, without)

harness.begin(harness.parser(__doc__))
SAMPLED = ("--temperature", "1.5", "--seed", "11")
FOLDER = checkpoints.folder()
OTHER = checkpoints.other_model()


def expected(model, count=100, *arguments):
    """What a rank that loads the model by itself answers."""
    text = undisturbed("--worker", harness.own_weights(), "--model", model, "--max-tokens", "8", "--file",
                       prompts_file(count), *arguments)
    check(text.count("\n") == count, "not every prompt has an answer")
    return text


def answers(group, count=100, *arguments):
    return expect(group.generate("--quiet", "--max-tokens", "8", "--file", prompts_file(count), *arguments), 0).out


def weights(group, folder, *arguments):
    return run(["reload", "--name", group.name, *arguments, folder])


def replace(group, folder, version):
    result = expect(weights(group, folder), 0)
    check(result.out == "version %d\n" % version, "another version than %d" % version, result)


def in_use(group):
    return group.status()["weights"]


def check_group(group, model, *arguments):
    check(answers(group, 100, *arguments) == expected(model, 100, *arguments), "another text")


def ends(group, *parts):
    expect(group.stop(), 0)
    expect(finish(group.process), 0, *parts)
    group.left_nothing()


# ---- the same text, in less memory ----


@test
def weights_the_same_text_shared_or_not():
    for arguments in ((), SAMPLED):
        for model in (MODEL, OTHER):
            alone = expected(model, 100, *arguments)
            for ranks in (1, 2, 4, 8):
                for more in ((), ("--worker", harness.own_weights())):
                    result = expect(run(["generate", "-n", str(ranks), "--model", model, "--quiet", "--max-tokens", "8",
                                         "--file", prompts_file(100), *arguments, *more]), 0)
                    check(result.out == alone, "another text on %d ranks, %s" % (ranks, more), result)
    for arguments in ((), SAMPLED):
        pairs = list(zip(expected(MODEL, 100, *arguments).splitlines(), expected(OTHER, 100, *arguments).splitlines()))
        check(sum(one != other for one, other in pairs) > 90, "two models with one text: %s" % pairs)


@test
def weights_without_pidfd_getfd_come_by_the_socket():
    for attach in ("named", "sealed"):
        result = expect(harness.generate_on(["-n", "2", "--attach", attach], "27+58=", under=without("pidfd_getfd=EPERM")), 0)
        check(result.out == "27+58=85\n", "another text", result)


@test
def weights_without_pidfd_getfd_are_switched_by_the_socket():
    header, data = read_model()
    huge = write_model("huge_at_the_socket", header, numpy.sign(data).astype("<f4") * numpy.float32(3e38))
    for attach in ("named", "sealed"):
        with Group(2, ("--attach", attach, *RESTART), under=without("pidfd_getfd=EPERM")) as group:
            check_group(group, MODEL)
            replace(group, OTHER, 2)
            check_one_version(group, "the old version is still in memory")
            check_group(group, OTHER)
            # Ranks go over without rows, cannot compute with it, and come back to what they had.
            client = start(["generate", "--name", group.name, "--quiet", "--max-tokens", "8", "--file", prompts_file(900)])
            wait_until(lambda g=group: g.status()["serving"]["running"] > 0, "prompts")
            refused(group, huge, 3, "not finite", "keep their current weights")
            expect(finish(client), 0)
            os.kill(group.pids[1], signal.SIGKILL)
            check_group(group, OTHER)
            version = in_use(group)["version"]
            replace(group, MODEL, version + 1)
            check_group(group, MODEL)
            check_one_version(group, "old versions are still in memory")
            ends(group, "killed by signal 9")


@test
def weights_a_group_that_ends_meanwhile_is_named():
    with Group(2) as group:
        group.stopped(1)  # which is to answer first
        client = start(["reload", "--name", group.name, OTHER])
        wait_until(lambda: group.status()["limits"]["control connections"]["count"] >= 2, "the command's connection")
        group.process.kill()
        expect(finish(client), 1, "the group '%s' has ended, its coordinator is gone" % group.name)
        group.process.communicate()


def private_kib(pid):
    """Proportional set size without files, and how much of it is not shared.

    Pages of files, the libraries, are shared with whatever else runs on the machine.
    """
    with open("/proc/%d/smaps_rollup" % pid, encoding="ascii") as file:
        values = dict(line.split(":", 1) for line in file if ":" in line)
    kib = {name: int(values[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem", "Private_Dirty")}
    return kib["Pss_Anon"] + kib["Pss_Shmem"], kib["Private_Dirty"]


def memory(arguments):
    """After some steps: of the ranks and of all, with the coordinator."""
    with Group(4, arguments) as group:
        answers(group)
        ranks = [private_kib(pid) for pid in group.pids]
        own = private_kib(group.process.pid)
        ends(group)
    return sum(pss for pss, _ in ranks) + own[0], max(dirty for _, dirty in ranks)


@test
def weights_are_in_memory_once():
    size = os.path.getsize(os.path.join(MODEL, "model.safetensors")) >> 10
    before, before_private = memory(("--worker", harness.own_weights()))
    after, after_private = memory(())
    print("proportional set size of 4 ranks and their coordinator: %d KiB with a copy of its part in every rank, %d KiB with one "
          "for all; private memory of a rank %d and %d KiB" % (before, after, before_private, after_private))
    check(after_private < before_private - size // 8, "ranks have private weights: %d KiB, before %d KiB" %
          (after_private, before_private))
    check(after < before + size // 4, "more memory than before: %d KiB, before %d KiB" % (after, before))


# ---- other weights ----


def images(group):
    """Inode and KiB of each version of the weights that a process of the group has mapped, or has an fd of."""
    found = {}
    for pid in [group.process.pid] + [rank["pid"] for rank in group.status()["ranks"]]:
        for folder in ("fd", "map_files"):
            try:
                names = os.listdir("/proc/%d/%s" % (pid, folder))
            except FileNotFoundError:
                continue  # died meanwhile
            for name in names:
                path = "/proc/%d/%s/%s" % (pid, folder, name)
                try:
                    if "memfd:cox_weights" in os.readlink(path):
                        entry = os.stat(path)
                        found[entry.st_ino] = entry.st_blocks // 2
                except (FileNotFoundError, PermissionError):
                    pass  # closed meanwhile; or files by their mappings are root's to see: then by their names, below
        try:
            with open("/proc/%d/maps" % pid, encoding="ascii") as file:
                for line in file:
                    if "memfd:cox_weights" in line:
                        found.setdefault(int(line.split()[4]), 0)
        except FileNotFoundError:
            pass
    return found


def check_one_version(group, words):
    """The control socket's fds are closed by a thread of their own, which may be late."""
    wait_until(lambda: len(images(group)) == 1, "one version; %s" % words)


@test
def weights_switch_between_two_steps():
    for ranks in (1, 2, 4, 8):
        with Group(ranks) as group:
            check_group(group, MODEL)
            taken = images(group)
            check(len(taken) == 1 and sum(taken.values()) >= os.path.getsize(os.path.join(MODEL, "model.safetensors")) >> 10,
                  "no weights, or too many: %s" % taken)
            first = in_use(group)
            check((first["version"], first["next"]) == (1, 0), "odd status: %s" % first)
            replace(group, OTHER, 2)
            second = in_use(group)
            check((second["version"], second["next"]) == (2, 0) and second["digest"] != first["digest"],
                  "odd status: %s" % second)
            after = images(group)
            check(set(after) != set(taken) and sorted(after.values()) == sorted(taken.values()),
                  "the old version is still in memory: %s, before %s" % (after, taken))
            check_group(group, OTHER)
            check_group(group, OTHER, *SAMPLED)
            replace(group, MODEL, 3)
            check(in_use(group)["digest"] == first["digest"], "another digest of the same model")
            check_group(group, MODEL)
            check_group(group, MODEL, *SAMPLED)
            ends(group)


@test
def weights_switch_before_any_prompt_and_by_the_socket():
    with Group(2) as group:
        result = expect(run(["reload", "--socket", group.socket_path, OTHER]), 0)
        check(result.out == "version 2\n", "another version", result)
        check_group(group, OTHER)
        text = expect(run(["status", "--name", group.name]), 0).out
        check("weights: version 2 for all ranks" in text, "status does not tell:\n" + text)
        ends(group)


@test
def weights_switch_again_and_again_under_prompts():
    """Every answer is whole, no rank computes with another version than the others (that would end the run), and after the
    last switch all is as with a group of that model."""
    count = 2700
    for ranks, more in ((2, ()), (4, ("--attach", "sealed"))):
        with Group(ranks, more) as group:
            clients = [start(["generate", "--name", group.name, "--quiet", "--max-tokens", "8", "--file", prompts_file(count)])
                       for _ in range(2)]
            version, switched = 1, 0
            while any(client.poll() is None for client in clients) and version < 60:
                version += 1
                replace(group, (MODEL, OTHER)[version % 2 == 0], version)
                switched += any(client.poll() is None for client in clients)
            check(switched >= 3, "only %d switches under prompts" % switched)
            prompts = prompts_of(count)
            for client in clients:
                result = expect(finish(client), 0)
                lines = result.out.splitlines()
                check(len(lines) == len(prompts), "%d answers" % len(lines), result)
                check(all(line.startswith(prompt) for line, prompt in zip(lines, prompts)), "other prompts", result)
            check_one_version(group, "old versions are still in memory")
            check_group(group, (MODEL, OTHER)[version % 2 == 0])
            ends(group)


@test
def weights_switch_in_a_generate_of_its_own():
    process = start(["generate", "-n", "2", "--model", MODEL, "--file", prompts_file(900),
                     "--quiet", "--max-tokens", "8", "--temperature", "1"])
    name = harness.own_name(process)

    def serves():
        return run(["status", "--name", name]).status == 0
    wait_until(serves, "a group")
    result = run(["reload", "--name", name, OTHER])
    check(result.status in (0, 1, 2, 3), "odd status", result)
    expect(finish(process), 0)


@test
def m13_weights_are_switched_under_adapters_that_stay():
    adapter = "strong=" + checkpoints.strong_adapter()
    named = ("--lora", "strong")
    for ranks in (1, 2, 4):
        with Group(ranks, ("--adapter", adapter)) as group:
            for model, version in ((MODEL, 1), (OTHER, 2), (MODEL, 3)):
                if version > 1:
                    replace(group, model, version)
                alone = expect(harness.generate_on(["-n", "1", "--adapter", adapter], "--max-tokens", "8", "--file",
                                                   prompts_file(100), *named, model=model), 0).out
                check(alone != expected(model), "the adapter changes nothing")
                check(answers(group, 100, *named) == alone, "another text on %d ranks" % ranks)
                check_group(group, model)
            ends(group)


# ---- what is wrong ----


def refused(group, folder, status, *parts):
    result = expect(weights(group, folder), status, *parts)
    check(result.out == "", "it says something all the same", result)


@test
def weights_that_cannot_be_are_refused_and_the_group_goes_on():
    header, data = read_model()
    wrong = data.copy()
    wrong[len(wrong) // 2] = numpy.nan
    with Group(2) as group:
        refused(group, os.path.join(FOLDER, "nowhere"), 2, "nowhere")
        refused(group, FOLDER, 2, "config.json does not exist")
        refused(group, write_model("shapes", header, data, {"num_hidden_layers": 3}), 2, "num_hidden_layers is 3",
                "that of the model in use 4")
        refused(group, write_model("more_positions", header, data, {"max_position_embeddings": 32}), 2,
                "max_position_embeddings is 32")
        refused(group, write_model("kind", header, data, {"model_type": "gpt2"}), 2, "gpt2")
        refused(group, write_model("ends", header, data, {"eos_token_id": 5}), 2, "eos_token_id is not that of the model in use")
        refused(group, write_model("nan", header, wrong), 2, "not finite")
        refused(group, write_model("short", header, data[:-1000]), 2, "model.safetensors")
        refused(group, write_model("numbers", header.replace(b'"F32"', b'"I32"'), data), 2, "has dtype I32")
        for size in (0, 3, 100, 8 + len(header)):
            folder = write_model("cut at %d" % size, header, data)
            os.truncate(os.path.join(folder, "model.safetensors"), size)
            refused(group, folder, 2, "model.safetensors", "complete?" if size > 8 else "8 bytes of header length")
        for kind, make, words in (("none", lambda path: None, "contains neither"), ("pipe", os.mkfifo, "not a regular file"),
                                  ("folder", os.mkdir, "not a regular file")):
            folder = write_model("a %s" % kind, header, data)
            os.unlink(os.path.join(folder, "model.safetensors"))
            make(os.path.join(folder, "model.safetensors"))
            refused(group, folder, 2, words)
        refused(group, os.path.join(OTHER, "config.json"), 2, "config.json")
        refused(group, write_model("tensors", header.replace(b"lm_head.weight", b"lm_haed.weight"), data), 2, "lm_haed.weight")
        expect(run(["reload", "--name", group.name]), 2, "DIR")
        expect(run(["reload", "--name", "coxweights.nobody", MODEL]), 2)
        now = in_use(group)
        check((now["version"], now["next"]) == (1, 0), "something is left of them: %s" % now)
        check_one_version(group, "something is left of them")
        check_group(group, MODEL)
        replace(group, shutil.copytree(OTHER, os.path.join(FOLDER, "a name with blanks")), 2)
        check_group(group, OTHER)
        ends(group)


@test
def weights_of_ranks_that_load_their_own_are_not_replaced():
    with Group(2, ("--worker", harness.own_weights())) as group:
        refused(group, OTHER, 1, "loaded its own weights")
        check(group.status()["weights"] is None, "status tells of weights")
        check_group(group, MODEL)
        ends(group)


@test
def weights_that_changed_where_a_new_rank_reads_its_own_end_the_group_with_words():
    """Half of the sums of one model and half of another one's would be no model's."""
    for attempts, model in ((1, OTHER), (0, MODEL)):
        folder = shutil.copytree(MODEL, os.path.join(FOLDER, "changing %d" % attempts))
        with Group(2, ("--worker", harness.own_weights(), "--on-death", "restart,2/60"), model=folder) as group:
            check_group(group, MODEL)
            shutil.copy(os.path.join(model, "model.safetensors"), folder)
            os.kill(group.pids[1], signal.SIGKILL)
            if attempts:
                result = expect(finish(group.process), 3, "rank 1 has loaded another model, or other weights")
                check(": replaced by process" not in result.err, "it was taken for one of the others", result)
                group.left_nothing()
            else:
                check_group(group, MODEL)
                ends(group)


@test
def a_tokenizer_that_changed_under_a_running_group_is_refused():
    """Clients make tokens of texts: with other files than the group's, every text would be wrong."""
    folder = shutil.copytree(MODEL, os.path.join(FOLDER, "tokenizer"))
    path = os.path.join(folder, "tokenizer.json")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    vocabulary = json.loads(text)["model"]["vocab"]
    other = text.replace('"1": %d' % vocabulary["1"], '"1": -1').replace('"2": %d' % vocabulary["2"], '"2": %d' % vocabulary["1"]).replace(
        '"1": -1', '"1": %d' % vocabulary["2"])
    check(other != text, "nothing was changed")
    with Group(1, model=folder) as group:
        expect(run(["generate", "--name", group.name, "21+1="]), 0)
        for changed in (path, os.path.join(folder, "config.json")):
            with open(changed, encoding="utf-8") as file:
                before = file.read()
            with open(changed, "w", encoding="utf-8") as file:
                file.write(other if changed == path else before + " ")
            result = expect(run(["generate", "--name", group.name, "21+1="]), 1, "has changed since the group '%s' was started" % group.name)
            check(not result.out, "a text all the same", result)
            with open(changed, "w", encoding="utf-8") as file:
                file.write(before)
        result = expect(run(["generate", "--name", group.name, "21+1="]), 0)
        check(result.out == "21+1=22\n", "another text", result)
        ends(group)


def too_large_for(rank, rank_count):
    """A model of which one rank's slices alone are too large together."""
    header, data = read_model()
    for name, tensor in json.loads(header).items():
        if name.endswith("down_proj.weight"):
            begin, end = (offset // 4 for offset in tensor["data_offsets"])
            columns = data[begin:end].reshape(tensor["shape"])
            width = columns.shape[1] // rank_count
            own = columns[:, rank * width:(rank + 1) * width]
            own[:] = numpy.sign(own) * numpy.float32(3e38)
    return write_model("huge %d of %d" % (rank, rank_count), header, data)


@test
def p10_the_rank_whose_numbers_are_too_large_is_named():
    """By every rank, before it computes with them and gives in its own name what comes of that."""
    with Group(4) as group:
        client = start(["generate", "--name", group.name, "--quiet", "--max-tokens", "8", "--file", prompts_file(2700)])
        wait_until(lambda: group.status()["serving"]["running"] > 0, "prompts")
        for rank in (3, 1):
            refused(group, too_large_for(rank, 4), 3, "rank %d gave " % rank)
        check(client.poll() is None, "the client has ended before")
        check(expect(finish(client), 0).out == expected(MODEL, 2700), "another text")
        ends(group)


@test
def weights_that_ranks_cannot_compute_with_are_withdrawn():
    """Numbers as they may be, but too large together: the first step with rows fails on every rank."""
    header, data = read_model()
    huge = write_model("huge", header, numpy.sign(data).astype("<f4") * numpy.float32(3e38))
    count = 2700
    for ranks in (1, 2, 4):
        with Group(ranks) as group:
            client = start(["generate", "--name", group.name, "--quiet", "--max-tokens", "8", "--file", prompts_file(count)])
            wait_until(lambda g=group: g.status()["serving"]["running"] > 0, "prompts")
            refused(group, huge, 3, "rank ", "not finite", "keep their current weights")
            check(client.poll() is None, "the client has ended before")
            now = in_use(group)
            check((now["version"], now["next"]) == (3, 0), "odd status: %s" % now)
            result = expect(finish(client), 0)
            check(result.out == expected(MODEL, count), "another text", result)
            check_one_version(group, "what was withdrawn is still in memory")
            replace(group, OTHER, 4)
            check_group(group, OTHER)
            ends(group)


@test
def weights_that_one_rank_has_no_memory_for_are_withdrawn_from_all():
    """The other ranks have switched, and go back; that one needs no more memory to stay as it is."""
    if "ASAN_OPTIONS" in os.environ or "TSAN_OPTIONS" in os.environ:
        skip("a sanitizer's own memory is limited as well")
    count = 900
    for ranks, busy in ((2, False), (2, True), (4, True)):
        with Group(ranks) as group:
            client = None
            if busy:
                client = start(["generate", "--name", group.name, "--quiet", "--max-tokens", "8", "--file", prompts_file(count)])
                wait_until(lambda g=group: g.status()["serving"]["running"] > 0, "prompts")
            before = resource.prlimit(group.pids[1], resource.RLIMIT_DATA)
            resource.prlimit(group.pids[1], resource.RLIMIT_DATA, (1 << 20, before[1]))
            refused(group, OTHER, 3, "rank 1 failed: version 2", "no memory", "keep their current weights")
            if busy:
                check(client.poll() is None, "the client has ended before")
                result = expect(finish(client), 0)
                check(result.out == expected(MODEL, count), "another text", result)
            check_group(group, MODEL)
            now = in_use(group)
            check((now["version"], now["next"]) == (3, 0), "odd status: %s" % now)
            check_one_version(group, "what was withdrawn is still in memory")
            resource.prlimit(group.pids[1], resource.RLIMIT_DATA, before)
            replace(group, OTHER, 4)
            check_group(group, OTHER)
            ends(group)


@test
def weights_one_replacement_at_a_time_and_one_that_waits_comes_later():
    with Group(2) as group:
        check_group(group, MODEL)
        group.stopped(1)
        first = start(["reload", "--name", group.name, "--timeout", "2", OTHER])
        wait_until(lambda: in_use(group)["next"] == 2, "the next version")
        refused(group, MODEL, 1, "is in progress")
        expect(finish(first), 3, "no step has ended with version 2 in time")
        refused(group, MODEL, 1, "is in progress")
        os.kill(group.pids[1], signal.SIGCONT)
        wait_until(lambda: in_use(group)["version"] == 2, "the switch")
        check_group(group, OTHER)
        replace(group, MODEL, 3)
        check_group(group, MODEL)
        ends(group)


@test
def weights_a_replacement_that_waits_hears_that_the_group_stops():
    with Group(2) as group:
        group.stopped(1)
        first = start(["reload", "--name", group.name, OTHER])
        wait_until(lambda: in_use(group)["next"] == 2, "the next version")
        expect(group.stop(), 0)
        check(finish(first).status != 0, "it says that all is well")
        finish(group.process)


# ---- prefill and decode ----


PROMPT = list(range(3, 13)) * 4


def hold(holder):
    """Keys and values of PROMPT, held, as groups.pull_by_hand names them."""
    told = holder.hold(PROMPT)
    return {"cluster": told[1].decode(), "life": told[2], "sequence": told[3], "blocks": list(told[4]), "lease": told[5]}


def split(a, b, count=100, *arguments):
    return groups.split(a, b, "--quiet", "--max-tokens", "8", "--file", prompts_file(count),
                        *arguments)


def check_split(a, b, model):
    result = expect(split(a, b), 0)
    check(result.out == expected(model), "another text", result)


OTHER_WEIGHTS = "computes with another model, or other weights"


def refused_split(a, b):
    result = expect(split(a, b, 100), 2, "the group '%s' %s" % (a.name, OTHER_WEIGHTS))
    check(result.out == "", "it says something all the same", result)
    expect(run(["link", "--name", b.name, a.name]), 2, OTHER_WEIGHTS)


@test
def weights_of_two_groups_are_switched_one_after_the_other():
    for ranks in (1, 2):
        with groups.prefill(ranks=ranks) as a, groups.decode(ranks=ranks) as b:
            check_split(a, b, MODEL)
            replace(a, OTHER, 2)
            refused_split(a, b)
            replace(b, OTHER, 2)
            check_split(a, b, OTHER)
            replace(b, MODEL, 3)
            refused_split(a, b)
            check_group(b, MODEL)
            replace(a, MODEL, 3)
            check_split(a, b, MODEL)
            # A text that ends with its first token has nothing to pull.
            ended = sum(line == prompt for line, prompt in zip(expected(OTHER).splitlines(), prompts_of(100)))
            now = groups.transfer(b)
            check(now["recomputed"] == 0 and now["succeeded"] >= 300 - ended, "not pulled: %s" % now)
            check(ended < 20, "%d texts of 100 are empty" % ended)
            groups.all_is_given_back(a, b)
            groups.stop(a, b)


@test
def weights_that_are_switched_end_leases_and_the_epoch_of_links():
    with groups.prefill() as a, groups.decode() as b:
        expect(run(["link", "--name", b.name, a.name]), 0)
        with groups.Holder(a.socket_path) as holder:
            old = hold(holder)
            expect(groups.pull_kv(b, a, old["sequence"]), 0)
            replace(a, OTHER, 2)
            wait_until(lambda: groups.transfer(a)["holds"] == 0, "the end of what is held")
            expect(groups.pull_kv(b, a, old["sequence"]), 2, "has no KV lease of sequence")
            text = groups.pull_by_hand(b.socket_path, **old)
            check("belongs to" in text, "old keys and values were pulled")
            # Later leases are of another epoch than the links, and cannot be linked by groups with other weights.
            new = hold(holder)
            check(new["life"] != old["life"], "the same life")
            expect(groups.pull_kv(b, a, new["sequence"]), 3, "is linked in epoch")
            expect(run(["link", "--name", b.name, a.name]), 2, OTHER_WEIGHTS)
            text = groups.pull_by_hand(b.socket_path, **new)
            check("is linked in epoch" in text, "pulled by other weights")
            replace(b, OTHER, 2)
            expect(run(["link", "--name", b.name, a.name]), 0)
            expect(groups.pull_kv(b, a, new["sequence"]), 0)
            # A reader that switches reads no more until it links anew, and only from groups with the same weights.
            replace(b, MODEL, 3)
            expect(groups.pull_kv(b, a, new["sequence"]), 2, "the link to %s has failed" % a.name,
                   "model_digest")
            expect(run(["link", "--name", b.name, a.name]), 2, OTHER_WEIGHTS)
        groups.all_is_given_back(a, b)
        groups.stop(a, b)


@test
def weights_that_are_withdrawn_end_leases_and_the_epoch_of_links():
    header, data = read_model()
    huge = write_model("huge_held", header, numpy.sign(data).astype("<f4") * numpy.float32(3e38))
    with Group() as a, groups.decode() as b:
        expect(run(["link", "--name", b.name, a.name]), 0)
        with groups.Holder(a.socket_path) as holder:
            old = hold(holder)
            # With rows, or no rank could tell.
            client = start(["generate", "--name", a.name, "--quiet", "--max-tokens", "8", "--file", prompts_file(2700)])
            wait_until(lambda: a.status()["serving"]["running"] > 0, "prompts")
            refused(a, huge, 3, "not finite", "keep their current weights")
            result = expect(finish(client), 0)
            check(result.out == expected(MODEL, 2700), "another text", result)
            expect(groups.pull_kv(b, a, old["sequence"]), 2, "has no KV lease of sequence")
            new = hold(holder)
            check(new["life"] != old["life"], "the same life")
            expect(run(["link", "--name", b.name, a.name]), 0)
            expect(groups.pull_kv(b, a, new["sequence"]), 0)
        check_split(a, b, MODEL)
        groups.all_is_given_back(a, b)
        groups.stop(a, b)


@test
def weights_switched_under_prompts_of_two_groups_end_them_with_words():
    count = 2700
    texts = {line for model in (MODEL, OTHER) for line in expected(model, count).splitlines()}
    for first in (0, 1):
        with groups.prefill() as a, groups.decode() as b:
            client = start(["generate", "--prefill", a.name, "--decode", b.name, "--quiet", "--max-tokens", "8", "--file",
                            prompts_file(count)])
            head = [client.stdout.readline() for _ in range(20)]
            expect(weights((a, b)[first], OTHER), 0)
            result = rest(client, "".join(head))
            expect(result, 2, OTHER_WEIGHTS)
            # Of the first group a prompt has either weights, and the second one continues none of the others'. Where the second one
            # switches, a text that is being decoded continues with the new ones, as in one group.
            # What was not answered has no line.
            if first == 0:
                for line in result.out.splitlines():
                    check(line in texts, "a text of two weights: %s" % line, result)
            replace((b, a)[first], OTHER, 2)
            check_split(a, b, OTHER)
            groups.all_is_given_back(a, b)
            groups.stop(a, b)


@test
def weights_switched_where_nothing_is_held_leave_no_text_of_both():
    """The first group holds nothing, so its first tokens, of other weights, come with no source that tells it."""
    needs_fault_points()  # the same builds read COXSWAIN_TEST_HOLDS
    count = 1000
    texts = {line for model in (MODEL, OTHER) for line in expected(model, count).splitlines()}
    with groups.prefill(COXSWAIN_TEST_HOLDS="0") as a, groups.decode() as b:
        client = start(["generate", "--prefill", a.name, "--decode", b.name, "--quiet", "--max-tokens", "8", "--file",
                        prompts_file(count)])
        head = [client.stdout.readline() for _ in range(20)]
        expect(weights(a, OTHER), 0)
        result = rest(client, "".join(head))
        check(result.status == 0, "not all answered", result)
        lines = result.out.splitlines()
        check(len(lines) == count, "%d lines of %d" % (len(lines), count), result)
        for line in lines:
            check(line in texts, "a text of two weights: %s" % line, result)
        groups.all_is_given_back(a, b)
        groups.stop(a, b)


@test
def weights_of_a_group_that_has_a_rank_replaced_are_announced_with_the_switch():
    with groups.prefill(*RESTART) as a, groups.decode(*RESTART) as b:
        replace(a, OTHER, 2)
        for group in (a, b):
            os.kill(group.pids[1], signal.SIGKILL)
            wait_until(lambda g=group: g.status()["ranks"][1]["incarnation"] == 2 and not g.status()["recovery"]["doing"],
                       "a replacement")
        refused_split(a, b)
        expect(weights(b, OTHER), 0)
        check_split(a, b, OTHER)
        check_split(a, b, OTHER)
        groups.all_is_given_back(a, b)
        groups.stop(a, b)


# ---- deaths ----


def faulty_group(ranks, plan, arguments=(), life="1"):
    """A group of which a process meets a fault; in the life given."""
    more = {"COXSWAIN_FAULT_INCARNATION": life} if life else {}
    return Group(ranks, arguments, COXSWAIN_FAULT=plan, **more)


def needs_fault_points():
    if not harness.program_has("coxswain-worker", b"weights.taken"):
        skip("this build has no fault points")


@test
def weights_a_rank_killed_in_the_switch_is_replaced_and_all_switch():
    needs_fault_points()
    for ranks, rank in ((1, 0), (2, 1), (4, 0), (4, 2)):
        for point in ("weights.taken", "weights.switched"):
            # Its second passage: the first one is in init.
            with faulty_group(ranks, "%s:kill:%d:2" % (point, rank), RESTART) as group:
                check_group(group, MODEL)
                result = expect(weights(group, OTHER), 0)
                check(result.out.startswith("version "), "no version", result)
                now = group.status()
                check(now["ranks"][rank]["incarnation"] == 2, "rank %d was not killed: %s" % (rank, now["ranks"]))
                check_one_version(group, "what the dead one had is still in memory")
                check_group(group, OTHER)
                check_group(group, OTHER, *SAMPLED)
                ends(group, "killed by signal 9")


@test
def weights_a_rank_killed_when_it_takes_them_in_init_is_named():
    needs_fault_points()
    for point in ("weights.taken", "weights.switched"):
        for ranks in (1, 2, 4):
            result = run(["generate", "-n", str(ranks), "--model", MODEL, "1+1="],
                         env=environment(COXSWAIN_FAULT="%s:kill:%d" % (point, ranks - 1)))
            expect(result, 3, "rank %d" % (ranks - 1), "killed by signal 9")


@test
def weights_whose_publisher_is_killed_end_the_ranks():
    needs_fault_points()
    for point in ("weights.published", "weights.retired", "weights.filled"):
        count = 2 if point == "weights.filled" else 1
        with faulty_group(2, "%s:kill:coordinator:%d" % (point, count), life=None) as group:
            check_group(group, MODEL)
            result = weights(group, OTHER)
            # Behind the last point all ranks have switched: that may have been reported.
            check(result.status != 0 or point == "weights.retired", "it says that all is well", result)
            group.process.wait(TIMEOUT)
            check(group.process.returncode == -signal.SIGKILL, "the coordinator was not killed")
            wait_until(lambda g=group: not any(os.path.exists("/proc/%d" % pid) for pid in g.pids), "the end of the ranks")
            group.process.communicate()
            # What a killed one leaves goes with the next one of that name.
            again = start(["run", "--name", group.name, "-n", "2", "--model", MODEL])
            expect(run(["status", "--name", group.name, "--wait", "60"]), 0)
            expect(run(["generate", "--name", group.name, "1+1="]), 0)
            expect(run(["stop", "--name", group.name]), 0)
            expect(finish(again), 0)


@test
def weights_of_a_rank_that_is_replaced_are_the_present_ones():
    for ranks in (1, 2, 4):
        with Group(ranks, RESTART) as group:
            check_group(group, MODEL)
            replace(group, OTHER, 2)
            os.kill(group.pids[-1], signal.SIGKILL)
            check_group(group, OTHER)
            wait_until(lambda g=group: g.status()["ranks"][-1]["incarnation"] == 2, "a replacement")
            check_group(group, OTHER)
            version = in_use(group)["version"]
            replace(group, MODEL, version + 1)
            check_group(group, MODEL)
            check_one_version(group, "old versions are still in memory")
            ends(group)


@test
def weights_published_while_a_rank_is_dead_reach_its_replacement():
    for ranks in (2, 4):
        with Group(ranks, ("--on-death", "wait")) as group:
            check_group(group, MODEL)
            os.kill(group.pids[1], signal.SIGKILL)
            wait_until(lambda g=group: g.status()["ranks"][1]["liveness"] == "dead", "the death")
            command = start(["reload", "--name", group.name, OTHER])
            wait_until(lambda g=group: in_use(g)["next"] == 2, "the next version")
            expect(run(["recover", "restart", "--rank", "1", "--name", group.name]), 0)
            result = expect(finish(command), 0)
            check(result.out.startswith("version "), "no version", result)
            check_group(group, OTHER)
            check_one_version(group, "old versions are still in memory")
            ends(group)


@test
def weights_published_while_a_replacement_is_in_init_reach_it():
    """It has the request of the init, which tells of version 1, and has not opened that yet."""
    needs_fault_points()
    for ranks in (2, 4):
        with faulty_group(ranks, "rank.taken:stop:1:1", ("--on-death", "wait"), life="2") as group:
            check_group(group, MODEL)
            os.kill(group.pids[1], signal.SIGKILL)
            wait_until(lambda g=group: g.status()["ranks"][1]["liveness"] == "dead", "the death")
            restart = start(["recover", "restart", "--rank", "1", "--name", group.name])

            def stopped(g=group):
                rank = g.status()["ranks"][1]
                return rank["incarnation"] == 2 and rank["stopped"]
            wait_until(stopped, "the stop")
            command = start(["reload", "--name", group.name, OTHER])
            wait_until(lambda g=group: in_use(g)["next"] >= 2, "the next version")
            os.kill(group.status()["ranks"][1]["pid"], signal.SIGCONT)
            expect(finish(restart), 0)
            expect(finish(command), 0)
            check_group(group, OTHER)
            check_one_version(group, "old versions are still in memory")
            ends(group)


@test
def weights_switch_of_a_paused_group_comes_with_the_start():
    with Group(2) as group:
        check_group(group, MODEL)
        expect(run(["recover", "pause", "--name", group.name]), 0)
        command = start(["reload", "--name", group.name, OTHER])
        wait_until(lambda: in_use(group)["next"] == 2, "the next version")
        expect(run(["recover", "reinit", "--name", group.name]), 0)
        expect(run(["recover", "start", "--name", group.name]), 0)
        expect(finish(command), 0)
        check_group(group, OTHER)
        ends(group)


@test
def weights_of_all_ranks_started_again_are_the_present_ones():
    with Group(2, ("--on-death", "restart-all")) as group:
        replace(group, OTHER, 2)
        os.kill(group.pids[0], signal.SIGKILL)
        wait_until(lambda: all(rank["incarnation"] == 2 for rank in group.status()["ranks"]), "all of them again")
        check_group(group, OTHER)
        ends(group)


if __name__ == "__main__":
    sys.exit(harness.main())
