"""Output that nobody reads holds up neither a group nor its end."""

import fcntl
import os
import pathlib
import subprocess
import sys
import time

import pytest

from coxswain._internal import output as _output

HOST = """
import sys
import coxswain, workers

with coxswain.Group(workers.obey, 2, name=sys.argv[1]) as group:
    group.call(b"print", timeout=30)
    open(sys.argv[2], "w").close()
    if sys.argv[3] == "coxswain stop":
        try:
            while True:
                group.call(b"")
        except coxswain.Closed:
            sys.exit(3)
"""


@pytest.fixture(name="full_pipe")
def fixture_full_pipe():
    """Both ends of a pipe in which no byte has room."""
    reader, writer = os.pipe()
    os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)))
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("end", ["its own", "coxswain stop"])
def test_a_group_ends_though_nobody_reads_its_host(tmp_path, coxswain_command, full_pipe, end):
    """As in a container whose log pipe is full."""
    name, ready = f"unread-{os.getpid()}", tmp_path / "ready"
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, name, str(ready), end],
        cwd=pathlib.Path(__file__).parent,
        stdout=full_pipe[1],
        stderr=full_pipe[1],
    )
    try:
        while not ready.exists():
            assert host.poll() is None
            time.sleep(0.001)
        if end == "coxswain stop":
            subprocess.run([coxswain_command, "stop", "--name", name], check=True, timeout=60)
        assert host.wait(30) == (3 if end == "coxswain stop" else 0)
    finally:
        host.kill()
        host.wait()


def test_lines_without_room_are_counted(full_pipe, caplog, monkeypatch):
    monkeypatch.setattr(_output, "_PATIENCE", 0.01)
    output = _output.Output()
    with open(full_pipe[1], "w", encoding="ascii", closefd=False) as stream:
        for line in ("one", "two"):
            output.write(stream, line)
        assert output.dropped == 2 and not caplog.records
        size = fcntl.fcntl(full_pipe[0], fcntl.F_GETPIPE_SZ)
        assert os.read(full_pipe[0], size) == bytes(size)
        output.write(stream, "three")
    assert os.read(full_pipe[0], 100) == b"three\n"
    (record,) = caplog.records
    assert record.getMessage().startswith("2 lines of ranks and messages were dropped: ")


def test_messages_of_a_stream_without_room_are_counted(full_pipe, monkeypatch):
    monkeypatch.setattr(_output, "_PATIENCE", 0.01)
    with open(full_pipe[1], "w", encoding="ascii", closefd=False) as stream:
        monkeypatch.setattr(_output, "_log_streams", lambda: [stream])
        output = _output.Output()
        output.log(40, "an error")
        output.tell_dropped()
        assert output.dropped == 1
