"""Replies and arguments that mean nothing: refused in words, and never sent as something else."""

import array
import ctypes
import decimal
import inspect
import math
import os
import signal
import struct
import time

import coxswain
import pytest
import workers

SECONDS = 30


@pytest.fixture(scope="module")
def group():
    with coxswain.Group(workers.be_odd, 2) as found:
        yield found


def refusal(group, what):
    """The text of the rank's error."""
    with pytest.raises(coxswain.RankError) as caught:
        group.call(what.encode(), SECONDS, ranks=[1])
    assert caught.value.rank == 1
    assert group.call(b"well", SECONDS) == [b"well"] * 2  # the rank lives
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "kind"), [("number", "int"), ("list", "list"), ("text", "str"), ("none", "NoneType")]
)
def test_a_reply_that_is_not_bytes_like_is_an_error_of_its_handler(group, what, kind):
    line = inspect.getsourcelines(workers.odd)[1]
    text = refusal(group, what)
    assert f"the reply of odd ({workers.__file__}:{line}) is {kind}; it may be bytes" in text


def test_a_reply_of_objects_or_of_gaps_is_refused(group):
    pytest.importorskip("numpy")
    assert "is ndarray of Python objects or pointers" in refusal(group, "objects")
    assert "numpy.ascontiguousarray" in refusal(group, "columns")
    assert group.call(b"dates", SECONDS, ranks=[0]) == [struct.pack("q", 20784)]


def test_data_that_another_process_cannot_read_is_refused(group):
    numpy = pytest.importorskip("numpy")
    for data in (
        numpy.array([object()], dtype=object),
        numpy.zeros(2, dtype=[("O", "i4"), ("x", object)]),
        (ctypes.py_object * 2)(),
        (ctypes.c_void_p * 2)(),
    ):
        with pytest.raises(TypeError, match="data is .* of Python objects or pointers"):
            group.call(data)
    with pytest.raises(TypeError, match="not contiguous; numpy.ascontiguousarray"):
        group.call(numpy.arange(12).reshape(3, 4)[:, 1])
    for data in (5, "text", None, [1]):
        with pytest.raises(TypeError, match=f"data is {type(data).__name__}; it may be bytes"):
            group.call(data)
    # Names of fields are no codes.
    plain = numpy.zeros(1, dtype=[("OPX&", "i4")])
    for data in (plain, array.array("d", [1]), memoryview(b"ab"), numpy.zeros(0)):
        assert len(group.call(data, SECONDS)) == 2


def test_timeouts(group):
    for timeout in (math.inf, 1e300, None, 10**30):
        assert group.call(b"x", timeout) == [b"x"] * 2
    with pytest.raises(TypeError, match="timeout is '5', of type str; it may be a number of sec"):
        group.call(b"x", "5")
    with pytest.raises(TypeError, match="timeout is True, of type bool"):
        group.call(b"x", True)
    with pytest.raises(TypeError, match="of type Decimal"):
        group.call(b"x", decimal.Decimal(1))
    for timeout in (-1, math.nan, -math.inf):
        with pytest.raises(coxswain.Invalid, match="from 0 on"):
            group.call(b"x", timeout)
    with pytest.raises(TypeError, match="of type str"):
        group.submit(b"x").result("1")
    with pytest.raises(TypeError, match="of type str"):
        coxswain.Group(workers.echo, timeout="1")


def test_an_error_with_a_file_name_that_is_not_utf_8(group):
    assert "OSError: no file caf\\udce9" in refusal(group, "surrogate")


def test_a_long_error_keeps_what_raised_it(group):
    text = refusal(group, "long")
    assert "ValueError: the reason xxx" in text
    assert 'raise ValueError("the reason' in text.splitlines()[-1]
    assert "calls above)" in text
    with pytest.raises(coxswain.RankError) as caught:
        group.call(b"long", SECONDS)
    assert str(caught.value).endswith(text[text.index("ValueError") :])


def test_an_error_says_what_caused_it(group):
    text = refusal(group, "caused")
    assert "RuntimeError: the step failed\nIt was caused by ValueError: the reason" in text
    assert 'raise RuntimeError("the step failed")' in text


def test_every_call_after_a_late_rank_names_it():
    with coxswain.Group(workers.obey, 2) as group:
        group.call(b"hello", SECONDS)
        pid = group.status().ranks[1].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(3):
                with pytest.raises(coxswain.TimedOut, match="rank 1") as caught:
                    group.call(b"hello", 0.3)
                assert [late.rank for late in caught.value.late] == [1]
                assert caught.value.late[0].pid == pid and caught.value.late[0].stopped
            with pytest.raises(coxswain.TimedOut, match="before its deadline: .*rank 1 still owes"):
                group.submit(b"hello", 0.1, wait=True)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert group.call(b"hello", SECONDS) == [b"hello"] * 2


def test_submit_waits_for_room(tmp_path):
    with coxswain.Group(workers.wait_for_file, 1, depth=1) as group:
        data = os.fsencode(tmp_path / "go")
        first = group.submit(data)
        with pytest.raises(coxswain.Full):
            group.submit(data)
        with pytest.raises(coxswain.TimedOut, match="not sent before its deadline: .*in flight"):
            group.submit(data, 0.2, wait=True)
        (tmp_path / "go").touch()
        assert group.submit(data, SECONDS, wait=True).result() == first.result()


def test_a_forked_child_leaves_the_block_of_a_group():
    with coxswain.Group(workers.shout, 1) as group:
        pid = os.fork()
        if pid:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
            assert group.call(b"x", SECONDS) == [b"X"]
        else:
            status = 4
            try:
                with group_that_runs(group):
                    raise SystemExit(3)
            except SystemExit as error:
                status = error.code
            finally:
                os._exit(status)


class group_that_runs:
    """The end of a with block, for a group that was started in another one."""

    def __init__(self, group):
        self.group = group

    def __enter__(self):
        return self.group

    def __exit__(self, *error):
        return self.group.__exit__(*error)


def test_a_long_wait_is_not_cut_short(group):
    begin = time.monotonic()
    assert group.call(b"x", 1e12) == [b"x"] * 2
    assert time.monotonic() - begin < SECONDS
