"""What the NATS server of packaging/nats lets the lead and the nodes of a group do, and what not.

    permissions_test.py URL DIR OTHER IMPOSTOR [TEST...]

URL is a server with the configuration that coxswain-certificates wrote to DIR, which has the nodes
a, b and `expired`, whose certificate is no longer valid. OTHER was made by the same script with a
CA of its own, and has a node b. IMPOSTOR is a server that has the certificate of node b.
permissions.sh starts all this.

A test that expects a refusal has its opposite beside it: the same client, or the same subject used
by whom it belongs to, so that a server that refuses everything fails, too."""

from __future__ import annotations

import contextlib
import ctypes
import json
import pathlib
import queue
import select
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import threading
import time
import unittest

DISCONNECT = "$SYS.ACCOUNT.COX.DISCONNECT"
SETTINGS = "$SYS.REQ.SERVER.PING.VARZ"
# The name that coxswain-certificates gives to servers, whatever their address.
SERVER_NAME = "coxswain-nats"
WAIT = 2.0

if sys.argv[1:2] == ["--hold"]:
    own_url, own_dir = sys.argv[2:4]
else:
    own_url, own_dir, other_dir, impostor_url = sys.argv[1:5]


class Client:
    """A connection of this name; a thread of its own answers the server's pings."""

    def __init__(
        self, name: str, url: str = own_url, ca: str = own_dir, keys: str | None = own_dir
    ) -> None:
        host, port = url.removeprefix("nats://").split(":")
        raw = socket.create_connection((host, int(port)), WAIT)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = raw.makefile("rb", buffering=0).readline()
        self.info = json.loads(greeting.removeprefix(b"INFO "))
        context = ssl.create_default_context(cafile=f"{ca}/ca.pem")
        if keys:
            context.load_cert_chain(f"{keys}/{name}.pem", f"{keys}/{name}-key.pem")
        self.socket = context.wrap_socket(raw, server_hostname=SERVER_NAME)
        self.socket.setblocking(False)
        self.name = name
        self.errors: list[str] = []
        self.messages: dict[int, queue.Queue[tuple[str, str]]] = {}
        # None: a PONG.
        self.answers: queue.Queue[Exception | None] = queue.Queue()
        # Of the socket: OpenSSL is not to read and write at once.
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.read)
        self.thread.start()
        options = {"verbose": False, "tls_required": True, "name": name, "protocol": 1}
        try:
            self.send(f"CONNECT {json.dumps(options)}")
            self.flush()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.socket.close()

    def send(self, *lines: str) -> None:
        with self.lock:
            self.socket.sendall("".join(f"{line}\r\n" for line in lines).encode())

    def read(self) -> None:
        data = b""
        try:
            while select.select([self.socket], [], []):
                with self.lock, contextlib.suppress(ssl.SSLWantReadError):
                    while piece := self.socket.recv(1 << 16):
                        data += piece
                    raise ConnectionResetError(self.errors)
                data = self.take(data)
        except OSError as error:
            self.answers.put(error)

    def take(self, data: bytes) -> bytes:
        """Returns what is not whole yet."""
        while True:
            line, end, rest = data.partition(b"\r\n")
            words = line.decode().split()
            size = int(words[-1]) + 2 if end and words[0] == "MSG" else 0
            if not end or len(rest) < size:
                return data
            data = rest[size:]
            if words[0] == "MSG":
                self.messages[int(words[2])].put((words[1], rest[: size - 2].decode()))
            elif words[0] == "PING":
                self.send("PONG")
            elif words[0] == "PONG":
                self.answers.put(None)
            elif words[0] == "-ERR":
                self.errors.append(line.decode())

    def flush(self) -> None:
        """The server has handled all that was sent before, and its errors have arrived."""
        self.send("PING")
        if error := self.answers.get(timeout=WAIT):
            raise error

    def publish(self, subject: str, text: str, reply: str = "") -> None:
        self.send(f"PUB {subject} {reply} {len(text)}", text)

    def subscribe(self, subject: str, group: str = "") -> queue.Queue[tuple[str, str]]:
        number = len(self.messages) + 1
        self.messages[number] = queue.Queue()
        self.send(f"SUB {subject} {group} {number}")
        self.flush()
        return self.messages[number]

    def request(self, subject: str) -> str:
        inbox = f"_INBOX.{self.name}.{len(self.messages)}"
        replies = self.subscribe(inbox)
        self.publish(subject, "", inbox)
        return replies.get(timeout=WAIT)[1]


