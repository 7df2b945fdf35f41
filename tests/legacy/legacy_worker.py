#!/usr/bin/env python3
"""A worker as the MindIE-LLM executor's own workers behave, from docs/wire.md alone.

It stands in for a worker of the other project: it knows the named objects, the order of the semaphores, the command
line and the protobuf fields, and nothing of Coxswain. Its "model" gives for every sequence the token

    (sum of the prompt token ids seen for the sequence + replies given for it before) % 97

Environment, for tests:
    COX_LEGACY_DELAY_MS=ms       wait so long before every MODEL_INFER reply
    COX_LEGACY_FAULT=rank:text   that rank reports text on the error channel at its first MODEL_INFER (and replies)
    COX_LEGACY_FAIL=rank:text    that rank's first MODEL_INFER fails: no outputs, text in the reply and as a report
    COX_LEGACY_INIT=form         how the number of device blocks is told at init: "new" (the default; since March 2026) in
                                 the KV cache descriptor alone, "old" (up to 3.0.0.beta.2) in the map alone, "mixed" old on
                                 even ranks and new on odd ones, "neither" on rank 1 and new on the others
    COX_LEGACY_NEEDS=key,key     end at an init whose configuration lacks one of them, too; key=value: with another value
    COX_LEGACY_FINISH=n:reason   the n-th token of every sequence has this finish reason; 7 and 9 come with token 0
    COX_LEGACY_STEP_FAULT=rank:n:reason:text  that rank's n-th MODEL_INFER fails as the original's do: text is reported,
                                 and then the reply ends every sequence of the step with this reason and token 0
    COX_LEGACY_HANG=rank:n       that rank never replies to its n-th MODEL_INFER
    COX_LEGACY_SPLIT=1           split fuse is on: as the original's, it takes the lengths of rows from their splits alone
    COX_LEGACY_HELD=n            the n-th MODEL_INFER has token -1, which is none; at each cleanup the sequences that are still
                                 held are printed
    COX_LEGACY_LINK_ERROR=n      the status of its replies to PD_LINK_STATUS_QUERY, which have no text
    COX_LEGACY_UNLINK=1          at a clean exit, wait until the resource tracker has unlinked the opened region names

As the original's, a worker that gets SIGTERM posts all semaphores of its channels, whether a request is under way or not,
and ends with status 1: its threads do not survive that it closes them.

As with the original, Python's resource tracker, a process beside each worker, unlinks by name every region that the worker
had opened: after the worker's end, however that came, and unless it is killed itself before.

Exit status: 0 after MODEL_FINALIZE, 1 SIGTERM or an init that lacks something, 2 command line or names refused, 3 bytes that
make no sense, 4 parent gone.
"""

import argparse
import ctypes
import errno
import os
import signal
import stat
import struct
import sys
import threading
import time
from multiprocessing import resource_tracker, shared_memory

SHM_DIR = "/dev/shm"
# What the original refuses to start without. It takes rank, world size and device from its own flags.
REQUIRED_TEXTS = ("model_id", "distributed_enable")
REQUIRED_NUMBERS = ("cpu_mem", "npu_mem", "max_seq_len", "max_iter_times", "max_prefill_tokens", "block_size")
REQUIRED_LISTS = ("npu_device_ids",)
SLOT_STRIDE = 512 * 1024

(MODEL_INIT, MODEL_INFER, MODEL_FINALIZE, MODEL_INFER_SECOND, PD_LINK, KV_TRANSFER, TEXT_GENERATOR_CLEANUP,
 LORA_OPERATION, REMOTE_MODEL_INIT, EOS_CLEANUP, PAUSE_COMMAND_EXEC, CLEAR_COMMAND_EXEC, RECOVER_COMMAND_EXEC,
 START_COMMAND_EXEC, PD_LINK_STATUS_QUERY, EXECUTE_ERROR, PAUSE_COMMAND_EXEC_ROCE) = range(17)

RECOVER_TYPES = (PAUSE_COMMAND_EXEC, PAUSE_COMMAND_EXEC_ROCE, CLEAR_COMMAND_EXEC, RECOVER_COMMAND_EXEC,
                 START_COMMAND_EXEC)


