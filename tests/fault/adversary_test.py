#!/usr/bin/python3
"""A rank of a sealed group attacks everything that it can reach (adversary.c) while prompts run, weights and adapters are
switched, another rank is replaced, and another group is linked to its own.

Usage: adversary_test.py BIN_DIR SOURCE_DIR ADVERSARY [TEST...]

What must hold: the coordinator lives; status, stop and recover answer within their bounds; every text is right or an error;
errors name the hostile rank; after it has been replaced, all is as if it had never been there. Only of memory that is called
memfd:cox_payload_* may the hostile rank change texts, since it holds what that rank computes itself.
"""

import collections
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import checkpoints  # pylint: disable=wrong-import-position
import groups  # pylint: disable=wrong-import-position
import harness  # pylint: disable=wrong-import-position
from groups import RESTART  # pylint: disable=wrong-import-position
from harness import MODEL, TIMEOUT, alive, check, expect, run, sums, test, undisturbed, wait_until

parser = harness.parser(__doc__)
parser.add_argument("adversary", type=os.path.abspath)
ADVERSARY = harness.begin(parser).adversary
OTHER = checkpoints.other_model()

# What a rank may have mapped for writing, and which others write there: none, except hints.
OWN = {
    "memfd:cox_rank": "what this rank says and answers on the channels",
    "memfd:cox_group": "what this rank says in the rank group",
    "memfd:cox_payload_group": "its values of the rank group",
    "memfd:cox_payload_exchange": "its partial sums",
    "memfd:cox_payload_kv": "its KV cache",
    "memfd:cox_kv": "whose its KV blocks are",
    "memfd:cox_large_payload": "a reply of its own that does not fit its slot",
    "memfd:coxswain-stacks": "where its threads are",
}
HINTS = "memfd:cox_wake"
# Attempts that are in order where the memory is the rank's own, and where it holds hints.
HARMLESS = {"map", "pwrite", "punch", "reopen-map", "reopen-pwrite", "reopen-punch", "remove"}

# A rank that destroys its own replies is waited for, as one that is late: until these deadlines.
SEALED = ("--attach", "sealed", "--timeout", "5", "--start-timeout", "10")
# Of an order that is given while a rank attacks: an init whose reply is destroyed ends no sooner.
BRIEFLY = ("--timeout", "3")
VALUES = ("zero", "ones", "random", "identities")
PROMPT_COUNT = 60
# Of a command that asks a group whose rank attacks; the commands' own bounds are shorter, 60 s the longest.
BOUND = 90
# Errors that name no rank, whichever reports them: a rank has taken back what it gave, and it is unknown which.
ABOUT_NOBODY = ("none of its inputs explains that",)


class Adversary:
    """The hostile rank: orders go in, reports come out."""

    def __init__(self, rank):
        self.rank = rank
        self.folder = tempfile.mkdtemp()
        self.orders_path = os.path.join(self.folder, "orders")
        self.report_path = os.path.join(self.folder, "report")
        os.mkfifo(self.orders_path, 0o600)
        self.orders = os.open(self.orders_path, os.O_RDWR)  # both ends: no reader meets an end of file
        with open(self.report_path, "w", encoding="ascii"):
            pass
        self.number = 0

    def variables(self):
        return {"LD_PRELOAD": ADVERSARY, "ADVERSARY_FOLDER": self.folder, "ADVERSARY_RANK": str(self.rank)}

    def report(self):
        with open(self.report_path, encoding="ascii") as file:
            return file.read().splitlines()

    def order(self, what):
        self.number += 1
        os.write(self.orders, ("%d %s\n" % (self.number, what)).encode())
        return self.number

    def is_done(self, number, pid):
        """Or its process is dead, by its own hand or another's."""
        return "done %d" % number in self.report() or not alive(pid)

    def do(self, what, pid):
        number = self.order(what)
        wait_until(lambda: self.is_done(number, pid), "the end of '%s'" % what)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        os.close(self.orders)
        shutil.rmtree(self.folder)


