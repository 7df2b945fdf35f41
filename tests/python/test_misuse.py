"""What must be an exception: never a crash, never a hang."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import coxswain
import workers


def run_script(text, timeout=60, **options):
    """Runs a program that may end in any way. Returns its exit status and output."""
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        **options,
    )
    return process.returncode, process.stdout + process.stderr


def test_before_start_and_after_stop():
    group = coxswain.Group(workers.echo, 1)
    with pytest.raises(coxswain.Closed, match="not started"):
        group.call(b"")
    with group:
        future = group.submit(b"x", 30)
    with pytest.raises(coxswain.Closed):
        future.result()
    for call in (
        lambda: group.call(b""),
        lambda: group.submit(b""),
        group.status,
        group.start,
        lambda: group.restart(0),
        lambda: group.name,
        group.fileno,
    ):
        with pytest.raises(coxswain.Closed):
            call()
    group.stop()
    group.poll()


def test_a_stop_ends_calls_of_other_threads():
    group = coxswain.Group(workers.obey, 2).start()
    errors = []
    begun = threading.Barrier(4)

    def run():
        begun.wait()
        try:
            group.call(b"hang", timeout=60)
        except coxswain.Error as error:
            errors.append(type(error))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait()
    while group.status().channels[0].published < 2:
        time.sleep(0.001)
    group.stop()
    for thread in threads:
        thread.join(30)
    assert errors == [coxswain.Closed] * 3


def test_a_group_that_is_forgotten_is_stopped():
    with pytest.warns(ResourceWarning, match="not stopped"):
        coxswain.Group(workers.echo, 1).start()


def test_a_forked_child_is_refused():
    with coxswain.Group(workers.shout, 2) as group:
        assert group.call(b"x", timeout=30) == [b"X"] * 2
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                group.call(b"y")
            except coxswain.StateError as error:
                status = 0 if "forked" in str(error) else 2
            finally:
                del group
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert group.call(b"y", timeout=30) == [b"Y"] * 2


def test_a_wait_inside_on_line_is_refused():
    errors = []
    told = threading.Event()

    def on_line(_rank, _line):
        try:
            group.call(b"x", timeout=5)
        except coxswain.Error as error:
            errors.append(error)
        told.set()

    with coxswain.Group(workers.obey, 1, on_line=on_line) as group:
        group.call(b"print", timeout=30)
        assert told.wait(30)
    assert isinstance(errors[0], coxswain.Deadlock)


def test_a_callback_may_call_back():
    with coxswain.Group(workers.shout, 2) as group:
        replies = []
        done = threading.Event()

        def callback(_):
            replies.append(group.call(b"inside", timeout=30))
            done.set()

        group.submit(b"x", 30).add_done_callback(callback)
        assert done.wait(30)
        assert replies == [[b"INSIDE"] * 2]


def test_views_of_a_request_end_with_it():
    pytest.importorskip("numpy")
    with coxswain.Group(workers.keep_view, 1) as group:
        for verb in (b"itself", b"slice", b"array"):
            with pytest.raises(coxswain.RankError, match="kept"):
                group.call(verb, timeout=30)
            assert group.call(b"nothing", timeout=30) == [b"ok"]
        assert group.call(b"returned", timeout=30) == [b"returned"]
        assert group.call(b"slice returned", timeout=30) == [b"ice returned"]


def test_a_second_worker_and_a_second_handler_are_refused():
    code, output = run_script("""
        import coxswain
        worker = coxswain.Worker()
        worker.opaque(bytes)
        try:
            worker.opaque(bytes)
        except coxswain.Busy as error:
            print("busy", error)
        try:
            worker.rank
        except coxswain.Invalid as error:
            print("no rank:", error)
    """)
    assert code == 0 and "busy" in output and "COXSWAIN_SOCKET" in output


def test_an_interpreter_that_ends_with_requests_in_flight():
    code, output = run_script("""
        import sys
        import coxswain, workers
        group = coxswain.Group(workers.obey, 2).start()
        print(*[rank.pid for rank in group.status().ranks], flush=True)
        future = group.submit(b"hang", 60)
        future.add_done_callback(lambda future: print("called", type(future.exception()).__name__))
    """)
    assert code == 0, output
    assert "called Closed" in output
    for pid in output.split()[:2]:
        assert not os.path.exists(f"/proc/{pid}")


def test_an_exit_in_the_midst_of_a_call():
    code, output = run_script("""
        import os, threading
        import coxswain, workers
        group = coxswain.Group(workers.obey, 2).start()
        print(*[rank.pid for rank in group.status().ranks], flush=True)
        thread = threading.Thread(target=lambda: group.call(b"hang", timeout=60), daemon=True)
        thread.start()
        while not group.status().channels[0].published:
            pass
        os._exit(5)
    """)
    assert code == 5, output
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in output.split()[:2]):
        assert time.monotonic() < deadline, "the ranks outlive their coordinator"


@pytest.mark.parametrize("what", ["call", "result", "start", "restart"])
def test_ctrl_c_ends_a_wait(what):
    """SIGINT ends a wait in the main thread, and what was begun is cleaned up."""
    script = textwrap.dedent(f"""
        import sys
        import coxswain, workers
        what = {what!r}
        try:
            if what == "start":
                print("ready", flush=True)
                coxswain.Group(workers.never_attach, 2, timeout=60).start()
            with coxswain.Group(workers.attach_once, 2, timeout=60) as group:
                if what == "restart":
                    group.kill(1)
                    while group.status().ranks[1].liveness != "dead":
                        pass
                print("ready", flush=True)
                if what == "call":
                    group.call(b"hang", timeout=60)
                elif what == "result":
                    group.submit(b"hang", 60).result()
                else:
                    group.restart(1, timeout=60)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            sys.exit(9)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout.readline() == "ready\n"
    begun = time.monotonic()
    while process.poll() is None:  # one that comes before the wait counts as well
        process.send_signal(signal.SIGINT)
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            pass
        assert time.monotonic() - begun < 30
    output = process.stdout.read()
    process.stdout.close()
    assert process.returncode in (9, 130, -signal.SIGINT), output