def permitted(name: str, verb: str, subject: str) -> bool:
    """A connection of its own for each: its errors are of nothing else."""
    with Client(name) as client:
        if verb == "publish":
            client.publish(subject, "forged")
        else:
            client.subscribe(subject, "queue" if verb == "subscribe in a queue" else "")
        client.flush()
        if [
            text
            for text in client.errors
            if "Permissions Violation" not in text or subject not in text
        ]:
            raise AssertionError(f"{name}, {subject}: {client.errors}")
        return not client.errors


class Permissions(unittest.TestCase):
    def expect(self, allowed: bool, name: str, verb: str, *subjects: str) -> None:
        for subject in subjects:
            with self.subTest(name=name, verb=verb, subject=subject):
                self.assertEqual(permitted(name, verb, subject), allowed)

    def test_permits_what_is_needed(self) -> None:
        self.expect(True, "node-b", "publish", "cox.g.from.b", "cox.h.from.b", SETTINGS)
        self.expect(
            True, "node-b", "subscribe", "cox.g.to.b", "cox.*.to.b", "cox.g.all", "_INBOX.node-b.x"
        )
        self.expect(True, "node-a", "publish", "cox.g.from.a")
        self.expect(True, "node-a", "subscribe", "cox.g.to.a")
        self.expect(True, "lead", "publish", "cox.g.to.a", "cox.g.to.b", "cox.g.all", SETTINGS)
        self.expect(
            True, "lead", "subscribe", "cox.g.from.a", "cox.*.from.*", "_INBOX.lead.x", DISCONNECT
        )

    def test_forbids_a_node_to_publish_anything_else(self) -> None:
        self.expect(
            False,
            "node-b",
            "publish",
            "cox.g.from.a",
            "cox.g.to.b",
            "cox.g.to.a",
            "cox.g.all",
            "cox.g.from.b.c",
            "cox.from.b",
            "other",
        )
        # A forged reply, and a forged death.
        self.expect(
            False,
            "node-b",
            "publish",
            "_INBOX.lead.x",
            "_INBOX.node-a.x",
            "_INBOX.node-b.x",
            DISCONNECT,
        )
        # Other questions that the server answers in its system account.
        self.expect(
            False,
            "node-b",
            "publish",
            "$SYS.REQ.SERVER.PING.CONNZ",
            "$SYS.REQ.SERVER.PING.STATSZ",
            "$SYS.REQ.ACCOUNT.COX.CONNZ",
            "$SYS.REQ.CLAIMS.UPDATE",
        )

    def test_forbids_a_node_to_read_anything_else(self) -> None:
        for verb in ("subscribe", "subscribe in a queue"):
            self.expect(
                False,
                "node-b",
                verb,
                "cox.g.to.a",
                "cox.*.to.a",
                "cox.*.to.*",
                "cox.g.to.*",
                "cox.*.from.*",
                "cox.g.from.a",
                "cox.g.from.b",
                "cox.>",
                "*.*.*.*",
                ">",
                "other",
                "_INBOX.>",
                "_INBOX.lead.>",
                "_INBOX.node-a.>",
                DISCONNECT,
                "$SYS.>",
                "$SYS.REQ.SERVER.*.VARZ",
                SETTINGS,
            )

    def test_forbids_the_lead_what_is_a_nodes(self) -> None:
        self.expect(False, "lead", "publish", "cox.g.from.a", "_INBOX.node-a.x", DISCONNECT)
        self.expect(
            False, "lead", "subscribe", "cox.g.to.a", "_INBOX.node-a.>", "cox.>", "$SYS.>", ">"
        )

    def test_delivers_only_what_is_permitted(self) -> None:
        """The server's word is one thing, what arrives is another. What is forged is sent first,
        and would arrive first."""
        with Client("lead") as lead, Client("node-a") as a, Client("node-b") as b:
            replies = lead.subscribe("cox.*.from.*")
            to_a, to_b = a.subscribe("cox.*.to.a"), b.subscribe("cox.*.to.b")
            for subject in ("cox.g.from.a", "cox.g.to.a", "cox.g.to.b"):
                b.publish(subject, "forged")
            b.flush()
            a.publish("cox.g.from.a", "reply")
            self.assertEqual(replies.get(timeout=WAIT), ("cox.g.from.a", "reply"))
            lead.publish("cox.g.to.b", "request")
            self.assertEqual(to_b.get(timeout=WAIT), ("cox.g.to.b", "request"))
            lead.publish("cox.g.to.a", "request")
            self.assertEqual(to_a.get(timeout=WAIT), ("cox.g.to.a", "request"))
            b.flush()
            self.assertTrue(to_b.empty())

    def refuse(self, why: str, name: str, url: str, ca: str, keys: str | None) -> None:
        """A server that does not run, or does not reply, refuses nobody."""
        refusals = (ssl.SSLError, BrokenPipeError, ConnectionResetError)
        with self.assertRaises(refusals, msg=why) as refused, Client(name, url, ca, keys):
            pass
        print(f"  {why}: {refused.exception}")
        with Client("node-b"):
            pass

    def test_refuses_clients(self) -> None:
        self.refuse("no certificate", "node-b", own_url, own_dir, None)
        self.refuse("another CA", "node-b", own_url, own_dir, other_dir)
        self.refuse("an expired one", "node-expired", own_url, own_dir, own_dir)
        self.refuse("no user's", "server", own_url, own_dir, own_dir)

    def test_clients_refuse_servers(self) -> None:
        self.refuse("a server of another CA", "node-b", own_url, other_dir, own_dir)
        self.refuse("a node as server", "node-b", impostor_url, own_dir, own_dir)

    def test_tells_its_settings(self) -> None:
        for name in ("lead", "node-a", "node-b"):
            with Client(name) as client:
                server = client.info["server_id"]
                for subject in (SETTINGS, f"$SYS.REQ.SERVER.{server}.VARZ"):
                    said = json.loads(client.request(subject))
                    self.assertEqual(said["server"]["id"], server)
                    self.assertEqual(said["data"]["server_id"], server)
                    expected = {
                        "ping_interval": 100_000_000,
                        "ping_max": 2,
                        "write_deadline": 1_000_000_000,
                        "max_payload": 1 << 20,
                        "tls_verify": True,
                    }
                    self.assertEqual({key: said["data"][key] for key in expected}, expected)

    def ended(self, reports: queue.Queue[tuple[str, str]], holder: Holder, stale: bool) -> float:
        """When the server reports the end of that connection. Reports of others, whose user may be
        the same, are skipped. The reason is "Client Closed" or, if the dead process has left bytes
        unread, "Read Error"; "Stale Connection" if it does not reply to pings."""
        while True:
            said = json.loads(reports.get(timeout=WAIT)[1])
            now = time.monotonic()
            if (said["server"]["id"], said["client"]["id"]) == (holder.server, holder.client):
                self.assertEqual(
                    (said["client"]["user"], said["client"]["acc"]), ("CN=node-b", "COX")
                )
                self.assertEqual(said["reason"] == "Stale Connection", stale, said)
                return now

    def test_reports_a_process_that_ends(self) -> None:
        """Other connections of the same user come and go meanwhile."""
        took = []
        with Client("lead") as lead:
            reports = lead.subscribe(DISCONNECT)
            for _ in range(20):
                with Holder() as holder:
                    with Client("node-b"):
                        pass
                    start = time.monotonic()
                    holder.program.send_signal(signal.SIGKILL)
                    took.append(1000 * (self.ended(reports, holder, False) - start))
        middle, longest = statistics.median(took), max(took)
        print(
            f"  killed, reported after {middle:.1f} ms (median), {longest:.1f} ms (longest of 20)"
        )
        self.assertLess(longest, 1000)

    def test_reports_a_process_that_is_stopped(self) -> None:
        """Nothing but the server's short ping interval can find this."""
        with Client("lead") as lead, Holder() as holder:
            reports = lead.subscribe(DISCONNECT)
            start = time.monotonic()
            holder.program.send_signal(signal.SIGSTOP)
            took = 1000 * (self.ended(reports, holder, True) - start)
        print(f"  stopped, reported after {took:.0f} ms")
        self.assertLess(took, 1000)


class Holder:
    """A process that is connected as node b until a signal ends it."""

    def __init__(self) -> None:
        self.program = subprocess.Popen(
            [sys.executable, pathlib.Path(__file__), "--hold", own_url, own_dir],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.program.stdout
        self.server, client = self.program.stdout.readline().split()
        self.client = int(client)

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.program.kill()
        self.program.communicate()


def hold() -> None:
    # PR_SET_PDEATHSIG: a test that fails leaves it to this.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    with Client("node-b") as client:
        print(client.info["server_id"], client.info["client_id"], flush=True)
        signal.pause()


if __name__ == "__main__":
    if sys.argv[1] == "--hold":
        hold()
    else:
        unittest.main(argv=[sys.argv[0], *sys.argv[5:]])