class WireError(Exception):
    """Bytes that cannot be what the contract says."""


class Refused(Exception):
    """A name that is missing, or not ours, or open to others."""


# ---- protobuf, as much as is needed; a proto3 sender leaves out what is zero or empty ----


def varint(value):
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def present(field, value):
    """An integer, bool or enum that is sent also when it is zero: `optional` fields."""
    return varint(field << 3) + varint(int(value))


def number(field, value):
    """An integer, bool or enum."""
    return present(field, value) if value else b""


def chunk(field, value):
    """A message, an element of a repeated field, or an `optional` string: told also when it is empty."""
    if isinstance(value, str):
        value = value.encode()
    return varint(field << 3 | 2) + varint(len(value)) + bytes(value)


def words(field, value):
    """A string or bytes."""
    return chunk(field, value) if value else b""


def packed(field, values):
    return chunk(field, b"".join(varint(v) for v in values)) if values else b""


def packed_floats(field, values):
    return chunk(field, struct.pack("<%df" % len(values), *values)) if values else b""


def single(field, value):
    """A float."""
    return varint(field << 3 | 5) + struct.pack("<f", value) if value else b""


def string_map(field, entries):
    return b"".join(chunk(field, chunk(1, key) + chunk(2, str(value))) for key, value in entries.items())


def read_varint(data, at):
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise WireError("a varint without end")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value & ((1 << 64) - 1), at


def fields(data):
    """{field number: [values in order]}; integers unsigned, everything else bytes."""
    found = {}
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        wire_type = tag & 7
        if wire_type == 0:
            value, at = read_varint(data, at)
        else:
            if wire_type == 2:
                size, at = read_varint(data, at)
            elif wire_type in (1, 5):
                size = 8 if wire_type == 1 else 4
            else:
                raise WireError("wire type %d" % wire_type)
            value = data[at:at + size]
            if len(value) != size:
                raise WireError("a field that ends beyond its message")
            at += size
        found.setdefault(tag >> 3, []).append(value)
    return found


def last(found, field, default):
    return found[field][-1] if field in found else default


def text(found, field):
    return last(found, field, b"").decode()


def signed(value):
    return value - (1 << 64) if value >> 63 else value


def integers(found, field):
    """A repeated integer field, packed or not."""
    values = []
    for value in found.get(field, []):
        if isinstance(value, int):
            values.append(signed(value))
            continue
        at = 0
        while at < len(value):
            item, at = read_varint(value, at)
            values.append(signed(item))
    return values


