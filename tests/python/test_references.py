"""No reference and no object is left by a request, on either side: 10^5 calls.

A debug CPython counts every reference (nightly); an ordinary one its objects and memory blocks.
"""

import asyncio

import pytest

import coxswain
import workers

CALLS = 100_000
# What interpreters keep for themselves: caches, free lists, logging.
SLACK = 200


def grown(before, after):
    return [now - then for then, now in zip(before, after, strict=True)]


def counts(group):
    (reply,) = group.call(b"count", timeout=60)
    return workers.references(), tuple(map(int, reply.split()))


def measure(work):
    with coxswain.Group(workers.count_references, 1) as group:
        work(group, 200)
        counts(group)
        ours, theirs = counts(group)
        work(group, CALLS)
        ours_after, theirs_after = counts(group)
    for side, growth in (
        ("coordinator", grown(ours, ours_after)),
        ("rank", grown(theirs, theirs_after)),
    ):
        assert max(growth) < SLACK, f"the {side} keeps references, objects or blocks: {growth}"


def test_calls_keep_nothing():
    def work(group, count):
        for _ in range(count):
            group.call(b"x" * 300, timeout=60)

    measure(work)


def test_futures_keep_nothing():
    def work(group, count):
        for _ in range(count // 10):
            futures = [group.submit(b"x", 60) for _ in range(4)]
            futures[-1].add_done_callback(lambda _: None)
            for future in futures:
                future.result()

    measure(work)


def test_errors_keep_nothing():
    def work(group, count):
        for _ in range(count // 100):
            with pytest.raises(coxswain.RankError):
                group.call(b"raise", timeout=60)

    measure(work)


def test_awaits_keep_nothing():
    def work(group, count):
        async def main():
            for _ in range(count // 10):
                await group.submit(b"x", 60)

        asyncio.run(main())

    measure(work)
