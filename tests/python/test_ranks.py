"""coxswain.RankGroup, with ranks that are processes. This process is rank 0 of most groups."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

import coxswain
from processes import Other, listen, say

numpy = pytest.importorskip("numpy")


@pytest.fixture
def name():
    """Of a group: unique, and of this process, so that what it leaves is found."""
    return f"ranks_{os.getpid()}_{time.monotonic_ns()}"


def join(name, rank, rank_count, **options):
    return coxswain.RankGroup.join(name, rank, rank_count, timeout=30, **options)


@contextlib.contextmanager
def others(function, name, rank_count, *arguments):
    """Processes for all ranks but 0."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Other(function, name, rank, rank_count, *arguments))
            for rank in range(1, rank_count)
        ]


# ---- operations ----


def operate(name, rank, rank_count):
    with join(name, rank, rank_count, value_size=1 << 16) as ranks:
        assert (ranks.rank, ranks.rank_count, ranks.value_size) == (rank, rank_count, 1 << 16)
        ranks.barrier(timeout=30)
        assert ranks.gather(b"rank %d" % rank, timeout=30) == [
            b"rank %d" % r for r in range(rank_count)
        ]
        own = numpy.full((4, 5), rank, dtype=numpy.float32)
        all_ = numpy.empty((rank_count, 4, 5), dtype=numpy.float32)
        ranks.gather_into(own, all_, timeout=30)
        assert (all_ == numpy.arange(rank_count)[:, None, None]).all()
        all_ = numpy.zeros((rank_count, 1 << 14), dtype=numpy.int32)
        all_[rank] = rank + 1
        ranks.gather_into(all_[rank], all_, timeout=30)  # in place
        assert (all_ == numpy.arange(1, rank_count + 1)[:, None]).all()
        with pytest.raises(coxswain.TooLarge, match="at most 65536"):
            ranks.gather(bytes(65537))
        with pytest.raises(coxswain.Invalid, match="no bytes"):
            ranks.gather(b"")
        with pytest.raises(coxswain.Invalid, match="out has 3 bytes"):
            ranks.gather_into(b"1234", bytearray(3))
        with pytest.raises(TypeError, match="out is bytes"):
            ranks.gather_into(b"1", bytes(rank_count))
        with pytest.raises(TypeError, match="data is str"):
            ranks.gather("text")
        with pytest.raises(TypeError, match="contiguous"):
            ranks.gather(numpy.zeros((4, 4))[:, 1])
    with pytest.raises(coxswain.Closed, match="left"):
        ranks.barrier()
    ranks.leave()


@pytest.mark.parametrize("rank_count", [1, 2, 4])
def test_barrier_and_gather(name, rank_count):
    with others(operate, name, rank_count) as processes:
        operate(name, 0, rank_count)
        assert [process.wait() for process in processes] == [0] * (rank_count - 1)


def gather_tensors(name, rank, rank_count):
    import torch  # pylint: disable=import-outside-toplevel

    with join(name, rank, rank_count) as ranks:
        own = torch.full((8,), rank, dtype=torch.bfloat16)
        all_ = torch.empty((rank_count, 8), dtype=torch.bfloat16)
        ranks.gather_into(own, all_, timeout=30)
        assert all((all_[r] == r).all() for r in range(rank_count))
        with pytest.raises(coxswain.Invalid, match="not contiguous"):
            ranks.gather(torch.zeros(4, 4).t())


def test_gather_of_tensors(name):
    pytest.importorskip("torch", reason="torch cannot be imported: tensors are not gathered here")
    with others(gather_tensors, name, 2) as processes:
        gather_tensors(name, 0, 2)
        assert processes[0].wait() == 0


def unequal(name, rank, rank_count):
    with join(name, rank, rank_count) as ranks:
        with pytest.raises(coxswain.Invalid):
            ranks.gather(bytes(1 + rank), timeout=30)
        ranks.barrier(timeout=30)  # still in step


def test_values_of_unequal_size_fail_on_every_rank(name):
    with others(unequal, name, 2) as processes:
        unequal(name, 0, 2)
        assert processes[0].wait() == 0


def made_of(text):
    fd = os.memfd_create("a test's")
    os.write(fd, text)
    return fd


def content(fd):
    try:
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


