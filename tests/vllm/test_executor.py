"""The executor without an engine: calls, late replies, deaths, what it needs of vLLM."""

import concurrent.futures
import contextlib
import gc
import importlib.util
import logging
import os
import pathlib
import pickle
import select
import signal
import subprocess
import threading
import time
import types

import coxswain
import pytest
from conftest import environment, shared_memory
from coxswain import vllm_worker
from coxswain._internal import vllm_interface as interface, vllm_plugin as plugin
from test_interface import fetch


@pytest.fixture(scope="module")
def make(models):
    """Makes an executor of two ranks, with no engine around it."""
    before = dict(os.environ)
    os.environ.update(environment(2, VLLM_COXSWAIN_ON_DEATH="fail"))
    from vllm.engine.arg_utils import EngineArgs

    from coxswain.vllm import Executor

    def make_one(**options):
        config = EngineArgs(
            model=os.path.join(models, "random"),
            distributed_executor_backend=Executor,
            tensor_parallel_size=2,
            enforce_eager=True,
            max_model_len=64,
            dtype="float32",
            worker_cls="faulty_worker.Worker",
            **options,
        ).create_engine_config()
        return Executor(config)

    yield make_one
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def executor(make):
    found = make(additional_config={"coxswain": {"name": f"vllm_direct_{os.getpid()}"}})
    yield found
    found.shutdown()


def rank_and(worker, value):
    return (worker.rank, value)


def test_a_call_has_a_reply_of_each_rank(executor):
    assert executor.collective_rpc("say", args=(5,)) == [(0, 5), (1, 5)]
    assert executor.collective_rpc("say", kwargs={"value": "x"}) == [(0, "x"), (1, "x")]


def test_a_function_is_called_with_the_worker(executor):
    assert executor.collective_rpc(rank_and, args=(1,)) == [(0, 1), (1, 1)]
    five = 5
    assert executor.collective_rpc(lambda worker: five * worker.rank) == [0, 5]


def test_one_rank_replies(executor):
    assert executor.collective_rpc("say", args=(5,), unique_reply_rank=1) == (1, 5)


def test_an_aggregator_gets_the_replies_of_all_ranks(executor):
    class Aggregator:
        def aggregate(self, outputs, output_rank):
            return [outputs, output_rank]

    found = executor.collective_rpc(
        "say", args=(5,), unique_reply_rank=1, kv_output_aggregator=Aggregator()
    )
    assert found == [[(0, 5), (1, 5)], 1]


def with_transfers(worker):
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=[str(worker.rank)],
        req_id_to_index={},
        kv_connector_output=KVConnectorOutput(
            finished_sending={"both"} if worker.rank == 0 else {"both", "one"}
        ),
    )


