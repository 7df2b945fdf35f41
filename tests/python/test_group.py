"""coxswain.Group: requests, and what becomes of them."""

import asyncio
import contextlib
import json
import logging
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

import coxswain
import workers


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_call_gives_the_replies_of_all_ranks(ranks, attach):
    with coxswain.Group(workers.who, ranks, attach=attach) as group:
        replies = [reply.split() for reply in group.call(b"", timeout=30)]
        status = group.status()
        assert [int(reply[0]) for reply in replies] == list(range(ranks))
        assert {int(reply[1]) for reply in replies} == {ranks}
        assert [int(reply[3]) for reply in replies] == [rank.pid for rank in status.ranks]
        assert group.rank_count == ranks and group.depth == 4


def test_a_command_starts_the_ranks(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import coxswain\ncoxswain.serve(lambda data: bytes(data) + b'!')\n")
    with coxswain.Group([sys.executable, str(script)], ranks=2) as group:
        assert group.call(b"hello", timeout=30) == [b"hello!", b"hello!"]


def test_payloads_of_every_size_come_back():
    with coxswain.Group(workers.echo, 2) as group:
        for size in (0, 1, 255, 4096, 1 << 17, (1 << 20) + 3, 1 << 24):
            data = os.urandom(size)
            assert group.call(data, timeout=30) == [data, data]
        assert group.call(bytearray(b"array"), timeout=30) == [b"array"] * 2
        assert group.call(memoryview(b"a view")[2:], timeout=30) == [b"view"] * 2


def test_gather_and_ranks_choose_what_comes_back():
    with coxswain.Group(workers.who, 4) as group:
        assert [reply[:1] for reply in group.call(b"", ranks=[3, 1], timeout=30)] == [b"1", b"3"]
        assert group.call(b"", gather="rank0", timeout=30)[:1] == b"0"
        assert group.call(b"", gather="rank0", ranks=[2], timeout=30)[:1] == b"2"
        assert group.call(b"", gather="none", timeout=30) is None
        with pytest.raises(coxswain.Invalid, match="0 to 3"):
            group.call(b"", ranks=[4])
        with pytest.raises(coxswain.Invalid):
            group.call(b"", ranks=[])
        with pytest.raises(coxswain.Invalid, match="'all', 'rank0', 'none'"):
            group.call(b"", gather="some")


def test_an_exception_of_a_rank_comes_with_its_traceback():
    with coxswain.Group(workers.obey, 2) as group:
        with pytest.raises(coxswain.RankError, match="ValueError: the reason") as caught:
            group.call(b"raise 1", timeout=30)
        assert caught.value.rank == 1
        assert "workers.py" in str(caught.value) and "in act" in str(caught.value)
        assert group.call(b"again", timeout=30) == [b"again"] * 2


def test_the_death_of_a_rank_says_which_and_how():
    with coxswain.Group(workers.obey, 4) as group:
        pid = group.status().ranks[2].pid
        with pytest.raises(coxswain.RankDied, match="rank 2") as caught:
            group.call(b"kill 2", timeout=30)
        death = caught.value
        assert (death.rank, death.pid, death.signal, death.exit_status) == (
            2,
            pid,
            signal.SIGKILL,
            -1,
        )
        assert list(death.last_lines) == ["last words"]
        assert death.code == coxswain._internal.errors.lib.COX_PEER_DEAD
        with pytest.raises(coxswain.RankDied) as caught:  # refused: it is dead
            group.call(b"x", timeout=30)
        assert (caught.value.rank, caught.value.pid, caught.value.signal) == (
            2,
            pid,
            signal.SIGKILL,
        )
        assert group.call(b"x", ranks=[0, 1, 3], timeout=30) == [b"x"] * 3
        status = group.status().ranks[2]
        assert status.liveness == "dead" and status.signal == signal.SIGKILL
        assert status.exit_status is None and status.deaths == 1
        group.restart(2, timeout=30)
        assert group.call(b"x", timeout=30) == [b"x"] * 4
        assert group.status().ranks[2].incarnation == 2


def test_an_exit_status_is_told():
    with coxswain.Group(workers.obey, 1) as group:
        with pytest.raises(coxswain.RankDied) as caught:
            group.call(b"exit", timeout=30)
        assert (caught.value.signal, caught.value.exit_status) == (0, 7)
        assert group.status().ranks[0].exit_status == 7


@pytest.mark.parametrize("on_death", ["restart", "restart-all"])
def test_on_death_restart_replaces_the_rank_and_later_calls_wait(on_death):
    with coxswain.Group(workers.obey, 2, on_death=on_death) as group:
        before = [rank.pid for rank in group.status().ranks]
        for _ in range(2):
            with pytest.raises(coxswain.RankDied):
                group.call(b"kill 1", timeout=30)
            assert group.call(b"x", timeout=30) == [b"x"] * 2
        after = [rank.pid for rank in group.status().ranks]
        assert before[1] != after[1]
        assert (before[0] == after[0]) == (on_death == "restart")


def hang(group, timeout):
    """Rank 1 stops itself; what the error says of the ranks that are late."""
    with pytest.raises(coxswain.TimedOut) as caught:
        group.call(b"stop 1", timeout=timeout)
    assert isinstance(caught.value, TimeoutError)
    return caught.value.late


def test_a_hang_says_what_each_rank_does():
    for timeout in (0.5, 5, 30):  # on a busy machine the ranks need time to come so far
        with coxswain.Group(workers.obey, 3) as group:
            pids = [rank.pid for rank in group.status().ranks]
            late = hang(group, timeout)
            if len(late) > 1 or not late[0].stopped:
                os.kill(pids[1], signal.SIGKILL)
                continue
            (late,) = late
            assert (late.rank, late.pid, late.taken) == (1, pids[1], True)
            assert late.liveness == "alive" and 0 < late.silent < 60
            with pytest.raises(coxswain.Late, match="rank 1"):
                group.submit(b"x")
            with pytest.raises(coxswain.TimedOut):
                group.call(b"x", timeout=0.2)
            os.kill(pids[1], signal.SIGCONT)
            assert group.call(b"x", timeout=30) == [b"x"] * 3  # and not the late reply
            return
    pytest.fail("another rank than the stopped one is late, or it is not said to be stopped")


def test_a_rank_that_hangs_is_replaced():
    with coxswain.Group(workers.obey, 2) as group:
        with pytest.raises(coxswain.TimedOut):
            group.call(b"hang 0", timeout=0.2)
        group.restart(0, kill=True, timeout=30)
        assert group.call(b"x", timeout=30) == [b"x"] * 2


def test_submit_gives_futures_and_full(tmp_path):
    gate = tmp_path / "gate"
    with coxswain.Group(workers.wait_for_file, 2, depth=4) as group:
        futures = [group.submit(str(gate).encode(), 30) for _ in range(4)]
        with pytest.raises(coxswain.Full):
            group.submit(b"")
        assert not any(future.done() for future in futures)
        with pytest.raises(TimeoutError):
            futures[0].result(0.05)
        assert "in flight" in repr(futures[0])
        gate.touch()
        assert [future.result(30) for future in futures] == [[b"done"] * 2] * 4
        assert futures[0].exception() is None and futures[0].done()
        assert [future.sequence for future in futures] == sorted({f.sequence for f in futures})


def test_replies_of_other_threads_in_any_order():
    with coxswain.Group(workers.out_of_order, 2, depth=4) as group:
        for _ in range(20):
            futures = [group.submit(b"%d." % i, 30) for i in range(4)]
            assert [future.result(30) for future in futures] == [[b".%d" % i] * 2 for i in range(4)]


def test_nobody_collects_for_a_request_that_is_done():
    """Another thread may have collected it a moment ago: then nothing may be in flight."""
    with coxswain.Group(workers.shout, 1) as group:
        future = group.submit(b"x", 30)
        future.result(30)
        assert group._collect(time.monotonic_ns() + 10**9, future) is None


def test_threads_share_a_group():
    with coxswain.Group(workers.shout, 2, depth=4) as group:
        wrong = []

        def run(number):
            for i in range(200):
                text = b"%d-%d" % (number, i)
                if group.call(text + b"x", timeout=30) != [text + b"X"] * 2:
                    wrong.append(text)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert group.status().channels[0].completed >= 1200


def test_callbacks_are_called_once_without_a_waiting_thread():
    with coxswain.Group(workers.shout, 2, depth=8) as group:
        called = []
        all_called = threading.Event()

        def callback(future):
            called.append(future.result())
            if len(called) == 8:
                all_called.set()

        for i in range(8):
            group.submit(b"c%d" % i, 30).add_done_callback(callback)
        assert all_called.wait(30)
        assert sorted(called) == sorted([b"C%d" % i] * 2 for i in range(8))
        done = group.submit(b"x", 30)
        done.result()
        done.add_done_callback(called.append)
        assert called[-1] is done


def test_a_callback_that_raises_harms_nothing(caplog):
    with coxswain.Group(workers.shout, 1) as group:
        future = group.submit(b"x", 30)
        future.add_done_callback(lambda _: 1 / 0)
        assert future.result(30) == [b"X"]
        assert group.call(b"y", timeout=30) == [b"Y"]
    assert "ZeroDivisionError" in caplog.text


def test_fileno_and_poll_serve_any_event_loop():
    import selectors

    with coxswain.Group(workers.shout, 2) as group, selectors.DefaultSelector() as selector:
        selector.register(group.fileno(), selectors.EVENT_READ)
        future = group.submit(b"x", 30)
        while not future.done():
            assert selector.select(30)
            group.poll()
        assert future.result(0) == [b"X"] * 2
        group.poll()
        assert not selector.select(0)


def test_lines_come_with_their_rank():
    lines = []
    two = threading.Event()

    def on_line(rank, line):
        lines.append((rank, line))
        if len(lines) == 2:
            two.set()

    with coxswain.Group(workers.obey, 2, on_line=on_line) as group:
        group.call(b"print 1", timeout=30)
        assert two.wait(30)
    assert sorted(lines) == [(1, "a line"), (1, "an error line")]


def test_lines_are_printed_where_they_were_written(capsys):
    with coxswain.Group(workers.obey, 2) as group:
        group.call(b"print 1", timeout=30)
    found = capsys.readouterr()
    assert (found.out, found.err) == ("rank 1: a line\n", "rank 1: an error line\n")
    with coxswain.Group(workers.obey, 2, on_line=None) as group:
        group.call(b"print 1", timeout=30)
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "")
    with pytest.raises(coxswain.Invalid, match="on_line is 'quiet'; it may be 'print', 'log'"):
        coxswain.Group(workers.obey, on_line="quiet")


