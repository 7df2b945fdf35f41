"""Groups that `coxswain run` keeps, in pairs for prefill and decode too, and clients by hand.

A Group is a context: inside of it all its ranks are there. At its end it is killed if it still
lives. What it leaves then is for the test to look at: left_nothing(), stop().
"""

import json
import os
import socket
import struct

import harness
from harness import (MODEL, TIMEOUT, check, environment, expect, finish, names_with, run, start,
                     stop_process, wait_until)

RESTART = ("--on-death", "restart,1000/60")


class Group:
    """A group that `run` keeps."""

    def __init__(self, ranks=2, arguments=(), command=(), model=MODEL, under=(), **variables):
        self.name = harness.fresh_name("group")
        self.ranks = ranks
        # A command of its own gets no model: its init callback, if it has one, may know none.
        models = () if command else ("--model", model)
        self.process = start(["run", "-n", str(ranks), "--name", self.name, *models, *arguments, *command], under=under,
                             env=environment(**variables))

    def __enter__(self):
        lines = [self.process.stdout.readline().split() for _ in range(2 + self.ranks)]
        check(lines[0] == ["name", self.name], "another name: %s" % lines)
        self.socket_path = lines[1][1]
        check(lines[1][0] == "socket" and os.path.exists(self.socket_path), "no control socket: %s" % lines)
        self.pids = [int(line[3]) for line in lines[2:]]
        return self

    def __exit__(self, *unused):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def status(self):
        return harness.status_of(self.name)

    def stop(self, *arguments):
        return run(["stop", "--name", self.name, *arguments])

    def generate(self, *arguments, **options):
        return run(["generate", "--name", self.name, *arguments], **options)

    def stopped(self, rank):
        """Its worker does nothing any more; on return none of its threads runs."""
        stop_process(self.pids[rank])

    def left_nothing(self):
        check(self.process.poll() is not None, "the coordinator lives")
        for pid in self.pids:
            check(not os.path.exists("/proc/%d" % pid), "worker %d lives on" % pid)
        check(not os.path.exists(self.socket_path), "the control socket is left")
        check(not names_with(self.name), "left in /dev/shm: %s" % names_with(self.name))


# ---- the protocol by hand ----


def varint(number):
    number &= (1 << 64) - 1
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def packed(numbers):
    return b"".join(varint(number) for number in numbers)


def frame(message):
    return struct.pack("<I", len(message)) + message


STATUS, STOP, CANCEL = field(1, b""), field(2, b""), field(4, b"")


def complete(prompts, new_count=5, stops=(2,)):
    """prompts: pairs of an index and tokens."""
    body = b"".join(field(1, field(1, index) + field(2, packed(tokens)))
                    for index, tokens in prompts)
    body += field(2, new_count) + field(3, 1) + field(8, packed(stops))
    return field(3, body)


def parse(message):
    """Field numbers and values, of one level."""
    fields, at = [], 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
    while at < len(message):
        key = number()
        if key & 7 == 0:
            fields.append((key >> 3, number()))
        else:
            check(key & 7 == 2, "odd wire type %d" % (key & 7))
            size = number()
            fields.append((key >> 3, message[at:at + size]))
            at += size
    return fields


class Stranger:
    """A connection of a command, by hand."""

    def __init__(self, socket_path):
        # The place of a connection that was closed is free a little later: until then it is
        # "try again later".
        wait_until(lambda: self.comes_in(socket_path), "a place for one more connection")

    def comes_in(self, socket_path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(TIMEOUT)
        self.socket.connect(socket_path)
        hello = struct.pack("<QIIQII", 1, 2, 0, 0, 0, 32)
        self.socket.sendall(hello + bytes(1024 - len(hello)))
        first = self.read(1)
        if first == b"\1":
            self.read(127)
            return True
        refusal = self.read(self.read(2)[1])
        self.socket.close()
        check(b"try again later" in refusal, "refused: %s" % refusal)
        return False

    def read(self, size):
        out = b""
        while len(out) < size:
            more = self.socket.recv(size - len(out))
            if not more:
                raise EOFError
            out += more
        return out

    def send(self, *messages):
        self.socket.sendall(b"".join(frame(message) for message in messages))

    def reply(self):
        """Its number in the oneof and its fields."""
        number, value = parse(self.read(struct.unpack("<I", self.read(4))[0]))[0]
        return number, parse(value)

    def ended(self):
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()


class Holder(Stranger):
    """A client that has prompts held, and says when they are not needed any more."""

    def hold(self, tokens, hold_ms=60000):
        prompt = field(1, field(1, 1) + field(2, packed(tokens)))
        self.send(field(3, prompt + field(2, 1) + field(20, hold_ms)))
        number, fields = self.reply()
        check(number == 2, "no item: %s" % fields)
        source = dict(fields)[20]
        return dict(parse(source))

    def release(self, *holds):
        self.send(field(11, field(1, packed(holds))))


def pull_kv(reader, owner, hold, *arguments):
    return run(["pull-kv", "--name", reader.name, "--from", owner.name, "--hold", str(hold),
                *arguments])


def pull_by_hand(socket_path, **changes):
    """A pull of a source that the test makes up. Returns the error's text."""
    source = field(1, changes["cluster"].encode()) + field(2, changes["life"])
    source += field(3, changes["sequence"]) + field(4, packed(changes["blocks"]))
    source += field(5, changes["lease"])
    with Stranger(socket_path) as stranger:
        stranger.send(field(10, field(1, source) + field(2, 5000)))
        number, fields = stranger.reply()
        check(number in (4, 8), "another answer: %d" % number)
        error = dict(fields)
        if number != 4:
            error = dict(parse(error[2])) if 2 in error else {}
        return error.get(2, b"").decode()


# ---- prefill and decode ----


def prefill(*arguments, ranks=2, **variables):
    return Group(ranks, ("--role", "prefill", *arguments), **variables)


def decode(*arguments, ranks=2):
    return Group(ranks, ("--role", "decode", *arguments))


def split(a, b, *arguments, **options):
    return run(["generate", "--prefill", a.name, "--decode", b.name, *arguments], **options)


def transfer(group):
    return group.status()["transfer"]


def all_is_given_back(*groups):
    """Nothing is leased, without a user or taken, once their clients are gone."""
    for group in groups:
        def is_free(group=group):
            now = group.status()
            pulls, serving = now["transfer"], now["serving"]
            return (pulls["holds"] == pulls["running"] == pulls["quarantined_blocks"] == 0 and
                    serving["free_blocks"] == serving["block_count"] and serving["clients"] == 0)
        wait_until(is_free, "all blocks of %s to be free: %s" % (group.name, transfer(group)))


def stop(*groups):
    for group in groups:
        expect(group.stop(), 0)
        finish(group.process)
        group.left_nothing()


def links(group):
    told = json.loads(run(["link-status", "--name", group.name, "--json"]).out)
    return {link["name"]: link["state"] for link in told["links"]}
