#!/usr/bin/env python3
"""A coordinator as the MindIE-LLM executor's own, from docs/wire.md alone: one short life of a group.

    legacy_coordinator.py --ranks N [options] -- worker command...

Creates the named objects, starts the worker command N times with the legacy arguments appended, and runs init, a
prefill, some decode steps, a clean-up, link, link status, LoRA, a pull, the recover commands and finalize. Prints one
JSON object with everything it got. Every wait ends by --timeout or by a worker's death; the names are gone afterwards
whatever happened.

Exit status: 0 all of it answered and every worker ended with 0; 1 otherwise (JSON with "error").
"""

import argparse
import ctypes
import errno
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True  # nothing into the source tree
import legacy_worker as wire
from legacy_worker import (chunk, fields, integers, last, number, packed, present, signed, single, string_map, text,
                           words)

LIBC = wire.libc
LIBC.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
CLOCK_MONOTONIC = 1
O_CREAT_EXCL = os.O_CREAT | os.O_EXCL

STRIDE = wire.SLOT_STRIDE
KIB = 1024
MIB = 1024 * KIB

# request and response bytes
LEGACY_SIZES = {
    "execute": (256 * MIB, 32 * MIB),
    "shared_sync_link": (32 * MIB, 32 * MIB),
    "recover_command": (8 * MIB, 8 * MIB),
    "transfer": (256 * MIB, 32 * MIB),
}
ERROR_SIZE = 1024

RECOVER_COMMANDS = (
    (wire.PAUSE_COMMAND_EXEC, "CMD_PAUSE_ENGINE"),
    (wire.CLEAR_COMMAND_EXEC, "CMD_CLEAR_TRANSER"),
    (wire.RECOVER_COMMAND_EXEC, "CMD_REINIT_NPU"),
    (wire.START_COMMAND_EXEC, "CMD_START_ENGINE"),
)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
BLOCK_SIZE = 128
PHASES = ("infer", "cleanup", "link", "lora", "transfer", "recover")


class Failed(Exception):
    """What ends the life of the group early."""


class Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class Semaphore:
    def __init__(self, name, value):
        self.name = name
        self.handle = LIBC.sem_open(name.encode(), O_CREAT_EXCL, 0o600, value)
        if not self.handle:
            raise Failed("sem_open %s: %s" % (name, os.strerror(ctypes.get_errno())))

    def wait_until(self, deadline):
        """False when the deadline (monotonic seconds) passed."""
        until = Timespec(int(deadline), int(deadline % 1 * 1e9))
        while LIBC.sem_clockwait(self.handle, CLOCK_MONOTONIC, ctypes.byref(until)):
            if ctypes.get_errno() == errno.ETIMEDOUT:
                return False
            if ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), "sem_clockwait " + self.name)
        return True

    def post(self):
        LIBC.sem_post(self.handle)

    def unlink(self):
        return LIBC.sem_unlink(self.name.encode()) == 0