def test_lines_go_to_logging(caplog):
    caplog.set_level(logging.INFO, "coxswain")
    with coxswain.Group(workers.obey, 2, on_line="log") as group:
        group.call(b"print 1", timeout=30)
    records = [record for record in caplog.records if record.getMessage() == "rank 1: a line"]
    assert records and records[0].rank == 1


def test_a_death_is_told_while_nothing_is_in_flight():
    told = queue.Queue()
    with coxswain.Group(
        workers.shout, 2, on_rank_death=lambda rank, text: told.put((rank, text))
    ) as group:
        pid = group.status().ranks[1].pid
        os.kill(pid, signal.SIGKILL)
        rank, text = told.get(timeout=10)
    assert rank == 1
    assert f"rank 1 (pid {pid}) was killed by signal 9" in text


@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_a_death_leaves_a_file_that_tells_what_the_ranks_did(
    attach, tmp_path, monkeypatch, coxswain_command
):
    def told(folder, cause):
        """Of a group that has ended: it writes first what it has to write."""
        (path,) = folder.iterdir()
        assert path.name.endswith(f".{cause}.crash")
        command = [coxswain_command, "postmortem", path]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout

    folder, other = tmp_path / "one", tmp_path / "of the environment"
    with coxswain.Group(workers.obey, 2, attach=attach, crash_dir=folder) as group:
        group.call(b"print 1", timeout=30)
        with pytest.raises(coxswain.RankDied):
            group.call(b"kill 1", timeout=30)
    text = told(folder, "death")
    assert "rank 1" in text and "Under way:" in text and "no reply of: " in text, text
    monkeypatch.setenv("COXSWAIN_CRASH_DIR", str(other))
    with coxswain.Group(workers.obey, 2, attach=attach) as group:
        with pytest.raises(coxswain.TimedOut):
            group.call(b"stop 1", timeout=0.2)
        os.kill(group.status().ranks[1].pid, signal.SIGCONT)
    assert "rank 1" in told(other, "timeout")
    with pytest.raises(coxswain.Error, match="/proc/none"):
        with coxswain.Group(workers.obey, 1, crash_dir="/proc/none"):
            pass


