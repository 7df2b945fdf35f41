"""Programs of ranks, as functions that coxswain.Group calls in each."""

import gc
import os
import signal
import sys
import threading
import time

import coxswain


def echo():
    coxswain.serve(lambda data: data)


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
    if verb == "wait":  # for a file that the test makes
        while not os.path.exists(words[-1]):
            time.sleep(0.001)
    return verb.encode()


def obey():
    coxswain.serve(act)


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