class Group(groups.Group):
    def __init__(self, ranks, adversary, *arguments):
        super().__init__(ranks, SEALED + arguments, **(adversary.variables() if adversary else {}))
        self.adversary = adversary
        # What a hostile rank says need not be text.
        self.process.stderr.reconfigure(errors="replace")
        # Its pipes must not fill while they are not read.
        self.err = []

    def __enter__(self):
        super().__enter__()
        self.reader = threading.Thread(target=self.read_err, daemon=True)
        self.reader.start()
        return self

    def read_err(self):
        for line in self.process.stderr:
            self.err.append(line)

    def attacker(self):
        return self.pids[self.adversary.rank]

    def order(self, what):
        return self.adversary.order(what)

    def is_done(self, number):
        return self.adversary.is_done(number, self.attacker())

    def ask(self, *arguments):
        """A command that must be answered, with whatever answer."""
        begin = time.monotonic()
        result = run([*arguments[:1], "--name", self.name, *arguments[1:]])
        check(time.monotonic() - begin < BOUND, "%s took %.0f s" % (arguments, time.monotonic() - begin), result)
        check(self.process.poll() is None, "the coordinator is gone after %s: %s" % (arguments, "".join(self.err)), result)
        return result

    def end(self):
        expect(self.ask_stop(), 0)
        self.process.wait(timeout=TIMEOUT)
        self.reader.join(timeout=TIMEOUT)
        check(self.process.returncode in (0, 1, 3), "the coordinator ended with %s: %s" % (self.process.returncode, "".join(self.err)))
        self.left_nothing()

    def ask_stop(self):
        begin = time.monotonic()
        result = self.stop()
        check(time.monotonic() - begin < BOUND, "stop took %.0f s" % (time.monotonic() - begin), result)
        return result


# ---- prompts ----

answers = {}


def prompts():
    return sums(PROMPT_COUNT)[0]


def expected(*arguments):
    """What an undisturbed rank says, by prompt."""
    if arguments not in answers:
        model = arguments or ("--model", MODEL)
        text = undisturbed(*model, "--json", "--max-tokens", "8", *prompts())
        answers[arguments] = [json.loads(line)["tokens"] for line in text.splitlines()]
        check(len(answers[arguments]) == PROMPT_COUNT, "not every prompt has an answer")
    return answers[arguments]


Outcome = collections.namedtuple("Outcome", "right wrong errors texts")


def prompt(group, models, *arguments):
    """One client of a group. models: what is expected of each, any of which may have answered."""
    result = group.ask("generate", "--json", "--quiet", "--max-tokens", "8", *arguments, *prompts())
    right, wrong, errors, texts = 0, [], 0, set()
    for index, line in enumerate(result.out.splitlines()):
        said = json.loads(line)
        if said["finish"] == "error":
            errors += 1
            if "error" in said:  # others have ended with it
                texts.add(said["error"])
        elif any(said["tokens"] == model[index] for model in models):
            right += 1
        else:
            wrong.append(line)
    if result.status:
        texts.update(result.err.splitlines())
    check((result.status == 0 and not errors) or texts, "an error without a word", result)
    check(result.status != 0 or right + len(wrong) == PROMPT_COUNT, "lines are missing, and the status is 0", result)
    return Outcome(right, wrong, errors, texts)


def all_right(outcome):
    check(outcome.right == PROMPT_COUNT and not outcome.errors, "not all is right: %s" % (outcome,))


def nothing_wrong(outcome, group, others=()):
    """Texts are right, or errors that name the hostile rank. others: those to which something else happened."""
    check(not outcome.wrong, "wrong texts: %s" % outcome.wrong[:3])
    for text in outcome.texts:
        named = {int(number) for number in re.findall(r"\brank (\d+)", text)}
        check(named & {group.adversary.rank, *others} or any(one in text for one in ABOUT_NOBODY),
              "an error does not name rank %d, the hostile one: %s" % (group.adversary.rank, text))


def replace(group):
    """The hostile rank goes, an honest one comes, and everything works."""
    victim = group.attacker()
    result = group.ask("recover", "restart", "--rank", str(group.adversary.rank), "--kill")
    expect(result, 0)
    wait_until(lambda: not alive(victim), "the end of the hostile rank")
    all_right(prompt(group, [expected()]))


def attack(group, what, during, others=()):
    """Gives the order, and does during() again and again until it has been carried out."""
    number = group.order(what)
    while True:
        last = group.is_done(number)
        for outcome in during():
            nothing_wrong(outcome, group, others)
        status = group.status()
        check(len(status["ranks"]) == group.ranks, "%s" % status)
        if last:
            return


