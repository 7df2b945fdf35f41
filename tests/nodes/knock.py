"""A machine at the direct connections of another one.

    knock.py HOST:PORT bare SECONDS
    knock.py HOST:PORT CERTIFICATES NODE GROUP PEER KIND SIZE [FRAME]

The first opens connections as fast as it goes, which say nothing, and says how many. The second has
the certificate of the node: it announces a message of this kind and size (nodes/direct), begun by a
frame of the kind FRAME, and ends when the other side has ended the connection."""

import contextlib
import socket
import ssl
import struct
import sys
import time


def bare(host, port, seconds):
    held, count, end = [], 0, time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            held.append(socket.create_connection((host, port), 1))
            count += 1
        if len(held) > 400:
            held.pop(0).close()
    print(count)


def announce(host, port, certificates, node, group, peer, kind, size, frame):
    context = ssl.create_default_context(cafile=f"{certificates}/ca.pem")
    context.check_hostname = False  # the name is that of the process
    pair = f"{certificates}/node-{node}"
    context.load_cert_chain(f"{pair}.pem", f"{pair}-key.pem")
    with context.wrap_socket(socket.create_connection((host, port), 10)) as other:
        other.sendall(f"node-{node}".encode().ljust(64, b"\0") + group.encode().ljust(64, b"\0"))
        greeting = b""
        while len(greeting) < 128:
            greeting += other.recv(128)
        if greeting[:64].rstrip(b"\0").decode() != peer:
            sys.exit(f"the process there is {greeting!r}")
        head = struct.pack("<IIQQ", 0x44584F43, kind, size, 0)  # "COXD"
        front = struct.pack("<IBBHII", 0x314E5843, frame, 0, 0, 0, size - 96)  # "CXN1"
        other.sendall(head + front.ljust(96, b"\0"))
        with contextlib.suppress(OSError):
            while other.recv(65536):
                pass


def main():
    host, port = sys.argv[1].rsplit(":", 1)
    if sys.argv[2] == "bare":
        bare(host, int(port), float(sys.argv[3]))
        return
    certificates, node, group, peer, kind, size = sys.argv[2:8]
    frame = int(sys.argv[8]) if len(sys.argv) > 8 else 0
    announce(host, int(port), certificates, node, group, peer, int(kind), int(size), frame)


main()
