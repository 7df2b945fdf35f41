#!@COX_PYTHON@
"""bench Python: ways in which a Python program asks N processes, each a subject of the benchmark (subject.h).

--by call, submit, await: the package coxswain, with workers in Python, or in C (--workers c). --by pipe, zmq, vllm,
mpi4py, ray: the peers, multiprocessing.connection, pyzmq, vLLM's MessageQueue, MPI, and Ray's compiled graphs. --by
columns: a decode step of --sequences rows in one Python worker; a sample is the time from the taken step to numpy
arrays of its tokens, positions and block table.

--what bytes: each worker sums the request. object: it calls a method of a worker object with small arguments; of
coxswain --by method does, and --by small has bytes of that size instead. array: a method returns the array of --bytes
that it gets. --by memcpy: what the array's bytes cost at least, one copy into memory that all workers share, and for
each worker one into its reply's memory and one out of it. --by copies: the same copies by the processes that have to
make them, with a wakeup of each worker and one of the coordinator, and nothing else.

The environment variable COXSWAIN_BENCH_PYTHON names other interpreters to run in, with colons between: the first one,
and for a peer that it lacks the first that has it.
"""

import argparse
import array
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import mmap
import multiprocessing.connection
import pickle
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import resource_tracker, shared_memory

BIN = os.path.dirname(os.path.abspath(__file__))
MODULES = {"zmq": "zmq", "vllm": "vllm", "mpi4py": "mpi4py", "ray": "ray"}
HERE, *ELSEWHERE = os.environ.get("COXSWAIN_BENCH_PYTHON", "").split(":")
if HERE and os.path.abspath(HERE) != sys.executable:
    os.execv(HERE, [HERE, os.path.abspath(__file__), *sys.argv[1:]])
ELSEWHERE = [path for path in ELSEWHERE if os.access(path, os.X_OK)]
if ELSEWHERE and "--by" in sys.argv:
    by = sys.argv[sys.argv.index("--by") + 1]
    if by in MODULES and not importlib.util.find_spec(MODULES[by]):
        os.environ["COXSWAIN_BENCH_PYTHON"] = ":".join(map(os.path.abspath, ELSEWHERE))
        os.execv(ELSEWHERE[0], [ELSEWHERE[0], os.path.abspath(__file__), *sys.argv[1:]])
os.environ.pop("COXSWAIN_BENCH_PYTHON", None)
sys.path.insert(0, os.path.join(BIN, "..", "python"))
sys.dont_write_bytecode = False  # of the package, which would take each subject longer than all else

try:
    import numpy
except ImportError:
    numpy = None

PR_SET_PDEATHSIG = 1
# load.h
LOAD_SUM = 0x636F787377616E21
LOAD_SIZE_MIN = 16
WORD = (1 << 64) - 1
# coxswain.h, steps.h
WORKER_FLAG, COXSWAIN_WORDS, STEPS_WORDS = "--worker", "bytes", "steps"
SAMPLES = "COXSWAIN_BENCH_SAMPLES"


class Skip(Exception):
    """Cannot run here."""


# ---- what every worker does, and what is checked (load.h) ----


def answerer(rank, reply_size):
    tail = rank.to_bytes(8, sys.byteorder) + b"\x5a" * (reply_size - LOAD_SIZE_MIN)
    add, read, words = numpy.add.reduce, numpy.frombuffer, numpy.uint64
    order = sys.byteorder

    def answer(request):
        return int(add(read(request, words))).to_bytes(8, order) + tail

    return answer


