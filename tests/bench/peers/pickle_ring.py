#!/usr/bin/python3
"""bench pickle ring: what Python engines broadcast steps with, as a subject of the benchmark (subject.h): objects are
pickled into chunks of shared memory, every chunk with a flag of the writer and one of each reader; all wait by looking
at flags and giving the CPU away in between. One ring to all workers, one reply ring from each.

Opaque: the request is one bytearray; every worker sums it up and answers as load.h says. With --sequences S the request
is a decode step: a list of S objects as a scheduler has them; every worker gathers tokens and positions from them, rank
0 answers with a list of tokens for each, the others with a sum."""
import argparse
import array
import ctypes
import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing import shared_memory

try:
    import numpy
except ImportError:
    numpy = None

PR_SET_PDEATHSIG = 1
LOAD_SUM = 0x636F787377616E21
WORD = (1 << 64) - 1
LOAD_SIZE_MIN = 16
CHUNK_COUNT_MAX = 10
RING_SIZE_MAX = 256 << 20
# Of a pickle, beyond the bytes in it.
PICKLE_OVERHEAD = 256
SEQUENCE_SIZE_MAX = 1024
VOCABULARY = 151936
BLOCK_SIZE = 128


class Ring:
    """One writer, many readers; made by the coordinator before it forks. Stores are seen in order, which x86 promises
    and other processors do not; objects are a chunk each."""

    def __init__(self, name, reader_count, object_size_max):
        self.chunk_size = object_size_max
        self.chunk_count = max(2, min(CHUNK_COUNT_MAX, RING_SIZE_MAX // object_size_max))
        self.reader_count = reader_count
        self.flags_at = self.chunk_count * self.chunk_size
        self.memory = shared_memory.SharedMemory(
            name=f"coxswain-bench-{os.getpid()}-{name}", create=True,
            size=self.flags_at + self.chunk_count * (1 + reader_count))
        self.bytes = self.memory.buf
        self.at = 0
        self.all_read = b"\1" * reader_count

    def _next(self):
        flag = self.flags_at + self.at * (1 + self.reader_count)
        chunk = self.at * self.chunk_size
        self.at = (self.at + 1) % self.chunk_count
        return flag, chunk

    def put(self, thing):
        data = pickle.dumps(thing, protocol=pickle.HIGHEST_PROTOCOL)
        if len(data) > self.chunk_size:
            raise ValueError(f"{len(data)} bytes, a chunk has {self.chunk_size}")
        flag, chunk = self._next()
        read = slice(flag + 1, flag + 1 + self.reader_count)
        shared = self.bytes
        while shared[flag] and shared[read] != self.all_read:
            os.sched_yield()
        shared[flag] = 0
        shared[chunk:chunk + len(data)] = data
        shared[read] = bytes(self.reader_count)
        shared[flag] = 1

    def get(self, reader):
        flag, chunk = self._next()
        mine = flag + 1 + reader
        shared = self.bytes
        while not shared[flag] or shared[mine]:
            os.sched_yield()
        thing = pickle.loads(shared[chunk:chunk + self.chunk_size])
        shared[mine] = 1
        return thing


def sum_words(data):
    """load_sum: of 64-bit words, the last one filled up with zeros."""
    whole = len(data) // 8 * 8
    words = numpy.frombuffer(data, numpy.uint64, whole // 8)
    return (int(words.sum(dtype=numpy.uint64)) + int.from_bytes(data[whole:], sys.byteorder)) & WORD


# ---- opaque bytes ----

class Opaque:
    def __init__(self, options):
        self.ranks = options.ranks
        self.reply_size = options.reply_bytes
        self.request = bytearray(os.urandom(1 << 16) * (options.bytes // (1 << 16) + 1))[:options.bytes]
        self.request[:LOAD_SIZE_MIN] = bytes(LOAD_SIZE_MIN)
        balance = (LOAD_SUM - sum_words(self.request)) & WORD
        self.request[8:16] = balance.to_bytes(8, sys.byteorder)
        self.request_size_max = options.bytes + PICKLE_OVERHEAD
        self.reply_size_max = options.reply_bytes + PICKLE_OVERHEAD
        self.filler = b"\x5a" * (options.reply_bytes - LOAD_SIZE_MIN)

    def number(self, number):
        self.request[:8] = number.to_bytes(8, sys.byteorder)
        return self.request

    def answer(self, request, rank):
        return sum_words(request).to_bytes(8, sys.byteorder) + rank.to_bytes(8, sys.byteorder) + self.filler

    def check(self, number, replies):
        total = ((LOAD_SUM + number) & WORD).to_bytes(8, sys.byteorder)
        for rank, reply in enumerate(replies):
            if (len(reply) != self.reply_size or reply[:8] != total
                    or reply[8:16] != rank.to_bytes(8, sys.byteorder)):
                raise ValueError(f"rank {rank} answered wrongly")

    def advance(self, replies):
        pass


# ---- a decode step ----

@dataclass
class SamplingParams:
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 40
    repetition_penalty: float = 1.05
    max_tokens: int = 512
    seed: int = 0
    logprobs: bool = False


@dataclass
class Sequence:
    request_id: str
    sequence_id: int
    token_id: int
    position: int
    block_ids: list
    do_sample: bool = True
    is_prompt: bool = False
    sampling_params: SamplingParams = field(default_factory=SamplingParams)


class Step:
    """As a scheduler does: a sequence has many steps, and gets the token of each reply."""

    def __init__(self, options):
        self.sequences = [
            Sequence(f"cmpl-{i:08x}", i, i % VOCABULARY, 300 + i % 200, [4 * i + block for block in range(4)],
                     sampling_params=SamplingParams(seed=i))
            for i in range(options.sequences)]
        self.request_size_max = options.sequences * SEQUENCE_SIZE_MAX + 4096
        self.reply_size_max = options.sequences * 64 + 4096

    def number(self, number):
        self.sum = sum(sequence.token_id + sequence.position for sequence in self.sequences)
        self.tokens = [[(sequence.token_id + sequence.position) % VOCABULARY] for sequence in self.sequences]
        return self.sequences

    def answer(self, sequences, rank):
        tokens = numpy.array([sequence.token_id for sequence in sequences])
        positions = numpy.array([sequence.position for sequence in sequences])
        if rank == 0:
            return [[token] for token in ((tokens + positions) % VOCABULARY).tolist()]
        return int(tokens.sum() + positions.sum())

    def check(self, number, replies):
        if replies[0] != self.tokens or any(reply != self.sum for reply in replies[1:]):
            raise ValueError("wrong tokens, or a wrong sum")

    def advance(self, replies):
        for sequence, tokens in zip(self.sequences, replies[0], strict=True):
            sequence.token_id = tokens[0]
            sequence.position += 1
            # A context that is full begins again, in the blocks it has.
            if sequence.position == len(sequence.block_ids) * BLOCK_SIZE:
                sequence.position = 300


# ---- processes ----

class Workers:
    def __init__(self, load, count):
        self.load = load
        self.number = 0
        self.requests = Ring("requests", count, load.request_size_max)
        self.replies = [Ring(f"replies-{rank}", 1, load.reply_size_max) for rank in range(count)]
        prctl = ctypes.CDLL(None).prctl
        coordinator = os.getpid()
        self.pids = []
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                self._work(rank, prctl, coordinator)
            self.pids.append(pid)
        # All have it mapped: nothing is left behind, however they end.
        for ring in [self.requests] + self.replies:
            ring.memory.unlink()

    def _work(self, rank, prctl, coordinator):
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            while os.getppid() == coordinator:
                self.replies[rank].put(self.load.answer(self.requests.get(rank), rank))
        except BaseException as failure:
            print(f"worker {rank}: {failure!r}", file=sys.stderr)
        os.kill(coordinator, signal.SIGTERM)
        os._exit(1)

    def round(self):
        self.number += 1
        request = self.load.number(self.number)
        begin = time.monotonic_ns()
        self.requests.put(request)
        replies = [ring.get(0) for ring in self.replies]
        self.load.check(self.number, replies)
        took = time.monotonic_ns() - begin
        self.load.advance(replies)
        return took

    def stop(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)
        for ring in [self.requests, *self.replies]:
            ring.memory.close()


def say(line, data=b""):
    text = line.replace("\n", " ").encode() + b"\n" + data
    while text:
        text = text[os.write(1, text):]


def rounds(workers, count, period_ns):
    samples = array.array("Q", bytes(8 * count))
    at = time.monotonic_ns()
    for i in range(count):
        if period_ns:
            at += period_ns
            time.sleep(max(0, at - time.monotonic_ns()) / 1e9)
        samples[i] = workers.round()
    say(f"done {count}", samples.tobytes())


def serve(workers):
    """Returns whether the row has ended, and not the program."""
    for line in iter(sys.stdin.buffer.readline, b""):
        words = line.split()
        if words in ([b"quit"], [b"end"]):
            return words == [b"end"]
        if words[0] == b"slice":
            rounds(workers, int(words[1]), 0)
        elif words[0] == b"rate":
            rounds(workers, int(words[1]), max(1, int(words[2])))
        elif words[0] == b"idle":
            time.sleep(int(words[1]) / 1000)
            say("done 0")
        else:
            raise ValueError(f"what is {line!r}?")
    return False


def next_row():
    """The arguments of the row that follows; None: none does."""
    say("done 0")
    words = sys.stdin.buffer.readline().decode().split()
    return words[1:] if words[:1] == ["again"] else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--reply-bytes", type=int, required=True)
    parser.add_argument("--sequences", type=int, default=0)
    if numpy is None:
        say("skip numpy is not installed")
        return 1
    workers, words = None, sys.argv[1:]
    try:
        while words is not None:
            options = parser.parse_args(words)
            if options.ranks < 1 or min(options.bytes, options.reply_bytes) < LOAD_SIZE_MIN:
                raise ValueError("expected --ranks N --bytes B --reply-bytes R")
            workers = Workers(Step(options) if options.sequences else Opaque(options), options.ranks)
            workers.round()
            say("ready")
            ended = serve(workers)
            workers.stop()
            workers = None
            words = next_row() if ended else None
    except (OSError, ValueError) as failure:
        say(f"error {failure}")
        return 1
    finally:
        if workers:
            workers.stop()
    return 0


if __name__ == "__main__":
    status = main()
    # Not exit: the interpreter would complain about memory that is still looked at.
    os._exit(status)
