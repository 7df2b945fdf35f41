#!/usr/bin/python3
"""Prompts on a running group, of many clients at once, and strangers at its control socket.

Usage: control_clients_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import os
import re
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
# pylint: disable-next=wrong-import-position
from groups import (CANCEL, STATUS, STOP, Group, Stranger, complete, field, frame, parse, varint)
# pylint: disable-next=wrong-import-position
from harness import (MODEL, TIMEOUT, check, expect, finish, generate, program, run, start,
                     stop_process, sums, temporary, test, wait_until)

harness.begin(harness.parser(__doc__))
RUNTIME = os.environ["XDG_RUNTIME_DIR"]


# ---- memory ----


@test
def test_clients_have_a_budget_of_memory_for_all_of_them():
    few, many = field(1, b""), 500000  # prompts without anything: 2 bytes of a message, 150 of memory
    large = field(3, few * many + field(2, 1))

    def peak(group):
        return int(re.search(r"^VmHWM:\s+(\d+) kB", harness.read("/proc/%d/status" % group.process.pid), re.M)[1]) >> 10
    with Group(1) as group:
        before = peak(group)
        clients = [Stranger(group.socket_path) for _ in range(24)]
        refused = 0
        for client in clients:
            client.send(large)  # and reads nothing, so that all of it stays there
        for client in clients:
            # Either results come, or that there is no memory; and then the end.
            number, fields = client.reply()
            if number == 4:
                check(b"try again later" in dict(fields)[2], "refused: %s" % fields)
                check(client.ended(), "a refused client goes on")
                refused += 1
        check(16 <= refused < 24, "%d refused" % refused)
        if not harness.program_has("coxswain", b"__asan_init") and not harness.program_has("coxswain", b"__tsan_init"):
            check(peak(group) - before < 512, "%d MiB, %d before" % (peak(group), before))
        # Small requests are served meanwhile, and large ones when the others have gone.
        group.status()
        expect(group.generate("27+58="), 0)
        for client in clients:
            client.close()
        wait_until(lambda: large_is_served(group, large), "the memory did not come back")
        expect(group.stop(), 0)


def large_is_served(group, large):
    """The threads of clients that have left may still have to give their memory back."""
    try:
        with Stranger(group.socket_path) as stranger:
            stranger.send(large)
            return stranger.reply()[0] != 4
    except ConnectionError:
        return False


# ---- a rank that gives commands ----


# The rank starts a process that leaves its process group and session and whose parent has ended.
# It lowers the limit RLIMIT_LOCKS (10) of the coordinator to its own, waits for its commands, one a line, and reports
# how each ended.
MUTINEER = """#!/bin/sh
(coordinator=$PPID setsid sh -c 'exec 3>"$0.told"
    python3 -c "import os, resource as r
r.prlimit(int(os.environ[\\"coordinator\\"]), 10, r.getrlimit(10))" >&3 2>&1 && echo lowered >&3
    while read -r words; do
        {program} $words >&3 2>&1; echo "status $?" >&3
    done <"$0.orders"; echo end >&3' "$0" </dev/null >/dev/null 2>&1 &)
exec {worker} "$@"
"""


@test
def test_a_process_that_a_rank_of_a_sealed_group_started_gives_it_no_commands():
    folder = tempfile.mkdtemp(dir=harness.scratch)
    script = os.path.join(folder, "coxswain-worker") # whose ranks share the weights
    with open(script, "w", encoding="ascii") as file:
        file.write(MUTINEER.format(program=program("coxswain"), worker=program("coxswain-worker")))
    os.chmod(script, 0o700)
    orders, told = script + ".orders", script + ".told"
    os.mkfifo(orders)
    try:
        with Group(1, ["--attach", "sealed", "--worker", script]) as group:
            name = ["--name", group.name]
            with open(orders, "w", encoding="ascii") as file:
                for words in (["reload", *name, MODEL], ["lora", "unload", *name, "a"], ["recover", "restart", "--kill", "--rank", "0", *name],
                              ["role", *name, "prefill"], ["stop", *name], ["status", *name], ["generate", *name, "1+1="]):
                    file.write(" ".join(words) + "\n")
            wait_until(lambda: os.path.exists(told) and harness.read(told).endswith("end\n"), "what the process was told")
            text = harness.read(told)
            check(text.count("is a rank or was started by one") == 7, "not refused: %s" % text)
            check(text.startswith("lowered\n"), "the limit of the coordinator was not lowered: %s" % text)
            check("status 0\n" not in text and text.count("\nstatus ") == 7, "one was served: %s" % text)
            status = group.status()
            check(status["deaths"] == status["restarts"] == 0 and not status["stopping"], "it was served: %s" % status)
            check(status["weights"]["version"] == 1, "other weights: %s" % status["weights"])
            # Who may is served, and named.
            expect(run(["reload", *name, MODEL]), 0)
            stop = start(["stop", *name])
            expect(finish(stop), 0)
            log = finish(group.process).err
            check(re.search(r"reload: ordered by process \d+ \(coxswain\) of user %d\b" % os.geteuid(), log), "not logged: %s" % log)
            check("stop: ordered by process %d (coxswain) of user %d\n" % (stop.pid, os.geteuid()) in log, "not logged: %s" % log)
    finally:
        shutil.rmtree(folder)


@test
def test_a_sealed_group_whose_ranks_could_not_be_told_apart_is_refused():
    for under in (["prlimit", "--locks=0"], harness.without("prlimit64>9=EPERM")):
        expect(run(["run", "-n", "1", "--attach", "sealed"], under=under), 2, "the hard limit RLIMIT_LOCKS (ulimit -Hx) of this process is 0, or")
        # One that has names can be started there.
        with Group(1, ["--attach", "named"], under=under) as group:
            expect(group.stop(), 0)


# ---- prompts ----


@test
def test_prompts_on_a_running_group_give_the_same_bytes():
    prompts, _ = sums(60)
    text = "\n".join(prompts) + "\n"
    with Group(2) as group:
        for arguments in ([], ["--json"], ["--max-tokens", "2", "--json"], ["--sequences", "3"], ["--sequences", "1"],
                          ["--temperature", "3", "--seed", "5", "--top-k", "7", "--top-p", "0.9", "--max-tokens", "9"]):
            own = generate(*arguments, text=text)
            other = group.generate(*arguments, text=text)
            check((own.status, own.out) == (other.status, other.out), "other bytes with %s" % arguments, other)
        for arguments in (["--tokens", "1 5 10 13 8 11 14", "1,4,13,4,14"], ["--quiet", "1+1="],
                          ["--tokens", "1", "1 999999", "2"], ["1+1=", "b\xe4d"], ["--max-tokens", "100000", "1+1="],
                          ["--json", "--max-tokens", "100000", "1+1=", "2+2="]):
            own, other = generate(*arguments), group.generate(*arguments)
            check((own.status, own.out) == (other.status, other.out), "other bytes with %s" % arguments, other)
            prefix = "coxswain: prompt"
            errors = [[line for line in result.err.splitlines() if line.startswith(prefix)] for result in (own, other)]
            check(errors[0] == errors[1], "other errors with %s: %s" % (arguments, errors), other)
        check(other.err.count("positions; the model has") == 2, "the refusal is not told per prompt", other)


        def free():  # a connection ends a little after its client
            status = group.status()["serving"]
            return status["free_blocks"] == status["block_count"] and status["clients"] == 0
        wait_until(free, "all is given back")
        expect(group.stop(), 0)


@test
def test_a_group_keeps_what_it_was_started_with():
    with Group(2) as group:
        check(expect(group.generate("--model", MODEL, "1+1="), 0).out == "1+1=2\n", "no")
        other = os.path.join(RUNTIME, "model")
        shutil.copytree(MODEL, other)
        for arguments, part in ((["-n", "2"], "leave out -n,"), (["--legacy-workers"], "leave out --legacy-workers,"),
                                (["--worker", "x"], "leave out --worker,"), (["--init", "k=v"], "leave out --init,"),
                                (["--model", other], "with the model " + MODEL)):
            result = expect(group.generate(*arguments, "1+1="), 2, "'%s'" % group.name, part)
            check(result.out == "", "it ran", result)
        shutil.rmtree(other)
    with Group(1, (), ["--", "sh", "-c", "exec %s --model %s" % (program("coxswain-worker"), MODEL)]) as group:
        expect(group.generate("1+1="), 1, "accepts no prompts", "command of its own")
        check("command of its own" in expect(run(["status"]), 0).out, "status does not tell")


@test
def test_many_clients_share_one_group():
    prompts, _ = sums(160)
    parts = [prompts[i * 20:(i + 1) * 20] for i in range(8)]
    expected = [generate(text="\n".join(part) + "\n").out for part in parts]
    with Group(4) as group:
        clients = [start(["generate", "--name", group.name, "--quiet", *part]) for part in parts]
        results = [finish(client) for client in clients]
        for result, text in zip(results, expected):
            expect(result, 0)
            check(result.out == text, "another text", result)
        status = group.status()["serving"]
        check(status["completed"] == 160 and status["clients"] == 0, "wrong: %s" % status)
        check(status["running"] == status["waiting"] == status["unread"] == 0, "something is left: %s" % status)
        expect(group.stop(), 0)
        group.left_nothing()


LONG = [(index, [1, 5, 10, 13, 8, 11, 14]) for index in range(300)]


def endless(prompts):
    """Prompts that no stop token ends."""
    return complete(prompts, 100000, ())


@test
def test_a_client_that_dies_or_cancels_gives_its_blocks_back():
    with Group(2) as group:
        one, two = Stranger(group.socket_path), Stranger(group.socket_path)
        for stranger in (one, two):
            stranger.send(endless(LONG))
        wait_until(lambda: group.status()["serving"]["free_blocks"] < group.status()["serving"]["block_count"], "steps")
        check(group.status()["serving"]["clients"] == 2, "two clients")
        client = start(["generate", "--name", group.name, "--quiet", "27+58="])
        one.close()
        two.send(CANCEL)
        while two.reply()[0] != 3:  # items that were on their way
            pass
        check(expect(finish(client), 0).out == "27+58=85\n", "another text")

        def free():
            status = group.status()["serving"]
            return status["free_blocks"] == status["block_count"] and status["running"] == 0 and status["clients"] == 1
        wait_until(free, "blocks given back")
        check(group.status()["serving"]["cancelled"] > 0, "nothing counted as cancelled")
        two.send(complete([(7, [1, 5, 10, 13, 8, 11, 14])]))
        number, item = two.reply()
        check(number == 2 and dict(item)[1] == 7, "no answer after a cancel: %s" % item)
        two.close()
        # A real client, killed and interrupted.
        for number, status in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
            before = group.status()["serving"]["cancelled"]
            path = temporary("1 5 10 13 8 11 14\n" * 20000)
            client = start(["generate", "--name", group.name, "--tokens", "--sequences", "1",
                            "--file", path])
            client.stdout.readline()
            client.send_signal(number)
            check(finish(client).status == status, "wrong status")
            wait_until(lambda: group.status()["serving"]["clients"] == 0, "a client that is gone")
            check(group.status()["serving"]["cancelled"] >= before, "less than before")
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "the group does not go on")
        expect(group.stop(), 0)


@test
def test_b21_a_client_that_reads_nothing_delays_no_other():
    with Group(2) as group, Stranger(group.socket_path) as deaf:
        deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.socket.setblocking(False)
        # Some to compute, and many refusals, which fill every buffer soon.
        message = frame(complete(LONG[:3] + [(index, [999999]) for index in range(300)], 3))
        sent = 0
        try:
            while sent < 64 << 20:
                sent += deaf.socket.send(message[sent % len(message):])
        except BlockingIOError:
            pass
        check(sent < 64 << 20, "it takes everything and answers nobody")
        wait_until(lambda: group.status()["serving"]["running"] == group.status()["serving"]["waiting"] == 0, "all done")
        status = group.status()["serving"]
        check(0 < status["unread"] <= 512, "what is unread has no bound: %s" % status)
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "another client is held up")
        # Once it reads, it gets all that it asked for.
        deaf.socket.setblocking(True)
        deaf.socket.settimeout(TIMEOUT)
        for _ in range(sent // len(message) * 303):
            check(deaf.reply()[0] == 2, "no item")
        deaf.close()
        expect(group.stop(), 0)
        group.left_nothing()


@test
def test_p10_garbage_at_the_control_connection_harms_no_other():
    with Group(1) as group:
        good = frame(complete([(1, [1, 5, 10, 13, 8, 11, 14])]))
        for data in (b"\0\0\0\0", b"\xff\xff\xff\xff", frame(b"\xff" * 40), frame(b"\0"), frame(field(9, b"")),
                     frame(field(3, b"")), frame(field(3, field(2, 0))), frame(complete([(1, [1])], 1, range(9))),
                     frame(field(3, field(2, 3) + field(6, -1 & (1 << 64) - 1)))):
            with Stranger(group.socket_path) as stranger:
                stranger.socket.sendall(data)
                number, error = stranger.reply()
                check(number == 4 and dict(error)[1] and dict(error)[2], "no error for %r" % data)
                check(stranger.ended(), "the connection lives on after %r" % data)
        for tokens in ([1, 999999], [1, -5], []):
            with Stranger(group.socket_path) as stranger:
                stranger.send(complete([(3, tokens), (4, [1, 5, 10, 13, 8, 11, 14])]))
                items = {dict(item)[1]: dict(item) for _, item in (stranger.reply(), stranger.reply())}
                check(items[3][2] == 2 and 4 in items[3] and 3 in items[4], "not per prompt: %s" % items)
        # Every bit flipped, and cut off everywhere.
        for bit in range(8 * len(good)):
            if good[bit // 8] ^ 1 << bit % 8 == STOP[0] and bit // 8 == 4:
                continue  # that asks for the end, and gets it
            with Stranger(group.socket_path) as stranger:
                data = bytearray(good)
                data[bit // 8] ^= 1 << bit % 8
                stranger.socket.sendall(bytes(data))
        for size in range(len(good)):
            with Stranger(group.socket_path) as stranger:
                stranger.socket.sendall(good[:size])
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "the group is harmed")
        expect(group.stop(), 0)
        group.left_nothing()


def leave_a_trap(listener, connection):
    """Sends an fd whose last close hangs for an hour: a socket in whose queue one lies that lingers over bytes that nobody reads. Its
    sender ends at once, which does not linger: whoever gets it must not close it before, or the close of the sender is the last, and
    does not hang. Returns the other end, with which that ends."""
    child = os.fork()
    if child == 0:
        try:
            lingers = socket.create_connection(listener.getsockname())
            lingers.setblocking(False)
            try:
                while lingers.send(bytes(65536)):
                    pass
            except BlockingIOError:
                pass
            lingers.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
            outer, inner = socket.socketpair()
            socket.send_fds(outer, [b"x"], [lingers.fileno()])
            socket.send_fds(connection, [b"x"], [inner.fileno()])
            os._exit(0)
        finally:
            os._exit(1)
    end = listener.accept()[0]
    status = os.waitpid(child, 0)[1]
    connection.close()
    check(status == 0, "the trap was not left")
    return end


@test
def test_g1g_status_and_stop_answer_while_closes_hang():
    def client():
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(group.socket_path)
        return stranger

    with Group(1) as group, socket.create_server(("127.0.0.1", 0)) as listener:
        # Else all that the other side sends may find room here, and nothing is left to linger for.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        strangers = [Stranger(group.socket_path) for _ in range(2)]
        # Once, and before the first close hangs: a signal, and so each stop, ends those that do.
        stop_process(group.process.pid)
        ends = [leave_a_trap(listener, stranger.socket) for stranger in strangers]
        ends += [leave_a_trap(listener, client()) for _ in range(2)]
        os.kill(group.process.pid, signal.SIGCONT)
        wait_until(lambda: group.status()["limits"]["closes that hang"]["count"] == 2, "closes that hang at the control socket")
        check(group.status()["limits"]["fds to close"]["count"] > 0, "nothing is to be closed")
        expect(run(["status", "--name", group.name]), 0)
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "the group is harmed")
        expect(group.stop(), 0)
        group.left_nothing()
        for end in ends:
            end.close()


def source(name=b"other", life=5, sequence=1, blocks=(0,), lease=(1 << 64) - 1):
    return (field(1, name) + field(2, life) + field(3, sequence) + field(4, b"".join(varint(b) for b in blocks)) +
            field(5, lease))


@test
def test_p10_m11_made_up_sources_and_groups_harm_no_other():
    with Group(1) as group:
        many = b"\0" * (4 << 20)
        refused = [field(10, b""), field(10, field(1, b"")), field(10, field(1, source(name=b"\x1b[31mno\nname"))),
                   field(10, field(1, source(name=b""))), field(10, field(1, source(name=b"x" * 100000))),
                   field(10, field(1, source(sequence=0))), field(10, field(1, source(sequence=-3))),
                   field(10, field(1, source(blocks=(0, -1)))), field(10, field(1, source(blocks=()))),
                   field(7, b""), field(7, field(1, b"\xff" * 40)), field(7, field(1, b"")),
                   field(7, field(1, field(1, b"x" * (2 << 20)))), field(7, field(2, b"nobody")),
                   field(9, field(1, 7)), field(6, field(1, 77))]
        for message in refused:
            with Stranger(group.socket_path) as stranger:
                stranger.send(message)
                number, error = stranger.reply()
                check(number == 4 and dict(error)[1] and dict(error)[2], "no error for %r" % message[:80])
        # These are possible: their result is reported.
        for made_up, text in ((source(), b"there is no link to other"),
                              (source(blocks=[2147483647] * 9), b"there is no link to other"),
                              (source(lease=0), b"deadline passed"),
                              (field(4, many) + source(), b"blocks are to be pulled: here are")):
            with Stranger(group.socket_path) as stranger:
                stranger.send(field(10, field(1, made_up)))
                number, reply = stranger.reply()
                error = dict(parse(dict(reply)[2]))
                check(number == 8 and text in error[2], "another end of %r: %r" % (made_up[-60:], reply))
        check(expect(group.generate("27+58="), 0).out == "27+58=85\n", "the group is harmed")
        expect(group.stop(), 0)
        group.left_nothing()


@test
def test_m10_an_order_about_links_waits_for_another_one_no_longer_than_it_may():
    def role(timeout_ms):
        return field(9, field(1, 3) + field(2, timeout_ms))
    with Group(1) as group:
        group.stopped(0)

        def answer(message):
            with Stranger(group.socket_path) as stranger:
                stranger.send(message)
                number, reply = stranger.reply()
                return number == 4 and dict(reply)[2]
        while not answer(role(20)):
            pass  # the worker takes no more
        with Stranger(group.socket_path) as patient:
            patient.send(role(3600000))
            wait_until(lambda: b"another order about links" in answer(role(20)), "an order that waits for another")
        os.kill(group.pids[0], signal.SIGCONT)
        expect(group.stop(), 0)
        group.left_nothing()


def fds_and_threads(pid):
    return len(os.listdir("/proc/%d/fd" % pid)), len(os.listdir("/proc/%d/task" % pid))


@test
def test_b15_connections_leave_no_fd_and_no_thread():
    with Group(1) as group:
        group.generate("1+1=")
        wait_until(lambda: group.status()["serving"]["clients"] == 0, "nobody")
        pid = group.process.pid
        before = fds_and_threads(pid)
        for i in range(100):
            with Stranger(group.socket_path) as stranger:
                if i % 2:
                    stranger.send(STATUS)
                if i % 3 == 0:
                    stranger.send(complete([(1, [1, 5, 10, 13, 8, 11, 14])]))
        wait_until(lambda: fds_and_threads(pid) <= before, "fds and threads given back: %s, %s" % (
            before, fds_and_threads(pid)))
        expect(group.stop(), 0)


@test
def test_connections_have_a_bound_and_status_has_its_place():
    with Group(1) as group:
        clients = [Stranger(group.socket_path) for _ in range(24)]
        for client in clients:
            client.send(endless(LONG[:1]))
        wait_until(lambda: group.status()["serving"]["clients"] == 24, "24 clients")
        with Stranger(group.socket_path) as one_more:
            one_more.send(complete(LONG[:1]))
            number, error = one_more.reply()
            check(number == 4 and b"too many clients" in dict(error)[2], "not refused: %s" % error)
        # A silent connection is closed for a client with a request: most often the first of them, which was silent for longest. Of the
        # connections that were closed before, some may hold their places still: more than one has to go then.
        before = set(harness.tasks(group.process.pid))
        others = [Stranger(group.socket_path) for _ in range(8)]
        # A connection is silent once its thread waits for a request. One of them may have been closed by then already.
        waiting = lambda: sum("poll" in harness.read("/proc/%d/task/%s/wchan" % (group.process.pid, task))
                              for task in set(harness.tasks(group.process.pid)) - before)
        closed = lambda: [other for other in others
                          if other.socket in select.select([o.socket for o in others], [], [], 0)[0]]
        wait_until(lambda: waiting() + len(closed()) >= len(others), "threads that wait")
        expect(run(["status", "--name", group.name]), 0)
        wait_until(closed, "one of them told")
        told = closed()
        check(1 <= len(told) < len(others), "%d of them were told" % len(told))
        for other in told:
            number, error = other.reply()
            check(number == 4 and b"asked for nothing" in dict(error)[2], "not told: %s" % error)
            check(other.ended(), "its connection lives on")
        check(group.status()["serving"]["clients"] == 24, "a client had to go")
        for client in clients + others:
            client.close()
        wait_until(lambda: group.status()["serving"]["clients"] == 0, "nobody")
        expect(group.stop(), 0)


@test
def test_b21_a_process_with_one_connection_keeps_it_when_another_hoards():
    with Group(1) as group, Stranger(group.socket_path) as modest:
        modest.send(STATUS)
        modest.reply()
        child = os.fork()
        if child == 0:
            try:
                hoard = []
                for _ in range(64):
                    hoard.append(Stranger(group.socket_path))
                    hoard[-1].send(STATUS)
                    hoard[-1].reply()  # its thread runs: one that has not begun is not known to be quiet
                os._exit(0)
            finally:
                os._exit(1)
        check(os.waitpid(child, 0)[1] == 0, "it got no further connection")
        modest.send(STATUS)
        number, _ = modest.reply()
        check(number == 1, "it was closed: %d" % number)
        expect(group.stop(), 0)


@test
def test_b21_an_idle_client_with_prompts_is_closed_for_others():
    with Group(1) as group:
        clients = [Stranger(group.socket_path) for _ in range(24)]
        sums_prompt = complete([(1, [1, 5, 10, 13, 8, 11, 14])])
        # What is held for some of them is let go of at the end of its lease, and so are they.
        held_prompt = field(3, field(1, field(1, 1) + field(2, bytes([1, 5, 10, 13, 8, 11, 14]))) + field(2, 1) +
                            field(20, 1000))
        for i, client in enumerate(clients[4:]):
            client.send(held_prompt if i % 2 else sums_prompt)
            number, item = client.reply()
            check(number == 2 and (20 in dict(item)) == i % 2, "no item, or none that is held: %s" % item)
        # These do not even take what they asked for.
        for deaf in clients[:4]:
            deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.socket.setblocking(False)
            message = frame(complete([(index, [999999]) for index in range(300)], 3))
            sent = 0
            try:
                while sent < 64 << 20:
                    sent += deaf.socket.send(message[sent % len(message):])
            except BlockingIOError:
                pass
        wait_until(lambda: group.status()["serving"]["clients"] == 24, "24 clients")
        others = []

        def comes_in():
            other = Stranger(group.socket_path)
            other.send(sums_prompt)
            number, value = other.reply()
            if number == 2:
                others.append(other)
                return True
            check(b"too many clients" in dict(value)[2], "refused: %s" % value)
            other.close()
            return False
        for _ in range(24):
            wait_until(comes_in, "a place for prompts")
        number, error = clients[4].reply()
        check(number == 4 and b"needed the place" in dict(error)[2], "not told: %s" % error)
        # Nothing is left of those either that take nothing, and hear nothing.
        wait_until(lambda: group.status()["serving"]["clients"] == 24, "those who had the places before gone")
        for client in clients + others:
            client.close()
        wait_until(lambda: group.status()["serving"]["clients"] == 0, "nobody")
        expect(group.stop(), 0)


@test
def test_b21_orders_that_wait_leave_room_for_status_and_stop():
    with Group(1) as group:
        group.stopped(0)
        pause = field(5, field(1, 0) + field(4, 600000))
        waiting = [Stranger(group.socket_path) for _ in range(24)]
        for stranger in waiting:
            stranger.send(pause)
        # All of them wait, for the rank or for each other: the next one may not.
        refused = []

        def one_is_refused():
            with Stranger(group.socket_path) as one_more:
                one_more.send(pause)
                readable = select.select([one_more.socket], [], [], 0.2)[0]
                refused.extend([one_more.reply()] if readable else [])
            return refused
        wait_until(one_is_refused, "one order too many")
        check(refused[0][0] == 4 and b"too many orders" in dict(refused[0][1])[2], "not refused: %s" % refused)
        check(group.status()["ranks"][0]["stopped"], "it is not stopped")
        expect(group.stop(), 0)
        for stranger in waiting:
            stranger.close()
        expect(finish(group.process), 0, "the group ends")
        group.left_nothing()


if __name__ == "__main__":
    sys.exit(harness.main())