def test_status_has_the_fields_of_the_command(coxswain_command):
    with coxswain.Group(workers.shout, 2) as group:
        group.call(b"x", timeout=30)
        said = json.loads(
            subprocess.run(
                [coxswain_command, "status", "--name", group.name, "--json"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        status = group.status()
        own = {name: getattr(status, name) for name in status.__dataclass_fields__}
        assert set(own) <= set(said)
        for name in ("name", "attach", "rank_count", "depth", "incarnation", "pid", "legacy"):
            assert said[name] == own[name]
        for rank in status.ranks:
            assert set(rank.__dataclass_fields__) <= set(said["ranks"][rank.rank])
            assert said["ranks"][rank.rank]["pid"] == rank.pid
            for name, channel in rank.channels.items():
                assert set(channel.__dataclass_fields__) == set(
                    said["ranks"][rank.rank]["channels"][name]
                )
        for channel, theirs in zip(status.channels, said["channels"], strict=True):
            assert set(channel.__dataclass_fields__) <= set(theirs)
            assert channel.name == theirs["name"]


def test_the_commands_work_on_a_group_of_python(coxswain_command):
    with coxswain.Group(workers.obey, 2) as group:
        with pytest.raises(coxswain.RankDied):
            group.call(b"kill 1", timeout=30)
        subprocess.run(
            [coxswain_command, "recover", "restart", "--rank", "1", "--name", group.name],
            check=True,
            capture_output=True,
        )
        assert group.call(b"x", timeout=30) == [b"x"] * 2


def test_a_pause_is_refused_where_the_program_decides(coxswain_command):
    with coxswain.Group(workers.obey, 2) as group:
        done = subprocess.run(
            [coxswain_command, "recover", "pause", group.name], capture_output=True, text=True
        )
        assert done.returncode == 1
        assert "pause is not legal in state INIT" in done.stderr
        assert "the program that drives this group decides itself when it sends" in done.stderr
        assert group.call(b"x", timeout=30) == [b"x"] * 2


def test_more_deaths_than_are_made_good():
    with coxswain.Group(workers.obey, 1, on_death="restart") as group:
        for _ in range(6):
            with pytest.raises(coxswain.RankDied, match="signal 9"):
                group.call(b"kill 0", timeout=30)
        with pytest.raises(coxswain.RankDied, match="6 deaths within 60 s are more than the 5"):
            group.call(b"x", timeout=30)


def test_a_rank_that_cannot_be_replaced_is_told_with_the_reason():
    """No fd is left when it dies."""
    with coxswain.Group(workers.obey, 2, on_death="restart") as group:
        pid = group.status().ranks[1].pid
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = []
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), before[1])
        )
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            os.kill(pid, signal.SIGKILL)
            for timeout in (0.5, 2):
                with pytest.raises(coxswain.RankDied) as raised:
                    group.call(b"x", timeout=timeout)
            assert raised.value.rank == 1
            assert "killed by signal 9" in str(raised.value)
            assert "it is not replaced yet: " in str(raised.value)
            assert "Too many open files" in str(raised.value)
        finally:
            for fd in taken:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert group.call(b"x", timeout=30) == [b"x"] * 2