# ---- what is writable ----


def shared_memory(pid):
    """Inode to (name, mapped for writing) of shared mappings of memory without a name."""
    found = {}
    with open("/proc/%d/maps" % pid, encoding="ascii") as file:
        for line in file:
            parts = line.split(None, 5)
            if len(parts) < 6 or parts[1][3] != "s" or not parts[5].startswith(("/memfd:", "/dev/shm/")):
                continue
            name = parts[5].strip().replace(" (deleted)", "").replace("/memfd:", "memfd:")
            before = found.get(int(parts[4]), (name, False))
            found[int(parts[4])] = (name, before[1] or parts[1][1] == "w")
    return found


def writers(pids):
    """Inode to its name and the processes that have it mapped for writing."""
    found = {}
    for pid in pids:
        for inode, (name, writable) in shared_memory(pid).items():
            found.setdefault(inode, (name, []))[1].extend([pid] if writable else [])
    return found


def check_writers(pids):
    """A process has a writable mapping only of memory that no other process writes; hints apart."""
    shared = ["%s (inode %d) by processes %s" % (name, inode, processes)
              for inode, (name, processes) in writers(pids).items() if len(processes) > 1 and name != HINTS]
    check(not shared, "written by several: %s" % "; ".join(shared))


def check_inventory(group):
    """Tries everything, and has nothing but its own."""
    before = len(group.adversary.report())
    own = {inode: name for inode, (name, writable) in shared_memory(group.attacker()).items() if writable}
    unknown = sorted(set(own.values()) - set(OWN) - {HINTS})
    check(not unknown, "writable, and of a name that this test does not know: %s" % unknown)
    for name, count in collections.Counter(own.values()).items():
        check(count == 1 or name.startswith("memfd:cox_payload_") or name == "memfd:cox_large_payload",
              "%d writable mappings of %s: whose are they?" % (count, name))
    group.adversary.do("inventory", group.attacker())
    check(alive(group.attacker()), "the hostile rank ended of its own attempts: %s" % "".join(group.err))
    gains = [line.split(None, 3)[1:] for line in group.adversary.report()[before:] if line.startswith("gains ")]
    bad = ["%s (inode %s%s): %s" % (name, inode, "" if int(inode) in own else ", not its own", how)
           for inode, how, name in gains if int(inode) not in own or how not in HARMLESS]
    check(not bad, "it can do what it must not: %s" % "; ".join(bad))
    return sorted(set(own.values()))


@test
def test_b16_a_rank_can_write_nothing_but_what_is_its_own():
    with Adversary(2) as adversary, Group(4, adversary, *RESTART) as group:
        folder = checkpoints.adapter("adversary")
        all_right(prompt(group, [expected()]))
        expect(group.ask("lora", "load", "adversary", folder), 0)
        check_writers([group.process.pid, *group.pids])
        print("writable for a rank: %s" % ", ".join(check_inventory(group)))
        nothing_wrong(prompt(group, [expected()]), group)
        expect(group.ask("reload", OTHER), 0)
        check_inventory(group)
        expect(group.ask("reload", MODEL), 0)
        # In the next incarnation of the rank group, too.
        expect(group.ask("recover", "restart", "--rank", "0", "--kill"), 0)
        check_inventory(group)
        replace(group)
        group.pids = [rank["pid"] for rank in group.status()["ranks"]]
        check_writers([group.process.pid, *group.pids])
        group.end()


# ---- damage ----


def damage(rank, sets, ms=500):
    with Adversary(rank) as adversary, Group(4, adversary, *RESTART) as group:
        all_right(prompt(group, [expected()]))
        for what in ["scribble %s %s %d" % (value, one, ms) for value in VALUES for one in sets] + ["punch words %d" % ms]:
            if alive(group.attacker()):
                attack(group, what, lambda: [prompt(group, [expected()])])
        replace(group)
        group.end()


@test
def test_p10_words_of_a_rank_written_over_while_prompts_run():
    damage(2, ["words"])


@test
def test_p10_words_of_the_rank_that_answers_written_over_while_prompts_run():
    damage(0, ["words"])


