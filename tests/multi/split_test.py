#!/usr/bin/python3
"""Prefill and decode as users see them: links, roles, holds, pulls, and prompts over two groups.

Usage: split_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import json
import os
import random
import re
import signal
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
import rights  # pylint: disable=wrong-import-position
# pylint: disable-next=wrong-import-position
from groups import (RESTART, Group, Holder, Stranger, all_is_given_back, decode, field, links,
                    packed, parse, prefill, pull_by_hand, pull_kv, split, stop, transfer)
from harness import (MODEL, TIMEOUT, check, expect, finish, prompts_file, rest, run, start, sums,
                     temporary, test, undisturbed, wait_until)

harness.begin(harness.parser(__doc__))
PROMPT_COUNT = 100
PROMPTS = prompts_file(PROMPT_COUNT)


def expected(*arguments, count=PROMPT_COUNT):
    return undisturbed("--model", MODEL, "--file", prompts_file(count), *arguments)


def pulled(group):
    """What status says of the bytes that were pulled, for people."""
    lines = expect(run(["status", "--name", group.name]), 0).out.splitlines()
    return [line for line in lines if line.startswith("pulled ")]


# ---- the same text ----


@test
def test_m11_the_text_of_two_groups_is_that_of_one():
    with prefill() as a, decode() as b:
        result = expect(split(a, b, "--file", PROMPTS), 0, "pulled %d prompts" % PROMPT_COUNT,
                        "computed 0 itself")
        check(result.out == expected(), "another text", result)
        now = transfer(b)
        check(now["succeeded"] == PROMPT_COUNT and now["failed"] == now["recomputed"] == now["late_results"] == 0, "%s" % now)
        check(now["bytes"] > 0 and now["role"] == "decode" and now["links"] == [a.name], "%s" % now)
        check(now["copy_s"] > 0, "%s" % now)
        mean = now["bytes"] / now["copy_s"]
        check(now["bytes_per_s"] > mean / 100 and now["bytes_per_s"] < mean * 100, "%s: the mean is %.0f" % (now, mean))
        told = pulled(b)
        check(len(told) == 1 and re.fullmatch(r"pulled [0-9.]+[KMG]iB, median [0-9.]+[KMG]iB/s per rank", told[0]), "%s" % told)
        check(transfer(a)["bytes"] == transfer(a)["copy_s"] == transfer(a)["bytes_per_s"] == 0 and not pulled(a),
              "the first group has pulled: %s" % transfer(a))
        all_is_given_back(a, b)
        check(a.status()["serving"]["generated_tokens"] == PROMPT_COUNT, "the first group has decoded")
        stop(a, b)


@test
def test_m11_groups_of_1_4_and_8_ranks_and_sealed_ones():
    for ranks, arguments in ((1, ()), (4, ()), (8, ()), (2, ("--attach", "sealed"))):
        with prefill(*arguments, ranks=ranks) as a, decode(*arguments, ranks=ranks) as b:
            result = expect(split(a, b, "--file", prompts_file(20)), 0, "pulled 20 prompts")
            check(result.out == expected(count=20), "another text on %d ranks" % ranks, result)
            all_is_given_back(a, b)
            stop(a, b)


@test
def test_m11_sampled_tokens_few_tokens_and_one_token_are_the_same():
    with prefill() as a, decode() as b:
        for arguments in (("--temperature", "2", "--seed", "5"), ("--max-tokens", "1"), ("--max-tokens", "2"),
                          ("--json", "--max-tokens", "3"), ("--temperature", "1.5", "--top-k", "4", "--sequences", "1")):
            result = expect(split(a, b, "--file", prompts_file(20), *arguments), 0)
            wanted = expect(run(["generate", "--name", b.name, "--file", prompts_file(20), *arguments]), 0)
            check(result.out == wanted.out, "another text with %s" % (arguments,), result)
        all_is_given_back(a, b)
        stop(a, b)


@test
def test_m11_prompts_of_any_length_up_to_the_limit():
    with prefill() as a, decode() as b:
        for length in (1, 15, 16, 17, 31, 32, 33, 62, 63, 64, 65):
            tokens = " ".join(str(3 + k % 10) for k in range(length))
            for more in ((), ("--max-tokens", "2")):
                one = run(["generate", "--name", b.name, "--tokens", "--quiet", *more, tokens])
                two = split(a, b, "--tokens", "--quiet", *more, tokens)
                check(two.out == one.out and two.status == one.status, "%d tokens: %s and %s" % (length, one.out, two.out), two)
        all_is_given_back(a, b)
        stop(a, b)


@test
def test_m11_several_clients_at_once_and_plain_prompts_between():
    with prefill() as a, decode() as b:
        file = PROMPTS
        clients = [start(["generate", "--prefill", a.name, "--decode", b.name, "--file", file]) for _ in range(3)]
        plain = start(["generate", "--name", b.name, "--file", file])
        for client in [*clients, plain]:
            result = expect(finish(client), 0)
            check(result.out == expected(), "another text", result)
        all_is_given_back(a, b)
        stop(a, b)


# ---- disturbed ----


@test
def test_p9_m11_a_paused_group_is_waited_for_longer_than_an_idle_connection_lasts():
    with prefill() as a, decode() as b:
        expect(run(["recover", "pause", "--name", a.name]), 0)
        client = start(["generate", "--prefill", a.name, "--decode", b.name, "27+58="])
        wait_until(lambda: a.status()["serving"]["clients"] == 1, "a client that waits")
        with Stranger(b.socket_path) as silent:  # it came later, and ends first
            check(silent.ended(), "something was said to a connection that asks for nothing")
        check(client.poll() is None, "it did not wait")
        expect(run(["recover", "start", "--name", a.name]), 0)
        check(expect(finish(client), 0).out == "27+58=85\n", "another text")
        all_is_given_back(a, b)
        stop(a, b)


@test
def test_p9_clients_that_leave_at_random_leave_nothing_and_disturb_no_other():
    chance = random.Random(4)
    with prefill() as a, decode() as b:
        file = PROMPTS
        steady = start(["generate", "--prefill", a.name, "--decode", b.name, "--file", file])
        for _ in range(12):
            client = start(["generate", "--prefill", a.name, "--decode", b.name, "--file", file])
            count = chance.randrange(0, 40)
            for _ in range(count):
                if not client.stdout.readline():
                    break
            client.send_signal(chance.choice((signal.SIGKILL, signal.SIGINT)))
            client.communicate()
        result = expect(finish(steady), 0)
        check(result.out == expected(), "another text", result)
        all_is_given_back(a, b)
        result = expect(split(a, b, "--file", file), 0)
        check(result.out == expected(), "another text afterwards", result)
        stop(a, b)


def over_killed_rank(victims):
    with prefill(*RESTART) as a, decode(*RESTART) as b:
        groups = {"a": a, "b": b}
        process = start(["generate", "--prefill", a.name, "--decode", b.name, "--file", PROMPTS,
                         "--sequences", "8"])
        lines = []
        for name, rank in victims:
            group = groups[name]
            for _ in range(10):
                lines.append(process.stdout.readline())
            before = group.status()["ranks"][rank]
            os.kill(before["pid"], signal.SIGKILL)
            wait_until(lambda group=group, rank=rank, before=before:
                       group.status()["ranks"][rank]["incarnation"] > before["incarnation"] and
                       not group.status()["recovery"]["doing"], "a replacement")
        result = rest(process, "".join(lines))
        expect(result, 0)
        check(result.out == expected(), "another text: %s" % sorted(set(result.out.splitlines()) ^ set(expected().splitlines())), result)
        all_is_given_back(a, b)
        # And the links were sent to the new ranks.
        result = expect(split(a, b, "--file", prompts_file(20)), 0, "pulled 20 prompts", "computed 0 itself")
        check(result.out == expected(count=20), "another text afterwards", result)
        check(links(b) == {a.name: "success"}, "%s" % links(b))
        stop(a, b)


@test
def test_p9_a_rank_of_the_prefill_group_is_killed_and_replaced():
    over_killed_rank([("a", 0), ("a", 1)])


@test
def test_p9_a_rank_of_the_decode_group_is_killed_and_replaced():
    over_killed_rank([("b", 1), ("b", 0)])


@test
def test_p9_ranks_of_both_groups_are_killed_and_replaced():
    over_killed_rank([("a", 1), ("b", 0), ("a", 0), ("b", 1)])


@test
def test_p9_a_prompt_that_found_no_place_is_not_reported_as_pulled():
    if not harness.program_has("coxswain", b"COXSWAIN_TEST_HOLDS"):
        harness.skip("this build holds as many prompts as it likes")
    for places in ("0", "1"):
        with prefill(COXSWAIN_TEST_HOLDS=places) as a, decode() as b:
            result = expect(split(a, b, "--file", prompts_file(20)), 0)
            check(result.out == expected(count=20), "another text", result)
            pulled, computed = re.search(r"pulled (\d+) prompts from .* and computed (\d+) itself", result.err).groups()
            check(int(pulled) + int(computed) == 20, "not all of 20", result)
            check(int(pulled) == b.status()["transfer"]["succeeded"], "others than the group says", result)
            if places == "0":
                check(int(pulled) == 0, "of no place", result)
            all_is_given_back(a, b)
            stop(a, b)


class Clearer(threading.Thread):
    """Cancels all pulls of a group that are under way, at random moments, until it is stopped."""

    def __init__(self, group, seed):
        super().__init__()
        self.group, self.chance, self.stopped = group, random.Random(seed), threading.Event()
        self.count, self.failure = 0, None

    def run(self):
        try:
            with Stranger(self.group.socket_path) as stranger:
                while not self.stopped.wait(self.chance.choice((0, 0, 0.0002, 0.001))):
                    stranger.send(field(5, field(1, 2)))
                    number, fields = stranger.reply()
                    check(number == 5 and 2 not in dict(fields), "recover clear: %d, %s" % (number, fields))
                    self.count += 1
        except BaseException as error:  # pylint: disable=broad-except
            self.failure = error

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *unused):
        self.stopped.set()
        self.join()


def shuffled(chance):
    """The prompts in another order, so that blocks hold others' keys and values than they did before, and their text."""
    prompts, _ = sums(PROMPT_COUNT)
    order = chance.sample(range(PROMPT_COUNT), PROMPT_COUNT)
    lines = expected().splitlines(keepends=True)
    return temporary("".join(prompts[i] + "\n" for i in order)), "".join(lines[i] for i in order)