def test_vllms_aggregator_of_a_kv_connector(executor):
    """A transfer is over when every rank has said so, in any step."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

    aggregator = KVOutputAggregator(expected_finished_count=2)
    finished = []
    for _ in range(2):
        output = executor.collective_rpc(
            with_transfers,
            unique_reply_rank=executor.output_rank,
            kv_output_aggregator=aggregator,
        )
        assert output.req_ids == [str(executor.output_rank)]
        finished.append(output.kv_connector_output.finished_sending)
    assert finished == [{"both"}, {"both", "one"}]


def test_a_late_reply_does_not_hold_up_the_next_call(executor):
    """The second call runs while the output of the first one is on its way."""
    late = executor.collective_rpc("late", args=(0.5, 1), non_block=True)
    ran = executor.collective_rpc(lambda worker: __import__("time").monotonic(), non_block=True)
    assert isinstance(late, concurrent.futures.Future)
    assert not late.done()
    assert late.result() == [1, 1]
    assert max(ran.result()) < time.monotonic() - 0.3


def test_futures_are_resolved_in_order(executor):
    order = []
    futures = [
        executor.collective_rpc("late", args=(0.01 * (3 - i), i), non_block=True) for i in range(3)
    ]
    for i, future in enumerate(futures):
        future.add_done_callback(lambda _, i=i: order.append(i))
    assert not any(future.done() for future in futures)
    assert futures[2].result() == [2, 2]
    assert order == [0, 1, 2]


def test_a_future_waits_as_long_as_it_is_told(executor):
    future = executor.collective_rpc("late", args=(0.3, 1), non_block=True)
    with pytest.raises(TimeoutError, match="in flight"):
        future.result(timeout=0.01)
    assert future.result(timeout=10) == [1, 1]


def test_more_calls_than_fit_wait(executor):
    futures = [executor.collective_rpc("say", args=(i,), non_block=True) for i in range(20)]
    assert [future.result()[1][1] for future in futures] == list(range(20))


def test_threads_call_at_the_same_time(executor):
    def call(i):
        return [
            executor.collective_rpc("say", args=(j,), unique_reply_rank=0)[1]
            for j in range(i, i + 20)
        ]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for i, found in zip(range(4), pool.map(call, range(4)), strict=True):
            assert found == list(range(i, i + 20))


def test_an_error_has_the_ranks_traceback(executor):
    with pytest.raises(
        coxswain.RankError, match=r"(^|; )rank [01] failed in fail: ValueError: the device is on fire\n"
    ) as caught:
        executor.collective_rpc("fail", args=("raise",))
    assert "faulty_worker.py" in str(caught.value)
    assert executor.collective_rpc("say", args=(1,)) == [(0, 1), (1, 1)]


def test_a_call_that_takes_too_long_says_what_each_rank_does(executor):
    with pytest.raises(coxswain.TimedOut, match="rank 0.*rank 1"):
        executor.collective_rpc(lambda worker: __import__("time").sleep(1), timeout=0.2)
    assert executor.collective_rpc("say", args=(1,)) == [(0, 1), (1, 1)]


def test_health(executor):
    executor.check_health()


def test_idle_ranks_take_no_processor_time(executor):
    """But for gloo: each of its 26 threads wakes up 100 times a second, whoever runs the ranks."""

    def used():
        """Of all ranks and this process, in nanoseconds."""
        total = 0
        for pid in (os.getpid(), *(rank.pid for rank in executor._ranks.group.status().ranks)):
            for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                if not (task / "comm").read_text().startswith("gloo"):
                    total += int((task / "schedstat").read_text().split()[0])
        return total

    executor.collective_rpc("say", args=(1,))
    begin = used()
    threading.Event().wait(2)
    assert used() - begin < 2e7  # 1 % of the time


def test_a_death_while_idle_is_told_at_once(make, tmp_path, monkeypatch):
    """The callback, within 10 ms of the death; rank, pid and signal in the text; a crash file."""
    monkeypatch.setenv("VLLM_COXSWAIN_CRASH_DIR", str(tmp_path / "crashes"))
    gc.collect()
    before = shared_memory()
    executor = make()
    name = executor._ranks.group.name
    pid = executor.collective_rpc("pid")[1]
    told = threading.Event()
    times = []
    executor.register_failure_callback(lambda: (times.append(time.monotonic()), told.set()))
    kernel = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([kernel], [], [])
    begin = time.monotonic()
    os.close(kernel)
    assert told.wait(5)
    with pytest.raises(coxswain.RankDied) as caught:
        executor.collective_rpc("say", args=(1,))
    assert (caught.value.rank, caught.value.pid, caught.value.signal) == (1, pid, 9)
    assert f"rank 1 (pid {pid}) was killed by signal 9" in str(caught.value)
    late = threading.Event()
    executor.register_failure_callback(late.set)
    assert late.is_set()
    executor.shutdown()
    executor.shutdown()
    assert [path.name.split(".")[-2:] for path in (tmp_path / "crashes").iterdir()] == [
        ["death", "crash"]
    ]
    print(f"told {1000 * (times[0] - begin):.1f} ms after the kernel's report")
    assert times[0] - begin < 1
    left = {entry for entry in shared_memory() - before if name in entry or "vllm_dist" in entry}
    assert not left


@pytest.mark.parametrize("on_death", ["fail", "restart"])
def test_coxswain_stop_ends_the_engine(make, on_death):
    """A call that hangs and later ones raise Closed; no rank is replaced."""
    compares = on_death == "restart"
    executor = make(additional_config={"coxswain": {"on_death": on_death, "compare": compares}})
    ranks = executor._ranks
    assert (ranks.comparison is not None) == compares
    told = threading.Event()
    executor.register_failure_callback(told.set)
    reply = executor.collective_rpc(lambda worker: __import__("time").sleep(60), non_block=True)
    command = [os.path.join(os.environ["COX_BIN_DIR"], "coxswain"), "stop", ranks.group.name]
    with subprocess.Popen(command) as process:
        text = rf"the group was stopped by process {process.pid} \(coxswain stop\)"
        with pytest.raises(coxswain.Closed, match=text):
            reply.result()
    assert process.returncode == 0
    assert told.wait(5)
    with pytest.raises(coxswain.Closed, match=text):
        executor.collective_rpc("say", args=(1,))
    assert executor._ranks is ranks
    executor.shutdown()


@pytest.mark.parametrize("what", [{"nmae": "x"}, {"on_death": "dance"}])
def test_wrong_options_are_refused(make, what):
    with pytest.raises(coxswain.Invalid, match="nmae|dance"):
        make(additional_config={"coxswain": what})


def test_this_vllm_fits():
    from coxswain.vllm import Executor

    assert interface.differences(Executor, interface.NEEDED + interface.SURVIVAL) == []


def test_a_vllm_that_differs_is_refused_in_words(monkeypatch):
    from coxswain.vllm import Executor
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    class Other:
        def __init__(self, vllm_config, rank, device_mesh):
            pass

    monkeypatch.delattr(WorkerWrapperBase, "init_device")
    monkeypatch.setattr(WorkerBase, "__init__", Other.__init__)
    monkeypatch.setattr(Executor, "__abstractmethods__", frozenset({"dance"}))
    with pytest.raises(coxswain.Unsupported) as caught:
        interface.check(Executor)
    for part in (
        "WorkerWrapperBase.init_device is missing",
        "does not take 'local_rank'",
        "requires 'device_mesh'",
        "Executor.dance is new",
        "0.31",
    ):
        assert part in str(caught.value)


class Dead(Exception):
    """As vLLM's EngineDeadError."""

    @plugin._explaining_death
    def __init__(self, *args):
        super().__init__("It is dead.", *args)


