"""coxswain.Pool and coxswain.Queue, with other processes."""

import gc
import os
import signal
import sys
import threading
import time

import pytest

import coxswain
from processes import Other, listen, say

numpy = pytest.importorskip("numpy")


@pytest.fixture
def pool():
    with coxswain.Pool.create(block_size=4096, block_count=8) as made:
        yield made
        gc.collect()


@pytest.fixture
def exporter():
    with coxswain.Exporter(ptrace_policy="any") as made:
        yield made


@pytest.fixture
def queue():
    with coxswain.Queue.create(depth=4) as made:
        yield made


# ---- blocks ----

DOUBLE = """
import numpy, coxswain
pools = {}

def double(data):
    handle, name = bytes(data[:128]), bytes(data[128:])
    pool = pools.setdefault(handle, None) or coxswain.Pool.open(handle)
    pools[handle] = pool
    with pool.block(name) as block:
        array = numpy.frombuffer(block.memory, dtype=numpy.float32)
        array[coxswain.rank()::coxswain.rank_count()] *= 2
        del array
    return b""

coxswain.serve(double)
"""


def test_an_array_in_a_block_is_seen_by_other_processes_without_a_copy(pool, exporter, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(DOUBLE)
    with coxswain.Group([sys.executable, str(script)], 2) as group, pool.allocate(4096) as block:
        array = numpy.frombuffer(block.memory, dtype=numpy.float32)
        array[:] = numpy.arange(1024)
        for factor in (2, 4):
            group.call(pool.export(exporter) + bytes(block), timeout=30)
            # the same array sees what they wrote
            assert (array == factor * numpy.arange(1024)).all()
        del array


def fill_tensor(handle, name):
    import torch  # pylint: disable=import-outside-toplevel

    pool = coxswain.Pool.open(bytes.fromhex(handle))
    with pool, pool.block(bytes.fromhex(name)) as block:
        torch.frombuffer(block.memory, dtype=torch.float32).fill_(3)


def test_a_tensor_in_a_block_is_seen_by_another_process_without_a_copy(pool, exporter):
    torch = pytest.importorskip("torch", reason="torch cannot be imported: no tensors here")
    with pool.allocate(4096) as block:
        tensor = torch.frombuffer(block.memory, dtype=torch.float32)
        with Other(fill_tensor, pool.export(exporter).hex(), bytes(block).hex()) as process:
            assert process.wait() == 0
        assert (tensor == 3).all()
        with pytest.raises(coxswain.StateError, match="a view"):
            block.release()
        del tensor


def test_a_view_keeps_the_block(pool):
    block = pool.allocate(100)
    assert block.size == 100 and len(bytes(block)) == 32 and not block.memory.readonly
    array = numpy.asarray(block.memory)[10:20]
    with pytest.raises(coxswain.StateError, match="a view"):
        block.release()
    with pytest.raises(coxswain.StateError, match="1 left"):
        pool.close()
    array[:] = 7
    del block  # the array alone keeps it
    gc.collect()
    assert pool.stats().reference_count == 1 and (array == 7).all()
    del array
    gc.collect()
    assert pool.stats().reference_count == 0
    block = pool.allocate(100)
    block.release()
    block.release()
    with pytest.raises(coxswain.Closed, match="this block is closed"):
        block.memory


def test_an_exception_is_not_hidden_by_its_views(pool):
    def fail():
        with pool.allocate(10) as block:
            array = numpy.asarray(block.memory)
            raise RuntimeError(array[0])

    with pytest.raises(RuntimeError):
        fail()
    gc.collect()
    assert pool.stats().reference_count == 0
    with pytest.raises(coxswain.StateError, match="a view"), pool.allocate(10) as block:
        array = numpy.asarray(block.memory)
    del array
    block.release()


def test_names_of_blocks(pool):
    with pool.allocate(10) as block:
        block.memory[:] = b"0123456789"
        with pool.block(bytes(block)) as again:
            assert bytes(again.memory) == b"0123456789"
            assert pool.stats().reference_count == 2
        name = bytes(block)
        with coxswain.Pool.create(4096, 1) as other, pytest.raises(coxswain.NotFound):
            other.block(name)
    with pytest.raises(coxswain.Stale):
        pool.block(name)
    with pytest.raises(coxswain.Invalid, match="32 bytes, not 3"):
        pool.block(b"abc")


def test_limits(pool):
    with pytest.raises(coxswain.TooLarge):
        pool.allocate(4097)
    with pytest.raises(coxswain.Invalid):
        pool.allocate(0)
    blocks = [pool.allocate(1) for _ in range(8)]
    with pytest.raises(coxswain.Full):
        pool.allocate(1)
    stats = pool.stats()
    assert (stats.block_count, stats.free_count, stats.reference_count) == (8, 0, 8)
    assert (stats.size, stats.used_size, stats.allocated, stats.freed) == (8 * 4096, 8 * 4096, 8, 0)
    for block in blocks:
        block.release()
    with pytest.raises(coxswain.Invalid):
        coxswain.Pool.create(block_size=100, block_count=1)
    with pytest.raises(coxswain.Invalid, match="two fds"):
        coxswain.Pool.attach([0])
    with pytest.raises(TypeError, match="Pool.create"):
        coxswain.Pool()


def test_a_pool_of_slabs_has_blocks_of_many_sizes():
    with coxswain.Pool.create(block_size=64, slabs_size=1 << 20) as pool:
        for size in (1, 64, 1000, 70000, 1 << 19):
            with pool.allocate(size) as block:
                assert block.size == size
                block.memory[-1:] = b"x"
        assert pool.stats().used_size == 0


def test_attach_by_fds_for_reading_only(pool):
    with coxswain.Pool.attach(pool.fds, read_only=True) as reader, pool.allocate(3) as block:
        block.memory[:] = b"abc"
        with reader.block(bytes(block)) as seen:
            assert bytes(seen.memory) == b"abc" and seen.memory.readonly
            array = numpy.asarray(seen.memory)
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
            del array
        with pytest.raises(coxswain.Denied):
            reader.allocate(1)


def hold(handle, name):
    pool = coxswain.Pool.open(bytes.fromhex(handle))
    kept = pool.block(bytes.fromhex(name)), pool.allocate(10)
    say(len(kept))
    listen()


def test_references_of_a_killed_process_are_given_back(pool, exporter):
    with pool.allocate(10) as block:
        with Other(hold, pool.export(exporter).hex(), bytes(block).hex()) as process:
            process.hear()
            stats = pool.stats()
            assert (stats.reference_count, stats.owner_count, stats.free_count) == (3, 2, 6)
            assert pool.sweep() == 0
            process.kill()
        assert pool.sweep() == 2
        stats = pool.stats()
        assert (stats.reference_count, stats.owner_count, stats.free_count) == (1, 1, 7)
        assert stats.swept == 2


def test_threads_share_a_pool(pool):
    def work():
        for _ in range(200):
            with pool.allocate(8) as block:
                block.memory[:] = b"x" * 8

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = pool.stats()
    assert (stats.reference_count, stats.allocated, stats.freed) == (0, 800, 800)


def in_child(function):
    """The exit status of a forked child: 0 if function raises StateError there."""
    child = os.fork()
    if not child:
        status = 1
        try:
            function()
        except coxswain.StateError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def test_a_fork_cannot_use_them(pool, queue):
    with pool.allocate(8) as block, coxswain.Subscriber(queue, [pool]) as subscriber:
        with coxswain.Publisher(queue, pool) as publisher:
            for call in (
                lambda: pool.allocate(1),
                pool.stats,
                block.release,
                subscriber.take,
                lambda: publisher.publish(block),
                pool.close,
                queue.close,
            ):
                assert in_child(call) == 0
            block.memory[:] = b"parent's"
            publisher.publish(block)
            with subscriber.take() as message:
                assert bytes(message.memory) == b"parent's"


# ---- queues ----


def subscribe(handle):
    with coxswain.Queue.open(coxswain.Handle(bytes.fromhex(handle))) as queue:
        with coxswain.Subscriber(queue) as subscriber, coxswain.QueueSet(subscriber) as set_:
            say()
            while True:
                assert set_.wait(timeout=30) is subscriber
                with subscriber.take() as message:
                    total = int(numpy.frombuffer(message.memory, dtype=numpy.int64).sum())
                    say([message.number, message.user_data, message.skipped, total])
                    if not total:
                        return


def test_every_process_takes_every_message(pool, queue, exporter):
    handle = bytes(queue.export(exporter)).hex()
    with Other(subscribe, handle) as one, Other(subscribe, handle) as two:
        one.hear(), two.hear()
        with coxswain.Publisher(queue, pool, exporter, read_only=True) as publisher:
            for number, total in enumerate((5, 0), 1):
                with pool.allocate(4096) as block:
                    numpy.frombuffer(block.memory, dtype=numpy.int64)[:] = 0
                    numpy.frombuffer(block.memory, dtype=numpy.int64)[3] = total
                    assert publisher.publish(block, 64, user_data=1 << 63) == number
                for process in (one, two):
                    assert process.hear() == [number, 1 << 63, 0, total]
            assert [one.wait(), two.wait()] == [0, 0]
            queue.sweep()
            assert pool.stats().reference_count == 0


def test_messages_end_and_are_skipped(pool, queue):
    with coxswain.Subscriber(queue, [pool]) as subscriber:
        with coxswain.Publisher(queue, pool) as publisher:
            assert subscriber.take() is None and subscriber.pending == 0
            for i in range(6):
                with pool.allocate(8) as block:
                    block.memory[:] = b"%08d" % i
                    publisher.publish(block)
            assert subscriber.pending == 4 and pool.stats().pin_count == 4
            message = subscriber.take()
            assert (bytes(message.memory), message.skipped, message.number) == (b"00000002", 2, 3)
            assert message.memory.readonly
            view = message.memory
            with pytest.raises(coxswain.StateError, match="a view"):
                message.release()
            del view
            with pytest.raises(coxswain.StateError, match="left"):
                subscriber.close()
            for other in (queue, pool):
                with pytest.raises(coxswain.StateError, match="left"):
                    other.close()
            with pool.block(bytes(message)) as block:  # a message is a block
                assert block.size == 8
            message.release()
            with pytest.raises(coxswain.Invalid), pool.allocate(8) as block:
                publisher.publish(block, 9)
        with coxswain.Pool.create(4096, 1) as other, other.allocate(1) as block:
            with coxswain.Publisher(queue, pool) as publisher, pytest.raises(coxswain.NotFound):
                publisher.publish(block)


def test_a_set_waits_for_several_queues(pool):
    with coxswain.Queue.create() as a, coxswain.Queue.create() as b:
        with coxswain.Subscriber(a, [pool]) as from_a, coxswain.Subscriber(b, [pool]) as from_b:
            set_ = coxswain.QueueSet(from_a, from_b)
            with set_, coxswain.Publisher(b, pool) as publisher:
                start = time.monotonic()
                assert set_.wait(timeout=0.12) is None
                assert time.monotonic() - start >= 0.12
                with pool.allocate(1) as block:
                    publisher.publish(block)
                assert set_.wait() is from_b
                from_b.take().release()
                with pytest.raises(coxswain.StateError, match="left"):
                    from_a.close()
                with pytest.raises(coxswain.Busy):
                    coxswain.QueueSet(from_a)
                gc.collect()
                thread = threading.Thread(target=set_.wait)
                thread.start()
                while set_._lock.acquire(blocking=False):
                    set_._lock.release()
                for call in (from_a.take, set_.close, lambda: set_.wait(0)):
                    with pytest.raises(coxswain.Busy):
                        call()
                with pool.allocate(1) as block:
                    publisher.publish(block)
                thread.join()
    with pytest.raises(coxswain.Invalid, match="one subscriber"):
        coxswain.QueueSet()


def wait_for_ever():
    with coxswain.Queue.create() as queue, coxswain.Subscriber(queue) as subscriber:
        with coxswain.QueueSet(subscriber) as set_:
            say()
            try:
                set_.wait()
            except KeyboardInterrupt:
                say("interrupted")


def test_ctrl_c_ends_a_wait():
    with Other(wait_for_ever) as process:
        process.hear()
        process.wait_until_asleep()
        os.kill(process.pid, signal.SIGINT)
        assert process.hear() == "interrupted"
        assert process.wait() == 0


def publish_and_wait(handle):
    with coxswain.Queue.open(coxswain.Handle(bytes.fromhex(handle))) as queue:
        pool, exporter = coxswain.Pool.create(4096, 1), coxswain.Exporter(ptrace_policy="any")
        publisher = coxswain.Publisher(queue, pool, exporter)
        with pool.allocate(1) as block:
            say(publisher.publish(block))
            listen()


def test_messages_of_a_dead_publisher_are_skipped(queue, exporter):
    with Other(publish_and_wait, bytes(queue.export(exporter)).hex()) as process:
        with coxswain.Subscriber(queue) as subscriber:
            assert process.hear() == 1
            process.kill()
            with pytest.raises(coxswain.PeerDead):
                subscriber.take()
            assert subscriber.take() is None
        assert queue.sweep() == 1
