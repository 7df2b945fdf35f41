"""Worker objects for test_objects.py, and what their methods raise."""

import os
import signal
import sys
import threading

import coxswain

LIMIT = 5


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
