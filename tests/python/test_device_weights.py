"""Weights in the memory of a GPU, with a stand-in for the driver (tests/lib/fake_cuda.h): device
memory is a memfd, whose device address is one of the process. It shows what our side asks of a
driver, and what the holder does with its fds; `sh tools/gpu-check` has a real one."""

import contextlib
import os
import pathlib
import signal

import pytest
from test_weights import (
    CUDA,
    DENIED,
    GET,
    INVALID,
    PUT,
    Script,
    ask,
    command,
    holder_connect,
    keys,
    runtime_dir,
    wait_until,
)

import coxswain
from coxswain._internal import device_memory

numpy = pytest.importorskip("numpy")
STAND_IN = str(pathlib.Path(os.environ["COX_BIN_DIR"]).parent / "lib" / "libfake_cuda.so")
__all__ = ["runtime_dir"]  # a fixture of all tests here

# Of a process: `store`, and `weights` with what the key has; prints what it did.
BEGIN = """
import ctypes, os, sys, numpy, coxswain
from coxswain._internal import device_memory
device_memory._driver = sys.argv[1]
store = coxswain.WeightStore(keep=60, device="cuda:1")
weights = store.get("k")
if weights is None:
    print("loads", flush=True)
    w = numpy.arange(100000, dtype=numpy.float32)
    weights = store.put("k", {"none": numpy.ones((3, 0, 2)), "w": w, "tied": w})
else:
    print("maps", flush=True)
def values(name="w"):
    return weights[name].numpy()
address = weights["w"].__cuda_array_interface__["data"][0]
assert address == weights["tied"].__cuda_array_interface__["data"][0] != 0
assert weights["w"].shape == (100000,) and (values() == numpy.arange(100000)).all()
assert values("none").shape == (3, 0, 2) == weights["none"].shape
"""
WAITS = "print('ready', flush=True); sys.stdin.readline()\n"


class Process(Script):
    """A process that uses the key."""

    def __init__(self, then=WAITS):
        super().__init__(BEGIN + then, STAND_IN)


@pytest.fixture
def stand_in(monkeypatch):
    """This process has devices, too."""
    monkeypatch.setattr(device_memory, "_driver", STAND_IN)
    device_memory.Devices.all.cache_clear()
    yield
    device_memory.Devices.all.cache_clear()


def test_device_memory_outlives_the_process_that_filled_it():
    with Process() as first:
        assert first.line() == "loads" and first.line() == "ready"
        with Process() as second:
            assert second.line() == "maps" and second.line() == "ready"
            (row,) = coxswain.WeightStore().list()
            assert row["users"] == 2 and row["memory"] == "CUDA"
            assert 400000 < row["bytes"] < 500000, "a tied array was put twice"
            # fake_cuda's device 1 has the number 11.
            assert row["key"] == "k GPU-0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b"
            first.process.kill()
            wait_until(lambda: coxswain.WeightStore().list()[0]["users"] == 1)
            assert second.end() == 0
    with Process() as third:
        assert third.line() == "maps" and third.line() == "ready"


def test_a_stray_write_into_device_memory_changes_nothing_elsewhere():
    """On a real device a kernel fails; with the stand-in a write shows that memory is read-only."""
    write = "ctypes.memset(address, 7, 4)\n"
    for what in "loads", "maps":  # the one that has put them is no better
        with Process(write) as process:
            assert process.line() == what
            assert process.end() == -signal.SIGSEGV
    with Process() as other:
        assert other.line() == "maps" and other.line() == "ready"


def test_device_memory_that_was_unshared_is_the_processes_own():
    write = "weights.unshare()\nctypes.memset(address, 7, 4096)\n"
    check = "assert values()[0] != 0 and values()[2000] == 2000\n"
    with Process(write + check + WAITS) as first:
        assert first.line() == "loads" and first.line() == "ready"
        with Process() as second:
            assert second.line() == "maps" and second.line() == "ready"
        assert first.end() == 0


def test_the_same_key_on_another_device_is_another_one(stand_in):
    stores = [coxswain.WeightStore(device=device) for device in ("cuda", "cuda:1", "cpu")]
    with contextlib.ExitStack() as stack:
        for i, store in enumerate(stores):
            assert store.get("k") is None
            weights = store.put("k", {"w": numpy.full(3, i)})
            stack.callback(weights.close)
            assert store.held("k") == weights.bytes > 0
        assert len(keys()) == 3 and "GPU-0a0a0a0a" in command().stdout
        assert [store.get("k")["w"] is not None for store in stores] == [True] * 3
        assert stores[0].get("k")["w"].numpy().tolist() == [0, 0, 0]
        assert stores[1].drop("k") == 1 and len(keys()) == 2
        assert stores[1].held("k") == 0


def test_a_device_without_room_takes_nothing(stand_in):
    store = coxswain.WeightStore(device="cuda:0")
    with pytest.raises(coxswain.NoSpace, match=r"bytes on cuda:0 .* are needed, .* are free of"):
        store.put("k", {"w": numpy.zeros(17 << 20, dtype=numpy.uint8)})
    assert keys() == []


def test_a_machine_without_a_gpu_says_so(monkeypatch):
    device_memory.Devices.all.cache_clear()
    monkeypatch.setattr(device_memory, "_driver", "/nonexistent/libcuda.so.1")
    with pytest.raises(coxswain.Unsupported, match=r"memory of cuda:0, .*: no CUDA driver: /nonex"):
        coxswain.WeightStore(device="cuda")
    for device in "tpu:0", "cuda:x", "":
        with pytest.raises(coxswain.Invalid, match="expected 'cpu', or 'cuda:'"):
            coxswain.WeightStore(device=device)


def test_a_device_that_there_is_not_is_told(stand_in):
    with pytest.raises(coxswain.Unsupported, match="cuda:7, .*this process has 2 of them"):
        coxswain.WeightStore(device="cuda:7")


def test_what_is_no_device_memory_is_told(stand_in):
    store = coxswain.WeightStore(device="cuda:0")
    store.put("other", {}).close()  # starts a holder
    fd = os.memfd_create("junk")
    os.write(fd, b"x" * 4096)
    name = store._device.name
    full = f"k {name}".encode()
    for key, memory, size, status in (
        (full, 5, 4096, INVALID),
        (full, CUDA, 0, DENIED),
        (full, 0, 4096, INVALID),
        (full, CUDA, 4096, 0),
        (b"h", CUDA, 4096, 0),
    ):
        with holder_connect() as connection:
            assert ask(connection, PUT, key, [fd], memory=memory, size=size) == status
            if status == 0 and key == full:
                with pytest.raises(coxswain.Corrupt, match="importing memory from an fd"):
                    store.get("k")
            elif status == 0:
                with pytest.raises(coxswain.Corrupt, match="another kind of device"):
                    coxswain.WeightStore().get("h")
    with holder_connect() as connection:
        assert ask(connection, GET, full, memory=CUDA) == INVALID
    os.close(fd)