def pass_fds(name, rank, rank_count):
    with join(name, rank, rank_count) as ranks:
        fd = made_of(b"of rank %d" % rank)
        fds = ranks.gather_fds(fd, timeout=30)
        assert fds[rank] == -1
        assert [content(other) for other in fds if other >= 0] == [
            b"of rank %d" % r for r in range(rank_count) if r != rank
        ]
        assert ranks.gather_fds(fd, keep=False, timeout=30).count(-1) == 1 or rank_count == 1
        with pytest.raises(OSError):
            os.fstat(fd)
        source = rank_count - 1
        fd = made_of(b"for all") if rank == source else None
        got = ranks.broadcast_fd(source, fd, timeout=30)
        if rank == source:
            assert got == -1
            os.close(fd)
        else:
            assert content(got) == b"for all"
        with pytest.raises(coxswain.Invalid, match="only it gives"):
            ranks.broadcast_fd(source, None if rank == source else 0)
        with pytest.raises(coxswain.Invalid, match=f"0 to {source}"):
            ranks.broadcast_fd(rank_count, 0)
        ranks.barrier(timeout=30)


@pytest.mark.parametrize("rank_count", [1, 2, 4])
def test_fds(name, rank_count):
    before = set(os.listdir("/proc/self/fd"))
    with others(pass_fds, name, rank_count) as processes:
        pass_fds(name, 0, rank_count)
        assert [process.wait() for process in processes] == [0] * (rank_count - 1)
    for fd in set(os.listdir("/proc/self/fd")) - before:  # duplicates of the second exchange
        with contextlib.suppress(OSError):
            if "a test's" in os.readlink("/proc/self/fd/" + fd):
                os.close(int(fd))


def divide(name, rank, rank_count):
    with join(name, rank, rank_count) as ranks:
        members = [r for r in range(rank_count) if r % 2 == rank % 2]
        with ranks.subgroup("half", members) as half:
            assert (half.rank, half.rank_count) == (members.index(rank), len(members))
            assert half.gather(b"%d" % rank, timeout=30) == [b"%d" % r for r in members]
            assert ranks.subgroup("half", members) is half
        with pytest.raises(coxswain.StateError, match="ends with its group"):
            half.leave()
        with pytest.raises(coxswain.Invalid, match="no member"):
            ranks.subgroup("others", [1 - rank % 2])
        with pytest.raises(coxswain.Invalid, match="no rank 200"):
            ranks.subgroup("far", [rank, 200])
        ranks.barrier(timeout=30)
    with pytest.raises(coxswain.Closed):
        half.barrier()


def test_a_subgroup_has_operations_of_its_own(name):
    with others(divide, name, 4) as processes:
        divide(name, 0, 4)
        assert [process.wait() for process in processes] == [0] * 3


# ---- what goes wrong ----


def wait_in_barrier(name, rank, rank_count):
    with join(name, rank, rank_count) as ranks:
        say()
        if rank == 2:
            listen()
        try:
            ranks.barrier(timeout=30)
        except coxswain.RankDied as error:
            say([time.monotonic(), error.rank, error.pid, str(error)])


def test_a_dead_rank_is_named_within_its_bound(name):
    with others(wait_in_barrier, name, 4) as processes, join(name, 0, 4) as ranks:
        for process in processes:
            process.hear()
        processes[1].kill()
        killed = time.monotonic()
        with pytest.raises(coxswain.RankDied, match="rank 2") as caught:
            ranks.barrier(timeout=30)
        assert (caught.value.rank, caught.value.pid) == (2, processes[1].pid)
        for process in (processes[0], processes[2]):
            when, rank, pid, text = process.hear()
            assert (rank, pid) == (2, processes[1].pid) and "rank 2" in text
            assert when - killed < 5  # 50 ms, and a busy machine
        with pytest.raises(coxswain.RankDied) as caught:
            ranks.barrier(timeout=30)
        assert (caught.value.rank, caught.value.pid) == (2, processes[1].pid)


def leave_at_once(name, rank, rank_count):
    join(name, rank, rank_count).leave()


def test_a_rank_that_left_is_named(name):
    with others(leave_at_once, name, 2), join(name, 0, 2) as ranks:
        with pytest.raises(coxswain.RankDied, match="has left") as caught:
            ranks.barrier(timeout=30)
        assert caught.value.rank == 1


def late(name, rank, rank_count):
    with join(name, rank, rank_count) as ranks:
        say()
        listen()
        ranks.align(2)
        ranks.barrier(timeout=30)


