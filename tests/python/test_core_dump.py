"""A rank whose core is being written is dead at once, for calls and for its replacement."""

import mmap
import os
import pathlib
import resource
import signal

import pytest

import coxswain

NO_LIMIT = (resource.RLIM_INFINITY,) * 2
MAP_NORESERVE = 0x4000
# None of it is ever touched, but the kernel looks at each page of it, for much of an hour.
ENDLESS = 64 << 40


def rank():
    resource.setrlimit(resource.RLIMIT_CORE, NO_LIMIT)

    def handle(data):
        if data == b"crash" and os.environ["COXSWAIN_RANK"] == "1":
            memory = mmap.mmap(-1, ENDLESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
            memory[0] = 1
            os.kill(os.getpid(), signal.SIGSEGV)
        return b"%d" % os.getpid()

    coxswain.serve(handle)


def dumps(pid):
    return "CoreDumping:\t1\n" in pathlib.Path(f"/proc/{pid}/status").read_text()


def test_p2_calls_end_and_the_rank_is_replaced_while_its_core_is_written(tmp_path, caplog):
    pattern = pathlib.Path("/proc/sys/kernel/core_pattern").read_text()
    if "|" in pattern or "/" in pattern or resource.getrlimit(resource.RLIMIT_CORE)[1] != -1:
        pytest.skip("no core is written into the working folder here")
    caplog.set_level("INFO")
    with coxswain.Group(rank, ranks=2, on_death="restart", cwd=tmp_path) as group:
        pid = group.status().ranks[1].pid
        with pytest.raises(coxswain.RankDied) as died:
            group.call(b"crash", timeout=30)
        text = f"rank 1 (pid {pid}) is dumping core after signal 11 (Segmentation fault)"
        assert text in str(died.value)
        assert (died.value.rank, died.value.pid, died.value.signal) == (1, pid, signal.SIGSEGV)
        replies = group.call(b"", timeout=30, gather="all")
        assert dumps(pid)
        assert int(replies[1]) != pid
        assert text in caplog.text
        os.kill(pid, signal.SIGKILL)  # it would be waited for
        assert group.call(b"", timeout=30, gather="all") == replies
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert f"rank 1 (pid {pid}) has ended, its core is cut off" in caplog.text