@pytest.mark.parametrize("where", ["in a call", "between calls", "in an event loop"])
def test_coxswain_stop_ends_the_group_and_not_the_program(coxswain_command, where):
    told = []
    with coxswain.Group(workers.obey, 2, on_stop=told.append) as group:
        command = [coxswain_command, "stop", "--name", group.name]
        name = group.name
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            expected = f"the group was stopped by process {process.pid} (coxswain stop)"
            with pytest.raises(coxswain.Closed) as raised:
                if where == "in a call":
                    group.call(b"hang", timeout=None)
                elif where == "in an event loop":

                    async def wait():
                        await group.submit(b"hang", timeout=None)

                    asyncio.run(wait())
                while True:
                    group.call(b"")
            assert str(raised.value) == expected and told == [expected]
            assert process.communicate(timeout=60)[1] == f"coxswain: the group '{name}' has ended\n"
        assert process.returncode == 0
        with pytest.raises(coxswain.Closed, match="stopped by process"):
            group.status()
    assert not os.path.exists(f"/dev/shm/{name}_control")


def test_coxswain_stop_is_logged_where_nothing_is_called(coxswain_command, caplog):
    with coxswain.Group(workers.echo, 1) as group:
        command = [coxswain_command, "stop", "--name", group.name]
        subprocess.run(command, check=True, timeout=60)
    assert [record.message for record in caplog.records if "(coxswain stop)" in record.message]


