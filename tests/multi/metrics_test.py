#!/usr/bin/python3
"""coxswain metrics and run --metrics: what Prometheus and probes get.

Usage: metrics_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import fcntl
import http.client
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from harness import (MODEL, SOURCE_DIR, TIMEOUT, check, expect, finish, fresh_name, run, skip, start,  # pylint: disable=wrong-import-position
                     status_of, test, wait_until)

harness.begin(harness.parser(__doc__))
LINE = re.compile(r'(coxswain_[a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)+)\})? (\S+)$')
DEADLINE = 3  # of a request, in seconds
PAIR = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


class Group:
    """One with metrics."""

    def __init__(self, *arguments, address="0", **more):
        self.name = fresh_name("metrics")
        self.process = start(["run", "--name", self.name, "-n", "2", "--metrics", address,
                              "--model", MODEL, *arguments], **more)
        self.pids = {}
        while len(self.pids) < 2:
            words = self.process.stdout.readline().split()
            check(words, "the group did not start: %s" % (words or self.process.stderr.read()))
            if words[0] == "rank":
                self.pids[int(words[1])] = int(words[3])
        self.url = self.await_line("metrics at ")[len("metrics at "):].strip()

    def await_line(self, text, process=None):
        while True:
            line = (process or self.process).stderr.readline()
            check(line, "%r was not said" % text)
            if text in line:
                return line[line.index(text):]

    def connect(self):
        return socket.create_connection(("127.0.0.1", int(self.url.split(":")[2].split("/")[0])), timeout=TIMEOUT)

    def get(self, path, method="GET"):
        if self.url.startswith("unix:"):
            connection = http.client.HTTPConnection("localhost", timeout=TIMEOUT)
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(TIMEOUT)
            connection.sock.connect(self.url[5:])
        else:
            host = self.url[len("http://"):-len("/metrics")]
            connection = http.client.HTTPConnection(host, timeout=TIMEOUT)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metrics(self):
        status, text = self.get("/metrics")
        check(status == 200, text)
        return parse(text)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        run(["stop", "--name", self.name])
        finish(self.process)


def parse(text):
    """Values by name and labels; every rule of the format that has a line to break it."""
    found, types, named = {}, {}, None
    for line in text.splitlines():
        if line.startswith("# HELP "):
            named = line.split()[2]
            check(named not in types, "%s twice" % named)
            check(len(line.split()) > 3, "%s has no help" % named)
        elif line.startswith("# TYPE "):
            check(line.split()[2] == named, "%s without HELP" % line)
            types[named] = line.split()[3]
        else:
            match = LINE.match(line)
            check(match, "not a sample: %r" % line)
            name, labels, value = match.groups()
            base = re.sub("_(bucket|sum|count)$", "", name) if types[named] == "histogram" else name
            check(base == named, "%s among the samples of %s" % (name, named))
            check(types[named] != "counter" or name.endswith("_total"), "%s is a counter" % name)
            key = (name, *sorted(PAIR.findall(labels or "")))
            check(key not in found, "%s twice" % line)
            found[key] = float(value)
    check(text.endswith("\n"), "the last line has no end")
    return found


def value(found, metric, **labels):
    return found[(metric, *sorted(labels.items()))]


def memory_of(pid):
    with open("/proc/%d/statm" % pid, encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def documented():
    with open(os.path.join(SOURCE_DIR, "docs", "metrics.md"), encoding="utf-8") as file:
        return set(re.findall(r"^\| `(coxswain_[a-z_]+)`", file.read(), re.MULTILINE))


@test
def test_m18_metrics_count_what_happened():
    with Group("--on-death", "restart", "--timeout", str(DEADLINE)) as group:
        before = group.metrics()
        expect(run(["generate", "--name", group.name, "27+58=", "1+2="]), 0)
        after = group.metrics()
        steps = value(after, "coxswain_requests_total", channel="execute")
        check(steps > value(before, "coxswain_requests_total", channel="execute"), "no step")
        check(value(after, "coxswain_prompts_completed_total") == 2, "not two prompts")
        check(value(after, "coxswain_generated_tokens_total") >= 4, "no tokens")
        # A histogram grows to its count, which is +Inf's.
        for phase in "queue", "ranks", "handler", "total":
            buckets = sorted((float("inf") if dict(key[1:])["le"] == "+Inf" else float(dict(key[1:])["le"]), number)
                             for key, number in after.items() if key[0] == "coxswain_phase_seconds_bucket"
                             and dict(key[1:])["phase"] == phase and dict(key[1:])["channel"] == "execute")
            counts = [number for _, number in buckets]
            check(len(counts) == 28 and counts == sorted(counts), "%s: %s" % (phase, buckets))
            check(counts[-1] == value(after, "coxswain_phase_seconds_count", channel="execute", phase=phase), "+Inf")
        total, parts = (sum(value(after, "coxswain_phase_seconds_sum", channel="execute", phase=phase)
                            for phase in phases) for phases in (["total"], ["queue", "ranks", "handler"]))
        check(0.8 < total / parts < 1.25, "the parts of %s are %s" % (total, parts))
        check(value(after, "coxswain_rank_resident_bytes", rank="1") > 1 << 20, "no memory")
        check(value(after, "coxswain_rank_cpu_seconds_total", rank="1") > 0, "no processor time")
        # A death, and the replacement.
        os.kill(group.pids[1], signal.SIGKILL)
        wait_until(lambda: value(group.metrics(), "coxswain_restarts_total") == 1, "a restart")
        now = group.metrics()
        check(value(now, "coxswain_rank_deaths_total", rank="1") == 1, "the death was not counted")
        check(value(now, "coxswain_rank_incarnation", rank="1") == 2, "not another incarnation")
        # How long it took: to find the rank dead that owed a reply, and to replace it; to find one hanging.
        check(not [key for key in after if key[0].startswith("coxswain_detect")], "found without a fault")
        # Counted when the rank's init was replayed, which is after it has attached.
        wait_until(lambda: group.metrics().get(("coxswain_replace_seconds_count",)) == 1, "a replacement")
        now = group.metrics()
        check(0 < value(now, "coxswain_replace_seconds_sum") < TIMEOUT, "a wrong time")
        wait_until(lambda: group.get("/readyz")[0] == 200, "ready")
        stopped = status_of(group.name)["ranks"][1]["pid"]
        for kill, cause in (signal.SIGKILL, "death"), (signal.SIGCONT, "hang"):
            os.kill(stopped, signal.SIGSTOP)
            client = start(["generate", "--name", group.name, "--quiet", "1+2="])
            wait_until(lambda: value(group.metrics(), "coxswain_in_flight", channel="execute") > 0, "a step")
            if cause == "hang":
                wait_until(lambda: value(group.metrics(), "coxswain_timeouts_total", channel="execute") > 0, "a deadline")
            os.kill(stopped, kill)
            finish(client)
            wait_until(lambda: group.get("/readyz")[0] == 200, "ready again")
            found = group.metrics()
            check(value(found, "coxswain_detect_seconds_count", channel="execute", cause=cause) >= 1, cause)
            stopped = status_of(group.name)["ranks"][1]["pid"]
        silent = value(found, "coxswain_detect_seconds_sum", channel="execute", cause="hang")
        check(silent > 0.5 * DEADLINE, "the rank was silent for %s s" % silent)
        # What each rank tells of its steps: a histogram, of which a part is spent with the other one.
        for rank in "0", "1":
            count = value(after, "coxswain_rank_execute_seconds_count", rank=rank)
            total = value(after, "coxswain_rank_execute_seconds_sum", rank=rank)
            check(count > 0 and total > 0, "rank %s: %s steps in %s s" % (rank, count, total))
            check(value(after, "coxswain_rank_execute_seconds_bucket", rank=rank, le="+Inf") == count, "+Inf")
            waited = value(after, "coxswain_rank_group_wait_seconds_total", rank=rank)
            check(0 < waited <= value(after, "coxswain_rank_group_seconds_total", rank=rank) < 1.1 * total,
                  "rank %s waited %s s" % (rank, waited))
            check(value(after, "coxswain_rank_errors_total", rank=rank) == 0, "errors")
        wait_until(lambda: group.get("/readyz")[0] == 200, "ready again")


@test
def test_m18_each_metric_is_in_the_docs():
    with Group("--role", "decode") as group:
        expect(run(["generate", "--name", group.name, "27+58="]), 0)
        status, text = group.get("/metrics")
        check(status == 200, text)
        # A histogram may have no sample yet.
        found = set(re.findall("^# TYPE (coxswain_[a-z_]+) ", text, re.MULTILINE))
        # The last two are of programs that set a note.
        wanted = documented() - {"coxswain_note", "coxswain_note_info"}
        check(found == wanted, "missing in docs/metrics.md: %s; not written: %s" % (found - wanted, wanted - found))


@test
def test_m18_the_dashboard_and_the_rules_ask_for_metrics_that_there_are():
    def read(name):
        with open(os.path.join(SOURCE_DIR, "docs", name), encoding="utf-8") as file:
            return file.read()
    panels = json.loads(read("grafana-dashboard.json"))["panels"]
    check(not [panel["title"] for panel in panels if not panel.get("description")], "a panel without a description")
    rules = re.findall(r"^ +expr: (.*)$", read("prometheus-rules.yml"), re.MULTILINE)
    told = set(re.findall(r"`(coxswain_[a-z_]+)`", read("metrics.md")))
    for expression in rules + [target["expr"] for panel in panels for target in panel["targets"]]:
        for name in re.findall(r"coxswain_[a-z0-9_]+", expression):
            check(re.sub("_(bucket|sum|count)$", "", name) in told, "no such metric: %s" % expression)
    # docs/at_3am tries each of these on a group that has what it is about.
    alerts = set(re.findall("^ +alert '(.*)'$", read("../tests/docs/at_3am.sh"), re.MULTILINE))
    check(len(alerts) == 5 and alerts <= set(rules), "not all alerts are rules: %s" % alerts)
    for anchor in re.findall(r"at-3am.md#(.*)$", read("prometheus-rules.yml"), re.MULTILINE):
        check("](#%s)" % anchor in read("at-3am.md"), "no case %s" % anchor)


@test
def test_m18_a_scrape_asks_no_rank():
    with Group() as group:
        for pid in group.pids.values():
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: value(group.metrics(), "coxswain_rank_stopped", rank="0") == 1, "stopped")
            check(group.get("/healthz") == (200, "alive\n"), "not alive")
            code, reason = group.get("/readyz")
            check(code == 503 and "rank 0 (pid %d) is stopped" % group.pids[0] in reason, "%d %s" % (code, reason))
        finally:
            for pid in group.pids.values():
                os.kill(pid, signal.SIGCONT)
        wait_until(lambda: group.get("/readyz") == (200, "ready\n"), "ready")
        check(group.get("/other")[0] == 404, "another path is there")
        expect(run(["recover", "pause", "--name", group.name]), 0)
        check(group.get("/readyz") == (503, "it is paused (coxswain recover start)\n"), "%s" % (group.get("/readyz"),))


@test
def test_m18_the_command_prints_the_same_and_prometheus_takes_it():
    with Group() as group:
        expect(run(["generate", "--name", group.name, "27+58="]), 0)
        wait_until(lambda: value(group.metrics(), "coxswain_in_flight", channel="execute") == 0, "the last step")
        printed = expect(run(["metrics", "--name", group.name]), 0).out
        check(parse(printed).keys() == group.metrics().keys(), "other metrics")
        promtool = shutil.which("promtool")
        if promtool:
            done = subprocess.run([promtool, "check", "metrics"], input=printed, capture_output=True,
                                  text=True, timeout=TIMEOUT, check=False)
            check(done.returncode == 0 and not done.stderr, done.stdout + done.stderr)


@test
def test_m18_a_process_beside_the_group_serves_the_same():
    """Also while the group is gone, and after it has come back."""
    with Group() as group:
        beside = start(["metrics", "--name", group.name, "--serve", "0"])
        own, group.url = group.url, group.await_line("metrics at ", beside)[len("metrics at "):].strip()
        check(group.url != own, group.url)
        expect(run(["generate", "--name", group.name, "27+58="]), 0)
        check(value(group.metrics(), "coxswain_prompts_completed_total") == 1, "another group")
        check(group.get("/readyz")[0] == 200 and group.get("/healthz")[0] == 200, "not ready")
        expect(run(["stop", "--name", group.name]), 0)
        finish(group.process)
        status, text = group.get("/metrics")
        check(status == 503 and group.name in text, "%d %s" % (status, text))
        check(group.get("/healthz")[0] == 200, "it has gone with the group")
        again = start(["run", "-n", "1", "--name", group.name, "--model", MODEL])
        check(again.stdout.readline(), "it did not start")
        check(value(group.metrics(), "coxswain_ranks") == 1, "not the one that came back")
        expect(run(["stop", "--name", group.name]), 0)
        finish(again)
        beside.send_signal(signal.SIGTERM)
        check(finish(beside).status == 0, "it did not end well")
        expect(run(["metrics", "--serve", "0", "--json"]), 2, "--json")


@test
def test_m18_weights_that_are_kept_are_counted_with_every_group():
    key, size = 'a "model" 1/2', 3 << 12
    holder = start(["weights", "hold", "--stay"])
    path = os.path.join(os.environ["XDG_RUNTIME_DIR"], "coxswain", ".weights.sock")
    wait_until(lambda: os.path.exists(path), "a holder")
    memory = os.memfd_create("weights", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, size)
    fcntl.fcntl(memory, 1033, 0xf)  # F_ADD_SEALS: all
    labels = {"key": key.replace('"', '\\"'), "memory": "host"}
    with Group() as group, socket.socket(socket.AF_UNIX) as loader:
        check(not [one for one in group.metrics() if "held_weights" in one[0]], "weights, and nobody has put any")
        loader.settimeout(TIMEOUT)
        loader.connect(path)
        # A put: program/weights/protocol.h.
        socket.send_fds(loader, [struct.pack("<IIQ16x512s", 2, 0, 60000, key.encode())], [memory])
        check(loader.recv(16)[:4] == bytes(4), "it was refused")
        found = parse(expect(run(["metrics", "--name", group.name]), 0).out)
        for numbers in found, group.metrics():
            check(value(numbers, "coxswain_held_weights_bytes", **labels) == size, "other bytes")
            check(value(numbers, "coxswain_held_weights_users", **labels) == 1, "not one user")
        loader.close()
        wait_until(lambda: value(group.metrics(), "coxswain_held_weights_users", **labels) == 0, "no user")
        # One that hangs keeps nobody from the group's numbers.
        holder.send_signal(signal.SIGSTOP)
        check(not [one for one in group.metrics() if "held_weights" in one[0]], "weights of a holder that hangs")
        holder.send_signal(signal.SIGCONT)
    os.close(memory)
    holder.send_signal(signal.SIGTERM)
    check(finish(holder).status == 0, "it did not end well")


@test
def test_s2_ranks_that_disagree_are_an_error_with_words_and_counted():
    folder = tempfile.mkdtemp(prefix=fresh_name("bend"))
    try:
        # One step at a time: one behind it, published by then, would differ and be counted as well.
        with Group("--depth", "1",
                   env=harness.environment(COXSWAIN_TEST_BEND=os.path.join(folder, "rank"))) as group:
            expect(run(["generate", "--name", group.name, "27+58="]), 0)
            wait_until(lambda: value(group.metrics(), "coxswain_in_flight", channel="execute") == 0, "the last step")
            check(value(group.metrics(), "coxswain_divergences_total", channel="execute") == 0, "ranks disagreed")
            with open(os.path.join(folder, "rank1"), "w", encoding="utf-8"):
                pass
            text = "they differ in block tables: rank 0 has "
            expect(run(["generate", "--name", group.name, "27+58="]), 3, text, ", rank 1 has ", "; first in step ")
            check("rank 1 has " in group.await_line(text), "the log does not name both")
            # It is counted when its handler has returned, which has told the client.
            wait_until(lambda: value(group.metrics(), "coxswain_divergences_total", channel="execute") > 0, "the count")
            check(value(group.metrics(), "coxswain_divergences_total", channel="execute") == 1, "counted twice")
            for rank in status_of(group.name)["ranks"]:
                check(text in rank["last_error"], "rank %d: %s" % (rank["rank"], rank))
            printed = run(["status", "--name", group.name]).out
            check("ranks disagreed on 1 step: last errors of ranks say in what" in printed, printed)
            check(expect(run(["generate", "--name", group.name, "27+58="]), 0).out.strip().endswith("85"), "not 85")
    finally:
        shutil.rmtree(folder)


@test
def test_m18_a_unix_socket_and_addresses_that_are_none():
    path = os.path.join(os.environ["TMPDIR"] if "TMPDIR" in os.environ else "/tmp", fresh_name("metrics.sock"))
    with Group(address="unix:" + path) as group:
        check(value(group.metrics(), "coxswain_ranks") == 2, "not two ranks")
        check(os.stat(path).st_mode & 0o777 == 0o600, "others can connect")
        busy = run(["run", "-n", "1", "--model", MODEL, "--metrics", "unix:" + path])
        expect(busy, 1, "metrics address unix:", "in use")
        group.process.kill()
        group.process.wait()
    check(os.path.exists(path), "a killed process leaves the file")
    with Group(address="unix:" + path):
        pass
    check(not os.path.exists(path), "the socket stays")
    for address in "nowhere:1", "127.0.0.1:65536", "127.0.0.1:", ":1", "[::1:9", "unix:", "":
        expect(run(["run", "-n", "1", "--model", MODEL, "--metrics", address]), 2, "metrics address")
        expect(run(["metrics", "--serve", address]), 2, "metrics address")


@test
def test_m18_many_scrapes_at_once():
    with Group() as group:
        begin, count = time.monotonic(), 0
        while count < 200 or time.monotonic() - begin < 1:
            check(group.get("/metrics")[0] == 200, "refused")
            count += 1
        check(status_of(group.name)["ranks"][0]["liveness"] == "alive", "the group is not well")


@test
def test_m18_what_is_no_request_is_refused():
    with Group() as group:
        def ask(*parts):
            """The reply to these bytes, each part sent on its own: status, head, body."""
            with group.connect() as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for part in parts:
                    connection.sendall(part)
                reply = b""
                while more := connection.recv(4096):
                    reply += more
            head, end, body = reply.partition(b"\r\n\r\n")
            check(end, "no head: %r" % reply)
            return int(head.split()[1]), head.decode(), body.decode()

        for request, status in [(b"nonsense", 400), (b"GET /metrics", 400), (b"GET  /metrics HTTP/1.1", 400),
                                (b"GET metrics HTTP/1.1", 400), (b"GET /metrics HTTP/1.1 x", 400),
                                (b"PRI * HTTP/2.0", 400), (b"GET /metrics HTTP/2.0", 505),
                                (b"get /metrics HTTP/1.1", 405), (b"POST /metrics HTTP/1.1", 405),
                                (b"GET /metric HTTP/1.1", 404), (b"GET /metricss HTTP/1.1", 404),
                                (b"GET /healthz?from=probe HTTP/1.0", 200), (b"GET /healthz HTTP/1.1\r\nA: b", 200)]:
            got, head, body = ask(request + b"\r\n\r\n")
            check(got == status, "%r: %s" % (request, head))
            check(("Allow: GET, HEAD" in head) == (status == 405), head)
            check("Content-Length: %d" % len(body) in head and "Connection: close" in head, head)
        check(ask(b"GET /" + (8192 - 5) * b"x")[0] == 431, "a head of any length")
        status, head, body = ask(b"HEAD /healthz HTTP/1.1\r\n\r\n")
        check(status == 200 and "Content-Length: 6" in head and not body, head)
        check(ask(*(bytes([byte]) for byte in b"GET /healthz HTTP/1.1\r\n\r\n"))[2] == "alive\n", "byte by byte")
        # The end of the group does not wait for them.
        silent = [group.connect() for _ in range(7)]
        silent[0].sendall(b"GET /hea")
        check(group.get("/healthz")[0] == 200, "silent connections keep others out")
    for connection in silent:
        connection.close()


STRANGER = "127.0.0.9"


class Crowd:
    """A process with connections that come again as soon as they are closed; where some are of other addresses, at most
    1,000 a second, so that the prober, which may lose the processor, is not among the oldest before it has sent its
    request. Each sends a byte of a request now and then, or, where `request` is given, that one whole, and takes no
    reply. It says when as many as `count` have been there, and ends after `last` of them."""

    def __init__(self, group, count, sources, request=b"", last=0):
        self.port = int(group.url.split(":")[2].split("/")[0])
        self.count, self.sources, self.request, self.last = count, sources, request, last

    def connect(self, number):
        connection = socket.socket()
        connection.bind((self.sources[number % len(self.sources)], 0))
        connection.settimeout(TIMEOUT)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(self.request or b"GET /metr")
        return connection

    def run(self):
        crowd, opened, paced = [], 0, not self.request and self.sources != [STRANGER]
        while not self.last or opened < self.last:
            if paced:
                time.sleep(0.001)
            try:
                if len(crowd) < self.count:
                    crowd.append(self.connect(opened))
                    opened += 1
                    if opened == self.count:
                        os.write(self.there, b"x")
                else:
                    crowd[0].sendall(b"" if self.request else b"x")
                    crowd.append(crowd.pop(0))
            except OSError:  # it was closed
                crowd[:1] = []
            if self.request and crowd:
                crowd.pop(0).close()

    def __enter__(self):
        waits, self.there = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(waits)
                self.run()
            finally:
                os._exit(0)
        os.close(self.there)
        check(os.read(waits, 1), "there is no crowd")
        os.close(waits)
        return self

    def goes_on(self):
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def __exit__(self, *unused):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def probe(group, path):
    """As a kubelet asks, which acts on the third failure in a row: a connection may be one of those that a crowd has pushed
    out before this process could run."""
    for left in (2, 1, 0):
        try:
            return group.get(path)
        except ConnectionError:
            if not left:
                raise


@test
def test_m18_a_crowd_keeps_no_probe_out():
    """Slow heads of one address, of many, and of the prober's own; replies that nobody takes; 10,000 connections."""
    scrape = b"GET /metrics HTTP/1.1\r\n\r\n"
    others = ["127.0.%d.%d" % (i // 200, 2 + i % 200) for i in range(600)]
    with Group() as group:
        for crowd in (Crowd(group, 300, [STRANGER]), Crowd(group, 300, ["127.0.0.1"]),
                      Crowd(group, 300, others), Crowd(group, 50, [STRANGER], scrape),
                      Crowd(group, 1, others, scrape, 10000)):
            with crowd:
                probes = 0
                while probes < 10 or (crowd.last and crowd.goes_on()):
                    for path in ("/healthz", "/readyz", "/metrics"):
                        status, text = probe(group, path)
                        check(status == 200, "%s: %s" % (path, text))
                    probes += 1


@test
def test_m18_connections_that_say_nothing_are_closed():
    if "COX_SCRAPE_SECONDS" not in os.environ:
        skip("it takes the 5 s that a connection has")
    with Group() as group:
        silent = [group.connect() for _ in range(8)]
        silent[0].sendall(b"GET /hea")
        check(group.get("/healthz")[0] == 200, "silent connections keep others out")
        check(silent[0].recv(1) == b"", "a reply to half a request")
        for connection in silent:
            connection.close()


@test
def test_m18_a_scrape_every_10_ms():
    """For COX_SCRAPE_SECONDS, over prompts, deaths and replacements: counters only grow, nothing is left."""
    seconds = float(os.environ.get("COX_SCRAPE_SECONDS", "1"))
    with Group("--on-death", "restart,1000/60") as group:
        pid, before, deaths, count = group.process.pid, {}, 0, 0
        expect(run(["generate", "--name", group.name, "27+58="]), 0)
        fds, resident = len(os.listdir("/proc/%d/fd" % pid)), memory_of(pid)
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            now = group.metrics()
            for key in before.keys() & now.keys():
                if key[0].endswith(("_total", "_bucket", "_count", "_sum")) and "cpu" not in key[0]:
                    check(now[key] >= before[key], "%s was %s and is %s" % (key, before[key], now[key]))
            before, count = now, count + 1
            if count % 100 == 0:
                expect(run(["generate", "--name", group.name, "27+58="]), 0)
            if count % 500 == 0:
                os.kill(status_of(group.name)["ranks"][1]["pid"], signal.SIGKILL)
                deaths += 1
                wait_until(lambda: value(group.metrics(), "coxswain_restarts_total") == deaths, "a restart")
            time.sleep(0.01)  # the pace, nothing is waited for
        check(count >= min(50, seconds), "only %d scrapes" % count)
        wait_until(lambda: len(os.listdir("/proc/%d/fd" % pid)) <= fds, "as many fds as before")
        check(memory_of(pid) < resident + (32 << 20), "it grew from %d to %d bytes" % (resident, memory_of(pid)))
        print("%d scrapes, %d deaths" % (count, deaths))


if __name__ == "__main__":
    sys.exit(harness.main())