@test
def test_p9_m11_the_text_is_the_same_while_pulls_are_cancelled_at_random_and_tried_again():
    chance = random.Random(11)
    with prefill() as a, decode() as b:
        with Clearer(b, 12) as clearer:
            deadline = time.monotonic() + TIMEOUT
            turns = 0
            # How many it meets is chance: enough of them, and some rounds at least.
            while turns < 5 or transfer(b)["retries"] < 20 and time.monotonic() < deadline:
                rounds = [shuffled(chance) for _ in range(1 + turns % 3)]
                clients = [start(["generate", "--prefill", a.name, "--decode", b.name, "--file", file]) for file, _ in rounds]
                for client, (_, text) in zip(clients, rounds):
                    result = expect(finish(client), 0)
                    check(result.out == text, "another text", result)
                turns += 1
        check(clearer.failure is None, "%r" % clearer.failure)
        now = transfer(b)
        check(now["retries"] >= 20 and now["failed"] >= now["retries"] and clearer.count > 0,
              "%d clears in %d turns, and %s" % (clearer.count, turns, now))
        all_is_given_back(a, b)
        # Nothing is cancelled any more.
        file, text = shuffled(chance)
        result = expect(split(a, b, "--file", file), 0, "pulled %d prompts" % PROMPT_COUNT, "computed 0 itself")
        check(result.out == text, "another text afterwards", result)
        check(transfer(b)["retries"] == now["retries"], "%s, then %s" % (now, transfer(b)))
        stop(a, b)