class Region:
    def __init__(self, name, size):
        self.path = "%s/%s" % (wire.SHM_DIR, name.lstrip("/"))
        self.size = size
        fd = os.open(self.path, os.O_RDWR | O_CREAT_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            self.map = mmap.mmap(fd, size)
        except BaseException:
            os.unlink(self.path)
            raise
        finally:
            os.close(fd)

    def write(self, data):
        if 4 + len(data) > self.size:
            raise Failed("%s: a request of %d bytes in %d" % (self.path, len(data), self.size))
        self.map[4:4 + len(data)] = data
        struct.pack_into("<I", self.map, 0, len(data))

    def read(self, offset, room):
        size, = struct.unpack_from("<I", self.map, offset)
        if 4 + size > min(room, self.size - offset):
            raise Failed("%s: %d bytes at %d" % (self.path, size, offset))
        return fields(self.map[offset + 4:offset + 4 + size])

    def unlink(self):
        """False when a worker's exit has removed the name already, which is normal."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            return False
        return True


class Channel:
    def __init__(self, group, suffix, sizes):
        base = "%s_%s" % (group.prefix, suffix)
        self.group = group
        self.suffix = suffix
        self.request = group.keep(Region(base + "_request", sizes[0]))
        self.response = group.keep(Region(base + "_response", sizes[1]))
        self.semaphores = {}
        for direction in ("request", "response"):
            for role, value in (("produce", 1), ("consume", 0)):
                self.semaphores[direction, role] = [
                    group.keep(Semaphore("%s_%s_%s_%d" % (base, direction, role, rank), value))
                    for rank in range(group.ranks)]

    def send(self, data):
        for rank, semaphore in enumerate(self.semaphores["request", "produce"]):
            self.group.wait(semaphore, rank, "to take the request before on " + self.suffix)
        self.request.write(data)
        for semaphore in self.semaphores["request", "consume"]:
            semaphore.post()

    def gather(self, slots):
        """The answers: one of every rank from its slot, or rank 0's from offset 0."""
        for rank, semaphore in enumerate(self.semaphores["response", "consume"]):
            self.group.wait(semaphore, rank, "to answer on " + self.suffix)
        if slots:
            answers = [self.response.read(rank * STRIDE, STRIDE) for rank in range(self.group.ranks)]
        else:
            answers = [self.response.read(0, self.response.size)]
        for semaphore in self.semaphores["response", "produce"]:
            semaphore.post()
        for rank, answer in enumerate(answers):
            if last(answer, 3, 0):
                # The original drops it, and its engine waits for ever.
                raise Failed("the answer of rank %d on %s has status %d and is dropped" %
                             (rank, self.suffix, signed(answer[3][-1])))
        return answers


class Group:
    def __init__(self, args):
        self.args = args
        self.ranks = args.ranks
        self.prefix = args.prefix or "/%d_0" % os.getpid()
        self.objects = []
        self.workers = []
        self.errors = []
        self.stop_errors = threading.Event()

    def keep(self, thing):
        self.objects.append(thing)
        return thing

    def create(self, sizes):
        for suffix in ("execute", "recover_command", "transfer"):
            if self.ranks * STRIDE > sizes[suffix][1]:
                raise Failed("%d ranks need %d bytes of slots, the responses of %s have %d" %
                             (self.ranks, self.ranks * STRIDE, suffix, sizes[suffix][1]))
        self.execute = Channel(self, "execute", sizes["execute"])
        self.link = Channel(self, "shared_sync_link", sizes["shared_sync_link"])
        self.recover = Channel(self, "recover_command", sizes["recover_command"])
        self.transfer = Channel(self, "transfer", sizes["transfer"])
        base = self.prefix + "_execute_error_response"
        self.error_region = self.keep(Region(base, ERROR_SIZE))
        self.error_produce = self.keep(Semaphore(base + "_produce_0", 1))
        self.error_consume = self.keep(Semaphore(base + "_consume_0", 0))
        self.error_thread = threading.Thread(target=self.watch_errors, daemon=True)
        self.error_thread.start()

    def watch_errors(self):
        while True:
            ending = self.stop_errors.is_set()
            if self.error_consume.wait_until(time.monotonic() + (0 if ending else 0.05)):
                report = self.error_region.read(0, ERROR_SIZE)
                self.error_produce.post()
                if last(report, 3, 0):
                    continue  # dropped, as the original does
                self.errors.append({
                    "type": last(report, 1, 0),
                    "rank": last(report, 2, None),
                    "text": text(fields(last(report, 4, b"")), 5),
                })
            elif ending:
                return

    def start(self):
        for rank in range(self.ranks):
            command = self.args.command + [
                "--local_rank", str(rank), "--local_world_size", str(self.ranks),
                "--npu_num_per_dp", str(self.ranks), "--npu_device_id", str(rank),
                "--parent_pid", str(os.getpid()), "--shm_name_prefix", self.prefix]
            self.workers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))

    def wait(self, semaphore, rank, why):
        """In slices, because a semaphore knows nothing of death."""
        deadline = time.monotonic() + self.args.timeout
        while True:
            now = time.monotonic()
            if semaphore.wait_until(min(deadline, now + 0.1)):
                return
            if now >= deadline:
                raise Failed("rank %d took longer than %g s %s" % (rank, self.args.timeout, why))
            status = self.workers[rank].poll()
            # Last words may have come between the wait and the look.
            if status is not None and not semaphore.wait_until(time.monotonic()):
                raise Failed("rank %d ended with status %d and had %s" % (rank, status, why))

    def stop(self):
        """The exit status of every worker: given time to end, then told, then made to."""
        deadline = time.monotonic() + self.args.grace
        for tell in (None, subprocess.Popen.terminate, subprocess.Popen.kill):
            for worker in self.workers:
                if tell and worker.poll() is None:
                    tell(worker)
            for worker in self.workers:
                try:
                    worker.wait(max(0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    pass
            deadline = time.monotonic() + 2
        return [worker.poll() for worker in self.workers]

    def destroy(self):
        """Returns how many names were gone already."""
        self.stop_errors.set()
        if hasattr(self, "error_thread"):
            self.error_thread.join()
        return sum(not thing.unlink() for thing in self.objects)

    def leftovers(self):
        name = self.prefix.lstrip("/")
        return sorted(entry for entry in os.listdir(wire.SHM_DIR)
                      if entry.startswith((name + "_", "sem." + name + "_")))


# ---- requests ----


def int64s(values):
    return struct.pack("<%dq" % len(values), *values)


def request(execute_type, field=None, payload=b""):
    return number(1, execute_type) + (chunk(field, payload) if field else b"")


def block_table(seq_id, token_count):
    first = seq_id * 8
    return int64s(range(first, first + (token_count + BLOCK_SIZE - 1) // BLOCK_SIZE))


def prefill_group(seq_id, prompt):
    sampling = single(1, 1.0) + single(4, 1.0) + present(5, 1) + number(8, 1) + number(10, 64) + number(13, 1)
    return (words(1, "request-%d" % seq_id) + number(2, 1) + words(3, int64s([seq_id])) +
            chunk(4, int64s([len(prompt)])) + chunk(5, int64s(prompt)) + present(6, 0) + chunk(7, sampling) +
            chunk(8, block_table(seq_id, len(prompt))) + words(9, int64s([0])) + present(15, 1) +
            packed(17, [1]) + packed(18, [1]) + packed(19, [0]) + packed(20, [len(prompt)]))


def chunk_group(seq_id, prompt, start, end, whole=False, split=True, is_prompt=False):
    """Part of a prompt in a mixed step: is_req_prefill says that it is one. whole: with all tokens up to its end."""
    tokens = prompt[:end] if whole else prompt[start:end]
    return (words(1, "request-%d" % seq_id) + number(2, is_prompt) + words(3, int64s([seq_id])) +
            chunk(4, int64s([len(tokens)])) + chunk(5, int64s(tokens)) + present(6, 0) +
            chunk(8, block_table(seq_id, end)) + words(9, int64s([0])) + present(15, 1) +
            packed(17, [1]) + packed(18, [int(end == len(prompt))]) +
            (packed(19, [start]) + packed(20, [end]) if split else b""))


def decode_group(seq_id, token_count):
    return (words(1, "request-%d" % seq_id) + words(3, int64s([seq_id])) +
            chunk(8, block_table(seq_id, token_count)) + words(9, int64s([0])) + present(15, 1) +
            packed(17, [0]) + packed(18, [1]))


def model_request(groups, forward_type):
    model = b"".join(chunk(1, group) for group in groups) + number(7, len(groups)) + number(12, forward_type)
    return request(wire.MODEL_INFER, 3, model)


def describe_outputs(answer):
    outputs = []
    model = fields(last(answer, 4, b""))
    for group in model.get(1, []):
        for sample in fields(group).get(1, []):
            sample = fields(sample)
            outputs.append({
                "seq_id": signed(last(sample, 1, 0)),
                "tokens": integers(sample, 3),
                "finish_reason": signed(last(sample, 5, 0)),
            })
    result = {"type": last(answer, 1, 0), "status": signed(last(answer, 3, 0)), "outputs": outputs}
    if text(model, 5):
        result["err_msg"] = text(model, 5)
    return result


# ---- the life of a group ----


def init_config(ranks):
    """What a worker requires in its init, and more that it always gets."""
    return {"rank_num": ranks, "world_size": ranks, "local_world_size": ranks, "npu_num_per_dp": ranks, "model_id": "none",
            "distributed_enable": "false", "npu_device_ids": ",".join(map(str, range(ranks))), "cpu_mem": 0, "npu_mem": -1,
            "max_seq_len": 2560, "max_iter_times": 512, "max_prefill_tokens": 8192, "block_size": 128,
            "infer_mode": "standard", "rank": 0}


class Life:
    def __init__(self, group, args, result):
        self.group = group
        self.args = args
        self.result = result

    def init(self):
        group = self.group
        config = dict(init_config(group.ranks), **dict(self.args.config))
        group.execute.send(string_map(2, config))  # MODEL_INIT is 0 and so left out
        ranks = []
        for answer in group.execute.gather(slots=True):
            init = fields(last(answer, 5, b""))
            entries = [fields(entry) for entry in init.get(1, [])]
            ranks.append({
                "type": last(answer, 1, 0),
                "rank": last(answer, 2, 0),
                "status": signed(last(answer, 3, 0)),
                "map": {text(entry, 1): text(entry, 2) for entry in entries},
                "kv_cache_descs": [{
                    "npu_block_num": signed(last(desc, 1, 0)),
                    "block_size": signed(last(desc, 2, 0)),
                    "compression_ratio": last(desc, 3, 0),
                    "cache_type": signed(last(desc, 4, 0)),
                } for desc in map(fields, init.get(2, []))],
            })
        self.result["init"] = ranks
        for rank, answer in enumerate(ranks):
            if answer["map"].get("status") != "ok":
                raise Failed("rank %d: init failed: %s" % (rank, answer["map"].get("status")))
        # Each release looks in its own place.
        blocks = {
            "old": lambda rank: int(rank["map"]["npuBlockNum"]),
            "new": lambda rank: rank["kv_cache_descs"][0]["npu_block_num"],
        }[self.args.release]
        merged = {key: min(int(rank["map"][key]) for rank in ranks) for key in ("cpuBlockNum", "maxPositionEmbeddings")}
        merged["blocks"] = min(map(blocks, ranks))
        self.result["init_merged"] = merged

    def step(self, groups, forward_type):
        self.group.execute.send(model_request(groups, forward_type))
        return describe_outputs(self.group.execute.gather(slots=False)[0])

    def infer(self):
        prompts = list(enumerate(self.args.prompts))
        steps = [self.step([prefill_group(seq_id, prompt) for seq_id, prompt in prompts], 0)]
        for count in range(self.args.steps):
            steps.append(self.step([decode_group(seq_id, len(prompt) + 1 + count) for seq_id, prompt in prompts], 1))
        self.result["steps"] = steps

    def cleanup(self):
        """No reply; that it worked shows when the same sequence starts again."""
        group = self.group
        seq_ids = list(range(len(self.args.prompts)))
        group.execute.send(request(wire.TEXT_GENERATOR_CLEANUP, 7, packed(1, seq_ids)))
        self.result["after_cleanup"] = self.step([prefill_group(0, self.args.prompts[0])], 0)
        group.execute.send(request(wire.EOS_CLEANUP, 7, packed(1, seq_ids)))

    def link(self):
        group = self.group
        host = words(1, "192.0.2.1") + words(2, "cluster-1")
        device = words(1, "192.0.2.2") + number(2, 1)
        info = number(1, 2) + number(3, 1) + chunk(5, chunk(1, host) + chunk(2, device))
        group.link.send(request(wire.PD_LINK, 4, chunk(1, info)))
        # Linking has no reply; the state is asked for until it is final.
        deadline = time.monotonic() + self.args.timeout
        while True:
            group.link.send(request(wire.PD_LINK_STATUS_QUERY, 11))
            status = fields(last(group.link.gather(slots=False)[0], 6, b""))
            if not (status.get(3) or status.get(4)) or time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        self.result["link_status"] = {
            "failed": [{"cluster_id": text(link, 1), "code": last(link, 2, 0)}
                       for link in map(fields, status.get(1, []))],
            "success": [link.decode() for link in status.get(2, [])],
            "running": [link.decode() for link in status.get(3, [])],
            "waiting": [link.decode() for link in status.get(4, [])],
        }

    def lora(self):
        group = self.group
        answers = []
        for operation in (0, 0, 1, 1):
            payload = words(1, "base") + words(2, "adapter") + words(3, "/adapters/adapter") + number(4, operation)
            group.link.send(request(wire.LORA_OPERATION, 8, payload))
            answer = fields(last(group.link.gather(slots=False)[0], 9, b""))
            answers.append({"name": text(answer, 1), "status": last(answer, 2, 0)})
        self.result["lora"] = answers

    def transfer(self):
        group = self.group
        infos = b""
        for seq_id, prompt in enumerate(self.args.prompts):
            table = block_table(seq_id, len(prompt))
            infos += chunk(1, chunk(1, table) + chunk(2, table) + words(3, "cluster-1") +
                           chunk(4, prefill_group(seq_id, prompt)))
        group.transfer.send(request(wire.KV_TRANSFER, 6, infos))
        self.result["transfer"] = [
            {text(result, 1): last(result, 2, 0)
             for result in map(fields, fields(last(answer, 8, b"")).get(1, []))}
            for answer in group.transfer.gather(slots=True)]

    def recover(self):
        group = self.group
        self.result["recover"] = []
        for execute_type, command in RECOVER_COMMANDS:
            group.recover.send(request(execute_type, 10, words(1, command)))
            ranks = []
            for answer in group.recover.gather(slots=True):
                result = fields(last(answer, 11, b""))
                ranks.append({
                    "type": last(answer, 1, 0),
                    "npu_device_id": signed(last(result, 1, 0)),
                    "command_result": signed(last(result, 2, 0)),
                    "error_msg": text(result, 3),
                    "answered": 11 in answer,
                })
            self.result["recover"].append({"command": command, "ranks": ranks})

    def finalize(self):
        for channel in (self.group.execute, self.group.transfer, self.group.link):
            channel.send(request(wire.MODEL_FINALIZE))

    def run(self):
        self.init()
        for phase in PHASES:
            if phase not in self.args.skip:
                getattr(self, phase)()
        self.finalize()


def parse_command_line():
    parser = argparse.ArgumentParser(description="A legacy coordinator, for tests.", allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--prefix", help="default /<pid>_0")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for any one wait")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds from finalize to SIGTERM")
    parser.add_argument("--steps", type=int, default=3, help="decode steps")
    parser.add_argument("--prompts", default="1,2,3;40,50,60,70", help="token ids, sequences apart by ;")
    parser.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help="for MODEL_INIT")
    parser.add_argument("--skip", default="", help="phases to leave out: " + ",".join(PHASES))
    parser.add_argument("--release", choices=("old", "new"), default="new",
                        help="where the number of device blocks is read: the init map, or the KV cache descriptor")
    parser.add_argument("--legacy-sizes", action="store_true", help="the contract's region sizes")
    for suffix in LEGACY_SIZES:
        parser.add_argument("--%s-sizes" % suffix.replace("_", "-"), metavar="REQUEST,RESPONSE", help="bytes")
    parser.add_argument("command", nargs="+", help="worker command, after --")
    args = parser.parse_args()
    args.prompts = [[int(token) for token in prompt.split(",")] for prompt in args.prompts.split(";")]
    args.config = dict(entry.split("=", 1) for entry in args.config)
    args.skip = [phase for phase in args.skip.split(",") if phase]
    if args.ranks < 1 or not set(args.skip) <= set(PHASES):
        parser.error("--ranks 1 or more; phases are " + ", ".join(PHASES))
    return args


def region_sizes(args):
    slots = args.ranks * STRIDE
    small = {"execute": (MIB, slots), "shared_sync_link": (64 * KIB, 64 * KIB),
             "recover_command": (64 * KIB, slots), "transfer": (MIB, slots)}
    sizes = dict(LEGACY_SIZES if args.legacy_sizes else small)
    for suffix in sizes:
        told = getattr(args, suffix + "_sizes")
        if told:
            request_size, response_size = told.split(",")
            sizes[suffix] = (int(request_size), int(response_size))
    return sizes


def on_signal(signal_number, _frame):
    raise Failed("signal %d" % signal_number)


def main():
    args = parse_command_line()
    for signal_number in SIGNALS:
        signal.signal(signal_number, on_signal)
    os.umask(0o077)
    group = Group(args)
    result = {"ranks": args.ranks, "prefix": group.prefix}
    try:
        try:
            # Half-made names would escape the clean-up.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                group.create(region_sizes(args))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            group.start()
            Life(group, args, result).run()
        except (Failed, OSError, wire.WireError, ValueError, LookupError) as error:
            result["error"] = str(error) or repr(error)
            for worker in group.workers:
                worker.kill()
        result["exit_statuses"] = group.stop()
    finally:
        # A second signal finds no handler that could cut this short.
        for signal_number in SIGNALS:
            signal.signal(signal_number, signal.SIG_IGN)
        for worker in group.workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
        result["names_gone"] = group.destroy()
    result["errors"] = group.errors
    result["leftovers"] = group.leftovers()
    result["ok"] = "error" not in result and not result["leftovers"] and not any(result["exit_statuses"])
    print(json.dumps(result, indent=2))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
