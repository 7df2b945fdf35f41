"""A lead whose clock is of the future: false_lead.py GROUP NODE CERTIFICATES HOST EPOCH

A NATS client with the certificate of the lead seeks the agent of a node, at HOST:4222, and welcomes
it (nodes/node.proto) with an epoch that no lead can have."""

import struct
import sys
import time

from hello import connected, field, varint

SEEK, WELCOME = 1, 2  # nodes/link/frame.h
CHANNEL_COUNT = 5


def frame(kind, epoch, payload):
    head = struct.pack("<IBBHIIQQQQQQQQQQ", 0x314E5843, kind, 0, 0, 0, len(payload),
                       epoch, 0, 0, 0, 0, time.monotonic_ns(), 0, 0, 0, 0)  # fmt: skip
    return head + payload


def agent_of(hello):
    """The third field, behind a text and a number."""
    at, fields = 96, {}
    while len(fields) < 3:
        key, at = number(hello, at)
        value, at = number(hello, at)
        if key & 7 == 2:
            at += value
        fields[key >> 3] = value
    return fields[3]


def number(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def message(stream):
    """The payload of the next message, whatever else the server says before it."""
    while not (line := stream.readline()).startswith(b"MSG "):
        if not line:
            sys.exit("the server has ended the connection")
    payload = stream.read(int(line.split()[-1]))
    stream.readline()
    return payload


def main():
    group, node, certificates, host, epoch = sys.argv[1:]
    with connected(f"cox.{group}.from.{node}", f"{certificates}/lead", host) as server:
        server.settimeout(20)

        def publish(data):
            server.sendall(f"PUB cox.{group}.to.{node} {len(data)}\r\n".encode() + data + b"\r\n")

        publish(frame(SEEK, int(epoch), b""))
        agent = agent_of(message(server.makefile("rb")))
        sizes = varint(65536) * CHANNEL_COUNT
        publish(frame(WELCOME, int(epoch), b"".join(field(*pair) for pair in (
            (1, int(epoch)), (2, agent), (3, 1), (6, 0), (7, 2), (8, 4), (9, 4), (10, sizes),
            (11, sizes))) + b"\x70\x00\x70\x00"))  # fmt: skip
        server.sendall(b"PING\r\n")
        while b"PONG" not in server.recv(65536):
            pass


main()
