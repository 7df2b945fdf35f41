"""Groups with codec="pickle": methods by name, with objects as arguments and results."""

import asyncio
import collections
import functools
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
import types

import coxswain
import objects
import processes
import pytest
import workers

SECONDS = 30
HERE = os.path.dirname(objects.__file__)


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request):
    return request.param


@pytest.fixture(scope="module")
def group(ranks):
    with coxswain.Group(objects.Engine, ranks, args=(10,), codec="pickle") as found:
        yield found


@pytest.fixture(scope="module")
def pair():
    with coxswain.Group(objects.Engine, 2, kwargs={"name": "pair"}, codec="pickle") as found:
        yield found


def refused(group, name, *args):
    with pytest.raises(coxswain.RankError) as caught:
        group.call_method(name, *args, timeout=SECONDS)
    assert group.call_method("add", 1, timeout=SECONDS)  # the ranks live
    return str(caught.value)


# ---- calls ----


def test_methods_are_called_by_name_with_arguments(group, ranks):
    assert group.call_method("add", 1, timeout=SECONDS) == [11] * ranks
    assert group.call_method("add", 1, 2, 3, scale=2, timeout=SECONDS) == [32] * ranks
    assert group.call_method("add", x=1, timeout=None) == [11] * ranks
    args, kwargs = (1, "text", None, [b"x"], {1, 2}), {"name": "a", "data": 5, "self_": 6}
    found = group.call_method("echo", *args, **kwargs, timeout=SECONDS)
    assert found == [(args, kwargs)] * ranks
    assert [rank for rank, _, _ in group.call_method("who")] == list(range(ranks))
    assert group.call_method("of_class") == ["Engine"] * ranks
    assert group.call_method("of_none") == ["static"] * ranks


def frames_of(function, *args, **kwargs):
    """How many functions of Python a call enters, where its replies are there at once."""

    def once():
        entered = []
        sys.setprofile(lambda _, event, __: entered.append(event) if event == "call" else None)
        try:
            function(*args, **kwargs)
        finally:
            sys.setprofile(None)
        return len(entered)

    return min(once() for _ in range(50))


def test_a_call_enters_few_functions_of_python_and_a_method_call_one_more(group, ranks):
    # With small arguments most of its time is that of such functions.
    with coxswain.Group(workers.echo, ranks) as of_bytes:
        of_bytes_has = frames_of(of_bytes.call, b"x" * 80)
    assert of_bytes_has <= 14 + ranks
    assert frames_of(group.call_method, "add", 1) <= of_bytes_has + 1


def test_ranks_and_gather_are_those_of_call(group, ranks):
    last = ranks - 1
    assert group.call_method("who", ranks=[last])[0][0] == last
    assert group.call_method("who", ranks=[last], gather="rank0")[0] == last
    assert group.call_method("who", gather="rank0")[0] == 0
    assert group.call_method("same", None, gather="rank0") is None
    assert group.call_method("who", gather="none") is None
    future = group.submit_method("add", 5, gather="none")
    assert future.result(SECONDS) is None and future.exception() is None
    future = group.submit_method("same", {"a": [1]})
    assert future.result(SECONDS) == [{"a": [1]}] * ranks
    assert future.result() is future.result()  # it is unpickled once


def test_what_may_not_be_called_is_refused_with_what_may(pair):
    methods = (
        "Engine has add, add_to, echo, fail, generate, hang, keep, kill, leave, of_class, of_none, "
        "other, same, sums, who"
    )
    text = refused(pair, "_private")
    assert "'_private' to call: it begins with an underscore" in text and methods in text
    assert "'__class__' to call: it begins with an underscore" in refused(pair, "__class__")
    assert "'limit' to call: it is int, which is not callable; Engine has add" in refused(
        pair, "limit"
    )
    assert "'none' to call: it does not exist; Engine has add" in refused(pair, "none")
    assert "'add.__self__' to call: it does not exist" in refused(pair, "add.__self__")
    with pytest.raises(TypeError, match="the method is 5; it may be the name of one"):
        pair.call_method(5)


