"""What a node says that lies.

    hello.py GROUP NODE CERTIFICATES HOST ADDRESS EPOCH [NAME=VALUE]...

A NATS client of its own, with the certificate of the node, publishes a hello (nodes/node.proto) to
HOST:4222 until the lead refuses it, as that of a second agent, or 10 s have passed. NAME: through,
incarnation: its numbers; facts: so many; lead: the address of its lead; version; count: it is
published so often and as fast as it goes, and the refusal is not awaited."""

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


def hello(address, epoch, lies):
    version = lies.get("version", os.environ["COXSWAIN_VERSION"]).encode()
    fields = [
        (1, version),
        (2, PROTOCOL),
        (3, 4711),
        (4, os.getpid()),
        (5, address.encode()),
        (9, epoch),
        (10, 0),
    ]
    fields += [(8, field(1, b"name") + field(2, b"value"))] * int(lies.get("facts", 0))
    if "through" in lies:
        fields += [(14, field(1, int(lies["through"])))] * 2
    if "incarnation" in lies:
        fields += [(16, int(lies["incarnation"]))]
    if "lead" in lies:
        fields += [(17, lies["lead"].encode())]
    return b"".join(field(number, value) for number, value in fields)


def frame(payload):
    """The head, of which a hello has the kind, the size and the time alone."""
    return (
        struct.pack(
            "<IBBHIIQQQQQQQQQQ",
            0x314E5843,
            HELLO,
            0,
            0,
            0,
            len(payload),
            0,
            0,
            0,
            0,
            0,
            time.monotonic_ns(),
            0,
            0,
            0,
            0,
        )
        + payload
    )


@contextlib.contextmanager
def connected(subject, pair, host):
    """A client of the NATS server with this pair of files; it subscribes to the subject."""
    certificates = os.path.dirname(pair)
    context = ssl.create_default_context(cafile=f"{certificates}/ca.pem")
    context.load_cert_chain(f"{pair}.pem", f"{pair}-key.pem")
    plain = socket.create_connection((host, 4222), 10)
    while not plain.recv(1).endswith(b"\n"):  # INFO
        pass
    with context.wrap_socket(plain, server_hostname=host) as server:
        server.sendall(f'CONNECT {{"verbose":false}}\r\nSUB {subject} 1\r\n'.encode())
        yield server


def main():
    group, node, certificates, host, address, epoch = sys.argv[1:7]
    lies = dict(word.split("=", 1) for word in sys.argv[7:])
    message = frame(hello(address, int(epoch), lies))
    publish = f"PUB cox.{group}.from.{node} {len(message)}\r\n".encode() + message + b"\r\n"
    subject = f"cox.{group}.to.{node}"
    with connected(subject, f"{certificates}/node-{node}", host) as server:
        server.settimeout(10)
        if "count" in lies:
            server.sendall(publish * int(lies["count"]) + b"PING\r\n")
            said = b""
            while b"PONG" not in said:  # the server has them
                said += server.recv(65536)
            return
        server.settimeout(0.1)
        said, end = b"", time.monotonic() + 10
        while b"is another agent" not in said:
            server.sendall(b"PONG\r\n" + publish)
            with contextlib.suppress(TimeoutError):
                said += server.recv(65536)
            if b"-ERR" in said or time.monotonic() > end:
                sys.exit(f"the hello was not refused; the server said {said}")


if __name__ == "__main__":
    main()
