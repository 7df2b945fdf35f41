"""A group in event loops."""

import asyncio
import signal
import threading
import time

import pytest

import coxswain
import workers


def test_await_gives_the_replies():
    async def main():
        async with coxswain.Group(workers.shout, 2, depth=8) as group:
            replies = await asyncio.gather(*[group.submit(b"a%d" % i, 30) for i in range(8)])
            assert replies == [[b"A%d" % i] * 2 for i in range(8)]
            done = group.submit(b"x", 30)
            assert await done == await done == [b"X"] * 2

    asyncio.run(main())


def test_a_group_serves_several_loops_one_after_the_other():
    async def one(group):
        return await group.submit(b"x", 30)

    with coxswain.Group(workers.shout, 2) as group:
        for _ in range(3):
            assert asyncio.run(one(group)) == [b"X"] * 2
        assert group.call(b"y", timeout=30) == [b"Y"] * 2


def test_loops_and_threads_share_a_group():
    with coxswain.Group(workers.shout, 2, depth=8) as group:
        failures = []

        async def work(number):
            for i in range(100):
                text = b"%d-%dx" % (number, i)
                assert await group.submit(text, 30) == [text.upper()] * 2

        def run(number):
            try:
                if number % 2:
                    asyncio.run(work(number))
                else:
                    for i in range(100):
                        text = b"%d-%dx" % (number, i)
                        assert group.call(text, timeout=30) == [text.upper()] * 2
            except BaseException as error:  # pylint: disable=broad-exception-caught
                failures.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures


def test_requests_wait_for_room_in_order(tmp_path):
    gate = tmp_path / "gate"
    sequences = {}

    async def ask(group, number):
        future = group.submit(str(gate).encode(), 30)
        reply = await future
        sequences[number] = future.sequence
        return reply

    async def main():
        async with coxswain.Group(workers.wait_for_file, 2, depth=4) as group:
            asked = [asyncio.create_task(ask(group, number)) for number in range(500)]
            await asyncio.sleep(0)  # each task has asked
            assert group.status().channels[0].in_flight == 4
            # One that is given up leaves its turn to the next.
            asked[10].cancel()
            gate.touch()
            replies = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(replies.pop(10), asyncio.CancelledError)
            assert replies == [[b"done"] * 2] * 499
            # Plain futures, without a task of one's own for each.
            assert len(await asyncio.gather(*[group.submit(b"/", 30) for _ in range(50)])) == 50

    asyncio.run(main())
    assert len(sequences) == 499
    assert sorted(sequences, key=sequences.__getitem__) == sorted(sequences)


def test_a_request_that_waits_for_its_turn_is_sent_by_await(tmp_path):
    gate = tmp_path / "gate"

    async def main():
        with coxswain.Group(workers.wait_for_file, 1, depth=1) as group:
            first = group.submit(str(gate).encode(), 30)
            second = group.submit(str(gate).encode(), 30)
            assert (second.sequence, second.done(), repr(second)) == (
                0,
                False,
                "<coxswain.Future of a request that waits for room>",
            )
            with pytest.raises(coxswain.StateError, match="await it"):
                second.result()
            with pytest.raises(coxswain.StateError, match="await it"):
                second.add_done_callback(print)
            gate.touch()
            assert await asyncio.gather(second, second, first) == [[b"done"]] * 3
            assert second.result() == [b"done"]

    asyncio.run(main())


def test_room_waits_until_there_is_room(tmp_path):
    gate = tmp_path / "gate"

    async def main():
        with coxswain.Group(workers.wait_for_file, 2, depth=2) as group:
            futures = [group.submit(str(gate).encode(), 30) for _ in range(2)]
            with pytest.raises(coxswain.Full):
                group.submit(b"", wait=False)
            waiting = asyncio.create_task(group.room())
            await asyncio.sleep(0)
            assert not waiting.done()
            gate.touch()
            await asyncio.wait_for(waiting, 30)
            futures.append(group.submit(str(gate).encode(), 30))
            assert await asyncio.gather(*futures) == [[b"done"] * 2] * 3

    asyncio.run(main())


def test_room_waits_for_a_late_rank(tmp_path):
    gate = tmp_path / "gate"

    async def main():
        with coxswain.Group(workers.wait_for_file, 2) as group:
            with pytest.raises(coxswain.TimedOut) as caught:
                await group.submit(str(gate).encode(), 0.2)
            assert [late.rank for late in caught.value.late] == [0, 1]
            with pytest.raises(coxswain.Late):
                group.submit(b"", wait=False)
            with pytest.raises(coxswain.TimedOut, match="rank 0 still owes") as caught:
                await group.submit(b"", 0.2)
            assert [late.rank for late in caught.value.late] == [0, 1]
            unsent = group.submit(b"", 0.5)
            time.sleep(0.5)  # so that its deadline is over before it is awaited
            with pytest.raises(coxswain.TimedOut, match="rank 0 still owes"):
                await unsent
            gate.touch()
            assert await group.submit(str(gate).encode(), 30) == [b"done"] * 2

    asyncio.run(main())


def test_the_death_of_a_rank_ends_an_await():
    async def main():
        with coxswain.Group(workers.obey, 2) as group:
            with pytest.raises(coxswain.RankDied) as caught:
                await group.submit(b"kill 1", 30)
            assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)

    asyncio.run(main())


def test_a_cancelled_await_leaves_the_request_alone(tmp_path):
    gate = tmp_path / "gate"

    async def main():
        with coxswain.Group(workers.wait_for_file, 2) as group:
            future = group.submit(str(gate).encode(), 30)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(_await(future), 0.1)
            gate.touch()
            assert await future == [b"done"] * 2

    async def _await(future):
        return await future

    asyncio.run(main())


def test_stop_ends_what_is_awaited():
    async def main():
        group = coxswain.Group(workers.obey, 2).start()
        future = group.submit(b"hang", 60)
        waiting = asyncio.ensure_future(_await(future))
        await asyncio.sleep(0)
        await asyncio.to_thread(group.stop)
        with pytest.raises(coxswain.Closed):
            await waiting

    async def _await(future):
        return await future

    asyncio.run(main())


def test_an_idle_loop_sleeps():
    """A loop with a group that nothing asks makes no turn."""

    async def main():
        with coxswain.Group(workers.shout, 2) as group:
            await group.submit(b"x", 30)
            turns = []
            poll = group._poll
            group._poll = lambda: turns.append(poll())
            loop = asyncio.get_running_loop()
            loop.remove_reader(group.fileno())
            loop.add_reader(group.fileno(), group._poll)
            best = 99
            for _ in range(5):
                before, cpu = len(turns), time.thread_time()
                await asyncio.sleep(0.3)  # the measurement
                best = min(best, len(turns) - before)
                assert time.thread_time() - cpu < 0.2
            assert best == 0

    asyncio.run(main())


def test_a_callback_after_a_loop_has_ended_is_called():
    async def one(group):
        return await group.submit(b"x", 30)

    with coxswain.Group(workers.shout, 2) as group:
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(one(group)) == [b"X"] * 2
        called = threading.Event()
        group.submit(b"y", 30).add_done_callback(lambda _: called.set())
        assert called.wait(10)
    loop.close()