@test
def test_m15_stop_and_recover_are_bounded_while_a_rank_attacks():
    for value in VALUES:
        with Adversary(2) as adversary, Group(4, adversary, *RESTART) as group:
            number = group.order("scribble %s all 60000" % value)
            for order in (["pause"], ["reinit"], ["start"], ["restart", "--rank", "0", "--kill"]):
                group.ask("recover", *order, *BRIEFLY)
            check(not group.is_done(number) or not alive(group.attacker()), "the attack is over already")
            group.end()


@test
def test_p10_payload_written_over_changes_texts_and_nothing_else():
    with Adversary(1) as adversary, Group(4, adversary, *RESTART) as group:
        all_right(prompt(group, [expected()]))
        payload = [name for name, writable in shared_memory(group.attacker()).values()
                   if writable and name.startswith("memfd:cox_payload_")]
        check({"memfd:cox_payload_exchange", "memfd:cox_payload_kv"} <= set(payload), "of its payload it has %s" % payload)
        for value in VALUES:
            number = group.order("scribble %s payload 300" % value)
            while not group.is_done(number):
                # Texts may be wrong: finite numbers cannot be attributed. All others name their rank.
                nothing_wrong(prompt(group, [expected()])._replace(wrong=[]), group)
                group.status()
        replace(group)
        group.end()


@test
def test_p10_weights_and_adapters_are_switched_meanwhile():
    other = expected("--model", OTHER)
    with Adversary(3) as adversary, Group(4, adversary, *RESTART) as group:
        folder = checkpoints.adapter("meanwhile")
        models = [expected(), other]

        def during():
            for model in (OTHER, MODEL):
                group.ask("reload", *BRIEFLY, model)
                yield prompt(group, models)
            group.ask("lora", "load", "meanwhile", folder, *BRIEFLY)
            yield prompt(group, models)
            group.ask("lora", "unload", "meanwhile", *BRIEFLY)

        for value in VALUES:
            if alive(group.attacker()):
                attack(group, "scribble %s words 500" % value, during)
        group.ask("recover", "restart", "--rank", "3", "--kill")
        for model, tokens in ((OTHER, other), (MODEL, expected())):
            expect(group.ask("reload", model), 0)
            all_right(prompt(group, [tokens]))
        expect(group.ask("lora", "load", "meanwhile", folder), 0)
        group.end()


@test
def test_p8_another_rank_is_replaced_meanwhile():
    with Adversary(1) as adversary, Group(4, adversary, *RESTART) as group:
        for value in VALUES:
            if not alive(group.attacker()):
                break
            number = group.order("scribble %s words 500" % value)
            os.kill(group.status()["ranks"][2]["pid"], signal.SIGKILL)
            # Rank 2 has died, and says so.
            nothing_wrong(prompt(group, [expected()]), group, others=[2])
            group.ask("recover", "restart", "--rank", "2", "--kill", *BRIEFLY)
            nothing_wrong(prompt(group, [expected()]), group, others=[2])
            wait_until(lambda: group.is_done(number), "the end of the attack")
        replace(group)
        group.end()


@test
def test_p9_a_rank_of_a_linked_group_harms_the_other_group_in_nothing():
    with Adversary(1) as adversary, Group(2, None, "--role", "prefill", *RESTART) as a, \
            Group(2, adversary, "--role", "decode", *RESTART) as b:
        both = ["generate", "--prefill", a.name, "--decode", b.name, "--quiet", "--max-tokens", "8"]
        text = undisturbed("--model", MODEL, "--max-tokens", "8", *prompts())
        result = expect(run([*both, *prompts()]), 0)
        check(result.out == text, "another text", result)
        check_writers([a.process.pid, *a.pids, b.process.pid, *b.pids])
        check_inventory(b)
        for value in VALUES:
            for what in ("scribble %s all 400" % value, "punch all 200"):
                if not alive(b.attacker()):
                    continue
                number = b.order(what)
                while not b.is_done(number):
                    run([*both, *prompts()])
                    check(a.process.poll() is None and b.process.poll() is None, "a coordinator is gone")
                    a.status()
                    b.status()
        b.ask("recover", "restart", "--rank", "1", "--kill")
        result = expect(run([*both, *prompts()]), 0)
        check(result.out == text, "another text after the hostile rank was replaced", result)
        b.end()
        a.end()


if __name__ == "__main__":
    sys.exit(harness.main())
