#!/usr/bin/env python3
"""A worker on Coxswain's library under legacy_coordinator.py, which knows no control region: native_test.py WORKER REFERENCE_WORKER.

The life of a group is the one of legacy_selftest.py, with the same answers, alone and mixed with legacy_worker.py."""

import contextlib
import json
import os
import subprocess
import sys
import time
import types
import unittest
import unittest.mock

sys.dont_write_bytecode = True
import legacy_coordinator as coordinator
import legacy_selftest as selftest
import legacy_worker as wire

NATIVE = []
REFERENCE = []
MODEL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "models", "sums")

# Ranks of the group by turns, beginning with the one named first.
BY_TURNS = ["sh", "-c", """
first=$1 second=$2; shift 3
case $2 in *[02468]) exec $first "$@";; *) exec $second "$@";; esac""", "by_turns"]


def by_turns(first, second):
    return BY_TURNS + [" ".join(first), " ".join(second), "--"]


class NativeTest(selftest.LegacyTest):
    """Everything that the legacy pair does by itself, where it is not about the legacy worker itself."""

    test_worker_removes_region_names_at_exit = None
    test_worker_refuses_names_open_to_others = None
    test_more_ranks_than_slots = None
    test_worker_that_ends_early = None

    test_init_answers_of_both_releases = None  # there is one form of answer here, for both: see below
    fault_rank = 1

    def start(self, *options, worker=None, **environment):
        return super().start(*options, worker=worker or NATIVE, **environment)

    def check_life(self, result, ranks):
        # The library's memPoolId is a number, the only difference.
        for index, rank in enumerate(result["init"]):
            if rank["map"]["memPoolId"] == str(index):
                rank["map"]["memPoolId"] = "pool-%d" % index
        super().check_life(result, ranks)

    def test_eight_ranks(self):
        self.check_life(self.run_group("--ranks", "8"), 8)

    def test_many_steps(self):
        result = self.run_group("--ranks", "2", "--steps", "300")
        self.assertEqual([[out["tokens"] for out in step["outputs"]] for step in result["steps"]],
                         [[[(6 + count) % 97], [(220 + count) % 97]] for count in range(301)])

    def test_mixed_with_legacy_workers(self):
        for ranks in (2, 4):
            for worker in (by_turns(NATIVE, selftest.WORKER), by_turns(selftest.WORKER, NATIVE)):
                with self.subTest(ranks=ranks, worker=worker):
                    self.check_life(self.run_group("--ranks", str(ranks), worker=worker), ranks)

    def test_blocks_are_reported_in_both_places(self):
        """Whichever release reads them, and wherever the callback has put them."""
        for release in ("old", "new"):
            for blocks in ("both", "count", "cache"):
                with self.subTest(release=release, blocks=blocks):
                    result = self.run_group("--ranks", "2", "--release", release, COX_NATIVE_BLOCKS=blocks)
                    self.assertEqual(result["init_merged"]["blocks"], 100)
                    self.assertEqual([(rank["map"]["npuBlockNum"], rank["kv_cache_descs"][0]["npu_block_num"])
                                      for rank in result["init"]], [("100", 100), ("101", 101)])

    def test_failure_of_the_first_rank_is_its_answer(self):
        """The original drops replies with another status than 0: failures are sent as text, and reported beside."""
        result = self.run_group("--ranks", "2", COX_NATIVE_FAIL="0:out of coffee")
        self.assertEqual(result["steps"][0]["status"], 0)
        self.assertEqual(result["steps"][0]["outputs"], [])
        self.assertEqual(result["steps"][0]["err_msg"], "out of coffee")
        self.assertEqual([(error["rank"], error["text"]) for error in result["errors"]][0], (0, "out of coffee"))

    def test_odd_bytes_in_a_failure_are_mended(self):
        """Its protobuf refuses a message of which a string is no UTF-8."""
        result = self.run_group("--ranks", "2", COX_NATIVE_FAIL=b"0:out of caf\xe9")
        self.assertEqual(result["steps"][0]["err_msg"], "out of caf?")
        self.assertIn("out of caf?", [error["text"] for error in result["errors"]])

    def test_init_that_fails_is_reported(self):
        result = self.run_group("--ranks", "2", status=1, COX_NATIVE_FAIL_INIT="no device")
        self.assertEqual(result["error"], "rank 0: init failed: no device")
        with unittest.mock.patch.dict(os.environ, COX_NATIVE_FAIL_INIT="no device"), self.served_group(2) as group:
            group.execute.send(coordinator.request(wire.MODEL_INIT))
            for answer in group.execute.gather(slots=True):
                self.assertIn(b"no device", wire.last(answer, 5, b""))
            selftest.wait_until(lambda: len(group.errors) >= 2, "two reports")
            self.assertEqual(sorted((error["rank"], error["text"]) for error in group.errors),
                             [(0, "no device"), (1, "no device")])

    def test_other_failures_are_reported(self):
        """A link query, LoRA, pulls and recovery: each where the protocol has a place for it, and reported."""
        result = self.run_group("--ranks", "2", COX_NATIVE_FAIL_REST="not today")
        self.assertEqual(result["link_status"], {"failed": [], "success": [], "running": [], "waiting": []})
        self.assertEqual(result["lora"], [{"name": "adapter", "status": 6}] * 4)  # UNSUPPORT_CMD
        self.assertEqual(result["transfer"], [{"request-0": 2003, "request-1": 2003}] * 2)  # PD_PULL_KV_ERROR
        for command in result["recover"]:
            for rank in command["ranks"]:
                self.assertNotEqual(rank["command_result"], 0)
                self.assertEqual(rank["error_msg"], "not today")
        reports = [error["rank"] for error in result["errors"] if error["text"] == "not today"]
        for rank in (0, 1):  # a query, four operations and a batch of pulls; a command's failure is sent as its result
            self.assertEqual(reports.count(rank), 6)

    def test_chunked_prefill(self):
        """In mixed steps, is_prompt false: the tokens of a chunk alone, or all up to its end, with a split or without."""
        prompts = ([1, 2, 3, 4, 5, 6, 7], [40, 50, 60, 70])
        for worker in (NATIVE, selftest.WORKER, by_turns(NATIVE, selftest.WORKER)):
            for how in ({}, {"whole": True}, {"split": False}, {"is_prompt": True}):
                with self.subTest(worker=worker, how=how), self.served_group(2, worker) as group:
                    group.execute.send(wire.string_map(2, coordinator.init_config(2)))
                    group.execute.gather(slots=True)
                    step = coordinator.Life(group, None, {}).step
                    first = step([coordinator.chunk_group(0, prompts[0], 0, 3, **how),
                                  coordinator.prefill_group(1, prompts[1])], 3)
                    second = step([coordinator.decode_group(1, 5),
                                   coordinator.chunk_group(0, prompts[0], 3, 5, **how)], 3)
                    third = step([coordinator.chunk_group(0, prompts[0], 5, 7, **how),
                                  coordinator.decode_group(1, 6)], 3)
                    fourth = step([coordinator.decode_group(0, 8), coordinator.decode_group(1, 7)], 1)
                    tokens = [{out["seq_id"]: out["tokens"] for out in answer["outputs"]}
                              for answer in (first, second, third, fourth)]
                    self.assertEqual(tokens, [{0: [], 1: [220 % 97]}, {0: [], 1: [221 % 97]}, {0: [28], 1: [222 % 97]},
                                              {0: [29], 1: [223 % 97]}])

    def test_failure_of_another_rank_is_a_fault(self):
        """Its reply is never read: the report on the error channel is all there is."""
        result = self.run_group("--ranks", "2", COX_NATIVE_FAIL="1:out of coffee")
        self.assertEqual(result["steps"][0]["status"], 0)
        self.assertIn((1, "out of coffee"), [(error["rank"], error["text"]) for error in result["errors"]])

    def test_chunked_prefill_with_the_model(self):
        """The reference worker: sums that came in chunks, beside one that decodes, are right, and the same as whole."""
        with open(os.path.join(MODEL, "tokenizer.json"), encoding="utf-8") as file:
            vocabulary = json.load(file)["model"]["vocab"]
        characters = {number: character for character, number in vocabulary.items()}
        prompts = [[vocabulary["<bos>"]] * ("<bos>" in vocabulary) + [vocabulary[c] for c in text]
                   for text in ("123+456=", "27+58=")]

        def outputs(answer):
            self.assertNotIn("err_msg", answer)
            return answer["outputs"]

        def chunked(step, sizes, **how):
            """What the first one gives in chunks of these sizes, and the second one beside it, each until 4 tokens are there."""
            texts, ends = [[], []], [0]
            for size in sizes:
                ends.append(ends[-1] + size)
            for i, (start, end) in enumerate(zip(ends, ends[1:])):
                other = (coordinator.prefill_group(1, prompts[1]) if i == 0 else
                         coordinator.decode_group(1, len(prompts[1]) + i))
                groups = [coordinator.chunk_group(0, prompts[0], start, end, **how), other]
                for out in outputs(step(groups if i % 2 else groups[::-1], 3)):
                    texts[out["seq_id"]] += out["tokens"]
            while len(texts[0]) < 4:
                groups = [coordinator.decode_group(i, len(prompts[i]) + len(texts[i])) for i in (0, 1)]
                for out in outputs(step(groups, 1)):
                    texts[out["seq_id"]] += out["tokens"]
            return ["".join(characters[token] for token in text[:3]) for text in texts]

        worker = [REFERENCE[0], "--model", MODEL, "--block-size", str(coordinator.BLOCK_SIZE)]
        for ranks in (1, 2):
            with self.served_group(ranks, worker) as group:
                group.execute.send(coordinator.request(wire.MODEL_INIT))
                group.execute.gather(slots=True)
                step = coordinator.Life(group, None, {}).step
                for sizes in ([len(prompts[0])], [3, len(prompts[0]) - 3], [1, 4, len(prompts[0]) - 5],
                              [1] * len(prompts[0])):
                    for how in ({}, {"whole": True}, {"split": False}, {"is_prompt": True}):
                        with self.subTest(ranks=ranks, sizes=sizes, how=how):
                            if how == {"is_prompt": True} and len(sizes) > 1:
                                how = {"is_prompt": True, "whole": True}
                            texts = chunked(step, sizes, **how)
                            self.assertEqual(texts[0], "579")
                            self.assertEqual(texts[1][:2], "85")
                            group.execute.send(coordinator.request(
                                wire.TEXT_GENERATOR_CLEANUP, 7, wire.packed(1, [0, 1])))

    @contextlib.contextmanager
    def group(self, ranks, worker=None):
        """A group in this process, with workers that are running; native ones if not told."""
        self.prefix = self.fresh_prefix()  # trackers of the last group's workers may be at work on its names
        sizes = dict.fromkeys(coordinator.LEGACY_SIZES, (65536, ranks * wire.SLOT_STRIDE))
        sizes["shared_sync_link"] = (65536, 65536)  # no slots there
        group = coordinator.Group(types.SimpleNamespace(
            ranks=ranks, prefix=self.prefix, timeout=selftest.LIMIT_S, grace=selftest.LIMIT_S, command=worker or NATIVE))
        try:
            group.create(sizes)
            group.start()
            yield group
        finally:
            for worker in group.workers:
                worker.kill()
                worker.wait()
            group.destroy()

    @contextlib.contextmanager
    def served_group(self, ranks, worker=None):
        """The same, whose workers get a goodbye at the end."""
        with self.group(ranks, worker) as group:
            yield group
            group.execute.send(coordinator.request(wire.MODEL_FINALIZE))
            self.assertEqual(group.stop(), [0] * ranks)

    def test_killed_once_the_frame_is_returned(self):
        """The token of room is out, and the answer will never come."""
        with open(NATIVE[0], "rb") as file:
            if b"COXSWAIN_FAULT" not in file.read():
                self.skipTest("built without COX_TESTING")
        with unittest.mock.patch.dict(os.environ, COXSWAIN_FAULT="posted.request_produce:kill:1"), self.group(2) as group:
            returned = group.execute.semaphores["request", "produce"]
            for semaphore in returned:
                self.assertTrue(semaphore.wait_until(time.monotonic()))
                semaphore.post()
            group.execute.send(coordinator.request(wire.MODEL_INIT))
            for rank, semaphore in enumerate(returned):
                group.wait(semaphore, rank, "to return the frame")
            self.assertEqual(group.workers[1].wait(selftest.LIMIT_S), -9)
            self.assertFalse(group.execute.semaphores["response", "consume"][1].wait_until(time.monotonic()))

    def test_answer_waits_for_the_token_of_its_slot(self):
        with self.served_group(2) as group:
            produce = group.execute.semaphores["response", "produce"][1]
            consume = group.execute.semaphores["response", "consume"][1]
            returned = group.execute.semaphores["request", "produce"][1]
            self.assertTrue(produce.wait_until(time.monotonic()))
            group.execute.send(coordinator.request(wire.MODEL_INIT))
            group.wait(returned, 1, "to return the frame")
            returned.post()
            self.assertFalse(consume.wait_until(time.monotonic() + 0.2))
            produce.post()
            answers = group.execute.gather(slots=True)
            self.assertEqual([wire.last(answer, 2, 0) for answer in answers], [0, 1])

    def test_a_wakeup_loses_no_request(self):
        """cox_worker_wake while next blocks: only the token of the next request ends that wait, and it is the request."""
        def woken():
            return sorted(error["rank"] for error in group.errors if error["text"] == "woken")

        with unittest.mock.patch.dict(os.environ, COX_NATIVE_TAKES="1"), self.served_group(2) as group:
            group.execute.send(coordinator.request(wire.MODEL_INIT))
            group.execute.gather(slots=True)
            for turn in range(3):
                group.recover.send(coordinator.request(wire.CLEAR_COMMAND_EXEC, 10, wire.words(1, "CMD_CLEAR_TRANSER")))
                group.recover.gather(slots=True)
                self.assertEqual(woken(), sorted([0, 1] * turn))  # next blocks still
                for _ in range(2):
                    answer = coordinator.Life(group, None, {}).step([coordinator.prefill_group(turn, [5, 6])], 0)
                    self.assertEqual([out["tokens"] for out in answer["outputs"]], [[11]])
                selftest.wait_until(lambda: woken() == sorted([0, 1] * (turn + 1)), "the wakeup of both ranks")

    def test_bytes_that_are_no_request(self):
        """Ranks that are looked at answer, and all report; the next request is served as ever."""
        reported = 0

        def expect_failure(group, channel, slots):
            nonlocal reported
            for answer in channel.gather(slots):
                model, command = (wire.fields(wire.last(answer, field, b"")) for field in (4, 11))
                if channel is group.execute:
                    self.assertTrue(wire.text(model, 5))
                elif channel is group.recover:
                    self.assertNotEqual(wire.last(command, 2, 0), 0)
            reported += 2
            selftest.wait_until(lambda: len(group.errors) >= reported, "%d reports" % reported)

        def statuses(channel, slots):
            return [wire.last(answer, 3, 0) for answer in channel.gather(slots)]

        with self.served_group(2) as group:
            for channel, slots in ((group.execute, True), (group.link, False), (group.recover, True),
                                   (group.transfer, True)):
                for request in (b"\xff\xff", b"\x08", b"\x0b" * 40, coordinator.request(wire.EXECUTE_ERROR + 99)):
                    channel.send(request)
                    expect_failure(group, channel, slots)
                for rank, semaphore in enumerate(channel.semaphores["request", "produce"]):
                    group.wait(semaphore, rank, "to take the request before")
                channel.request.map[0:4] = b"\xff\xff\xff\x7f"  # a length that is not possible
                for semaphore in channel.semaphores["request", "consume"]:
                    semaphore.post()
                expect_failure(group, channel, slots)
            group.execute.send(coordinator.request(wire.MODEL_INIT))
            self.assertEqual(statuses(group.execute, True), [0, 0])
            group.link.send(coordinator.request(wire.PD_LINK_STATUS_QUERY, 11))
            self.assertEqual(statuses(group.link, False), [0])

    def test_refusals(self):
        flags = ["--local_rank", "0", "--local_world_size", "1", "--shm_name_prefix", self.prefix]
        for more, text in ((["--parent_pid", str(os.getpid())], "_control"), ([], "_control")):
            refused = subprocess.run(NATIVE + flags + more, capture_output=True, text=True, check=False,
                                     timeout=selftest.LIMIT_S)
            self.assertEqual(refused.returncode, 1)
            self.assertIn(text, refused.stderr)


if __name__ == "__main__":
    NATIVE.append(sys.argv.pop(1))
    REFERENCE.append(sys.argv.pop(1))
    selftest.harness.guard()
    unittest.main()