@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_a_group_that_stands_by_takes_the_name_of_another_one(coxswain_command, attach):
    def status(name, *options):
        command = [coxswain_command, "status", "--name", name, *options]
        return subprocess.run(command, capture_output=True, text=True)

    name = f"taken_{os.getpid()}"
    with coxswain.Group(workers.who, 2, standby=True, attach=attach) as second:
        with coxswain.Group(workers.who, 2, name=name) as first:
            assert len(second.call(b"", timeout=30)) == 2
            assert second.socket == "" and status(second.name).returncode != 0
            with pytest.raises(coxswain.Taken, match=name):
                second.take_name(name)
            with pytest.raises(coxswain.Error, match=name):
                first.take_name("another")
        with pytest.raises(coxswain.Invalid):
            second.take_name("a/b")
        second.take_name(name)
        assert second.name == second.status().name == name
        said = json.loads(status(name, "--json").stdout)
        assert said["name"] == name and said["note"] is None
        assert [rank["pid"] for rank in said["ranks"]] == [
            rank.pid for rank in second.status().ranks
        ]
    assert status(name).returncode != 0


def only_ranks_write():
    """Of the memory of ranks this process has mappings that it cannot write, and no fd."""
    with open("/proc/self/maps") as maps:
        rights = [line.split()[1] for line in maps if "memfd:cox_rank" in line]
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    assert rights and set(rights) == {"r--s"}
    assert not [target for target in targets if "cox_rank" in target]


@pytest.mark.parametrize("takes_name", [False, True])
def test_a_sealed_group_without_a_socket_hands_its_memory_down(takes_name):
    """It has no name in /dev/shm, not even while a rank attaches; nor has one that is replaced."""
    with coxswain.Group(workers.names_of_coordinator, 2, standby=True, attach="sealed") as group:
        assert group.status().attach == "sealed"
        only_ranks_write()
        replies = group.call(b"", timeout=30)
        if takes_name:
            group.take_name(f"taken_{os.getpid()}")
        for rank in (1, 0):
            group.restart(rank, kill=True)
            replies += group.call(b"", timeout=30)
            only_ranks_write()
        pids = [rank.pid for rank in group.status().ranks]
    assert [int(reply.split()[0]) for reply in replies[-2:]] == pids
    assert len({*replies}) == 4 and not any(reply.split()[1:] for reply in replies)


def test_status_shows_a_note(coxswain_command):
    with coxswain.Group(workers.who, 1) as group:
        command = [coxswain_command, "status", "--name", group.name]

        def said(*options):
            return subprocess.run([*command, *options], capture_output=True, check=True).stdout

        assert group.note == "" and group.status().note is None
        group.note = "all is well"
        assert group.status().note == group.note
        assert b"\nnote: all is well\n" in said()
        assert json.loads(said("--json"))["note"] == group.note
        note = {"incidents": 2, "spare": "\033", "pause": {"load": 0.5}}
        group.note = json.dumps(note)
        assert json.loads(said("--json"))["note"] == note
        assert b'\nincidents: 2\nspare: \\u001b\npause: {"load": 0.5}\n' in said()
        # Prometheus has its numbers, and its texts as labels.
        command[1] = "metrics"
        lines = said().splitlines()
        assert b'coxswain_note{key="incidents"} 2' in lines
        assert b'coxswain_note{key="pause.load"} 0.5' in lines
        assert any(line.startswith(b'coxswain_note_info{key="spare",value="') for line in lines)
        group.note = "all is\nwell"
        assert b'coxswain_note_info{key="note",value="all is\\nwell"} 1' in said().splitlines()
        command[1] = "status"
        with pytest.raises(coxswain.TooLarge):
            group.note = 4096 * "x"
        group.note = ""
        assert json.loads(said("--json"))["note"] is None