def int64_array(data):
    """Token ids, block tables and sequence ids inside `bytes` fields."""
    if len(data) % 8:
        raise WireError("an int64 array of %d bytes" % len(data))
    return list(struct.unpack("<%dq" % (len(data) // 8), data))


# ---- named objects ----

libc = ctypes.CDLL(None, use_errno=True)
libc.sem_open.restype = ctypes.c_void_p
libc.sem_wait.argtypes = [ctypes.c_void_p]
libc.sem_post.argtypes = [ctypes.c_void_p]


def check_file(path):
    """What a legacy worker checks before it opens a name."""
    try:
        info = os.lstat(path)
    except OSError as error:
        raise Refused("%s: %s" % (path, error.strerror)) from error
    if not stat.S_ISREG(info.st_mode):
        raise Refused("%s is no regular file" % path)
    if stat.S_IMODE(info.st_mode) != 0o600:
        raise Refused("%s has mode %04o, 0600 is expected" % (path, stat.S_IMODE(info.st_mode)))
    if info.st_uid != os.geteuid():
        raise Refused("%s belongs to user %d, not to %d" % (path, info.st_uid, os.geteuid()))


class Semaphore:
    def __init__(self, name):
        check_file("%s/sem.%s" % (SHM_DIR, name.lstrip("/")))
        self.name = name
        self.handle = libc.sem_open(name.encode(), 0)
        if not self.handle:
            raise Refused("sem_open %s: %s" % (name, os.strerror(ctypes.get_errno())))

    def wait(self):
        while libc.sem_wait(self.handle):
            if ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), "sem_wait " + self.name)

    def post(self):
        if libc.sem_post(self.handle):
            raise OSError(ctypes.get_errno(), "sem_post " + self.name)


class Region:
    def __init__(self, name):
        self.path = "%s/%s" % (SHM_DIR, name.lstrip("/"))
        check_file(self.path)
        # Registers the name with the resource tracker, also where it was not created here.
        try:
            self.memory = shared_memory.SharedMemory(name=name.lstrip("/"))
        except FileNotFoundError as error:
            raise Refused("%s: %s" % (self.path, error.strerror)) from error
        self.map, self.size = self.memory.buf, self.memory.size
        if self.size < 4:
            raise Refused("%s has %d bytes" % (self.path, self.size))

    def read_frame(self):
        size, = struct.unpack_from("<I", self.map, 0)
        if size > self.size - 4:
            raise WireError("%s: a frame of %d bytes in a region of %d" % (self.path, size, self.size))
        return bytes(self.map[4:4 + size])

    def write_frame(self, offset, room, data):
        room = min(room, self.size - offset)
        if 4 + len(data) > room:
            raise WireError("%s: %d bytes do not fit at %d" % (self.path, 4 + len(data), offset))
        struct.pack_into("<I", self.map, offset, len(data))
        self.map[offset + 4:offset + 4 + len(data)] = data


class Channel:
    """One two-way channel, as seen by one rank."""

    def __init__(self, prefix, suffix, rank):
        base = prefix + suffix
        self.rank = rank
        self.request = Region(base + "_request")
        self.response = Region(base + "_response")
        self.request_produce = Semaphore("%s_request_produce_%d" % (base, rank))
        self.request_consume = Semaphore("%s_request_consume_%d" % (base, rank))
        self.response_produce = Semaphore("%s_response_produce_%d" % (base, rank))
        self.response_consume = Semaphore("%s_response_consume_%d" % (base, rank))

    def receive(self):
        self.request_consume.wait()
        data = self.request.read_frame()
        self.request_produce.post()
        return fields(data)

    def reply_at_slot(self, data):
        """Every rank's payload counts: each at its own slot."""
        self.response_produce.wait()
        self.response.write_frame(self.rank * SLOT_STRIDE, SLOT_STRIDE, data)
        self.response_consume.post()

    def reply_of_first(self, data):
        """Rank 0's payload counts, at offset 0; the others only take their turn."""
        self.response_produce.wait()
        if self.rank == 0:
            self.response.write_frame(0, self.response.size, data)
        self.response_consume.post()


class ErrorChannel:
    def __init__(self, prefix):
        base = prefix + "_execute_error_response"
        self.region = Region(base)
        self.produce = Semaphore(base + "_produce_0")
        self.consume = Semaphore(base + "_consume_0")

    def report(self, data):
        self.produce.wait()
        self.region.write_frame(0, self.region.size, data)
        self.consume.post()


# ---- the worker ----


def odd_number(given):
    """Why a value that must be a number, or a list of numbers, is none; "": all are."""
    values = [(key, given[key]) for key in REQUIRED_NUMBERS]
    values += [(key, item) for key in REQUIRED_LISTS for item in given[key].split(",")]
    for key, value in values:
        try:
            int(value)
        except ValueError:
            return "%s is '%s', expected a number" % (key, value)
    return ""


class Sequence:
    def __init__(self):
        self.prompt_sum = 0
        self.replies = 0


class Worker:
    def __init__(self, args):
        self.rank = args.rank
        self.device_id = args.npu_device_id
        self.execute = Channel(args.shm_name_prefix, "_execute", self.rank)
        self.link = Channel(args.shm_name_prefix, "_shared_sync_link", self.rank)
        self.recover = Channel(args.shm_name_prefix, "_recover_command", self.rank)
        self.transfer = Channel(args.shm_name_prefix, "_transfer", self.rank)
        self.error = ErrorChannel(args.shm_name_prefix)

        self.delay_s = int(os.environ.get("COX_LEGACY_DELAY_MS", "0")) / 1000
        fault_rank, _, self.fault_text = os.environ.get("COX_LEGACY_FAULT", "").partition(":")
        self.fault_pending = fault_rank != "" and int(fault_rank) == self.rank
        fail_rank, _, self.fail_text = os.environ.get("COX_LEGACY_FAIL", "").partition(":")
        self.fail_pending = fail_rank != "" and int(fail_rank) == self.rank
        self.init_form = os.environ.get("COX_LEGACY_INIT", "new")
        self.finish_at, self.finish_reason = map(int, os.environ.get("COX_LEGACY_FINISH", "0:0").split(":"))
        fault = os.environ.get("COX_LEGACY_STEP_FAULT", "-1:0:0:").split(":", 3)
        self.step_fault_at = int(fault[1]) if int(fault[0]) == self.rank else 0
        self.step_fault_reason, self.step_fault_text = int(fault[2]), fault[3]
        hang_rank, hang_at = map(int, os.environ.get("COX_LEGACY_HANG", "-1:0").split(":"))
        self.hang_at = hang_at if hang_rank == self.rank else 0
        self.steps = 0
        self.link_error = int(os.environ.get("COX_LEGACY_LINK_ERROR", "0"))
        self.splits = os.environ.get("COX_LEGACY_SPLIT") == "1"
        self.spoilt_at = int(os.environ.get("COX_LEGACY_HELD", "0"))
        self.needs = [key for key in os.environ.get("COX_LEGACY_NEEDS", "").split(",") if key]

        self.sequences = {}
        self.links = []
        self.adapters = {}
        self.ended = threading.Event()
        self.exit_status = 0

    def response(self, execute_type, field, payload, status=0):
        return number(1, execute_type) + number(2, self.rank) + number(3, status) + chunk(field, payload)

    # one function per operation; request is the decoded ExecuteRequest

    def model_init(self, request):
        """Numbers that differ by rank, so that the coordinator's minimum can be seen."""
        given = {text(entry, 1): text(entry, 2) for entry in map(fields, request.get(2, []))}
        missing = [need for need in (*REQUIRED_TEXTS, *REQUIRED_NUMBERS, *REQUIRED_LISTS, *self.needs)
                   if not (need in given or tuple(need.split("=", 1)) in given.items())]
        refusal = "the configuration has no " + ", ".join(missing) if missing else odd_number(given)
        if refusal:
            print("legacy worker %d: ValueError: %s" % (self.rank, refusal), file=sys.stderr, flush=True)
            os._exit(1)  # without a reply
        blocks = 100 + self.rank
        results = {
            "status": "ok",
            "cpuBlockNum": blocks,
            "maxPositionEmbeddings": 4096 - self.rank,
            "memPoolId": "pool-%d" % self.rank,
        }
        form = self.init_form
        if form == "mixed":
            form = ("old", "new")[self.rank % 2]
        if form == "old":
            results["npuBlockNum"] = blocks
        results = string_map(1, results)
        if form != "old":
            told = 0 if form == "neither" and self.rank == 1 else blocks
            results += chunk(2, number(1, told) + number(2, 128) + number(3, 1) + number(4, 0))
        self.execute.reply_at_slot(self.response(MODEL_INIT, 5, results))

    def report(self, words_of_it):
        """Neither rank nor status: a report never says which rank it is of, and any status but 0 would be dropped."""
        self.error.report(number(1, EXECUTE_ERROR) + chunk(4, chunk(5, words_of_it)))

    def infer(self, request, execute_type):
        if self.fault_pending:
            self.fault_pending = False
            self.report(self.fault_text)
        if self.fail_pending:
            self.fail_pending = False
            self.execute.reply_of_first(self.response(execute_type, 4, chunk(5, self.fail_text)))
            self.report(self.fail_text)
            return
        self.steps += 1
        if self.steps == self.hang_at:
            threading.Event().wait()
        groups = [fields(group) for group in fields(last(request, 3, b"")).get(1, [])]
        if self.steps == self.step_fault_at:
            self.report(self.step_fault_text)
            outputs = b"".join(chunk(1, self.ended_group(group)) for group in groups)
        else:
            outputs = b"".join(chunk(1, self.infer_group(group)) for group in groups)
        if self.delay_s:
            time.sleep(self.delay_s)
        self.execute.reply_of_first(self.response(execute_type, 4, outputs))

    def ended_group(self, group):
        return b"".join(chunk(1, number(1, seq_id) + number(2, seq_id) + packed(3, [0]) + packed_floats(4, [0.0]) +
                              number(5, self.step_fault_reason) + number(7, 1) + number(11, 1))
                        for seq_id in int64_array(last(group, 3, b"")))

    def infer_group(self, group):
        text(group, 1)  # a string that is no UTF-8 is the end of this worker
        prefill, last_chunk = integers(group, 17), integers(group, 18)
        starts, ends = integers(group, 19), integers(group, 20)
        seq_ids = int64_array(last(group, 3, b""))
        prompt = int64_array(last(group, 5, b""))
        lengths = int64_array(last(group, 4, b""))
        if len(lengths) != len(seq_ids):
            # Without a length for each of them the prompt is the first one's.
            lengths = [len(prompt)] + [0] * (len(seq_ids) - 1)
        if self.splits:
            if not len(prefill) == len(last_chunk) == len(starts) == len(ends) == len(seq_ids):
                raise WireError("split fuse is on, and a row has no split")
            lengths = [end - start for start, end in zip(starts, ends)]
        samples = b""
        at = 0
        for i, (seq_id, length) in enumerate(zip(seq_ids, lengths)):
            is_prefill = prefill[i] if i < len(prefill) else last(group, 2, 0)
            if is_prefill and (seq_id not in self.sequences or self.sequences[seq_id].replies):
                self.sequences[seq_id] = Sequence()  # a prompt that had replies begins again
            sequence = self.sequences[seq_id]
            if is_prefill:
                tokens = prompt[at:at + length]
                at += length
                if i < len(ends) and len(tokens) >= ends[i]:
                    tokens = tokens[starts[i]:ends[i]]  # the whole prompt was sent, not its chunk alone
                sequence.prompt_sum += sum(tokens)
                if i < len(last_chunk) and not last_chunk[i]:
                    samples += chunk(1, number(1, seq_id) + number(2, seq_id))
                    continue
            token = (sequence.prompt_sum + sequence.replies) % 97
            sequence.replies += 1
            reason = self.finish_reason if sequence.replies == self.finish_at else 0
            token = 0 if reason in (7, 9) else -1 if self.steps == self.spoilt_at else token
            samples += chunk(1, number(1, seq_id) + number(2, seq_id) + packed(3, [token]) +
                             packed_floats(4, [-0.5]) + number(5, reason) + number(7, 0) + single(8, -0.5) +
                             number(11, 1))
        return samples

    def clean_up(self, request):
        for seq_id in integers(fields(last(request, 7, b"")), 1):
            self.sequences.pop(seq_id, None)
        if self.spoilt_at:
            print("held: %s" % sorted(self.sequences), flush=True)

    def pd_link(self, request):
        for info in fields(last(request, 4, b"")).get(1, []):
            info = fields(info)
            for cluster_id in self.cluster_ids(info, 6):
                if cluster_id in self.links:
                    self.links.remove(cluster_id)
            for cluster_id in self.cluster_ids(info, 5):
                if cluster_id not in self.links:
                    self.links.append(cluster_id)

    @staticmethod
    def cluster_ids(info, field):
        return [text(fields(host), 2) for remote in info.get(field, []) for host in fields(remote).get(1, [])]

    def link_status(self, request):
        status = b"".join(chunk(2, cluster_id) for cluster_id in self.links)
        self.link.reply_of_first(self.response(PD_LINK_STATUS_QUERY, 6, status, self.link_error))

    def lora(self, request):
        operation = fields(last(request, 8, b""))
        name = text(operation, 2)
        if last(operation, 4, 0) == 0:
            status = 2 if name in self.adapters else 0
            self.adapters.setdefault(name, text(operation, 3))
        else:
            status = 0 if self.adapters.pop(name, None) is not None else 3
        self.link.reply_of_first(self.response(LORA_OPERATION, 9, words(1, name) + number(2, status)))

    def pull(self, request):
        results = b""
        for info in fields(last(request, 6, b"")).get(1, []):
            group = fields(last(fields(info), 4, b""))
            results += chunk(1, words(1, text(group, 1)) + number(2, 0))
        self.transfer.reply_at_slot(self.response(KV_TRANSFER, 8, results))

    def command(self, request, execute_type):
        result = number(1, self.device_id) + number(2, 0) + words(3, "")
        self.recover.reply_at_slot(self.response(execute_type, 11, result))

    # one function per channel; False ends its thread

    def on_execute(self, execute_type, request):
        if execute_type == MODEL_INIT:
            self.model_init(request)
        elif execute_type in (MODEL_INFER, MODEL_INFER_SECOND):
            self.infer(request, execute_type)
        elif execute_type in (TEXT_GENERATOR_CLEANUP, EOS_CLEANUP):
            self.clean_up(request)
        else:
            return False
        return True

    def on_link(self, execute_type, request):
        if execute_type == PD_LINK:
            self.pd_link(request)
        elif execute_type == PD_LINK_STATUS_QUERY:
            self.link_status(request)
        elif execute_type == LORA_OPERATION:
            self.lora(request)
        else:
            return False
        return True

    def on_recover(self, execute_type, request):
        if execute_type not in RECOVER_TYPES:
            return False
        self.command(request, execute_type)
        return True

    def on_transfer(self, execute_type, request):
        if execute_type != KV_TRANSFER:
            return False
        self.pull(request)
        return True

    def end(self, exit_status):
        if not self.ended.is_set():
            self.exit_status = exit_status
            self.ended.set()

    def serve(self, name, channel, handler):
        try:
            while True:
                request = channel.receive()
                execute_type = last(request, 1, 0)
                if execute_type == MODEL_FINALIZE:
                    break
                if not handler(execute_type, request):
                    raise WireError("%s: execute type %s does not belong here" % (name, execute_type))
        except Exception as error:  # pylint: disable=broad-except
            print("legacy worker %d: %s: %s" % (self.rank, name, error), file=sys.stderr)
            self.end(3)
        # FINALIZE comes on several channels; the one in which inferences are answered is the last to stop for.
        if channel is self.execute:
            self.end(0)

    def terminated(self, _signal, _frame):
        for channel in (self.execute, self.link, self.transfer, self.recover):
            for semaphore in (channel.request_consume, channel.request_produce, channel.response_consume,
                              channel.response_produce):
                semaphore.post()
        os._exit(1)

    def run(self, parent_pid):
        signal.signal(signal.SIGTERM, self.terminated)
        for name, channel, handler in (("execute", self.execute, self.on_execute),
                                       ("transfer", self.transfer, self.on_transfer),
                                       ("shared_sync_link", self.link, self.on_link),
                                       ("recover_command", self.recover, self.on_recover)):
            threading.Thread(target=self.serve, args=(name, channel, handler), daemon=True).start()
        first_parent = os.getppid()
        while not self.ended.wait(0.1):
            if os.getppid() != first_parent or not alive(parent_pid):
                self.end(4)
        if self.exit_status == 0 and os.environ.get("COX_LEGACY_UNLINK") == "1":
            resource_tracker._resource_tracker._stop()  # pylint: disable=protected-access
        return self.exit_status


def alive(pid):
    """A process that is dead but not yet waited for counts as dead."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def parse_command_line():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--local_rank", type=int, required=True)
    parser.add_argument("--local_world_size", type=int, required=True)
    parser.add_argument("--npu_num_per_dp", type=int, required=True)
    parser.add_argument("--npu_device_id", type=int, required=True)
    parser.add_argument("--parent_pid", type=int, required=True)
    parser.add_argument("--shm_name_prefix", required=True)
    parser.add_argument("--global_rank", type=int)
    parser.add_argument("--global_world_size", type=int)
    args = parser.parse_args()
    if not 0 <= args.local_rank < args.local_world_size or args.npu_num_per_dp < 1:
        parser.error("rank %d of %d, %d per group" %
                     (args.local_rank, args.local_world_size, args.npu_num_per_dp))
    # The rank in the group; a node with several data-parallel groups has a prefix for each.
    args.rank = args.local_rank % args.npu_num_per_dp
    return args


def main():
    args = parse_command_line()
    if not alive(args.parent_pid):
        return 4
    try:
        worker = Worker(args)
    except (Refused, ValueError) as error:
        print("legacy worker %d: %s" % (args.rank, error), file=sys.stderr)
        return 2
    status = worker.run(args.parent_pid)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that wait in libc cannot be joined.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
