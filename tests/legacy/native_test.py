#!/usr/bin/env python3
"""A worker on Coxswain's library under legacy_coordinator.py, which knows no control region: native_test.py WORKER.

The life of a group is the one of legacy_selftest.py, with the same answers, alone and mixed with legacy_worker.py."""

import contextlib
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

    def test_failure_of_the_first_rank_is_its_answer(self):
        result = self.run_group("--ranks", "2", COX_NATIVE_FAIL="0:out of coffee")
        self.assertNotEqual(result["steps"][0]["status"], 0)
        self.assertEqual(result["steps"][0]["outputs"], [])
        self.assertEqual([(error["rank"], error["text"]) for error in result["errors"]][0], (0, "out of coffee"))

    def test_failure_of_another_rank_is_a_fault(self):
        """Its answer is looked at by nobody: the report on the error channel is all there is."""
        result = self.run_group("--ranks", "2", COX_NATIVE_FAIL="1:out of coffee")
        self.assertEqual(result["steps"][0]["status"], 0)
        self.assertIn((1, "out of coffee"), [(error["rank"], error["text"]) for error in result["errors"]])

    @contextlib.contextmanager
    def group(self, ranks):
        """A group in this process, with native workers that are running."""
        sizes = dict.fromkeys(coordinator.LEGACY_SIZES, (65536, ranks * wire.SLOT_STRIDE))
        sizes["shared_sync_link"] = (65536, 65536)  # no slots there
        group = coordinator.Group(types.SimpleNamespace(
            ranks=ranks, prefix=self.prefix, timeout=selftest.LIMIT_S, grace=selftest.LIMIT_S, command=NATIVE))
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
    def served_group(self, ranks):
        """The same, whose workers are told to leave at the end."""
        with self.group(ranks) as group:
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

    def test_bytes_that_are_no_request(self):
        """Ranks that are looked at answer with an error; the next request is served as ever."""

        def statuses(channel, slots):
            return [wire.last(answer, 3, 0) for answer in channel.gather(slots)]

        with self.served_group(2) as group:
            for channel, slots in ((group.execute, True), (group.link, False), (group.recover, True),
                                   (group.transfer, True)):
                for request in (b"\xff\xff", b"\x08", b"\x0b" * 40, coordinator.request(wire.EXECUTE_ERROR + 99)):
                    channel.send(request)
                    self.assertNotIn(0, statuses(channel, slots))
                for rank, semaphore in enumerate(channel.semaphores["request", "produce"]):
                    group.wait(semaphore, rank, "to take the request before")
                channel.request.map[0:4] = b"\xff\xff\xff\x7f"  # a length that is not possible
                for semaphore in channel.semaphores["request", "consume"]:
                    semaphore.post()
                self.assertNotIn(0, statuses(channel, slots))
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
    unittest.main()
