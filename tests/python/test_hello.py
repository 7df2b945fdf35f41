"""What a client says first at a control socket may be anything: it gets a reply, and no harm is
done."""

import os
import pathlib
import random
import socket
import struct
import subprocess
import sys
import threading

import pytest

import coxswain
from processes import Other, listen, say

SIZE, REPLY_SIZE = 1024, 128
# Bytes that have a meaning: each of their bits is flipped.
MEANING = 64
ROLE = 8
STATUSES = range(1, 24)  # of enum cox_status


def receive(connection, size):
    """So many bytes, or what comes before the end; fds that come along are closed."""
    data = b""
    while len(data) < size:
        part, fds, _, _ = socket.recv_fds(connection, size - len(data), 64)
        for fd in fds:
            os.close(fd)
        if not part:
            break
        data += part
    return data


def reply_of(connection):
    """Whether it is a hello reply, or a refusal with a reason; None: it was closed without one."""
    try:
        kind = receive(connection, 1)
        if not kind:
            return None
        if kind == b"\1":
            return len(receive(connection, REPLY_SIZE - 1)) == REPLY_SIZE - 1
        code, length = receive(connection, 2)
        return kind == b"\0" and code in STATUSES and 0 < length == len(receive(connection, length))
    except ConnectionResetError:
        return None


def converse(path, pieces, fds=(), half=False):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(path)
        try:
            for piece in pieces:
                socket.send_fds(connection, [piece], fds) if fds else connection.sendall(piece)
            if half:
                connection.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has said why, and closed, before it has it all
        return reply_of(connection)


def changed(good, number):
    """A good frame with some changes, maybe of another role; and whether it is cut."""
    frame = bytearray(good + bytes(8))
    frame[ROLE] = number.randrange(5)
    for _ in range(number.randrange(4)):
        at = number.randrange(MEANING if number.randrange(8) else SIZE)
        frame[at] = number.choice([0, 1, 2, 3, 4, 127, 128, 129, 255])
    way = number.choice(["cut", "longer", "in pieces", "with fds", "", "", "", ""])
    size = {"cut": number.randrange(SIZE), "longer": SIZE + 8}.get(way, SIZE)
    pieces, at = [], 0
    while at < size:
        step = number.randint(1, 300) if way == "in pieces" else size
        pieces.append(bytes(frame[at : min(at + step, size)]))
        at += step
    return pieces, range(number.randrange(4)) if way == "with fds" else (), way == "cut"


def say_anything(path):
    """What it says is taken back before it ends, unless it is a rank by then: so it waits."""
    start = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    good = struct.pack("<QIIQIIIIQQQ", 1, 1, 0xFFFFFFFF, 0, 0, 32, 0, 0, 0, 0, start).ljust(
        SIZE, b"\0"
    )
    for bit in range(8 * SIZE):
        if bit // 8 < MEANING or bit % 8 == bit // 8 % 8:
            frame = bytearray(good)
            frame[bit // 8] ^= 1 << bit % 8
            assert converse(path, [frame]), bit
    for seed in range(400):
        pieces, fds, cut = changed(good, random.Random(seed))
        found = converse(path, pieces, fds, cut)
        assert found or (cut and found is None), seed
    say()
    listen()


def rank_start(path):
    env = {"COXSWAIN_SOCKET": path, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", "import workers; workers.echo()"], env={**os.environ, **env}
    )


@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_p10_b14_a_hello_of_any_bytes_gets_a_reply_and_harms_no_other(attach):
    name = f"hello{os.getpid()}"
    group = coxswain.Group(ranks=2, external=True, name=name, attach=attach, timeout=60)
    starting = threading.Thread(target=group.start)
    starting.start()
    ranks = []
    try:
        with Other(say_anything, group.socket) as client:
            client.hear()
            ranks = [rank_start(group.socket) for _ in range(2)]
            starting.join()
            client.tell()
            assert client.wait() == 0
        assert [bytes(reply) for reply in group.call(b"after that", timeout=30)] == 2 * [
            b"after that"
        ]
        # And at the control socket of a group that has all its ranks.
        with Other(say_anything, group.socket) as client:
            client.hear()
            client.tell()
            assert client.wait() == 0
        assert len(group.call(b"still", timeout=30)) == 2
    finally:
        group.stop()
        for rank in ranks:
            rank.wait(30)