def test_wrong_arguments_are_the_methods_own_error(pair):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        pair.call_method("add")
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        pair.call_method("add", 1, z=2)


def test_the_worker_may_be_made_by_a_function_or_be_a_table():
    with coxswain.Group(objects.make, 2, args=(3,), codec="pickle") as group:
        assert group.call_method("add", 1) == [4] * 2
        assert group.call_method("who", gather="rank0")[2] == "made"
    for table in (objects.TABLE, objects):
        with coxswain.Group(table, 1, codec="pickle") as group:
            assert group.call_method("double", 4) == [8]
            assert group.call_method("negative", x=4) == [-4]
            text = refused_of_table(group, "_hidden")
            assert "begins with an underscore" in text and "double" in text
            assert "'nothing' to call: it does not exist" in refused_of_table(group, "nothing")
    assert "the table has double, negative" in text or "objects has " in text


def refused_of_table(group, name):
    with pytest.raises(coxswain.RankError) as caught:
        group.call_method(name, 1)
    return str(caught.value)


def test_a_command_serves_objects_by_itself():
    program = [sys.executable, "-c", "import objects; objects.serve_engine()"]
    paths = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([HERE, paths])
    try:
        with coxswain.Group(program, 2, codec="pickle") as group:
            assert group.call_method("add", 1) == [101] * 2
    finally:
        os.environ["PYTHONPATH"] = paths


def test_each_codec_says_that_the_other_side_has_another(pair):
    for name in ("call", "submit"):
        with pytest.raises(coxswain.StateError, match=f"{name} is for a group with codec='bytes'"):
            getattr(pair, name)(b"x")
    with coxswain.Group(objects.serve_bytes, 1) as group:
        for name in ("call_method", "submit_method"):
            with pytest.raises(coxswain.StateError, match=f"{name} is for .* codec='pickle'"):
                getattr(group, name)("add")
        with pytest.raises(coxswain.Invalid, match="codec is 'json'; it may be 'bytes' or 'pick"):
            coxswain.serve(objects, codec="json")
    with pytest.raises(coxswain.Invalid, match="codec is 'json'; it may be 'bytes' or 'pickle'"):
        coxswain.Group(objects.Engine, codec="json")
    command = [sys.executable, "-c", "import coxswain; coxswain.serve(lambda data: data)"]
    with coxswain.Group(command, 1, codec="pickle") as group:
        with pytest.raises(coxswain.RankError, match="rank 0 replied .* that are no object: its"):
            group.call_method("add")
    command = [sys.executable, "-c", "import coxswain; coxswain.serve({}, codec='pickle')"]
    with coxswain.Group(command, 1) as group:
        for data in (b"", b"bytes", b"q"):
            with pytest.raises(coxswain.RankError, match="this rank serves objects|Unpickling"):
                group.call(data)


def test_what_cannot_be_pickled_is_said_with_the_method(pair):
    with pytest.raises(TypeError, match="an argument of same cannot be pickled: .*lambda"):
        pair.call_method("same", lambda: 0)
    with pytest.raises(TypeError, match="the result of generate, of type generator, cannot be"):
        pair.call_method("generate")
    assert pair.call_method("add", 1) == [1, 1]


# ---- plain values ----

PLAIN = {
    "nothing": (None, True, False, (), [], {}, "", b""),
    "numbers": [0, -1, 2**63 - 1, -(2**63), 0.0, -0.0, 1e308, float("inf")],
    "texts": ("ascii", "\0", "\xe4\u20ac\U0001f600", b"\xff\0", "x" * 3500),
    "nested": [[[]], ({},), {"a": {1: (2.5, b"b")}, (1, "k"): None, None: [True], 1.5: "f"}],
    "deep": functools.reduce(lambda inner, _: [inner], range(15), ["text", 1]),
    "lists": [[i] for i in range(63)],
}