@test
def test_m10_links_are_made_again_by_generate_when_they_are_removed():
    with prefill() as a, decode() as b:
        stopped = threading.Event()

        def meddle():
            while not stopped.wait(0.02):
                run(["unlink", "--name", b.name, a.name])
        meddler = threading.Thread(target=meddle)
        meddler.start()
        try:
            result = split(a, b, "--file", PROMPTS)
        finally:
            stopped.set()
            meddler.join()
        # Also of one that is gone between the order and the look whether the ranks have linked.
        expect(result, 0)
        check(result.out == expected(), "another text", result)
        result = expect(split(a, b, "--file", PROMPTS), 0)
        check(result.out == expected(), "another text afterwards", result)
        all_is_given_back(a, b)
        stop(a, b)


@test
def test_p9_the_prefill_group_ends_and_comes_again():
    with decode() as b:
        with prefill() as a:
            expect(split(a, b, "27+58="), 0)
            client = start(["generate", "--prefill", a.name, "--decode", b.name, "--file", prompts_file(100)])
            a.process.kill()
            a.process.communicate()
            wait_until(lambda: not any(os.path.exists("/proc/%d" % pid) for pid in a.pids), "the end of its workers")
            result = finish(client)
            if result.status:
                check(result.status in (1, 2, 3) and a.name in result.err, "what has ended is not told", result)
            wanted = iter(expected().splitlines())
            check(all(line in wanted for line in result.out.splitlines()), "another text, or order", result)
            check(result.status or result.out == expected(), "another text", result)
            expect(split(a, b, "1+1="), 2, "no group '%s' is alive" % a.name)
            wait_until(lambda: links(b) == {a.name: "failed"}, "a failed link")
            name = a.name
        again = start(["run", "-n", "2", "--name", name, "--model", MODEL, "--role", "prefill"])
        for _ in range(4):
            again.stdout.readline()
        result = expect(run(["generate", "--prefill", name, "--decode", b.name, "27+58="]), 0, "pulled 1 prompts")
        check(result.out == "27+58=85\n", "another text", result)
        expect(run(["stop", "--name", name]), 0)
        finish(again)
        stop(b)


