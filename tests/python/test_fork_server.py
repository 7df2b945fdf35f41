"""The fork server: a rank of it is as one that executed its program."""

import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import coxswain
import workers
from coxswain._internal.fork_server import ForkServer, obstacle

RANKS = 2


def function_of(function):
    return f"{function.__module__}:{function.__name__}"


@pytest.fixture(params=[False, True], ids=["interpreter", "fork"])
def fork(request):
    return request.param


def serve(function, fork=False, **more):
    server = ForkServer(["json", "workers"], function_of(function), fork=fork, **more)
    assert server.wait() == "", server.stop()
    return server


def group(function, server=None, **options):
    made = coxswain.Group(function, ranks=RANKS, **options)
    if server:
        made._fork_from([server.fileno()] * RANKS)
    return made


def looked(server=None, **options):
    """What each rank has, and what it has alone."""
    with group(workers.look, server, **options) as running:
        replies = [json.loads(reply) for reply in running.call(b"", timeout=30)]
        pids = [rank.pid for rank in running.status().ranks]
    assert [own["pid"] for _, own in replies] == pids
    return [seen for seen, _ in replies], [own for _, own in replies]


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")")[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("attach", ["named", "sealed"])
def test_a_rank_is_as_one_that_was_executed(fork, attach, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("GONE", "with the server")
    server = serve(workers.look, fork)
    try:
        # What has changed since the server was started counts.
        monkeypatch.delenv("GONE")
        monkeypatch.setenv("LOOKED", "yes")
        monkeypatch.chdir(tmp_path)
        name = f"forks_{os.getpid()}"
        executed, _ = looked(name=name, attach=attach)
        for _ in range(2):
            forked, own = looked(server, name=name, attach=attach)
            for one, other in zip(forked, executed, strict=True):
                assert {
                    what: (one[what], other[what]) for what in one if one[what] != other[what]
                } == {}
            assert forked[0]["in C"] == {"COXSWAIN_RANK": "0", "LOOKED": "yes", "GONE": ""}
            assert forked[0]["parent"] == os.getpid()
            for what in own[0]:
                assert own[0][what] != own[1][what], what
    finally:
        server.stop()
    assert not [record for record in caplog.records if "fork server" in record.getMessage()]


def test_how_it_ends_is_told_as_ever(fork):
    server = serve(workers.leave, fork)
    told = []
    for one in (None, server):
        lines = []
        made = coxswain.Group(
            workers.leave, on_line=lambda rank, line, lines=lines: lines.append(line)
        )
        if one:
            made._fork_from([one.fileno()])
        with made, pytest.raises(coxswain.RankDied) as failure:
            made.call(b"", timeout=30)
        assert failure.value.exit_status == 7
        told.append(lines)
    server.stop()
    assert told[1] == told[0] == ["without a flush", "at the end"]


def test_a_rank_that_is_killed_is_replaced(fork):
    server = serve(workers.who, fork)
    try:
        with group(workers.who, server) as running:
            first = running.call(b"", timeout=30)
            pid = int(first[1].split()[3])
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: running.status().ranks[1].death)
            assert "was killed by signal 9" in running.status().ranks[1].death
            running.restart(1)
            again = running.call(b"", timeout=30)
            assert again[0] == first[0]
            assert again[1].split()[:3] == [b"1", b"2", b"2"]
    finally:
        server.stop()


def reason_of(caplog, server, function=workers.who):
    """Starts ranks, which must be there all the same. Returns why the server forked none."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "coxswain"), group(function, server) as running:
        assert len(running.call(b"", timeout=30)) == RANKS
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == RANKS and all("its program is executed" in text for text in found), found
    return found[0]


def test_a_server_that_was_killed_costs_its_speed_alone(fork, caplog):
    server = serve(workers.who, fork)
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(server.pid))
    assert "no process of the fork server" in reason_of(caplog, server)
    server.stop()


def test_other_values_for_libraries_are_refused(caplog, monkeypatch):
    server = serve(workers.who)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" in reason_of(caplog, server)
    server.stop()


def test_values_of_its_own_are_those_of_its_ranks():
    server = serve(workers.look, environment={"OMP_NUM_THREADS": "3", "LOOKED": "too"})
    seen, _ = looked(server)
    server.stop()
    for one in seen:
        assert one["environment"]["OMP_NUM_THREADS"] == "3"
        assert one["in C"]["LOOKED"] == "too"


def test_threads_and_files_of_libraries_are_refused(caplog, tmp_path, monkeypatch):
    tmp_path.joinpath("with_a_thread.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), name='mine', daemon=True).start()\n"
    )
    tmp_path.joinpath("with_a_file.py").write_text("file = open('/dev/zero')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, reason in (("with_a_thread", "mine"), ("with_a_file", "opened files")):
        server = ForkServer([module], function_of(workers.who))
        server.wait()
        assert reason in reason_of(caplog, server)
        server.stop()


def test_what_cannot_be_imported_is_said(caplog):
    server = ForkServer(["json", "no_such_module"], function_of(workers.who))
    assert "no_such_module" in server.wait()
    assert "no_such_module" in reason_of(caplog, server)
    server.stop()


def test_a_process_with_a_device_is_not_forked():
    with open("/dev/full"):
        assert "/dev/full" in obstacle(("",))
    assert obstacle(("",)) == ""


SCRIPT = """
import os, sys, time, coxswain, workers
from coxswain._internal.fork_server import ForkServer
server = ForkServer(["json"], "workers:who", fork={fork})
server.wait()
group = coxswain.Group(workers.who, ranks=2)
group._fork_from([server.fileno()] * 2)
group.start()
print(server.pid, *[rank.pid for rank in group.status().ranks], flush=True)
time.sleep(1000)
"""


def test_nothing_outlives_the_coordinator(fork):
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(pathlib.Path(__file__).parent)])
    host = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(fork=fork)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    with host:
        pids = list(map(int, host.stdout.readline().split()))
        assert len(pids) == 3 and all(map(is_alive, pids))
        host.kill()
    wait_for(lambda: not any(map(is_alive, pids)))


FORGETTING = """
import gc, multiprocessing

def forget(queue):
    gc.collect()  # the type of a main process is gone here
    from coxswain._internal import fork_server as _fork_server
    _fork_server._forget_multiprocessing()
    current = multiprocessing.current_process()
    queue.put((current.name, current.daemon, len(current.authkey)))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=forget, args=(queue,))
    process.start()
    print(queue.get(timeout=60))
    process.join()
"""


def test_p2_a_process_of_multiprocessing_can_be_a_server(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FORGETTING)
    said = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, check=True, text=True
    )
    assert said.stdout == "('MainProcess', False, 32)\n"