class Load:
    def __init__(self, options):
        self.request = bytearray(os.urandom(options.bytes // 8 * 8))
        self.request[:LOAD_SIZE_MIN] = bytes(LOAD_SIZE_MIN)
        balance = (
            LOAD_SUM - int(numpy.add.reduce(numpy.frombuffer(self.request, numpy.uint64))) & WORD
        )
        self.request[8:16] = balance.to_bytes(8, sys.byteorder)
        self.reply_size = options.reply_bytes
        self.ranks = [rank.to_bytes(8, sys.byteorder) for rank in range(options.ranks)]
        self.number = 0

    def next(self):
        self.number += 1
        self.request[:8] = self.number.to_bytes(8, sys.byteorder)
        return self.request

    def check(self, replies):
        total = (LOAD_SUM + self.number & WORD).to_bytes(8, sys.byteorder)
        for rank, reply in zip(self.ranks, replies, strict=True):
            if reply[:16] != total + rank or len(reply) != self.reply_size:
                raise ValueError(f"rank {int.from_bytes(rank, sys.byteorder)} answered wrongly")


class Engine:
    """The worker object of all that calls methods."""

    def __init__(self, rank=None):
        if rank is None:
            import coxswain

            rank = coxswain.rank()
        self.rank = rank

    def step(self, number, tokens, *, scale):
        return {"rank": self.rank, "sum": scale * (number + sum(tokens))}

    def same(self, array):
        return array

    def answer(self, request):
        name, args, kwargs = request
        return getattr(self, name)(*args, **kwargs)


class ObjectLoad:
    def __init__(self, options):
        self.number = 0

    def next(self):
        self.number += 1
        return "step", (self.number, [1, 2, 3, 4]), {"scale": 2}

    def check(self, replies):
        for rank, reply in enumerate(replies):
            if reply != {"rank": rank, "sum": 2 * self.number + 20}:
                raise ValueError(f"rank {rank} answered wrongly: {reply}")


class SmallLoad(ObjectLoad):
    """Bytes of about the size of that."""

    def next(self):
        super().next()
        return self.number.to_bytes(80, "little")

    def check(self, replies):
        if any(reply != self.number.to_bytes(80, "little") for reply in replies):
            raise ValueError("a rank answered wrongly")


class ArrayLoad:
    def __init__(self, options):
        self.array = numpy.arange(options.bytes // 8, dtype=numpy.float64)

    def next(self):
        self.array[0] += 1
        self.array[-1] -= 1
        return "same", (self.array,), {}

    def check(self, replies):
        ends = self.array[0], self.array[-1], len(self.array)
        if any((reply[0], reply[-1], len(reply)) != ends for reply in replies):
            raise ValueError("a rank answered wrongly")


def load_of(options):
    return {"bytes": Load, "object": ObjectLoad, "array": ArrayLoad}[options.what](options)


# ---- Coxswain ----


class Group:
    def __init__(self, options):
        self.load = Load(options)
        self.start(options, [COXSWAIN_WORDS, str(options.bytes), str(options.reply_bytes)])

    def start(self, options, words, **more):
        """Workers in Python are forked by a server that has what they import, as the peers' are."""
        import coxswain
        from coxswain._internal.fork_server import ForkServer

        program = [sys.executable, os.path.abspath(__file__)]
        if options.workers == "c":
            program = [os.path.join(BIN, "coxswain-bench")]
        self.server = None
        if options.workers == "python":
            self.server = ForkServer([], "__main__:worker_main", [words], fork=True)
        self.group = coxswain.Group(
            [*program, WORKER_FLAG, *words],
            options.ranks,
            attach=options.attach,
            on_line=lambda rank, line: print(f"[rank {rank}] {line}", file=sys.stderr),
            **more,
        )
        if self.server:
            self.group._fork_from([self.server.fileno()] * options.ranks)
        self.group.start()

    def stop(self):
        self.group.stop()
        if self.server:
            self.server.stop()


class Call(Group):
    def round(self, request):
        return self.group.call(request)


class Small(Group):
    """As Call, with bytes of the size of the objects."""

    def __init__(self, options):
        self.load = SmallLoad(options)
        self.start(options, ["echo"])

    def round(self, request):
        return self.group.call(request)


class Method(Group):
    def __init__(self, options):
        self.load = load_of(options)
        self.start(options, ["methods"], codec="pickle")

    def round(self, request):
        name, args, kwargs = request
        return self.group.call_method(name, *args, **kwargs)


class Memcpy:
    def __init__(self, options):
        self.load = ArrayLoad(options)
        array = self.load.array
        self.shared = numpy.empty_like(array)
        self.pairs = [
            (numpy.empty_like(array), numpy.empty_like(array)) for _ in range(options.ranks)
        ]

    def round(self, request):
        numpy.copyto(self.shared, request[1][0])
        for reply, result in self.pairs:
            numpy.copyto(reply, self.shared)
            numpy.copyto(result, reply)
        return [result for _, result in self.pairs]

    def stop(self):
        pass


class Submit(Group):
    def round(self, request):
        return self.group.submit(request).result()


class Await(Group):
    def __init__(self, options):
        import asyncio  # which the others' subjects need not wait for

        super().__init__(options)
        self.loop = asyncio.new_event_loop()

    def rounds(self, count):
        return self.loop.run_until_complete(self._rounds(count))

    async def _rounds(self, count):
        samples = array.array("Q", bytes(8 * count))
        for i in range(count):
            request = self.load.next()
            begin = time.monotonic_ns()
            replies = await self.group.submit(request)
            samples[i] = time.monotonic_ns() - begin
            self.load.check(replies)
        return samples

    def stop(self):
        super().stop()
        self.loop.close()


def coxswain_worker(reply_size):
    import coxswain

    coxswain.serve(answerer(coxswain.rank(), reply_size))


# ---- peers ----


class Peer:
    """Workers by fork, each with a pipe to the coordinator, through which a peer may be set up."""

    def __init__(self, options):
        self.load = load_of(options)
        self.has_bytes = options.what == "bytes"
        self.prepare(options)
        prctl, parent = ctypes.CDLL(None).prctl, os.getpid()
        self.pids, self.pipes = [], []
        for rank in range(options.ranks):
            ours, theirs = multiprocessing.connection.Pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                    if os.getppid() == parent:
                        answer = answerer(rank, options.reply_bytes)
                        self.work(rank, theirs, answer if self.has_bytes else Engine(rank).answer)
                except BaseException as failure:
                    print(f"worker {rank}: {failure!r}", file=sys.stderr)
                os._exit(1)
            theirs.close()
            self.pids.append(pid)
            self.pipes.append(ours)
        self.connect(options)

    def prepare(self, options):
        """Before the fork."""

    def connect(self, options):
        """After it."""

    def stop(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)


class Copies(Peer):
    """What Memcpy copies, by the processes that have to, and a semaphore each way: no transport."""

    def prepare(self, options):
        count = options.bytes // 8
        self.shared, *self.replies = (
            numpy.frombuffer(mmap.mmap(-1, 8 * count)) for _ in range(options.ranks + 1)
        )
        self.results = [numpy.empty(count) for _ in self.replies]
        self.asked, self.replied = (
            [os.eventfd(0, os.EFD_SEMAPHORE) for _ in self.replies] for _ in range(2)
        )

    def work(self, rank, pipe, answer):
        asked, replied, reply = self.asked[rank], self.replied[rank], self.replies[rank]
        while True:
            os.eventfd_read(asked)
            numpy.copyto(reply, self.shared)
            os.eventfd_write(replied, 1)

    def round(self, request):
        numpy.copyto(self.shared, request[1][0])
        for asked in self.asked:
            os.eventfd_write(asked, 1)
        for replied, reply, result in zip(self.replied, self.replies, self.results, strict=True):
            os.eventfd_read(replied)
            numpy.copyto(result, reply)
        return self.results


class Pipe(Peer):
    def work(self, rank, pipe, answer):
        while self.has_bytes:
            pipe.send_bytes(answer(pipe.recv_bytes()))
        while True:
            pipe.send(answer(pipe.recv()))

    def round(self, request):
        if not self.has_bytes:
            for pipe in self.pipes:
                pipe.send(request)
            return [pipe.recv() for pipe in self.pipes]
        for pipe in self.pipes:
            pipe.send_bytes(request)
        return [pipe.recv_bytes() for pipe in self.pipes]


class Zmq(Peer):
    def prepare(self, options):
        try:
            self.zmq = importlib.import_module("zmq")
        except ImportError:
            raise Skip("pyzmq is not installed") from None
        self.folder = tempfile.mkdtemp(prefix=f"coxswain-bench-{os.getpid()}-")
        self.requests, self.replies = (
            f"ipc://{self.folder}/requests",
            f"ipc://{self.folder}/replies",
        )

    def work(self, rank, pipe, answer):
        zmq = self.zmq
        context = zmq.Context()
        requests, replies = context.socket(zmq.SUB), context.socket(zmq.PUSH)
        requests.subscribe(b"")
        pipe.recv_bytes()
        requests.connect(self.requests)
        replies.connect(self.replies)
        number = rank.to_bytes(4, sys.byteorder)
        replies.send(number)
        # The coordinator repeats it until all are subscribed.
        while requests.recv() != b"end":
            replies.send(number)
        replies.send(number + b"end")
        while self.has_bytes:
            replies.send(number + answer(requests.recv()))
        while True:
            reply = answer(self.unpacked(requests.recv_multipart(copy=False)))
            replies.send_multipart([number, *self.packed(reply)], copy=False)

    @staticmethod
    def packed(value):
        """Arrays are parts of their own, which zmq takes without a copy."""
        buffers = []
        pickled = pickle.dumps(value, 5, buffer_callback=buffers.append)
        return [pickled, *buffers]

    @staticmethod
    def unpacked(frames):
        return pickle.loads(frames[0].buffer, buffers=[frame.buffer for frame in frames[1:]])

    def connect(self, options):
        zmq = self.zmq
        self.context = zmq.Context()
        self.publisher, self.sink = self.context.socket(zmq.PUB), self.context.socket(zmq.PULL)
        self.publisher.bind(self.requests)
        self.sink.bind(self.replies)
        for pipe in self.pipes:
            pipe.send_bytes(b"go")
        for _ in self.pipes:
            self.sink.recv()
        ready = set()
        while len(ready) < options.ranks:
            self.publisher.send(b"")
            while self.sink.poll(20):
                ready.add(self.sink.recv())
        self.publisher.send(b"end")
        for _ in self.pipes:
            while not self.sink.recv().endswith(b"end"):
                pass

    def round(self, request):
        if not self.has_bytes:
            self.publisher.send_multipart(self.packed(request), copy=False)
            replies = [None] * len(self.pipes)
            for _ in replies:
                number, *frames = self.sink.recv_multipart(copy=False)
                replies[int.from_bytes(number.buffer, sys.byteorder)] = self.unpacked(frames)
            return replies
        self.publisher.send(request)
        replies = [b""] * len(self.pipes)
        for _ in replies:
            reply = self.sink.recv()
            replies[int.from_bytes(reply[:4], sys.byteorder)] = reply[4:]
        return replies

    def stop(self):
        super().stop()
        self.context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


class Vllm(Peer):
    """As vLLM's multiproc_executor: one queue to all workers, and one from each."""

    def prepare(self, options):
        name = "vllm.distributed.device_communicators.shm_broadcast"
        try:
            self.queue = importlib.import_module(name).MessageQueue
        except ImportError:
            raise Skip("vllm is not installed") from None
        resource_tracker.ensure_running()  # one for all workers, which outlives them

    def work(self, rank, pipe, answer):
        replies = self.queue(1, 1)
        pipe.send(replies.export_handle())
        requests = self.queue.create_from_handle(pipe.recv(), rank)
        requests.wait_until_ready()
        replies.wait_until_ready()
        while True:
            replies.enqueue(answer(requests.dequeue()))

    def connect(self, options):
        self.requests = self.queue(options.ranks, options.ranks)
        for pipe in self.pipes:
            pipe.send(self.requests.export_handle())
        handles = [pipe.recv() for pipe in self.pipes]
        self.names = [handle.buffer_handle[3] for handle in handles]
        self.replies = [self.queue.create_from_handle(handle, 0) for handle in handles]
        self.requests.wait_until_ready()
        for replies in self.replies:
            replies.wait_until_ready()

    def round(self, request):
        self.requests.enqueue(request)
        return [replies.dequeue() for replies in self.replies]

    def stop(self):
        """Its workers, which made the queues of replies, are killed: their names go with them."""
        super().stop()
        for name in getattr(self, "names", ()):
            with contextlib.suppress(FileNotFoundError):
                memory = shared_memory.SharedMemory(name)
                memory.close()
                memory.unlink()


class Mpi:
    """Workers that MPI_Comm_spawn starts, once for all rows: those of a row have a communicator, the others sleep in a
    socket. Objects by bcast and gather, arrays by Bcast and Gather."""

    world = spawned = None

    def __init__(self, options):
        self.load = load_of(options)
        self.what = options.what
        if not Mpi.world:
            Mpi.world = self.start_world(options.world)
        ranks = range(1, options.ranks + 1)
        self.tell(ranks, f"{options.ranks} {options.what} {options.bytes}")
        self.all = mpi_row(Mpi.world, options.ranks)
        if self.what == "array":
            self.replies = numpy.empty((options.ranks + 1, options.bytes // 8))

    @classmethod
    def start_world(cls, size):
        if not importlib.util.find_spec("mpi4py"):
            raise Skip("mpi4py is not installed")
        # Its launcher refuses root, and more processes than processors.
        folder = cls.folder_that_is_removed()
        os.environ.update(
            OMPI_MCA_orte_tmpdir_base=folder,
            OMPI_MCA_btl_vader_backing_directory=folder,
            OMPI_ALLOW_RUN_AS_ROOT="1",
            OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
            OMPI_MCA_rmaps_base_oversubscribe="1",
            OMPI_MCA_mpi_yield_when_idle="1",
        )
        cls.hide_input()
        mpi = importlib.import_module("mpi4py.MPI")
        words = [os.path.abspath(__file__), WORKER_FLAG, "mpi", str(os.getpid())]
        cls.spawned = mpi.COMM_SELF.Spawn(sys.executable, words, size)
        world = cls.spawned.Merge(False)
        world.Barrier()
        return world

    @staticmethod
    def tell(ranks, text):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            for rank in ranks:
                out.sendto(text.encode(), mpi_address(os.getpid(), rank))

    @staticmethod
    def hide_input():
        """The launcher inherits standard input, and reads it for a worker: the conductor's lines were lost."""
        sys.stdin = os.fdopen(os.dup(0))  # which no program inherits
        with open(os.devnull, encoding="ascii") as null:
            os.dup2(null.fileno(), 0)

    @staticmethod
    def folder_that_is_removed():
        """For files that Open MPI leaves when it is killed: a child removes it after this process."""
        folder = tempfile.mkdtemp(prefix=f"coxswain-bench-{os.getpid()}-", dir="/dev/shm")
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()
            os.close(writer)
            null = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            os.read(reader, 1)
            # Its launcher ends later, on a busy machine by seconds, and makes files until then.
            last_seen = time.monotonic()
            while time.monotonic() < last_seen + 5:
                if os.path.exists(folder):
                    last_seen = time.monotonic()
                    shutil.rmtree(folder, ignore_errors=True)
                time.sleep(0.1)
            os._exit(0)
        os.close(reader)
        return folder

    def round(self, request):
        if self.what == "array":
            array = request[1][0]
            self.all.Bcast(array, 0)
            self.all.Gather(array, self.replies, 0)
            return self.replies[1:]
        self.all.bcast(request, 0)
        return self.all.gather(None, 0)[1:]

    def stop(self):
        if self.what == "object":
            self.all.bcast(None, 0)
        else:
            self.all.Bcast(numpy.full(self.replies.shape[1], numpy.nan), 0)
        self.all.Free()

    @classmethod
    def finish(cls):
        if cls.world:
            cls.tell(range(1, cls.world.Get_size()), "0")
            mpi_part(cls.world, cls.spawned)


def mpi_address(coordinator, rank):
    return f"\0coxswain-bench-mpi4py-{coordinator}-{rank}"


def mpi_row(world, ranks):
    """A communicator of the coordinator and so many workers; all of them call it."""
    return world.Create_group(world.Get_group().Incl(range(ranks + 1)))


def mpi_part(world, between):
    """Else one that ends first leaves the other in MPI_Finalize, writing to a closed connection."""
    world.Barrier()
    world.Free()
    between.Disconnect()


def mpi_worker(coordinator):
    from mpi4py import MPI

    parent = MPI.Comm.Get_parent()
    world = parent.Merge(True)
    rank = world.Get_rank()
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    inbox.bind(mpi_address(coordinator, rank))
    world.Barrier()
    engine = Engine(rank - 1)
    while (words := inbox.recv(100).decode().split()) != ["0"]:
        group = mpi_row(world, int(words[0]))
        array = numpy.empty(int(words[2]) // 8)
        while words[1] == "array":
            group.Bcast(array, 0)
            if numpy.isnan(array[0]):
                break
            group.Gather(engine.same(array), None, 0)
        while words[1] == "object" and (request := group.bcast(None, 0)) is not None:
            group.gather(engine.answer(request), 0)
        group.Free()
    mpi_part(world, parent)


class Ray:
    """An actor for each rank, started once for all rows, and a compiled graph that asks those of a row."""

    ray = None
    actors = ()

    def __init__(self, options):
        self.load = load_of(options)
        if not Ray.ray:
            Ray.start_world(options.world)
        from ray.dag import InputNode, MultiOutputNode

        with InputNode() as request:
            graph = MultiOutputNode(
                [one.answer.bind(request) for one in Ray.actors[: options.ranks]]
            )
        self.graph = graph.experimental_compile(_buffer_size_bytes=max(1 << 20, 2 * options.bytes))

    @classmethod
    def start_world(cls, size):
        try:
            ray = importlib.import_module("ray")
        except ImportError:
            raise Skip("ray is not installed") from None
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=size,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=1 << 30,
        )
        actor = ray.remote(num_cpus=1)(Engine)
        cls.ray, cls.actors = ray, [actor.remote(rank) for rank in range(size)]

    def round(self, request):
        return self.ray.get(self.graph.execute(request))

    def stop(self):
        self.graph.teardown(kill_actors=False)

    @classmethod
    def finish(cls):
        if cls.ray:
            cls.ray.shutdown()


# ---- columns of a step ----


class Columns:
    """The benchmark's own coordinator of steps, and a Python worker that leaves its samples in a file."""

    def __init__(self, options):
        self.file = tempfile.NamedTemporaryFile(prefix=f"coxswain-bench-{os.getpid()}-")
        self.steps = subprocess.Popen(
            [
                os.path.join(BIN, "coxswain-bench"),
                "--subject",
                "steps",
                "--attach",
                options.attach,
                "--sequences",
                str(options.sequences),
                "--worker-program",
                os.path.abspath(__file__),
                "--ranks",
                str(options.ranks),
                "--bytes",
                str(options.bytes),
                "--reply-bytes",
                str(options.reply_bytes),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, SAMPLES: self.file.name},
        )
        self.expect(b"ready")

    def expect(self, line):
        said = self.steps.stdout.readline()
        if said != line + b"\n":
            raise ValueError(f"steps: {said!r}")

    def rounds(self, count):
        self.steps.stdin.write(b"slice %d\n" % count)
        self.steps.stdin.flush()
        self.expect(b"done %d" % count)
        self.steps.stdout.read(8 * count)
        # Rank 0's; it wrote each before it replied.
        self.file.seek(-8 * count, os.SEEK_END)
        samples = array.array("Q")
        samples.frombytes(self.file.read(8 * count))
        return samples

    def stop(self):
        self.steps.communicate(b"quit\n")
        self.file.close()


def steps_worker():
    import coxswain
    from coxswain._internal import worker as _worker

    worker = coxswain.Worker()
    path = os.environ.get(SAMPLES)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND) if path else -1
    begin = 0

    class TimedBatch(coxswain.Batch):
        def __init__(self, *arguments):
            nonlocal begin
            begin = time.monotonic_ns()
            super().__init__(*arguments)

    if path:
        _worker.Batch = TimedBatch

    @worker.execute
    def step(batch):
        tokens, positions = numpy.asarray(batch.tokens), numpy.asarray(batch.positions)
        blocks = numpy.asarray(batch.block_table())
        took = time.monotonic_ns() - begin
        if len(tokens) != len(positions) or len(blocks) != batch.row_count:
            raise ValueError("columns of another step")
        del blocks
        if fd >= 0 and worker.rank == 0:
            os.write(fd, took.to_bytes(8, sys.byteorder))
        # steps.c: token_after
        ends = positions[numpy.asarray(batch.starts)[1:] - 1] + 1
        after = numpy.asarray(batch.ids) * 31 + ends & 0x7FFF
        return numpy.where(numpy.asarray(batch.emits), after, -1).astype(numpy.int32)

    worker.serve()


# ---- the conductor's lines ----


def say(line, data=b""):
    text = line.replace("\n", " ").encode() + b"\n" + data
    while text:
        text = text[os.write(1, text) :]


def rounds(subject, count):
    if hasattr(subject, "rounds"):
        return subject.rounds(count)
    samples = array.array("Q", bytes(8 * count))
    load, round_ = subject.load, subject.round
    for i in range(count):
        request = load.next()
        begin = time.monotonic_ns()
        replies = round_(request)
        samples[i] = time.monotonic_ns() - begin
        load.check(replies)
    return samples


def rate(subject, count, period_ns):
    samples = array.array("Q")
    at = time.monotonic_ns()
    for _ in range(count):
        at += period_ns
        time.sleep(max(0, at - time.monotonic_ns()) / 1e9)
        samples += rounds(subject, 1)
    return samples


def serve(subject):
    """Returns whether the row has ended, and not the program."""
    for line in iter(sys.stdin.buffer.readline, b""):
        words = line.split()
        if words in ([b"quit"], [b"end"]):
            return words == [b"end"]
        if words[0] == b"slice":
            say(f"done {int(words[1])}", rounds(subject, int(words[1])).tobytes())
        elif words[0] == b"rate":
            say(
                f"done {int(words[1])}",
                rate(subject, int(words[1]), max(1, int(words[2]))).tobytes(),
            )
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


SUBJECTS = {
    "small": Small,
    "method": Method,
    "memcpy": Memcpy,
    "copies": Copies,
    "mpi4py": Mpi,
    "ray": Ray,
    "call": Call,
    "submit": Submit,
    "await": Await,
    "pipe": Pipe,
    "zmq": Zmq,
    "vllm": Vllm,
    "columns": Columns,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=SUBJECTS, required=True)
    parser.add_argument("--what", choices=("bytes", "object", "array"), default="bytes")
    parser.add_argument("--workers", choices=("c", "python"), default="python")
    parser.add_argument("--attach", choices=("named", "sealed"), default="named")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--reply-bytes", type=int, required=True)
    parser.add_argument("--world", type=int, default=0)
    if numpy is None:
        say("skip numpy is not installed")
        return 1
    subject, words = None, sys.argv[1:]
    try:
        while words is not None:
            options = parser.parse_args(words)
            options.world = max(options.world, options.ranks)
            subject = start(options)
            rounds(subject, 1)
            say("ready")
            ended = serve(subject)
            subject.stop()
            subject = None
            gc.collect()  # what it has mapped
            words = next_row() if ended else None
    except Skip as reason:
        say(f"skip {reason}")
        return 1
    except Exception as failure:
        say(f"error {failure!r}")
        return 1
    finally:
        if subject:
            subject.stop()
        for peer in Mpi, Ray:
            peer.finish()
    return 0


def start(options):
    if (
        options.ranks < 1
        or options.bytes % 8
        or min(options.bytes, options.reply_bytes) < LOAD_SIZE_MIN
    ):
        raise ValueError("expected --ranks N --bytes B --reply-bytes R, and B in words of 8 bytes")
    if SUBJECTS[options.by] in (Call, Submit, Await, Columns, Small, Method):
        try:
            importlib.import_module("coxswain")
        except ImportError as failure:
            raise Skip(f"the package coxswain is not built: {failure}") from None
    return SUBJECTS[options.by](options)


def worker_main(words):
    if words[0] == STEPS_WORDS:
        steps_worker()
    elif words[0] == "mpi":
        mpi_worker(int(words[1]))
    elif words[0] == "echo":
        import coxswain

        coxswain.serve(bytes)
    elif words[0] == "methods":
        import coxswain

        coxswain.serve(Engine(), codec="pickle")
    else:
        coxswain_worker(int(words[2]))


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER_FLAG]:
        worker_main(sys.argv[2:])
    else:
        sys.exit(main())
