"""Programs of ranks, as functions that coxswain.Group calls in each."""

import dataclasses
import gc
import json
import os
import signal
import sys
import threading
import time
import types

import coxswain


def echo():
    coxswain.serve(lambda data: data)


def interrupted_beside():
    """A second of its threads gets SIGINT when the first, which has replied, sleeps again: no event
    says that it does. Where it does not yet, the signal ends it all the same."""
    replied = threading.Event()

    def beside():
        replied.wait()
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def reply(data):
        replied.set()
        return bytes(data)

    threading.Thread(target=beside, daemon=True).start()
    coxswain.serve(reply)


def shout():
    coxswain.serve(lambda data: bytes(data).upper())


def who():
    """Replies rank, rank count, incarnation and pid."""
    worker = coxswain.Worker()
    text = f"{worker.rank} {worker.rank_count} {worker.incarnation} {os.getpid()}"

    @worker.opaque
    def reply(_):
        return text.encode()

    worker.serve()


def names_of_coordinator():
    """Replies its pid, and the names of its coordinator's groups in /dev/shm before it attaches."""
    stem = f"{os.getppid()}_"
    names = [str(os.getpid()), *(name for name in os.listdir("/dev/shm") if stem in name)]
    coxswain.serve(lambda _: " ".join(names).encode())


def act(data):
    """Does what the request says."""
    words = bytes(data).split()
    if not words:
        return b""
    verb, numbers = words[0].decode(), words[1:]
    if numbers and coxswain.rank() not in [int(number) for number in numbers]:
        return b"not me"
    if verb == "raise":
        raise ValueError("the reason")
    if verb == "kill":
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if verb == "exit":
        os._exit(7)
    if verb == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if verb == "hang":
        threading.Event().wait()
    if verb == "print":
        print("a line", flush=True)
        print("an error line", file=sys.stderr, flush=True)
    return verb.encode()


def obey():
    coxswain.serve(act)


def wait(data):
    """b"RANK PATH": this rank replies when there is a file of that path, the others at once."""
    rank, path = bytes(data).split(b" ", 1)
    while coxswain.rank() == int(rank) and not os.path.exists(path):
        time.sleep(0.001)
    return rank


def hold():
    coxswain.serve(wait)


def wait_for_file():
    """Replies when the file that the request names is there."""

    def reply(data):
        path = bytes(data).decode()
        while not os.path.exists(path):
            time.sleep(0.001)
        return b"done"

    coxswain.serve(reply)


def keep_view():
    """Keeps a view of each request, which it must not."""
    kept = []

    def reply(data):
        verb = bytes(data).decode()
        if verb == "itself":
            kept.append(data)
        elif verb == "slice":
            kept.append(data[1:])
        elif verb == "array":
            import numpy  # pylint: disable=import-outside-toplevel

            kept.append(numpy.frombuffer(data, dtype=numpy.uint8))
        elif verb == "returned":
            return data
        elif verb == "slice returned":
            return data[2:]
        return b"ok"

    coxswain.serve(reply)


def out_of_order():
    """Takes four requests, then replies to them from other threads, the last one first."""
    worker = coxswain.Worker()
    try:
        while True:
            requests = [worker.next() for _ in range(4)]
            for request in reversed(requests):
                thread = threading.Thread(target=request.reply, args=(bytes(request.data)[::-1],))
                thread.start()
                thread.join()
    except coxswain.Closed:
        worker.leave()


def never_attach():
    threading.Event().wait()


def attach_once():
    """Obeys; the process that replaces it never attaches."""
    if os.environ["COXSWAIN_INCARNATION"] != "1":
        never_attach()
    obey()


def fail_early():
    print("no GPU here", flush=True)
    sys.exit(3)


def references():
    """The references of this interpreter, if it counts them, and its objects and memory blocks."""
    gc.collect()
    total = getattr(sys, "gettotalrefcount", lambda: 0)()
    return total, len(gc.get_objects()), sys.getallocatedblocks()


def count_references():
    """Echoes; replies to "count" with what references() says."""

    def reply(data):
        if bytes(data) == b"count":
            return " ".join(map(str, references())).encode()
        if bytes(data) == b"raise":
            raise ValueError("no")
        return data

    coxswain.serve(reply)


