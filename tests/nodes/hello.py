"""What a node says that follows a later lead: hello.py GROUP NODE CERTIFICATES HOST ADDRESS EPOCH

A NATS client of its own, with the certificate of the node, publishes a hello (nodes/node.proto) to HOST:4222 until the lead
refuses it, as that of a second agent, or 10 s have passed."""

import contextlib
import os
import socket
import ssl
import struct
import sys
import time

PROTOCOL, HELLO = 1, 5  # nodes/link/frame.h


def varint(value):
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def hello(address, epoch):
    version = os.environ["COXSWAIN_VERSION"].encode()
    return b"".join(field(number, value) for number, value in (
        (1, version), (2, PROTOCOL), (3, 4711), (4, os.getpid()), (5, address.encode()),
        (9, epoch), (10, 0)))


def frame(payload):
    """The head, of which a hello has the kind, the size and the time alone."""
    return struct.pack("<IBBHIIQQQQQQQQQQ", 0x314E5843, HELLO, 0, 0, 0, len(payload),
                       0, 0, 0, 0, 0, time.monotonic_ns(), 0, 0, 0, 0) + payload


def main():
    group, node, certificates, host, address, epoch = sys.argv[1:]
    context = ssl.create_default_context(cafile=f"{certificates}/ca.pem")
    context.load_cert_chain(f"{certificates}/node-{node}.pem", f"{certificates}/node-{node}-key.pem")
    plain = socket.create_connection((host, 4222), 10)
    while not plain.recv(1).endswith(b"\n"):  # INFO
        pass
    with context.wrap_socket(plain, server_hostname=host) as server:
        server.sendall(f'CONNECT {{"verbose":false}}\r\nSUB cox.{group}.to.{node} 1\r\n'.encode())
        server.settimeout(0.1)
        said, end = b"", time.monotonic() + 10
        while b"is another agent" not in said:
            message = frame(hello(address, int(epoch)))
            server.sendall(f"PONG\r\nPUB cox.{group}.from.{node} {len(message)}\r\n".encode() + message + b"\r\n")
            with contextlib.suppress(TimeoutError):
                said += server.recv(65536)
            if b"-ERR" in said or time.monotonic() > end:
                sys.exit(f"the hello was not refused; the server said {said}")


main()