def test_a_late_rank_is_named_and_align_brings_all_in_step(name):
    with others(late, name, 2) as processes, join(name, 0, 2) as ranks:
        processes[0].hear()
        with pytest.raises(coxswain.TimedOut, match="rank 1") as caught:
            ranks.barrier(timeout=0.1)
        assert caught.value.rank == 1 and isinstance(caught.value, TimeoutError)
        with pytest.raises(coxswain.Aborted, match="align"):  # out of step
            ranks.barrier(timeout=30)
        ranks.align(2)
        with pytest.raises(coxswain.Invalid, match="epoch 1 "):
            ranks.align(1)
        processes[0].tell()
        ranks.barrier(timeout=30)
        assert processes[0].wait() == 0


def test_join_names_the_missing_ranks(name):
    with pytest.raises(coxswain.TimedOut, match="ranks 1-2 did not join"):
        coxswain.RankGroup.join(name, 0, 3, timeout=0.1)
    with pytest.raises(coxswain.Invalid, match="rank 3 of 3"):
        coxswain.RankGroup.join(name, 3, 3)
    with pytest.raises(TypeError, match="RankGroup.join"):
        coxswain.RankGroup()


def aborted(name, rank, rank_count):
    with join(name, rank, rank_count) as ranks:
        say()
        with pytest.raises(coxswain.Aborted, match="rank 0|rank 1|rank 2"):
            ranks.barrier(timeout=30)
        ranks.align(1)
        ranks.barrier(timeout=30)


def test_abort_on_another_thread_ends_a_wait_on_all_ranks(name):
    with others(aborted, name, 3) as processes, join(name, 0, 3) as ranks:
        processes[0].hear()
        processes[1].hear()
        processes[0].wait_until_asleep()
        ranks.blame(1)
        thread = threading.Thread(target=ranks.abort)
        thread.start()
        thread.join()
        with pytest.raises(coxswain.Aborted):
            ranks.barrier(timeout=30)
        ranks.align(1)
        ranks.barrier(timeout=30)
        assert [process.wait() for process in processes] == [0, 0]


def test_one_thread_at_a_time(name):
    with others(late, name, 2) as processes, join(name, 0, 2) as ranks:
        processes[0].hear()
        failures = []

        def wait():
            try:
                ranks.barrier(timeout=30)
            except coxswain.Error as error:
                failures.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while not ranks._operating.locked():
            pass
        for call in (ranks.barrier, ranks.leave, lambda: ranks.align(1)):
            with pytest.raises(coxswain.Busy):
                call()
        ranks.abort()
        thread.join()
        assert [type(failure) for failure in failures] == [coxswain.Aborted]


def test_a_fork_cannot_use_it(name):
    with join(name, 0, 1) as ranks:
        child = os.fork()
        if not child:
            status = 1
            try:
                ranks.barrier()
            except coxswain.StateError as error:
                status = 0 if "forked" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        ranks.barrier(timeout=30)


# ---- signals ----


def interrupted(name, rank, rank_count):
    with join(name, rank, rank_count) as ranks:
        say()
        try:
            ranks.barrier(timeout=60)
        except KeyboardInterrupt:
            say(time.monotonic())


def test_ctrl_c_ends_a_barrier(name):
    with others(interrupted, name, 2) as processes, join(name, 0, 2) as ranks:
        processes[0].hear()
        processes[0].wait_until_asleep()
        sent = time.monotonic()
        os.kill(processes[0].pid, signal.SIGINT)
        assert processes[0].hear() - sent < 5  # 50 ms, and a busy machine
        with pytest.raises((coxswain.Aborted, coxswain.RankDied), match="rank 1"):
            ranks.barrier(timeout=30)  # at which rank 1 has arrived
            ranks.barrier(timeout=30)
        assert processes[0].wait() == 0


def interrupted_join(name, rank, rank_count):
    say()
    try:
        join(name, rank, rank_count)
    except KeyboardInterrupt:
        say()


def test_ctrl_c_ends_a_join(name):
    with Other(interrupted_join, name, 0, 2) as process:
        process.hear()
        process.wait_until_asleep()
        os.kill(process.pid, signal.SIGINT)
        process.hear()
        assert process.wait() == 0
    assert not pathlib.Path(f"/dev/shm/{name}_group").exists()


