"""Worker objects for test_objects.py, and what their methods raise."""

import enum
import gc
import os
import resource
import signal
import sys
import threading
import weakref

import coxswain

LIMIT = 5


class Number(int):
    pass


class Kind(enum.Enum):
    ONE = 1


class OwnError(Exception):
    """Its __init__ takes other arguments than `args`."""

    def __init__(self, code, *, hint):
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self):
        super().__init__("the lock", threading.Lock())


class NarrowError(Exception):
    """Is pickled, and cannot be unpickled."""

    def __reduce__(self):
        return explode, ()


def explode():
    raise RuntimeError("not here")


class Engine:
    """The worker object of most tests."""

    limit = LIMIT

    def __init__(self, base=0, name="engine"):
        self.base, self.name = base, name
        self.kept = []

    def add(self, x, y=0, *more, scale=1):
        return (self.base + x + y + sum(more)) * scale

    def who(self):
        return coxswain.rank(), os.getpid(), self.name

    def echo(self, *args, **kwargs):
        return args, kwargs

    def same(self, value):
        return value

    def other(self, _, value):
        return value

    def keep(self, value):
        self.kept.append(value)

    def sums(self):
        return [float(value.sum()) for value in self.kept]

    def add_to(self, array):
        """Writes to what it has received."""
        array += 1
        return array

    def fail(self, what, *ranks):
        if ranks and coxswain.rank() not in ranks:
            return "well"
        if what == "own":
            raise OwnError(7, hint={"try": "again"})
        if what == "key":
            raise KeyError("missing")
        if what == "system":
            raise FileNotFoundError(2, "No such file", "weights.bin")
        if what == "unicode":
            b"\xff".decode("utf-8")
        if what == "locked":
            raise LockedError()
        if what == "narrow":
            raise NarrowError()
        if what == "large":
            raise ValueError("x" * 100_000)
        if what == "caused":
            try:
                self.fail("key")
            except KeyError as error:
                raise OwnError(1, hint=None) from error
        if what == "coxswain":
            raise coxswain.TimedOut("a barrier's")
        if what == "stop":
            raise StopIteration(5)
        raise AssertionError(what)

    def generate(self):
        yield 1

    def kill(self, rank):
        if coxswain.rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    def hang(self, path):
        while not os.path.exists(path):
            threading.Event().wait(0.001)
        return "woken"

    def leave(self):
        sys.exit(3)

    @classmethod
    def of_class(cls):
        return cls.__name__

    @staticmethod
    def of_none():
        return "static"

    @property
    def trap(self):
        raise AssertionError("a property was evaluated to list the methods")

    def _private(self):
        return "private"


def copied_of(array):
    """How many kB of the array's memory are pages that only this process has, and how many mappings
    of large payloads it has."""
    at, found, inside, mappings = array.ctypes.data, None, False, 0
    with open("/proc/self/smaps", encoding="ascii") as maps:
        for line in maps:
            words = line.split()
            if not words[0].endswith(":"):
                begin, end = (int(word, 16) for word in words[0].split("-"))
                inside = begin <= at < end
                mappings += "cox_large_payload" in line
            elif inside and words[0] == "Anonymous:":
                found = int(words[1])
    return found, mappings


def fault_count():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Views:
    """Keeps the array that it gets in all sorts of ways."""

    def __init__(self):
        gc.disable()  # which would free a cycle
        self.kept = self.sum = self.child = None
        self.asked = threading.Event()

    def same(self, array):
        return array

    def several(self, array):
        return [array, array[10:], {"half": array[: len(array) // 2]}, 2 * array]

    def faults(self):
        return fault_count()

    def copied(self, array, written):
        array[:written] += 1
        return copied_of(array)

    def keep(self, how, array):
        if how == "array":
            self.kept = array
        elif how == "slice":
            self.kept = array[:]
        elif how == "memoryview":
            self.kept = memoryview(array)
        elif how == "bytes":
            self.kept = memoryview(array).cast("B")
        elif how == "cycle":
            cell = [array]
            cell.append(cell)
            self.kept = weakref.ref(array)
        elif how == "exception":
            try:
                raise KeyError("kept")
            except KeyError as error:
                self.kept = error
        elif how == "thread":
            self.asked.clear()
            self.kept = threading.Thread(target=self.sum_later, args=(array,))
            self.kept.start()
        elif how == "raised":
            self.kept = array
            raise OwnError(7, hint=None)
        elif how == "returned":
            self.kept = array
            return array
        elif how == "fork":
            self.fork(array)
        return None

    def fork(self, array):
        ours, theirs = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.read(theirs[0], 1)
            os.write(ours[1], str(float(array.sum())).encode())
            os._exit(0)
        os.close(ours[1])
        os.close(theirs[0])
        self.child = pid, theirs[1], ours[0]

    def sum_later(self, array):
        self.asked.wait()
        self.sum = float(array.sum())

    def sum_kept(self):
        import numpy

        kept, self.kept = self.kept, None
        if isinstance(kept, threading.Thread):
            self.asked.set()
            kept.join()
            return self.sum
        if self.child:
            (pid, go, said), self.child = self.child, None
            os.write(go, b"x")
            text = os.read(said, 100)
            os.waitpid(pid, 0)
            os.close(go)
            os.close(said)
            return float(text)
        if isinstance(kept, weakref.ref):
            kept = kept()
        if isinstance(kept, KeyError):
            kept = kept.__traceback__.tb_frame.f_locals["array"]
        return float(numpy.frombuffer(kept).sum())

    def kill(self, array, rank):
        if coxswain.rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return array


def make(base):
    """Makes the worker object in the rank."""
    return Engine(base, name="made")


def double(x):
    return 2 * x


def negative(x):
    return -x


TABLE = {"double": double, "negative": negative, "limit": LIMIT, "_hidden": double}


def serve_engine():
    coxswain.serve(Engine(100), codec="pickle")


def serve_bytes():
    coxswain.serve(lambda data: data)
