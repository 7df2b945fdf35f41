"""coxswain.Handle, Exporter and Importer, with other processes."""

import gc
import mmap
import os

import pytest

import coxswain
from processes import Other, listen, say


@pytest.fixture
def fd():
    """Of a memfd with ten bytes."""
    made = os.memfd_create("a test's")
    os.write(made, b"0123456789")
    yield made
    os.close(made)


@pytest.fixture
def exporter():
    with coxswain.Exporter(ptrace_policy="any") as made:
        yield made


def change(data):
    handle = coxswain.Handle(bytes.fromhex(data))
    with coxswain.Importer() as importer, importer.open(handle, write=True) as opened:
        say(bytes(opened.memory).decode())
        opened.memory[:3] = b"new"
    fd = handle.open()
    say(os.pread(fd, 100, 0).decode())
    os.close(fd)


def test_another_process_maps_the_same_memory(exporter, fd):
    handle = exporter.export(fd, 2, 4)
    assert len(bytes(handle)) == 64 and coxswain.Handle(bytes(handle)) == handle
    assert (handle.pid, handle.size, handle.offset, handle.is_memory) == (os.getpid(), 4, 2, True)
    assert len({handle, coxswain.Handle(bytes(handle))}) == 1 and "4 bytes" in repr(handle)
    with mmap.mmap(fd, 10) as own:
        with Other(change, bytes(handle).hex()) as process:
            assert process.hear() == "2345"
            assert process.hear() == "01new56789"
            assert process.wait() == 0
        assert own[:] == b"01new56789"


def test_bytes_are_checked(exporter, fd):
    handle = bytes(exporter.export(fd))
    with pytest.raises(coxswain.Corrupt):
        coxswain.Handle(handle[:-1] + bytes([handle[-1] ^ 1]))
    with pytest.raises(coxswain.Invalid, match="64 bytes, not 3"):
        coxswain.Handle(b"abc")
    with pytest.raises(coxswain.Invalid):
        exporter.export(fd, 5, 6)
    with pytest.raises(coxswain.Invalid):
        exporter.export(99999)


def test_what_is_no_memory_is_opened_only(exporter):
    reader, writer = os.pipe()
    handle = exporter.export(reader)
    os.write(writer, b"x")
    assert not handle.is_memory and handle.size == 0
    with coxswain.Importer() as importer, importer.open(handle) as opened:
        assert os.read(opened.fd, 10) == b"x"
        assert (opened.size, bytes(opened.memory)) == (0, b"")
    os.close(reader)
    os.close(writer)


def test_after_a_put_it_cannot_be_opened(exporter, fd):
    handle = exporter.export(fd)
    exporter.put(handle)
    with pytest.raises(coxswain.NotFound):
        handle.open()
    with pytest.raises(coxswain.NotFound):
        exporter.put(handle)


def export():
    with coxswain.Exporter(ptrace_policy="any") as exporter:
        fd = os.memfd_create("a test's")
        os.write(fd, b"before")
        say(bytes(exporter.export(fd)).hex())
        listen()


def test_the_exporter_is_dead():
    with Other(export) as process, coxswain.Importer() as importer:
        handle = coxswain.Handle(bytes.fromhex(process.hear()))
        with importer.open(handle) as opened:
            process.kill()
            with pytest.raises(coxswain.PeerDead) as caught:
                handle.open()
            assert not isinstance(caught.value, coxswain.RankDied) and caught.value.code
            with pytest.raises(coxswain.PeerDead):
                importer.open(handle)
            assert bytes(opened.memory) == b"before"


def test_a_view_keeps_the_memory(exporter, fd):
    handle = exporter.export(fd)
    importer = coxswain.Importer()
    opened = importer.open(handle)
    view = opened.memory
    assert view.readonly and not opened.writable
    with pytest.raises(coxswain.StateError, match="a view"):
        opened.close()
    with pytest.raises(coxswain.StateError, match="1 left"):
        importer.close()
    del view
    opened.close()
    opened.close()
    with pytest.raises(coxswain.Closed, match="this import is closed"):
        opened.memory
    view = importer.open(handle, write=True).memory  # the view alone is left
    gc.collect()
    with pytest.raises(coxswain.StateError):
        importer.close()
    view[:2] = b"ab"
    assert os.pread(fd, 3, 0) == b"ab2"
    del view
    importer.close()
    with pytest.raises(coxswain.Closed):
        importer.open(handle)


def test_an_exception_is_not_hidden_by_its_views(exporter, fd):
    def fail():
        with coxswain.Importer() as importer, importer.open(exporter.export(fd)) as opened:
            view = opened.memory
            raise RuntimeError(view[0])

    with pytest.raises(RuntimeError):
        fail()
    gc.collect()


def test_a_fork_cannot_use_them(exporter, fd):
    child = os.fork()
    if not child:
        status = 1
        try:
            exporter.export(fd)
        except coxswain.StateError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    exporter.export(fd)