def two_takers():
    """Replies with the exception of a second thread, which takes while the first one does."""
    worker = coxswain.Worker()
    said = []

    def second():
        while not said:
            try:
                request = worker.next(timeout=0.001)
                if request:
                    request.reply(b"too early")
            except coxswain.Error as error:
                said.append(type(error).__name__)

    worker.attach()
    thread = threading.Thread(target=second)
    thread.start()
    while True:
        try:
            request = worker.next()
            request.reply(" ".join(said).encode())
        except coxswain.Busy:
            pass  # the second one was first
        except coxswain.Closed:
            break
    worker.leave()
    thread.join()


def woken():
    """Is woken while it takes, and then replies how often."""
    worker = coxswain.Worker()
    worker.attach()
    count = 0
    threading.Thread(target=worker.wake).start()
    try:
        while True:
            request = worker.next()
            if request is None:
                count += 1
            else:
                request.reply(b"%d" % count)
    except coxswain.Closed:
        worker.leave()


def one_row(sequence, block):
    """What KvTransfer.step reads of a batch: one row that begins and fits one block."""
    none = memoryview(b"")
    return types.SimpleNamespace(
        row_count=1,
        ids=[sequence],
        slots=[0],
        starts=[0, 3],
        positions=[0, 1, 2],
        finished=[],
        swap_in=none,
        copies=none,
        block_table=lambda: {(0, 0): block},
    )


def kv_errors():
    """Links this rank to itself, and replies how each of these pulls ends."""
    from coxswain import KvBlocks, KvLayout, KvTransfer, LinkRequest, Pull, PullRequest, RemoteGroup

    worker = coxswain.Worker()
    transfer = KvTransfer(worker)
    coxswain.Worker.pull_cancelled = False  # these pulls are not the coordinator's

    def link(pools, epoch=3, cancelled=(), unlink=()):
        remotes = [RemoteGroup("me", pools, None, epoch)] if pools is not None else []
        transfer._link(LinkRequest("decode", False, remotes, list(unlink), list(cancelled), b""))

    def pull(source, target, cluster="me", name="x", **more):
        request = PullRequest([Pull(name, cluster, source, target, **more)], b"")
        error = transfer._pull(request)[0].error
        return f"{type(error).__name__}: {error}" if error else ""

    @worker.opaque
    def run(_):
        blocks = KvBlocks(4, 64)
        pool = transfer.open(blocks, KvLayout(1, 0, 1, 1, 16, 4))
        blocks.memory[:64] = b"s" * 64
        blocks.give(0, 5)
        link([pool])
        now = time.monotonic()
        found = {"right": pull([[0]], [[1]], source_sequence=5, target_sequence=6)}
        assert bytes(blocks.memory[64:128]) == b"s" * 64 and blocks.user(1) == 6, found
        found["of another user"] = pull([[0]], [[2]], source_sequence=8)[:11]
        found["no such block"] = pull([[9]], [[1]])
        found["no such target"] = pull([[0]], [[4]])
        found["a target twice"] = pull([[0, 1]], [[2, 2]])
        found["no table"] = pull([], [])
        found["unequal tables"] = pull([[0, 1]], [[2]])
        found["no such group"] = pull([[0]], [[2]], cluster="you")
        found["of another epoch"] = pull([[0]], [[2]], epoch=4)
        found["too late"] = pull([[0]], [[2]], deadline=now - 1)
        found["lease over"] = pull([[0]], [[2]], lease=now - 1)
        link(None, cancelled=["gone"])
        found["cancelled"] = pull([[0]], [[2]], name="gone")
        assert pull([[0]], [[2]], deadline=now + 60, lease=now + 60, epoch=3) == ""
        layout = dataclasses.replace(pool.layout, head_dim=8)
        link([dataclasses.replace(pool, layout=layout)], epoch=4)
        found["another layout"] = pull([[0]], [[2]])
        link([pool, pool], epoch=5)
        found["more ranks"] = pull([[0]], [[2]])
        link([], epoch=6)
        found["no caches"] = pull([[0]], [[2]])
        link([pool], epoch=7)
        assert pull([[0]], [[2]]) == "" and transfer._status()[0].state == "linked"
        link(None, unlink=["me"])
        found["unlinked"] = pull([[0]], [[2]])
        # A step writes block 2, which a pull has left to another sequence. It fails, then succeeds.
        assert pull([[0]], [[2]], target_sequence=6) == "NotFound: there is no link to me"
        link([pool], epoch=8)
        assert pull([[0]], [[2]], target_sequence=6) == "" and blocks.user(2) == 6
        step = one_row(sequence=9, block=2)
        for failure in (ValueError, None):
            try:
                with transfer.step(step):
                    found_inside = blocks.user(2)
                    if failure:
                        raise failure
            except ValueError:
                assert blocks.user(2) == 0, "a step that failed gives blocks"
            assert found_inside == 0, "a step writes blocks that others may copy"
        assert blocks.user(2) == 9
        transfer.clear()
        assert [blocks.user(block) for block in range(4)] == [0] * 4
        return json.dumps(found).encode()

    worker.serve()