def handle_signal(name, rank, rank_count):
    signal.signal(signal.SIGUSR1, lambda *_: say("handled"))
    with join(name, rank, rank_count) as ranks:
        say()
        ranks.barrier(timeout=60)
        assert ranks.gather(b"%d" % rank, timeout=30) == [b"0", b"1"]


def test_a_signal_handler_runs_within_a_wait_which_goes_on(name):
    with others(handle_signal, name, 2) as processes, join(name, 0, 2) as ranks:
        processes[0].hear()
        processes[0].wait_until_asleep()
        os.kill(processes[0].pid, signal.SIGUSR1)
        assert processes[0].hear() == "handled"  # rank 0 has not arrived yet
        ranks.barrier(timeout=30)
        ranks.gather(b"0", timeout=30)
        assert processes[0].wait() == 0


# ---- ranks of a group ----

WORKER = """
import coxswain
ranks = coxswain.RankGroup.join()
coxswain.serve(lambda data: b" ".join(ranks.gather(b"%s %d" % (data, coxswain.rank()))))
"""


@pytest.mark.parametrize("rank_count", [1, 2])
def test_the_ranks_of_a_group_need_no_arguments(tmp_path, rank_count):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with coxswain.Group([sys.executable, str(script)], rank_count) as group:
        expected = b" ".join(b"x %d" % rank for rank in range(rank_count))
        assert group.call(b"x", timeout=30) == [expected] * rank_count


INIT = f"""#!{sys.executable}
import os, signal, sys
import coxswain

worker = coxswain.Worker()
size = int(os.environ["VALUE_SIZE"])
steps = 0

@worker.init
def init(request):
    global ranks
    ranks = request.join(value_size=size, timeout=30)
    assert ranks.value_size == size
    assert ranks.gather(bytes([ranks.rank]) * size) == [bytes([r]) * size
                                                        for r in range(ranks.rank_count)]
    print("joined", ranks.rank, ranks.rank_count, request.replayed, flush=True)
    return coxswain.InitResult(block_count=64, block_size=16, max_positions=256)

@worker.execute
def step(batch):
    global steps
    steps += 1
    if steps == 2 and ranks.rank == 1 and worker.incarnation == 1 and "DIE" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.barrier(timeout=30)
    return [5 if emits else -1 for emits in batch.emits]

worker.serve()
"""


def generate(coxswain_command, tmp_path, *options, **environment):
    """Prompts on a group that `coxswain run` starts with the options: what generate has printed,
    and the group's standard error."""
    script = tmp_path / "worker"
    script.write_text(INIT)
    script.chmod(0o700)
    name, environment = f"init{os.getpid()}", {**os.environ, **environment}
    with subprocess.Popen(
        [coxswain_command, "run", name, "--worker", script, *options],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as run:
        prompt = ["--quiet", "--tokens", "--max-tokens", "3", "3 4"]
        subprocess.run([coxswain_command, "status", name, "--wait", "60"], check=False)
        done = subprocess.run(
            [coxswain_command, "generate", "--name", name, *prompt],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        subprocess.run([coxswain_command, "stop", name], check=False)
        done.stderr += run.communicate(timeout=60)[1]
    return done


@pytest.mark.parametrize("value_size", [4096, 100_000])
@pytest.mark.parametrize("rank_count", [1, 2])
@pytest.mark.parametrize("form", ["--attach=named", "--attach=sealed", "--legacy-workers"])
def test_the_ranks_of_an_init(coxswain_command, tmp_path, form, rank_count, value_size):
    done = generate(
        coxswain_command, tmp_path, form, f"--ranks={rank_count}", VALUE_SIZE=str(value_size)
    )
    assert (done.returncode, done.stdout.split()[-3:]) == (0, ["5", "5", "5"]), done.stderr
    for rank in range(rank_count):
        assert f"joined {rank} {rank_count} False" in done.stderr


@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_an_init_again_leaves_the_group_of_before(coxswain_command, tmp_path, attach):
    done = generate(
        coxswain_command,
        tmp_path,
        f"--attach={attach}",
        "--ranks=2",
        "--on-death=restart",
        VALUE_SIZE="4096",
        DIE="1",
    )
    assert (done.returncode, done.stdout.split()[-3:]) == (0, ["5", "5", "5"]), done.stderr
    assert "joined 0 2 True" in done.stderr and "joined 1 2 True" in done.stderr
