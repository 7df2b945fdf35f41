"""coxswain handle, as a user runs it: a program that has nothing to do with the exporter."""

import os
import pathlib
import subprocess

import pytest

import coxswain
import workers
from processes import Other, listen, say

SIZE, OFFSET = 20000, 5001
# As handle_format.h lays it out.
START, SYSTEM, CRC = 8, 16, 60


def pattern(seed):
    return bytes((seed * 37 + i * 11 + i // 251) & 255 for i in range(SIZE))


def forge(handle, offset, value):
    """With another number of 8 bytes, and the checksum that belongs to it."""
    forged = handle[:offset] + value.to_bytes(8, "little") + handle[offset + 8 : CRC]
    crc = 0xFFFFFFFF
    for byte in forged:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return forged + (~crc & 0xFFFFFFFF).to_bytes(4, "little")


def export(socket=None):
    """Exports what it is told to, a seed or None for a pipe, and puts it when told False."""
    with coxswain.Exporter(socket, ptrace_policy="any") as exporter:
        handle = None
        while True:
            seed = listen()
            if seed is False:
                exporter.put(handle)
                say()
                continue
            fd = os.pipe()[0] if seed is None else os.memfd_create("handle")
            if seed is not None:
                os.write(fd, pattern(seed))
            handle = exporter.export(fd, 0 if seed is None else OFFSET)
            say(bytes(handle).hex())


def exported(process, seed):
    process.tell(seed)
    return bytes.fromhex(process.hear())


@pytest.fixture
def peer():
    with Other(export) as process:
        yield process


@pytest.fixture
def file(tmp_path):
    return tmp_path / "handle"


@pytest.fixture
def handle(coxswain_command):
    """Runs it. says: what its output has to have; without: calls that it is denied. Returns both
    outputs."""

    def run(*words, status=0, says=(), data=None, without=None):
        before = [os.path.join(os.environ["COX_BIN_DIR"], "without"), without] if without else []
        result = subprocess.run(
            [*before, coxswain_command, "handle", *map(str, words)],
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
        if without and result.returncode == 77:
            pytest.skip("no seccomp filters here")
        output = result.stdout.decode()
        assert result.returncode == status, output
        for text in says:
            assert text in output, output
        return output

    return run


def test_l2_l5_it_prints_what_is_in_a_handle_and_opens_it(handle, peer, file):
    data = exported(peer, 3)
    file.write_bytes(data)
    info, there = coxswain.Handle(data), pattern(3)[OFFSET:]
    inode = int.from_bytes(data[32:40], "little")
    output = handle(
        file,
        says=[
            "kind        memory\n",
            f"exporter    process {info.pid}, alive\n",
            f"start       {int.from_bytes(data[8:16], 'little')},",
            ", this one\n",
            f"fd          {int.from_bytes(data[24:28], 'little')} there\n",
            f"inode {inode}\n",
            f"size        {SIZE - OFFSET} bytes\n",
            f"offset      {OFFSET}\n",
            f"serial      {int.from_bytes(data[56:60], 'little')}\n",
            "opened by   pidfd_getfd\n",
            "00000010  " + there[16:24].hex(" "),
            "00000030  ",
        ],
    )
    assert "00000040  " not in output
    output = handle("--bytes", 20, "-", data=data, says=["00000010  " + there[16:20].hex(" ")])
    assert "00000020  " not in output
    assert "00000000  " not in handle("--bytes=0", file)
    hexadecimal = data.hex(" ").encode()
    handle("--hex", "-", data=hexadecimal, says=["opened by   pidfd_getfd\n"])
    file.write_bytes(exported(peer, None))
    handle(file, says=["kind        other", "nothing to map", "opened by   pidfd_getfd\n"])


def test_l8_l9_l10_l7_what_does_not_open_is_named(handle, peer, file):
    data = exported(peer, 4)
    file.write_bytes(forge(data, SYSTEM, 77))
    handle(file, status=2, says=["000000000000004d, not this one", "coxswain: unreachable"])
    file.write_bytes(forge(data, START, 78))
    handle(file, status=3, says=["the pid is another process's by now"])
    file.write_bytes(data)
    peer.tell(False)
    peer.hear()
    handle(file, status=2, says=["alive\n", "the handle was put"])
    peer.kill()
    handle(file, status=3, says=[f"exporter    process {peer.pid}, gone\n", "is gone\n"])


def test_l12_it_asks_the_socket_where_it_must(handle, file):
    denied = "pidfd_getfd=EPERM"
    first = pattern(5)[OFFSET]
    with coxswain.Group(workers.echo, ranks=1) as group, Other(export, group.socket) as process:
        file.write_bytes(exported(process, 5))
        handle(file, without=denied, says=["opened by   /proc\n", f"00000000  {first:02x}"])
        says = ["opened by   the control socket\n", f"00000000  {first:02x}"]
        handle(file, "--socket", group.socket, without=denied, says=says)
        handle(file, "--name", group.name, without="pidfd_getfd=ENOSYS", says=says)
        file.write_bytes(exported(process, None))
        handle(file, without=denied, status=1, says=["seccomp"])


REFUSALS = [
    (0, "", "0 bytes, a handle has 64"),
    (63, "", "63 bytes, a handle has 64"),
    (65, "", "65 bytes, a handle has 64"),
    (2000, "", "1024 or more bytes"),
    (64, "", "{file}: no handle: it begins with 0x6666"),
    (127, "--hex", "127 digits, expected 128"),
    (126, "--hex", "63 bytes"),
    (128, "--hex", "no handle"),
    (128, "", "128 bytes, a handle has 64; these are hexadecimal digits: read them with --hex"),
    (64, "--bytes x", "--bytes is 'x': expected 0 to 1048576"),
    (64, "--bytes -1", "--bytes is '-1': expected 0 to 1048576"),
    (64, "--bytes 99999999", "99999999"),
    (64, "--bogus", "--bogus"),
    (64, "--socket a --name b", "use one"),
    (64, "--name /", "name"),
    (64, "--socket", "needs a value"),
    (64, "more", "2 files named"),
]


@pytest.mark.parametrize("size, words, says", REFUSALS)
def test_l19_files_that_hold_no_handle_are_refused(handle, file, size, words, says):
    file.write_bytes(b"f" * size)
    handle(file, *words.split(), status=2, says=[says.format(file=file)])


def test_l19_what_is_no_file_is_refused(handle, file):
    file.write_bytes(b"f" * 70 + b"g" + b"f" * 57)
    handle("--hex", file, status=2, says=["byte 70 is no hexadecimal digit"])
    handle(pathlib.Path(file, "nothing"), status=2, says=["Not a directory"])
    handle(file.with_name("nothing"), status=2, says=["No such file"])
    handle(file.parent, status=2, says=["directory"])
    handle(status=2, says=["0 files named"])
    handle("--help", says=["Usage: coxswain handle", "Exit status"])