def look():
    """Replies, as JSON, with what a new process has of its own."""
    import ctypes
    import multiprocessing
    import random

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p

    def variable(name):
        return (libc.getenv(name.encode()) or b"").decode()

    signals = {}
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(("SigBlk", "SigIgn", "SigCgt")):
                # without the two that the C library has for itself
                signals[line[:6]] = hex(int(line.split()[1], 16) & ~(3 << 31))
    fds = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds[int(fd)] = os.readlink("/proc/self/fd/" + fd).split(":")[0]
        except OSError:
            pass  # that of the listing
    seen = {
        "argv": sys.argv,
        "fds": fds,
        "signals": signals,
        "handler": repr(signal.getsignal(signal.SIGINT)),
        "streams": [
            (stream.fileno(), getattr(stream, "line_buffering", None))
            for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "environment": {**os.environ, "COXSWAIN_SOCKET": ""},
        "in C": {name: variable(name) for name in ("COXSWAIN_RANK", "LOOKED", "GONE")},
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "leads": os.getpgid(0) == os.getpid(),
        "process": multiprocessing.current_process().name,
        "child of multiprocessing": multiprocessing.parent_process() is not None,
        "method": multiprocessing.get_start_method(allow_none=True),
        "threads": len(os.listdir("/proc/self/task")),
    }
    own = {"pid": os.getpid(), "random": random.random(), "key": None}
    own["key"] = bytes(multiprocessing.current_process().authkey).hex()
    print("looked")
    coxswain.serve(lambda _: json.dumps([seen, own]).encode())


def leave():
    """Ends with a status at the first request, and a line at the end of the interpreter."""
    import atexit

    atexit.register(print, "at the end")
    worker = coxswain.Worker().attach()
    worker.next()
    print("without a flush")
    sys.exit(7)


def odd(data):
    """Replies or raises what the request names."""
    what = bytes(data).decode("latin-1")
    if what == "number":
        return 5
    if what == "list":
        return [1, 2, 3]
    if what == "text":
        return "text"
    if what == "none":
        return None
    if what == "objects":
        import numpy

        return numpy.array([data, None], dtype=object)
    if what == "columns":
        import numpy

        return numpy.arange(12, dtype=numpy.int32).reshape(3, 4)[:, 1]
    if what == "dates":
        import numpy

        return numpy.array(["2026-11-27"], dtype="datetime64[D]")
    if what == "surrogate":
        raise OSError(f"no file {os.fsdecode(b'caf' + bytes([0xE9]))}")
    if what == "long":
        return deep(40)
    if what == "caused":
        try:
            deep(0)
        except ValueError as error:
            raise RuntimeError("the step failed") from error
    return what.encode("latin-1")


def deep(left):
    """Raises far down, with a long message."""
    if left:
        return deep(left - 1)
    raise ValueError("the reason " + "x" * 2000)


def be_odd():
    coxswain.serve(odd)


def reply_length(data):
    text = str(len(data)).encode()
    coxswain.serve(lambda _: text)
