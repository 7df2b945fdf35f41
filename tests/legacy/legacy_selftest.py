#!/usr/bin/env python3
"""The legacy pair by itself: legacy_coordinator.py drives legacy_worker.py at 1, 2 and 4 ranks, and every way to fail
leaves neither a name nor a process behind."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import types
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness
import legacy_coordinator as coordinator
import legacy_worker as wire

HERE = os.path.dirname(os.path.abspath(__file__))
COORDINATOR = [sys.executable, os.path.join(HERE, "legacy_coordinator.py")]
WORKER = [sys.executable, os.path.join(HERE, "legacy_worker.py")]
LIMIT_S = 30
wait_until = functools.partial(harness.wait_until, patience=LIMIT_S)


def names(prefix):
    return harness.names_of(prefix.lstrip("/"))


def workers_of(prefix):
    """Processes, zombies aside, that were given the prefix."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open("/proc/%s/cmdline" % entry, "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if b"--shm_name_prefix" in words and prefix.encode() in words:
            found.append(int(entry))
    return found


class LegacyTest(unittest.TestCase):
    counter = 0
    fault_rank = None  # a legacy worker does not say which it is

    @staticmethod
    def fresh_prefix():
        LegacyTest.counter += 1
        return "/coxselftest.%d_%d" % (os.getpid(), LegacyTest.counter)

    def setUp(self):
        self.prefix = self.fresh_prefix()

    def tearDown(self):
        left, running = names(self.prefix), workers_of(self.prefix)
        for name in left:
            os.unlink(os.path.join(wire.SHM_DIR, name))
        harness.kill_all(running)
        self.assertEqual((left, running), ([], []))

    def start(self, *options, worker=None, **environment):
        command = COORDINATOR + ["--prefix", self.prefix] + list(options) + ["--"] + (worker or WORKER)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env=dict(os.environ, **environment))

    def run_group(self, *options, status=0, **others):
        self.prefix = self.fresh_prefix()  # trackers of the last group's workers may be at work on its names
        process = self.start(*options, **others)
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            out, err = process.communicate()
        self.assertEqual(process.returncode, status, out + err)
        return json.loads(out)

    def check_life(self, result, ranks):
        self.assertTrue(result["ok"])
        self.assertEqual(result["exit_statuses"], [0] * ranks)
        self.assertEqual(result["leftovers"], [])

        self.assertEqual([rank["rank"] for rank in result["init"]], list(range(ranks)))
        for index, rank in enumerate(result["init"]):
            rank["map"].pop("npuBlockNum", None)  # init_merged tells whether the blocks were found
            self.assertEqual(rank["map"], {
                "status": "ok", "cpuBlockNum": str(100 + index),
                "maxPositionEmbeddings": str(4096 - index), "memPoolId": "pool-%d" % index})
            self.assertIn(rank["kv_cache_descs"], [[], [
                {"npu_block_num": 100 + index, "block_size": 128, "compression_ratio": 1, "cache_type": 0}]])
        self.assertEqual(result["init_merged"], {
            "cpuBlockNum": 100, "blocks": 100, "maxPositionEmbeddings": 4096 - (ranks - 1)})

        # Prompts 1,2,3 and 40,50,60,70: their sums, and one more with each step.
        self.assertEqual(len(result["steps"]), 4)
        for count, step in enumerate(result["steps"]):
            self.assertEqual((step["type"], step["status"]), (wire.MODEL_INFER, 0))
            self.assertEqual([(out["seq_id"], out["tokens"], out["finish_reason"]) for out in step["outputs"]],
                             [(0, [(6 + count) % 97], 0), (1, [(220 + count) % 97], 0)])
        self.assertEqual([out["tokens"] for out in result["after_cleanup"]["outputs"]], [[6]])

        self.assertEqual(result["link_status"],
                         {"failed": [], "success": ["cluster-1"], "running": [], "waiting": []})
        self.assertEqual([answer["status"] for answer in result["lora"]], [0, 2, 0, 3])
        self.assertEqual(result["transfer"], [{"request-0": 0, "request-1": 0}] * ranks)
        self.assertEqual([command["command"] for command in result["recover"]],
                         ["CMD_PAUSE_ENGINE", "CMD_CLEAR_TRANSER", "CMD_REINIT_NPU", "CMD_START_ENGINE"])
        for command, execute_type in zip(result["recover"], (10, 11, 12, 13)):
            self.assertEqual(command["ranks"], [
                {"type": execute_type, "npu_device_id": rank, "command_result": 0, "error_msg": "",
                 "answered": True} for rank in range(ranks)])

    def test_whole_run(self):
        for ranks in (1, 2, 4):
            with self.subTest(ranks=ranks):
                self.check_life(self.run_group("--ranks", str(ranks)), ranks)

    def test_legacy_sizes(self):
        self.check_life(self.run_group("--ranks", "2", "--legacy-sizes"), 2)

    def test_worker_removes_region_names_at_exit(self):
        result = self.run_group("--ranks", "2", COX_LEGACY_UNLINK="1")
        self.check_life(result, 2)
        self.assertEqual(result["names_gone"], 9)

    def test_a_killed_worker_has_its_region_names_removed_too(self):
        args = types.SimpleNamespace(ranks=1, prefix=self.prefix)
        group = coordinator.Group(args)
        try:
            group.create({suffix: (65536, wire.SLOT_STRIDE) for suffix in coordinator.LEGACY_SIZES})
            worker = subprocess.Popen(WORKER + ["--local_rank", "0", "--local_world_size", "1", "--npu_num_per_dp", "1",
                                                "--npu_device_id", "0", "--parent_pid", str(os.getpid()),
                                                "--shm_name_prefix", self.prefix])
            regions = len([name for name in names(self.prefix) if not name.startswith("sem.")])
            self.assertEqual(regions, 9)
            # It opens a region of the error channel last.
            path = os.path.join(wire.SHM_DIR, self.prefix.lstrip("/") + "_execute_error_response")
            def opened():
                with open("/proc/%d/maps" % worker.pid, encoding="ascii") as maps:
                    return path in maps.read()
            wait_until(opened, "a worker that has opened all")
            worker.kill()
            worker.wait()
            wait_until(lambda: all(name.startswith("sem.") for name in names(self.prefix)),
                       "no names of regions")
        finally:
            group.destroy()

    def test_fault_is_reported_beside_the_reply(self):
        result = self.run_group("--ranks", "2", COX_LEGACY_FAULT="1:device lost")
        self.assertEqual(result["errors"],
                         [{"type": wire.EXECUTE_ERROR, "rank": self.fault_rank, "text": "device lost"}])
        self.check_life(result, 2)

    def test_init_answers_of_both_releases(self):
        """Before and since March 2026; the other release's coordinator finds nothing."""
        for release, form in (("old", "old"), ("new", "new")):
            self.check_life(self.run_group("--ranks", "2", "--release", release, COX_LEGACY_INIT=form), 2)
        for release, form in (("old", "new"), ("new", "old")):
            self.run_group("--ranks", "2", "--release", release, COX_LEGACY_INIT=form, status=1)

    def test_slow_worker_within_and_beyond_the_timeout(self):
        self.check_life(self.run_group("--ranks", "1", COX_LEGACY_DELAY_MS="50"), 1)
        result = self.run_group("--ranks", "2", "--timeout", "0.3", status=1, COX_LEGACY_DELAY_MS="60000")
        self.assertIn("rank 0 took longer than 0.3 s to answer on execute", result["error"])
        self.assertEqual(result["leftovers"], [])

    def test_worker_that_ends_early(self):
        result = self.run_group("--ranks", "2", status=1, worker=["sh", "-c", "exit 7"])
        self.assertIn("rank 0 ended with status 7", result["error"])
        self.assertEqual(result["leftovers"], [])

    def test_more_ranks_than_slots(self):
        result = self.run_group("--ranks", "17", "--legacy-sizes", status=1)
        self.assertIn("17 ranks need 8912896 bytes of slots, the responses of recover_command have 8388608",
                      result["error"])

    def test_coordinator_gets_the_order_to_end(self):
        process = self.start("--ranks", "2", "--timeout", "60", COX_LEGACY_DELAY_MS="60000")
        wait_until(lambda: len(workers_of(self.prefix)) == 2, "two workers")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=LIMIT_S)
        self.assertEqual(process.returncode, 1)
        self.assertEqual(json.loads(out)["error"], "signal 15")

    def test_workers_end_when_the_coordinator_is_killed(self):
        process = self.start("--ranks", "2", "--timeout", "60", COX_LEGACY_DELAY_MS="60000")
        wait_until(lambda: len(workers_of(self.prefix)) == 2, "two workers")
        process.kill()
        # Not waited for yet: a coordinator that is a zombie is dead too.
        wait_until(lambda: not workers_of(self.prefix), "no workers")
        process.communicate(timeout=LIMIT_S)
        for name in names(self.prefix):
            with contextlib.suppress(FileNotFoundError):  # the workers' trackers do the same
                os.unlink(os.path.join(wire.SHM_DIR, name))

    def test_worker_refuses_names_open_to_others(self):
        args = types.SimpleNamespace(ranks=1, prefix=self.prefix)
        group = coordinator.Group(args)
        worker = WORKER + ["--local_rank", "0", "--local_world_size", "1", "--npu_num_per_dp", "1",
                           "--npu_device_id", "0", "--parent_pid", str(os.getpid()),
                           "--shm_name_prefix", self.prefix]
        refused = subprocess.run(worker, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        self.assertEqual(refused.returncode, 2)
        self.assertIn("No such file", refused.stderr)
        sizes = {suffix: (65536, wire.SLOT_STRIDE) for suffix in coordinator.LEGACY_SIZES}
        group.create(sizes)
        every = names(self.prefix)
        group.destroy()
        # In a group of its own each: what the refused worker had opened before is gone with it.
        for name in every:
            group = coordinator.Group(args)
            try:
                group.create(sizes)
                for other in every:
                    self.assertEqual(os.stat(os.path.join(wire.SHM_DIR, other)).st_mode & 0o7777, 0o600)
                os.chmod(os.path.join(wire.SHM_DIR, name), 0o640)
                refused = subprocess.run(worker, capture_output=True, text=True, timeout=LIMIT_S, check=False)
                self.assertEqual(refused.returncode, 2)
                self.assertIn(name + " has mode 0640", refused.stderr)
            finally:
                group.destroy()


class ProtobufTest(unittest.TestCase):
    """The hand-written encoder against bytes worked out from the protobuf specification."""

    def test_encoding(self):
        self.assertEqual(coordinator.request(wire.TEXT_GENERATOR_CLEANUP, 7, wire.packed(1, [7, 300])),
                         bytes.fromhex("08063a050a0307ac02"))
        self.assertEqual(wire.string_map(2, {"k": "v"}), bytes.fromhex("12060a016b120176"))
        self.assertEqual(wire.number(2, -1), bytes.fromhex("10ffffffffffffffffff01"))
        self.assertEqual(wire.packed_floats(4, [-0.5]), bytes.fromhex("2204000000bf"))
        self.assertEqual(wire.number(3, 0), b"")
        self.assertEqual(wire.present(3, 0), bytes.fromhex("1800"))

    def test_decoding(self):
        found = wire.fields(bytes.fromhex("08ffffffffffffffffff01" "1a03616263" "25000080bf" "1a00"))
        self.assertEqual(wire.signed(found[1][0]), -1)
        self.assertEqual(found[3], [b"abc", b""])
        self.assertEqual(wire.integers(wire.fields(bytes.fromhex("0a0207080809")), 1), [7, 8, 9])
        for broken in ("08", "0a05", "0b", "08ffffffffffffffffffffff"):
            with self.assertRaises(wire.WireError):
                wire.fields(bytes.fromhex(broken))


if __name__ == "__main__":
    harness.guard()
    unittest.main()