def not_plain():
    numpy = pytest.importorskip("numpy")
    twice, itself, within = [1], [], {}
    itself.append(itself)
    within["within"] = (within,)
    return {
        "large": "x" * 4096,
        "large, of two bytes": "\xe4" * 2100,
        "many": list(range(600)),
        "many small": [None] * 600,
        "deeper": [PLAIN["deep"]],
        "more lists": [[] for _ in range(64)],
        "a tuple twice": [(float("nan"),)] * 2,
        "large number": 2**63,
        "small number": -(2**63) - 1,
        "lone surrogate": "\ud800",
        "subclass": objects.Number(1),
        "ordered": collections.OrderedDict(a=1),
        "enumeration": objects.Kind.ONE,
        "set": {1},
        "bytearray": bytearray(b"b"),
        "complex": 1j,
        "number of numpy": numpy.float64(1.5),
        "array": numpy.arange(2),
        "twice": (twice, twice),
        "twice below": ((twice,), {"a": twice}),
        "within a list": itself,
        "within a dict": within,
    }


def types_of(value):
    """The value with the types of all that is in it; equal values may have others."""
    if isinstance(value, dict):
        return [(types_of(key), types_of(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(one) for one in value]
    return type(value), repr(value)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_come_back_as_pickle_brings_them(pair, name):
    from coxswain._internal import objects as _objects

    value = PLAIN[name]
    message = _objects.dump_plain(value, _objects.PLAIN_REPLY)
    assert type(message) is bytes and len(message) <= 4096
    found = _objects.load_plain(memoryview(message), _objects.PLAIN_REPLY)
    assert types_of(found) == types_of(pickle.loads(pickle.dumps(value)))
    others = (message[:-1], message[:-1] + b"a", message[:1] + b"N" + message[1:], message[1:])
    for other in (*others, message[:1], b""):
        assert _objects.load_plain(other, _objects.PLAIN_REPLY) is NotImplemented
    for found in pair.call_method("same", value, timeout=SECONDS):
        assert types_of(found) == types_of(value)


def test_other_values_are_pickled(pair):
    from coxswain._internal import objects as _objects

    for name, value in not_plain().items():
        assert _objects.dump_plain(value, _objects.PLAIN_REPLY) is None, name
        for found in pair.call_method("same", value, timeout=SECONDS):
            assert type(found) is type(value)
            if name == "a tuple twice":
                assert found[0] is found[1]
            elif "within" not in name:
                assert (found == value) is True or (found == value).all(), name
            if name.startswith("twice"):
                assert found[0] is found[1] or found[0][0] is found[1]["a"]
            if name.startswith("within"):
                assert found[0] is found if name == "within a list" else found["within"][0] is found
    assert pair.call_method("echo", 1, [2], timeout=SECONDS) == [((1, [2]), {})] * 2
    plain, pickled = {"a": 1}, {1, 2}
    for value, kind in ((plain, pickled), (pickled, plain)):  # the one may reply with the other
        assert pair.call_method("other", value, kind, timeout=SECONDS) == [kind] * 2


def test_any_bytes_are_a_plain_message_or_none():
    from coxswain._internal import objects as _objects

    value = PLAIN["nested"] + ["text", b"bytes", 5, 1.5, (None, True, False)]
    message = _objects.dump_plain(value, _objects.PLAIN_REPLY)
    for end in range(len(message) - 1):
        changed = message[:end] + message[-1:]
        assert _objects.load_plain(changed, _objects.PLAIN_REPLY) is NotImplemented
    read = 0
    for at in range(1, len(message) - 1):
        for byte in range(256):
            changed = message[:at] + bytes([byte]) + message[at + 1 :]
            found = _objects.load_plain(changed, _objects.PLAIN_REPLY)
            if found is not NotImplemented:
                read += 1
                repr(found)
    assert read > len(message)
    for body in (
        *(b"[\1\0" * 17 + b"N", b"(\xff\xff", b"{\1\0[\0\0N", b"s\1\0\xff", b"{\1\0N", b"i\0"),
        *(b"x", b"", b"[" + b"\xff" * 4093, b"NN", b"s\2\0a", b"[\x58\2" + b"N" * 600),
    ):
        changed = message[:1] + body + message[-1:]
        assert _objects.load_plain(changed, _objects.PLAIN_REPLY) is NotImplemented, body


def test_the_collector_sees_no_value_that_is_half_made():
    """Of CPython 3.11 it runs where an object is made. What it sees, another thread may keep."""
    from coxswain._internal import objects as _objects

    value = tuple(([i, {i: (i,)}], tuple(range(25))) for i in range(8))
    message = _objects.dump_plain(value, _objects.PLAIN_REPLY)
    kept, threshold = [], gc.get_threshold()

    def keep(phase, _):
        if phase == "stop":
            kept.append(gc.get_objects())

    gc.callbacks.append(keep)
    try:
        gc.set_threshold(1)
        for _ in range(10):
            assert _objects.load_plain(message, _objects.PLAIN_REPLY) == value
            kept.clear()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(keep)


# ---- exceptions ----


def caught(group, what, *ranks):
    with pytest.raises(Exception) as found:
        group.call_method("fail", what, *ranks, timeout=SECONDS)
    return found.value


def test_exceptions_are_raised_as_themselves(group, ranks):
    error = caught(group, "own", ranks - 1)
    assert type(error) is objects.OwnError and error.args == ("code 7",)
    assert error.code == 7 and error.hint == {"try": "again"}
    cause = error.__cause__
    assert type(cause) is coxswain.RankError and cause.rank == ranks - 1
    text = str(cause)
    assert f"rank {ranks - 1} failed: Traceback" in text and "objects.py" in text
    assert 'raise OwnError(7, hint={"try": "again"})' in text and "OwnError: code 7" in text
    assert "_internal/worker.py" not in text and "_internal/objects.py" not in text
    printed = "".join(traceback.format_exception(error))
    assert "direct cause of the following exception" in printed
    assert type(caught(group, "key")) is KeyError
    error = caught(group, "system")
    assert type(error) is FileNotFoundError and error.filename == "weights.bin"
    error = caught(group, "unicode")
    assert type(error) is UnicodeDecodeError and error.object == b"\xff" and error.start == 0
    text = str(caught(group, "caused").__cause__)
    assert "KeyError: 'missing'" in text and "was the direct cause" in text


def test_exceptions_that_cannot_travel_are_rank_errors(pair):
    for what, said in (
        ("locked", "LockedError: ('the lock', <unlocked"),
        ("narrow", "It is no exception here: RuntimeError('not here')"),
        ("large", "ValueError: xxx"),
        ("coxswain", "TimedOut: a barrier's"),
        ("stop", "StopIteration: 5"),
    ):
        error = caught(pair, what, 1)
        assert type(error) is coxswain.RankError and error.rank == 1
        assert said in str(error) and "in fail\n    raise" in str(error)


def test_the_first_of_several_ranks_that_fail_is_raised():
    with coxswain.Group(objects.Engine, 4, codec="pickle") as group:
        error = caught(group, "own", 2, 3)
        assert type(error) is objects.OwnError and error.__cause__.rank in (2, 3)
        assert group.call_method("fail", "own", 9) == ["well"] * 4


def test_an_error_ends_the_request_while_another_rank_is_busy(pair, tmp_path):
    """As with bytes: otherwise a rank that waits for the one that failed would hide why."""
    file = tmp_path / "file"
    busy = pair.submit_method("hang", str(file), ranks=[1])
    with pytest.raises(objects.OwnError):
        pair.call_method("fail", "own", 0, timeout=SECONDS)
    assert not busy.done()
    file.touch()
    assert busy.result(SECONDS) == ["woken"]


def test_an_exit_ends_the_rank():
    with coxswain.Group(objects.Engine, 1, codec="pickle", on_line=None) as group:
        with pytest.raises(coxswain.RankError, match="SystemExit: 3"):
            group.call_method("leave", timeout=SECONDS)
        with pytest.raises(coxswain.RankDied):
            group.call_method("add", 1, timeout=SECONDS)


# ---- arrays ----


def arrays():
    numpy = pytest.importorskip("numpy")
    large = numpy.arange(30_000, dtype=numpy.float64)
    fields = numpy.zeros(1000, dtype=[("a", "i4"), ("b", "f8", (2,))])
    fields["b"] = 3
    read_only = large.copy()
    read_only.flags.writeable = False
    return {
        "contiguous": large.reshape(100, 300),
        "small": numpy.arange(3),
        "Fortran": numpy.asfortranarray(large.reshape(100, 300)),
        "gaps": large.reshape(100, 300)[:, ::2],
        "backwards": large[::-1],
        "empty": numpy.zeros((0, 4)),
        "scalar": numpy.array(5.0),
        "structured": fields,
        "objects": numpy.array([1, "two", None, large], dtype=object),
        "dates": numpy.arange("2000-01-01", "2020-01-01", dtype="datetime64[D]"),
        "texts": numpy.array(["ab", "c"] * 2000),
        "bytes swapped": large.astype(">f4"),
        "half": large.astype("f2"),
        "above a slot": numpy.arange(40_000, dtype=numpy.int64),
        "kept out of line": numpy.arange(300_000, dtype=numpy.int64),
        "large": numpy.arange(700_000, dtype=numpy.int64),
        "read-only": read_only,
    }


def join(parts):
    """A message of parts, as the library joins it."""
    from coxswain._native import ffi

    return b"".join(bytes(ffi.buffer(part.iov_base, part.iov_len)) for part in parts.vectors)


def same(one, other):
    import numpy

    assert type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
    if one.dtype == object:
        return all(numpy.array_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool((one == other).all())


@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_arrays_go_there_and_back(attach):
    with coxswain.Group(objects.Engine, 2, codec="pickle", attach=attach) as group:
        for name, array in arrays().items():
            for found in group.call_method("same", array, timeout=SECONDS):
                assert same(found, array), name
                assert found.flags.f_contiguous == array.flags.f_contiguous or name == "backwards"
                assert found.flags.writeable == (name != "read-only"), name
        everything = arrays()
        for found in group.call_method("same", everything, timeout=SECONDS):
            assert list(found) == list(everything)
            assert all(same(found[name], everything[name]) for name in everything)


def test_arrays_travel_beside_the_pickle():
    numpy = pytest.importorskip("numpy")
    from coxswain._internal import objects as _objects

    array = numpy.arange(100_000)
    message = join(_objects.dumps(array, _objects.REPLY))
    assert message.endswith(b"R") and len(message) < array.nbytes + 1000
    assert array.tobytes() in message
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(message)  # its buffer is elsewhere
    back = _objects.loads(bytearray(message), _objects.REPLY)
    assert numpy.array_equal(back, array) and back.base is not None and back.flags.aligned


@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_what_is_kept_stays_right(attach):
    """On both sides: in the frame, out of line in memory that is used again, and in memory of its
    own."""
    numpy = pytest.importorskip("numpy")
    sizes = [10, 5_000, 100_000, 300_000, 700_000, 1_100_000]
    with coxswain.Group(objects.Engine, 2, codec="pickle", attach=attach, depth=2) as group:
        expected, kept = [], []
        for size in sizes:
            for i in range(4):
                array = numpy.full(size, float(i))
                expected.append(float(array.sum()))
                group.call_method("keep", array, timeout=SECONDS)
                kept.append((size, i, group.call_method("add_to", array, timeout=SECONDS)))
        assert group.call_method("sums", timeout=SECONDS) == [expected] * 2
        for _, _, (first, _) in kept:
            first[:] = -1  # the other rank's is another array
    for size, i, (_, second) in kept:  # the group has ended
        assert second.shape == (size,) and (second == i + 1).all()


@pytest.fixture(scope="module", params=["named", "sealed"])
def views(request):
    # In each frame a request is followed by the next one.
    with coxswain.Group(objects.Views, 2, codec="pickle", attach=request.param, depth=1) as found:
        # Opens what stays open as long as the group.
        found.call_method("same", pytest.importorskip("numpy").zeros(700_000), timeout=SECONDS)
        yield found


WAYS = [
    *("array", "slice", "memoryview", "bytes", "cycle", "exception", "thread"),
    *("raised", "returned", "fork", "nothing"),
]


@pytest.mark.parametrize("size", [5_000, 100_000, 700_000])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_rank_keeps_stays_right(views, way, size):
    """In a frame, and out of line, where it was no copy of the request until it was kept."""
    numpy = pytest.importorskip("numpy")
    for first in (1.0, 2.0):
        array = numpy.full(size, first)
        if way == "raised":
            with pytest.raises(objects.OwnError):
                views.call_method("keep", way, array, timeout=SECONDS)
        else:
            for found in views.call_method("keep", way, array, timeout=SECONDS):
                assert found is None or (found == first).all()
        for i in range(2):
            other = numpy.full(size, -5.0 - i)
            for found in views.call_method("same", other, timeout=SECONDS):
                assert (found == other).all()
        if way != "nothing":
            assert views.call_method("sum_kept", timeout=SECONDS) == [first * size] * 2


def test_a_rank_copies_only_what_it_writes_of_an_array(views):
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(700_000)
    unwritten = views.call_method("copied", array, 0, timeout=SECONDS)
    assert [copied for copied, _ in unwritten] == [0, 0]
    for _ in range(10):
        assert views.call_method("copied", array, 600, timeout=SECONDS) == [
            (4 * -(-600 * 8 // 4096), mappings) for _, mappings in unwritten
        ]
    assert not array.any()  # what a rank has written is nobody else's
    # Neither what is returned, nor what ends with the call. A fault of a page copies it.
    faults = views.call_method("faults", timeout=SECONDS)
    for _ in range(10):
        for found in views.call_method("same", array, timeout=SECONDS):
            assert not found.any()
    for before, after in zip(faults, views.call_method("faults", timeout=SECONDS), strict=True):
        assert after - before < array.nbytes // 4096


def test_a_reply_is_copied_to_memory_that_is_used_again(views):
    numpy = pytest.importorskip("numpy")
    # Larger ones malloc keeps by itself, once it has learnt their size.
    array = numpy.zeros(100_000)
    for i in range(15):
        if i == 5:
            faults = objects.fault_count()
        array[0] = array[-1] = i
        for found in views.call_method("same", array, timeout=SECONDS):
            assert found[0] == found[-1] == i
    assert objects.fault_count() - faults < array.nbytes // 4096


@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_what_is_too_large_to_be_kept_is_there_and_costs_no_fault_a_page(attach):
    """It is written by calls to memory of its own, in several parts."""
    numpy = pytest.importorskip("numpy")
    with coxswain.Group(objects.Views, 2, codec="pickle", attach=attach) as group:
        group.call_method("same", numpy.zeros(700_000), timeout=SECONDS)  # the ranks import numpy
        for i in range(3):
            value = {"large": numpy.arange(1_500_000.0) + i, "other": numpy.full(700_001, i)}
            faults = group.call_method("faults", timeout=SECONDS)
            for found in group.call_method("same", value, timeout=SECONDS):
                assert all(numpy.array_equal(found[name], value[name]) for name in value)
            size = sum(array.nbytes for array in value.values())
            after = group.call_method("faults", timeout=SECONDS)
            for before, now in zip(faults, after, strict=True):
                assert now - before < size // 4096 // 2
        array = numpy.ones(1_500_000)
        group.call_method("keep", "array", array, timeout=SECONDS)
        for found in group.call_method("same", 2 * array, timeout=SECONDS):
            assert (found == 2).all()
        assert group.call_method("sum_kept", timeout=SECONDS) == [array.sum()] * 2


@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_calls_one_after_the_other_use_the_same_memory(attach):
    """And not that of each frame in turn, which no cache has."""
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(700_000.0)
    _, others = objects.copied_of(array)
    with coxswain.Group(objects.Views, 2, codec="pickle", attach=attach, depth=4) as group:
        for i in range(9):
            for found in group.call_method("same", array + i, timeout=SECONDS):
                assert (found == array + i).all()
        # A rank has the request, its copy, and the reply; this process a request and two replies.
        copied = group.call_method("copied", array, 0, timeout=SECONDS)
        assert [mappings for _, mappings in copied] == [3, 3]
        assert objects.copied_of(array)[1] == others + 3
        futures = [group.submit_method("same", array + i) for i in range(4)]
        for i, future in enumerate(futures):
            assert all((found == array + i).all() for found in future.result(SECONDS))
        copied = group.call_method("copied", array, 0, timeout=SECONDS)
        assert max(mappings for _, mappings in copied) <= 12


def test_replies_are_kept_by_threads_and_forks(views):
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(700_000.0)
    expected = float(array.sum())
    found = views.call_method("same", array, timeout=SECONDS)
    sums = []
    thread = threading.Thread(target=lambda mine: sums.append(float(mine.sum())), args=(found[0],))
    (go, went), (said, say) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(went)
        os.read(go, 1)  # the end of the file: the next requests were replied to
        os.write(say, str(float(found[1].sum())).encode())
        os._exit(0)
    for i in range(3):
        views.call_method("same", numpy.full(700_000, float(i)), timeout=SECONDS)
    thread.start()
    thread.join()
    os.close(went)
    assert sums == [expected] and float(os.read(said, 100)) == expected
    os.waitpid(pid, 0)
    for fd in (go, said, say):
        os.close(fd)


def test_replies_outlive_their_group_and_its_ranks():
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(700_000.0)
    with coxswain.Group(objects.Views, 2, codec="pickle", depth=2) as group:
        kept = group.call_method("same", array, timeout=SECONDS)
        group.kill(0)
    assert (kept[0] == array).all() and (kept[1] == array).all()


def test_results_may_be_parts_of_the_arguments(views):
    numpy = pytest.importorskip("numpy")
    for i in range(5):
        array = numpy.arange(700_000.0) + i
        for found in views.call_method("several", array, timeout=SECONDS):
            whole, behind, halves, twice = found
            assert (whole == array).all() and (behind == array[10:]).all()
            assert (halves["half"] == array[:350_000]).all() and (twice == 2 * array).all()


@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_a_rank_that_dies_with_an_array_leaves_the_others_right(attach):
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(700_000.0)
    with coxswain.Group(
        objects.Views, 2, codec="pickle", attach=attach, depth=1, on_rank_death=lambda *_: None
    ) as group:
        before = group.call_method("same", array, timeout=SECONDS)
        group.call_method("keep", "array", array, timeout=SECONDS)
        with pytest.raises(coxswain.RankDied):
            group.call_method("kill", -array, 1, timeout=SECONDS)
        group.restart(1)
        for found in group.call_method("same", array + 1, timeout=SECONDS):
            assert (found == array + 1).all()
        for found in before:
            assert (found == array).all()
        kept = group.call_method("sum_kept", ranks=[0], timeout=SECONDS)
        assert kept == [float(array.sum())]


def test_what_has_failed_with_an_array_may_be_garbage(pair):
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(100_000)
    for _ in range(5):
        with pytest.raises(TypeError, match="unexpected keyword argument") as error:
            pair.call_method("same", array, nothing=array, timeout=SECONDS)
        error.value.itself = error.value
        del error
        gc.collect()


# ---- torch ----


def test_tensors_go_there_and_back():
    python = processes.find_torch()
    if not python:
        pytest.skip(
            "no Python here has torch, safetensors and cffi; `sh tools/torch` installs them"
        )
    subprocess.run(
        [python, "-c", "import objects_torch; objects_torch.main()"],
        check=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([HERE, os.environ["PYTHONPATH"]])},
    )


def test_call_says_how_a_tensor_becomes_bytes():
    tensor = types.SimpleNamespace(data_ptr=lambda: 0)
    with coxswain.Group(objects.serve_bytes, 1) as group:
        with pytest.raises(TypeError, match=r"data is a tensor.*pass tensor.numpy\(\)"):
            group.call(tensor)


# ---- deaths, deadlines, interrupts, event loops ----


def test_a_rank_that_dies_in_a_method_is_named(ranks):
    with coxswain.Group(
        objects.Engine, ranks, codec="pickle", on_rank_death=lambda *_: None
    ) as group:
        with pytest.raises(coxswain.RankDied) as found:
            group.call_method("kill", ranks - 1, timeout=SECONDS)
        assert found.value.rank == ranks - 1 and found.value.signal == signal.SIGKILL
        group.restart(ranks - 1)
        assert group.call_method("add", 1, timeout=SECONDS) == [1] * ranks


def test_a_deadline_names_who_is_late(pair, tmp_path):
    file = tmp_path / "file"
    with pytest.raises(coxswain.TimedOut) as found:
        pair.call_method("hang", str(file), timeout=0.05)
    assert {late.rank for late in found.value.late} <= {0, 1} and found.value.late
    file.touch()
    assert pair.call_method("add", 1, timeout=SECONDS) == [1, 1]


def test_futures_are_awaited_in_order():
    async def run():
        async with coxswain.Group(objects.Engine, 2, codec="pickle", depth=2) as group:
            found = await asyncio.gather(*[group.submit_method("add", i) for i in range(20)])
            assert found == [[i, i] for i in range(20)]
            with pytest.raises(objects.OwnError) as caught:
                await group.submit_method("fail", "own", 1)
            assert caught.value.__cause__.rank == 1
            seen = []
            # Rank 0 may still work for the request that rank 1 has failed.
            future = group.submit_method("add", 5, gather="rank0", wait=True)
            future.add_done_callback(lambda done: seen.append(done.result()))
            assert await future == 5 and seen == [5]

    asyncio.run(run())


def test_an_interrupt_ends_a_call(tmp_path):
    program = tmp_path / "main.py"
    program.write_text(
        textwrap.dedent(
            """
            import sys
            import coxswain
            import objects

            if __name__ == "__main__":
                with coxswain.Group(objects.Engine, 2, codec="pickle") as group:
                    future = group.submit_method("hang", sys.argv[1], timeout=None)
                    try:
                        print("begun", flush=True)
                        future.result()
                    except KeyboardInterrupt:
                        open(sys.argv[1], "w").close()
                        print(future.result(), group.call_method("add", 1), flush=True)
            """
        )
    )
    paths = [HERE, os.environ.get("PYTHONPATH", "")]
    with subprocess.Popen(
        [sys.executable, str(program), str(tmp_path / "file")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=SECONDS)[0] == "['woken', 'woken'] [1, 1]\n"
    assert process.returncode == 0


def test_classes_of_the_main_module_are_the_same_on_both_sides(tmp_path):
    program = tmp_path / "main.py"
    program.write_text(
        textwrap.dedent(
            """
            import coxswain

            class Item:
                pass

            class Failure(Exception):
                pass

            class Worker:
                def item(self, item):
                    assert type(item) is Item
                    return item

                def fail(self):
                    raise Failure("of main")

            if __name__ == "__main__":
                with coxswain.Group(Worker, 2, codec="pickle") as group:
                    assert type(group.call_method("item", Item(), gather="rank0")) is Item
                    try:
                        group.call_method("fail")
                    except Failure as error:
                        print("caught", error)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "caught of main\n", done.stderr
