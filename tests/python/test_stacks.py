"""Where the ranks of a group are: Group.stacks(), and the error of a request that hangs."""

import asyncio
import contextlib
import ctypes
import os
import pathlib
import signal
import sys
import threading
import time

import coxswain
import pytest

sys.path.insert(0, os.path.dirname(__file__))

LIMIT = 60
DUMPS = int(os.environ.get("COX_STACK_DUMPS", "50"))


def hold_the_gil():
    """A C call that does not release it."""
    ctypes.PyDLL(None).sleep(LIMIT)


def spin():
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        pass


def recurse(depth):
    if depth:
        recurse(depth - 1)
    else:
        time.sleep(LIMIT)


def wait_for_the_dead():
    lock = threading.Lock()
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    lock.acquire(timeout=LIMIT)


WAYS = (hold_the_gil, spin, lambda: recurse(300), wait_for_the_dead)


def hang():
    """Each rank hangs in a way of its own."""
    worker = coxswain.Worker()

    @worker.opaque
    def reply(_):
        WAYS[worker.rank]()
        return b""

    worker.serve()


def echo():
    coxswain.serve(lambda data: bytes(data))


def one_waits():
    """Rank 1 sleeps elsewhere than the others."""
    worker = coxswain.Worker()

    def odd():
        time.sleep(LIMIT)

    @worker.opaque
    def reply(_):
        if worker.rank == 1:
            odd()
        time.sleep(LIMIT)
        return b""

    worker.serve()


def await_running(group):
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if all(rank.channels["execute"].state == "running" for rank in group.status().ranks):
            return
        time.sleep(0.01)
    raise AssertionError("the ranks do not run the request")


def kill_all(group):
    for rank in group.status().ranks:
        os.kill(rank.pid, signal.SIGKILL)


def test_frames_of_ranks_that_hang_each_in_its_way():
    with coxswain.Group(hang, ranks=4, on_rank_death=lambda *_: None) as group:
        future = group.submit(b"", timeout=LIMIT)
        await_running(group)
        stacks = group.stacks()
        assert [rank.rank for rank in stacks.ranks] == [0, 1, 2, 3]
        for rank, name in zip(
            stacks.ranks, ("hold_the_gil", "spin", "recurse", "wait_for_the_dead"), strict=True
        ):
            assert f"MainThread in {name} (test_stacks.py:" in rank.summary, rank
            assert "/" not in rank.summary
            assert rank.age_s > 0
        assert ", runn" in stacks.ranks[1].summary  # running, or runnable without a processor
        assert "  ...\n" in stacks.ranks[2].text
        only = group.stacks(ranks=[3])
        assert [rank.rank for rank in only.ranks] == [3]
        for rank in stacks.ranks:
            status = pathlib.Path(f"/proc/{rank.pid}/status").read_text()
            assert "TracerPid:\t0\n" in status
        kill_all(group)
        with pytest.raises(coxswain.PeerDead):
            future.result()


def error_of_a_hang():
    with coxswain.Group(one_waits, ranks=3, on_rank_death=lambda *_: None) as group:
        future = group.submit(b"", timeout=6)
        with pytest.raises(coxswain.TimedOut) as caught:
            future.result()
        kill_all(group)
    return str(caught.value)


def test_the_error_of_a_hang_says_where_and_the_odd_rank_first():
    # On a busy machine a second may be too short.
    texts = (error_of_a_hang() for _ in range(5))
    text = next((text for text in texts if text.endswith("and may wait for it")), "")
    assert "; stacks: rank 1: MainThread in odd (test_stacks.py:" in text
    assert "; ranks 0,2: MainThread in reply (test_stacks.py:" in text
    assert text.endswith("and may wait for it")
    assert "/" not in text.split("; stacks: ")[1]


def test_no_stacks():
    with coxswain.Group(one_waits, ranks=2, stacks=False, on_rank_death=lambda *_: None) as group:
        future = group.submit(b"", timeout=1)
        with pytest.raises(coxswain.TimedOut) as caught:
            future.result()
        assert "stacks" not in str(caught.value)
        kill_all(group)


def test_a_rank_that_there_is_not():
    with coxswain.Group(echo) as group:
        with pytest.raises(coxswain.Invalid):
            group.stacks(ranks=[1])


class Load:
    """Calls of a thread, one after the other, while the body runs."""

    def __init__(self, group):
        self.group, self.over, self.done, self.wrong = group, threading.Event(), 0, []
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.over.is_set():
            data = b"%d" % self.done
            if self.group.call(data, timeout=LIMIT) != [data, data]:
                self.wrong.append(data)
            self.done += 1

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def check(self, least):
        assert not self.wrong
        assert self.done > least
        status = self.group.status()
        assert status.deaths == 0
        assert sum(channel.failed for channel in status.channels) == 0


@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_dumps_under_load_change_no_reply(attach):
    with coxswain.Group(echo, ranks=2, attach=attach) as group:
        with Load(group) as load:
            found = [rank.summary for _ in range(DUMPS) for rank in group.stacks().ranks]
        # On a busy machine a rank may get no processor for its frames in time.
        assert sum("MainThread in " in summary for summary in found) > DUMPS // 5, found[:20]
        load.check(DUMPS)


def tracers(pid):
    """The processes that hold threads of this one."""
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("TracerPid:") and line.split()[1] != "0":
                    yield int(line.split()[1])


def test_a_helper_killed_while_it_holds_a_rank_loses_nothing():
    with coxswain.Group(echo, ranks=2) as group:
        pids = [rank.pid for rank in group.status().ranks]
        over, killed = threading.Event(), set()

        def ask():
            while not over.is_set():
                group.stacks()

        asks = threading.Thread(target=ask)
        with Load(group) as load:
            asks.start()
            end = time.monotonic() + 5 * LIMIT
            while len(killed) < 10 and time.monotonic() < end:
                for tracer in {*tracers(pids[0]), *tracers(pids[1])} - killed:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(tracer, signal.SIGKILL)
                        killed.add(tracer)
            before = load.done
            over.set()
            asks.join()
            while load.done < before + 10 and time.monotonic() < end:
                time.sleep(0.001)
        assert len(killed) >= 10
        load.check(before + 9)
        for pid in pids:
            assert not [*tracers(pid)]
        # The rank replies to the next helper.
        summaries = [rank.summary for _ in range(20) for rank in group.stacks().ranks]
        assert any("MainThread in " in summary for summary in summaries), summaries


def test_the_error_in_asyncio_says_where():
    async def wait(group):
        with pytest.raises(coxswain.TimedOut) as caught:
            await group.submit(b"", timeout=4)
        return str(caught.value)

    with coxswain.Group(one_waits, ranks=2, on_rank_death=lambda *_: None) as group:
        text = asyncio.run(wait(group))
        kill_all(group)
    assert "; stacks: rank 0: MainThread in reply (test_stacks.py:" in text
    assert "; rank 1: MainThread in odd (test_stacks.py:" in text