@test
def test_p9_a_group_that_ends_meanwhile_is_named():
    """Nothing is replaced. What was printed by then is right, and the other group continues."""
    ends = {"coordinator": lambda group: group.process.kill(), "rank": lambda group: os.kill(group.pids[1], signal.SIGKILL),
            "stop": lambda group: group.process.terminate()}
    for end in ends.values():
        for who in (0, 1):
            with prefill() as a, decode() as b:
                gone, stays = (a, b)[who], (a, b)[1 - who]
                client = start(["generate", "--prefill", a.name, "--decode", b.name, "--file", prompts_file(300)])
                lines = [client.stdout.readline() for _ in range(5)]
                client.send_signal(signal.SIGSTOP)  # it is not done meanwhile
                try:
                    end(gone)
                    gone.process.communicate()
                finally:
                    client.send_signal(signal.SIGCONT)
                result = rest(client, "".join(lines))
                check(result.status in (1, 3) and gone.name in result.err,
                      "what has ended is not told", result)
                wanted = iter(expected(count=300).splitlines())
                check(all(line in wanted for line in result.out.splitlines()), "another text, or order", result)
                all_is_given_back(stays)
                stop(stays)


# ---- links and roles ----


@test
def test_m10_link_unlink_and_status():
    with prefill() as a, decode() as b, Group() as c:
        check(expect(run(["link-status", "--name", b.name]), 0).out == "no group is linked\n", "another line")
        expect(run(["link", "--name", b.name, a.name]), 0)
        expect(run(["link", "--name", b.name, a.name]), 0)
        expect(run(["link", "--name", b.name, "--no-wait", c.name]), 0)
        expect(run(["link-status", "--name", b.name, "--wait"]), 0)
        check(links(b) == {a.name: "success", c.name: "success"}, "%s" % links(b))
        out = expect(run(["status", "--name", b.name]), 0).out
        check("role decode, linked with %s, %s" % (a.name, c.name) in out, "no such line: %s" % out)
        expect(run(["unlink", "--name", b.name, a.name]), 0)
        check(links(b) == {c.name: "success"}, "%s" % links(b))
        expect(run(["unlink", "--name", b.name, a.name]), 2, "is not linked with")
        stop(a, b, c)