class NewerDead(Dead):
    CLIENT_MESSAGE = "There was an error."


def test_a_dead_engines_cause_is_for_the_log_and_for_clients(monkeypatch, tmp_path):
    monkeypatch.setenv("COXSWAIN_VLLM_CAUSE", str(tmp_path / "cause"))
    assert str(Dead()) == "It is dead."
    plugin.write_cause("rank 1 (pid 5) died")
    assert str(Dead()) == str(NewerDead()) == "It is dead. The cause: rank 1 (pid 5) died"
    assert NewerDead().CLIENT_MESSAGE == "There was an error. The cause: rank 1 (pid 5) died"
    plugin.write_cause("rank 1 (pid 5) died", "rank 1 died")
    assert str(Dead()) == "It is dead. The cause: rank 1 died"
    assert str(NewerDead()) == "It is dead. The cause: rank 1 (pid 5) died"
    assert NewerDead().CLIENT_MESSAGE == "There was an error. The cause: rank 1 died"
    plugin.write_cause("")
    assert str(Dead()) == "It is dead."


def test_clients_get_no_texts_of_the_host():
    from coxswain.vllm import _for_clients

    def made(type_, **fields):
        error = type_("rank 1 (pid 4711): /home/me")
        vars(error).update(fields)
        return error

    late = [coxswain.LateRank(rank, 4711, True, 5.0, "alive", False) for rank in (0, 2)]
    for error, text in (
        (made(coxswain.RankDied, rank=1, signal=9), "rank 1 was killed by signal 9"),
        (made(coxswain.RankDied, rank=1, exit_status=3), "rank 1 ended with status 3"),
        (made(coxswain.RankDied, rank=1, exit_status=-1), "rank 1 is lost"),
        (made(coxswain.RankError, rank=1), "rank 1 failed"),
        (made(coxswain.TimedOut, late=late), "no reply in time from rank 0, 2"),
        (made(coxswain.Closed), "the ranks failed"),
    ):
        assert _for_clients(error) == text


def test_a_watch_dog_is_fed_around_each_call():
    """vLLM's own, from 0.33 on: it is off while a rank waits for a call."""
    seen = []

    class WatchDog:
        def feed(self):
            seen.append("fed")

        @contextlib.contextmanager
        def disable(self):
            seen.append("off")
            yield
            seen.append("on")

    class Worker:
        def say(self, value):
            seen.append(value)

    class Request:
        data = pickle.dumps(("say", (5,), {}, None))

        def reply(self, data):
            seen.append("replied")

    rank = object.__new__(vllm_worker.Rank)
    rank.rank, rank.worker, rank.watch_dog, rank.choices = 0, Worker(), WatchDog(), None
    with rank.idle():
        seen.append("waits")
    rank.serve(Request())
    assert seen == ["off", "waits", "on", "fed", 5, "fed", "replied"]


@pytest.fixture
def watch_dog(monkeypatch):
    """vLLM's own, of 0.33: PyPI has that for CUDA alone, but this file of it needs none."""
    import vllm.config

    path = fetch("0.33.0") / "vllm/utils/watch_dog.py"
    monkeypatch.setattr(vllm.config, "WatchdogConfig", object, raising=False)
    spec = importlib.util.spec_from_file_location("watch_dog_of_0_33", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_vllms_watch_dog_writes_of_a_call_that_hangs_and_of_nothing_else(watch_dog, tmp_path):
    over = threading.Event()

    class Worker:
        def hang(self):
            over.wait(60)

        def reply(self):
            return 5

    class Request:
        def __init__(self, method):
            self.data = pickle.dumps((method, (), {}, None))

        def reply(self, data):
            pass

    config = types.SimpleNamespace(timeout=1.0, check_interval=0.01, dump_dir=str(tmp_path))
    watched = watch_dog.start_watch_dog("worker_0", config, logging.getLogger(__name__))
    assert watched.thread.is_alive()
    rank = object.__new__(vllm_worker.Rank)
    rank.rank, rank.worker, rank.watch_dog, rank.choices = 0, Worker(), watched, None
    try:
        for _ in range(2):
            with rank.idle():
                time.sleep(2 * config.timeout)  # no call: it may take as long as it likes
            rank.serve(Request("reply"))
        assert not list(tmp_path.iterdir())
        hangs = threading.Thread(target=rank.serve, args=(Request("hang"),))
        hangs.start()
        end = time.monotonic() + 60
        while not any("in hang" in path.read_text() for path in tmp_path.iterdir()):
            assert time.monotonic() < end
            time.sleep(0.01)
        over.set()
        hangs.join()
    finally:
        over.set()
        watched.stop()