def test_external_ranks_come_by_themselves(tmp_path):
    name = f"ext{os.getpid()}"
    group = coxswain.Group(ranks=2, external=True, name=name, timeout=60)
    started = []

    def start_ranks():
        path = group.socket
        for _ in range(2):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", "import workers; workers.who()"],
                    env={
                        **os.environ,
                        "COXSWAIN_SOCKET": path,
                        "PYTHONPATH": os.pathsep.join(sys.path),
                    },
                )
            )

    helper = threading.Timer(0, start_ranks)
    helper.start()
    try:
        with group:
            helper.join()
            replies = [reply.split() for reply in group.call(b"", timeout=30)]
            assert {int(reply[3]) for reply in replies} == {process.pid for process in started}
    finally:
        for process in started:
            process.wait(30)


def test_a_start_that_fails_says_why():
    with pytest.raises(coxswain.ExecFailed, match="no-such-program"):
        coxswain.Group(["/no-such-program"], 2).start()
    with pytest.raises(coxswain.RankDied, match="no GPU here"):
        coxswain.Group(workers.fail_early, 2).start()
    with pytest.raises(coxswain.TimedOut, match="attach"):
        coxswain.Group(workers.never_attach, 2, timeout=0.3).start()
    name = f"twice{os.getpid()}"
    with coxswain.Group(workers.echo, 1, name=name), pytest.raises(coxswain.Taken, match=name):
        coxswain.Group(workers.echo, 1, name=name).start()


def test_options_outside_what_is_allowed_are_refused():
    for arguments, text in (
        ({"ranks": 0}, "1 to 128"),
        ({"ranks": 129}, "1 to 128"),
        ({"depth": 33}, "1 to 32"),
        ({"attach": "fast"}, "'named', 'sealed'"),
        ({"on_death": "ignore"}, "'fail', 'restart'"),
        ({"timeout": 0}, "positive"),
        ({"devices": [1]}, "1 numbers for 2"),
        ({"external": True}, "external"),
    ):
        with pytest.raises(coxswain.Invalid, match=text):
            coxswain.Group(workers.echo, **{"ranks": 2, **arguments})
    with pytest.raises(coxswain.Invalid, match="list"):
        coxswain.Group("python3 worker.py")
    with coxswain.Group(workers.echo, 1) as group:
        for timeout in (-1, float("nan")):
            with pytest.raises(coxswain.Invalid):
                group.call(b"", timeout=timeout)
        with pytest.raises(TypeError, match="str"):
            group.call("text")


def test_an_idle_group_causes_no_wakeups():
    """Neither the coordinator's process nor the ranks run while nothing is asked."""

    def switches(pid):
        total = 0
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/status", encoding="ascii") as file:
                total += sum(
                    int(line.split()[1])
                    for line in file
                    if line.startswith("voluntary_ctxt_switches")
                )
        return total

    with coxswain.Group(workers.shout, 2) as group:
        group.call(b"x", timeout=30)
        pids = [rank.pid for rank in group.status().ranks]
        best = {}
        for _ in range(5):  # another program may make one of them run once
            before = {pid: switches(pid) for pid in pids}
            time.sleep(0.5)  # the measurement
            for pid in pids:
                best[pid] = min(best.get(pid, 99), switches(pid) - before[pid])
        assert best == {pid: 0 for pid in pids}


def test_stop_inside_stop_returns():
    """As a signal handler calls it, on the thread that is inside."""

    class Twice(coxswain.Group):
        def _end(self):
            self.stop()
            super()._end()

    group = Twice(workers.echo, ranks=1).start()
    thread = threading.Thread(target=group.stop, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(coxswain.Closed):
        group.call(b"")