@test
def test_m10_role_is_switched_on_a_live_group():
    with Group() as a:
        check(expect(run(["role", "--name", a.name]), 0).out == "standard\n", "another role")
        expect(a.generate("1+1="), 0)
        expect(run(["role", "--name", a.name, "prefill"]), 0)
        check(transfer(a)["role"] == "prefill", "another role")
        expect(a.generate("1+1="), 1, "the role of this group is prefill", "--prefill %s" % a.name)
        with decode() as b:
            expect(split(a, b, "1+1="), 0, "pulled 1 prompts")
            expect(split(b, a, "1+1="), 1, "the role of the group '%s' is decode" % b.name)
            expect(run(["role", "--name", b.name, "standard"]), 0)
            expect(run(["role", "--name", a.name, "standard"]), 0)
            expect(split(b, a, "1+1="), 0, "pulled 1 prompts")
            check(expect(a.generate("1+1="), 0).out == "1+1=2\n", "another text")
            stop(b)
        stop(a)


@test
def test_m10_a_rank_that_is_stuck_is_named_by_each_order():
    for first in (("link-status",), ("link", None)):
        with prefill() as a, decode() as b:
            b.stopped(1)
            # The second is refused because of the first, which has no reply yet.
            for words in (first, ("link-status", "--wait"), ("link", None), ("unlink", None), ("role", "standard")):
                result = run([words[0], "--name", b.name, "--timeout", "1", *(word or a.name for word in words[1:])])
                if words[0] != "unlink" or first[0] == "link":
                    expect(result, 3, "rank 1")
                else:
                    expect(result, 2, "is not linked with")
            os.kill(b.pids[1], signal.SIGCONT)
            stop(a, b)


@test
def test_m10_wrong_words():
    with prefill() as a, decode() as b:
        for words, status, part in (
                (["link", "--name", b.name], 2, "name the other group"),
                (["link", "--name", b.name, a.name, a.name], 2, "is not expected here"),
                (["link", "--name", b.name, b.name], 2, "cannot be linked with itself"),
                (["link", "--name", b.name, "coxsplit.nobody"], 2, "no group 'coxsplit.nobody' is alive"),
                (["link", "--name", "coxsplit.nobody", a.name], 2, "no group 'coxsplit.nobody' is alive"),
                (["link", "--name", b.name, "a/b"], 2, "a/b"),
                (["link", "--wait", "--name", b.name, a.name], 2, "--wait is no option of this command"),
                (["link-status", "--name", b.name, a.name], 2, "is not expected here"),
                (["role", "--name", b.name, "boss"], 2, "'boss' is no role: expected prefill, decode or standard"),
                (["run", "--role", "boss"], 2, "'boss' is no role"),
                (["run", "--role", "prefill", "--legacy-workers", "--model", MODEL], 2, "--role"),
                (["run", "--role", "prefill", "--model", MODEL, "--", "/bin/true"], 2, "--role"),
                (["pull-kv", "--name", b.name, "--from", a.name], 2, "--hold ID"),
                (["pull-kv", "--name", b.name, "--from", a.name, "--hold", "0"], 2, "--hold is '0'"),
                (["generate", "--prefill", a.name, "1+1="], 2, "go together"),
                (["generate", "--prefill", a.name, "--decode", a.name, "1+1="], 2, "are the same group"),
                (["generate", "--prefill", a.name, "--decode", b.name, "--name", b.name, "1+1="], 2, "leave out --name"),
                (["generate", "--prefill", a.name, "--decode", b.name, "-n", "4", "1+1="], 2, "leave out -n,")):
            expect(run(words), status, part)
        for word in ("link", "unlink", "link-status", "role", "pull-kv"):
            expect(run([word, "--help"]), 0)
            check("  %s " % word in expect(run(["--help"]), 0).out, "not in the list")
        stop(a, b)