def test_ctrl_c_ends_a_worker():
    """A worker that serves ends by KeyboardInterrupt; the group sees its death."""
    with coxswain.Group(workers.echo, 2) as group:
        group.call(b"x", timeout=30)
        os.kill(group.status().ranks[1].pid, signal.SIGINT)
        while group.status().ranks[1].liveness == "alive":
            time.sleep(0.001)
        with pytest.raises(coxswain.RankDied, match="rank 1"):
            group.call(b"x", timeout=30)


def test_a_signal_that_ends_no_sleep_ends_a_worker():
    """As one that comes just before the sleep: another thread gets it, and the first sleeps on."""
    with coxswain.Group(workers.interrupted_beside, 1) as group:
        assert group.call(b"x", timeout=30) == [b"x"]
        deadline = time.monotonic() + 30
        while group.status().ranks[0].liveness == "alive":
            assert time.monotonic() < deadline, "the rank sleeps on"
            time.sleep(0.001)


def test_two_threads_in_next_are_refused():
    """A worker whose second thread takes from the same channel gets Busy, and goes on."""
    with coxswain.Group(workers.two_takers, 1) as group:
        while group.call(b"x", timeout=30) != [b"Busy"]:
            pass
        assert group.call(b"x", timeout=30) == [b"Busy"]


def test_a_free_threaded_interpreter_is_refused_in_words():
    code, output = run_script("""
        import sys
        sys._is_gil_enabled = lambda: False
        import coxswain
    """)
    assert code == 1 and "free-threaded CPython" in output and "PYTHON_GIL=1" in output


def test_a_stop_that_a_signal_interrupts_is_completed_by_the_next():
    code, output = run_script("""
        import os, signal, sys, threading, time
        import coxswain, workers
        group = coxswain.Group(workers.obey, 2, stacks=False).start()
        pids = [rank.pid for rank in group.status().ranks]
        path = group.socket
        future = group.submit(b"hang", 60)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            group.stop()  # takes the seconds that ranks that hang are given
            print("not interrupted")
        except KeyboardInterrupt:
            print("interrupted")
        group.stop()
        assert not os.path.exists(path)
        assert not [pid for pid in pids if os.path.exists("/proc/%d" % pid)]
        print(type(future.exception(5)).__name__)
    """)
    assert (code, output.split()) == (0, ["interrupted", "Closed"]), output


def test_signal_handlers_that_raise_lose_no_result_of_other_threads():
    code, output = run_script("""
        import os, signal, threading, time
        import coxswain, workers

        class Interrupt(Exception):
            pass

        calling, interrupts = False, 0

        def interrupt(*_):  # raises in the midst of a call alone, and once in each
            global calling, interrupts
            if calling:
                calling = False
                interrupts += 1
                raise Interrupt

        signal.signal(signal.SIGUSR1, interrupt)
        with coxswain.Group(workers.echo, 1, depth=8) as group:
            counts, over = [0, 0], threading.Event()

            def run(number):  # on a busy machine few signals arrive in 3000 rounds
                while counts[number] < 3000 or interrupts < 20:
                    futures = [submit() for _ in range(1 + number)]
                    for future in futures:
                        assert future.result(60) == [b"x"]
                    counts[number] += 1

            def submit():  # requests of interrupted calls are in flight until they are answered
                while True:
                    try:
                        return group.submit(b"x", 60)
                    except coxswain.Full:
                        time.sleep(0.001)

            def kill():
                while not over.wait(0.0005):
                    os.kill(os.getpid(), signal.SIGUSR1)

            threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
            killer = threading.Thread(target=kill)
            for thread in [*threads, killer]:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                try:
                    calling = True
                    group.call(b"main", timeout=60)
                    calling = False
                except (Interrupt, coxswain.Full):
                    calling = False
            over.set()
            killer.join()
        print(min(counts) >= 3000, interrupts >= 20)
    """)
    assert (code, output.split()) == (0, ["True", "True"]), output


@pytest.fixture
def memory_limit():
    """A control group that may use 200 MiB; the path of its list of processes."""
    v2 = os.path.exists("/sys/fs/cgroup/cgroup.controllers")
    parent = "/sys/fs/cgroup" if v2 else "/sys/fs/cgroup/memory"
    group = f"{parent}/coxswain_test_{os.getpid()}"
    try:
        os.mkdir(group)
        with open(f"{group}/{'memory.max' if v2 else 'memory.limit_in_bytes'}", "w") as file:
            file.write(str(200 << 20))
    except OSError as error:
        if os.path.isdir(group):
            os.rmdir(group)
        pytest.skip(f"no control group for memory can be made: {error}")
    yield f"{group}/cgroup.procs"
    os.rmdir(group)


def test_a_request_beyond_the_memory_limit_is_refused(memory_limit):
    """The kernel would kill the host. The bytes themselves are one page of zeros, mapped often."""
    script = f"""
import os, sys
open({memory_limit!r}, "w").write(str(os.getpid()))
sys.path.append({os.path.dirname(workers.__file__)!r})
import coxswain, workers
with coxswain.Group(workers.echo, ranks=1) as group:
    try:
        group.call(bytes(300 << 20))
    except coxswain.NoSpace as error:
        print(error)
    print(group.call(b"x"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert "this process's control group may use 209715200" in done.stdout, done
    assert done.stdout.endswith("[b'x']\n")