@test
def test_m10_groups_of_another_size_being_started_or_of_other_workers():
    with prefill(ranks=4) as a, decode() as b:
        expect(run(["link", "--name", b.name, a.name]), 2, "has 4 ranks, this one 2")
        expect(split(a, b, "1+1="), 2, "has 4 ranks, this one 2")
        check(links(b) == {}, "%s" % links(b))
        name = b.name + ".waits"
        waits = start(["run", "--worker", "none", "-n", "2", "--name", name, "--model", MODEL])
        waits.stderr.readline()
        expect(run(["link", "--name", b.name, name]), 1, "waits for its workers")
        expect(run(["role", "--name", name, "prefill"]), 1, "waits for its workers")
        waits.send_signal(signal.SIGINT)
        waits.communicate()
        if rights.legacy_fits():
            name = b.name + ".legacy"
            legacy = start(["run", "-n", "2", "--name", name, "--legacy-workers", "--model", MODEL])
            for _ in range(4):
                legacy.stdout.readline()
            expect(run(["link", "--name", b.name, name]), 1, "legacy workers hold and pull nothing")
            expect(run(["role", "--name", name, "prefill"]), 1, "legacy workers hold and pull nothing")
            expect(run(["generate", "--prefill", name, "--decode", b.name, "1+1="]), 1, "it has legacy workers")
            legacy.send_signal(signal.SIGINT)
            legacy.communicate()
        name = b.name + ".sleeps"
        sleeps = start(["run", "-n", "2", "--name", name, "--", harness.program("coxswain-worker"), "--model", MODEL])
        for _ in range(4):
            sleeps.stdout.readline()
        expect(run(["link", "--name", b.name, name]), 1, "takes no part in transfers")
        sleeps.send_signal(signal.SIGINT)
        sleeps.communicate()
        stop(a, b)


# ---- holds ----


@test
def test_p9_pull_kv_of_what_is_held_and_of_what_is_not():
    with prefill() as a, decode() as b, Group() as c:
        expect(run(["link", "--name", b.name, a.name]), 0)
        expect(pull_kv(b, a, 1), 2, "has no KV lease of sequence 1")
        link = json.loads(expect(run(["link-status", "--name", b.name, "--json"]), 0).out)["links"][0]
        check(link["epoch"] and "life" not in link, "wrong: %s" % link)
        with Holder(a.socket_path) as holder:
            told = holder.hold(list(range(3, 13)) * 4)
            hold = told[3]
            wait_until(lambda: transfer(a)["holds"] == 1, "a hold")
            result = expect(pull_kv(b, a, hold), 0)
            check(result.out.startswith("rank 0: ok: ") and "\nrank 1: ok: " in result.out, "other lines", result)
            answer = json.loads(expect(pull_kv(b, a, hold, "--json"), 0).out)
            check(answer["ok"] and answer["state"] == "success" and [r["code"] for r in answer["ranks"]] == [0, 0] and
                  all(r["copied_bytes"] > 0 < r["copy_s"] for r in answer["ranks"]), "%s" % answer)
            result = expect(pull_kv(c, a, hold), 2)
            check("rank 0: 2004: there is no link" in result.out, "no reason of each rank", result)
            answer = json.loads(expect(pull_kv(c, a, hold, "--json"), 2).out)
            check(not answer["ok"] and answer["state"] == "failed" and answer["error"], "%s" % answer)
            expect(pull_kv(b, a, hold + 1), 2, "has no KV lease of sequence")
            with Holder(a.socket_path) as other:
                other.send(field(1, b""))
                other.reply()
                other.release(hold)  # not its own
                other.send(field(1, b""))
                other.reply()
                expect(pull_kv(b, a, hold), 0)
            holder.release(hold, hold, 12345)
            wait_until(lambda: transfer(a)["holds"] == 0, "no hold")
            expect(pull_kv(b, a, hold), 2, "has no KV lease of sequence %d" % hold)
            # It ends with its lease, and with its client.
            short = holder.hold([5, 6, 7], hold_ms=1)
            wait_until(lambda: transfer(a)["holds"] == 0, "an end of the lease")
            expect(pull_kv(b, a, short[3]), 2, "has no KV lease of sequence")
            holder.hold([5, 6, 7])
            wait_until(lambda: transfer(a)["holds"] == 1, "a hold")
        wait_until(lambda: transfer(a)["holds"] == 0, "no hold")
        all_is_given_back(a, b, c)
        stop(a, b, c)


@test
def test_p9_sources_that_are_made_up_are_refused_with_words():
    with prefill() as a, decode() as b:
        expect(run(["link", "--name", b.name, a.name]), 0)
        with Holder(a.socket_path) as holder:
            told = holder.hold(list(range(3, 13)) * 4)
            true = {"cluster": a.name, "life": told[2], "sequence": told[3], "blocks": list(told[4]), "lease": told[5]}
            check(pull_by_hand(b.socket_path, **true) == "", "the true one is refused: %s" % pull_by_hand(b.socket_path, **true))
            for change in ({"life": told[2] + 1}, {"sequence": told[3] + 1}, {"blocks": [400, 401, 402]}, {"lease": 1},
                           {"blocks": [1 << 30]}, {"cluster": "coxsplit.nobody"}, {"cluster": ""}, {"blocks": []},
                           {"sequence": 0}, {"blocks": [-1]}, {"blocks": list(range(600))}, {"cluster": "x" * 300}):
                text = pull_by_hand(b.socket_path, **{**true, **change})
                check(text, "%s was pulled" % change)
            check(pull_by_hand(b.socket_path, **true) == "", "the true one is refused afterwards")
            holder.release(told[3])
            wait_until(lambda: transfer(a)["holds"] == 0, "no hold")
            check("another sequence" in pull_by_hand(b.socket_path, **true), "a released one was pulled")
        all_is_given_back(a, b)
        stop(a, b)


@test
def test_p9_holds_end_when_a_rank_is_replaced():
    with prefill(*RESTART) as a, decode() as b:
        expect(run(["link", "--name", b.name, a.name]), 0)
        with Holder(a.socket_path) as holder:
            told = holder.hold([5, 6, 7, 8, 9])
            wait_until(lambda: transfer(a)["holds"] == 1, "a hold")
            os.kill(a.pids[1], signal.SIGKILL)
            wait_until(lambda: a.status()["ranks"][1]["incarnation"] == 2 and not a.status()["recovery"]["doing"],
                       "a replacement")
            holder.send(field(3, field(1, field(1, 2) + field(2, packed([5, 6]))) + field(2, 1) + field(20, 60000)))
            number, fields = holder.reply()
            again = dict(parse(dict(fields)[20]))
            check(number == 2 and again[2] != told[2], "the same life: %s" % again)
            wait_until(lambda: transfer(a)["holds"] == 1, "the new hold alone")
            expect(pull_kv(b, a, told[3]), 2, "has no KV lease of sequence")
            result = pull_kv(b, a, again[3])
            check(result.status == 3, "of another life than was linked, and pulled", result)
            expect(run(["link", "--name", b.name, a.name]), 0)
            expect(pull_kv(b, a, again[3]), 0)
        all_is_given_back(a, b)
        stop(a, b)


@test
def test_p9_a_stuck_rank_times_out_and_its_blocks_are_in_quarantine():
    with prefill() as a, decode() as b:
        expect(run(["link", "--name", b.name, a.name]), 0)
        with Holder(a.socket_path) as holder:
            hold = holder.hold(list(range(3, 13)) * 4)[3]
            wait_until(lambda: transfer(a)["holds"] == 1, "a hold")
            b.stopped(1)
            result = expect(pull_kv(b, a, hold, "--timeout", "0.3"), 3)
            now = b.status()
            check(now["transfer"]["quarantined_blocks"] > 0, "%s" % now["transfer"])
            check(now["serving"]["free_blocks"] + now["transfer"]["quarantined_blocks"] == now["serving"]["block_count"],
                  "%s" % now["serving"], result)
            os.kill(b.pids[1], signal.SIGCONT)
            wait_until(lambda: transfer(b)["quarantined_blocks"] == 0, "the end of the quarantine")
            expect(pull_kv(b, a, hold), 0)
        all_is_given_back(a, b)
        stop(a, b)


if __name__ == "__main__":
    sys.exit(harness.main())
