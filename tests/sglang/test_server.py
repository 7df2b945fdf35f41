"""SGLang's API server, with a real SGLang: clients see a pause, then the cause of the end."""

import concurrent.futures
import os
import re
import signal
import time

import pytest
from conftest import (
    PATIENCE,
    Server,
    children,
    mapped_names,
    names_of,
    schedulers_of,
    titled,
    wait_for_end,
)

CLIENTS = 16


def texts(server):
    """What clients that stream get."""

    def client(i):
        events = server.stream(
            "12+34=" * (1 + i % 3), max_new_tokens=24 + i, temperature=0, ignore_eos=True
        )
        for one, other in zip(events, events[1:], strict=False):
            assert other["text"].startswith(one["text"]), (one, other)
        meta = events[-1]["meta_info"]
        return events[-1]["text"], meta["finish_reason"], meta["completion_tokens"]

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(client, range(CLIENTS)))


def test_clients_see_a_pause_and_then_the_cause(model, tmp_path):
    arguments = ["--enable-metrics"]
    with Server(str(tmp_path), model, {"incidents": 1}, arguments) as server:
        reference = texts(server)
        assert texts(server) == reference
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            found = pool.submit(texts, server)
            time.sleep(0.5)  # in the middle of it, or not: either is right
            pids = schedulers_of(server.process.pid)
            os.kill(pids[1], signal.SIGKILL)
            assert found.result() == reference
        server.wait_for_text("incident 1.")
        assert server.get("/health") == 200
        assert texts(server) == reference

        # a second death is the end
        below = children(server.process.pid)
        pids += (ranks := schedulers_of(server.process.pid))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stream = pool.submit(
                server.stream, "1+1=", max_new_tokens=200, temperature=0, ignore_eos=True
            )
            time.sleep(0.5)
            os.kill(ranks[0], signal.SIGKILL)
            events = stream.result()
        reason = events[-1]["meta_info"]["finish_reason"]
        assert reason["type"] == "abort" and reason["status_code"] == 500
        told = rf"rank 0 \(pid {ranks[0]}\) was killed by signal 9 \(Killed\)"
        assert re.match(told, reason["message"])
        assert "incident 2 within 600 s" in reason["message"]
        server.process.wait(PATIENCE)
        wait_for_end(below)
        assert re.search("the server ends: " + told, server.text())
        assert names_of(pids) == []


VICTIMS = {
    "server": lambda pid: pid,
    "detokenizer": lambda pid: titled(pid, "sglang::detokenizer")[0],
    "rank 0": lambda pid: schedulers_of(pid)[0],
    "rank 1": lambda pid: schedulers_of(pid)[1],
}


@pytest.mark.parametrize("name", VICTIMS)
def test_nothing_is_left_after_a_kill(model, tmp_path, name):
    with Server(str(tmp_path), model, {"on_death": "fail"}) as server:
        server.stream("1+1=", max_new_tokens=4)
        pids = {server.process.pid, *children(server.process.pid)}
        memory = mapped_names(pids)
        victim = VICTIMS[name](server.process.pid)
        os.kill(victim, signal.SIGKILL)
        server.process.wait(PATIENCE)
        wait_for_end(pids)
        assert names_of(pids) == []
        assert [path for path in memory if os.path.exists(path)] == []
        if name != "server":
            who = name.replace("detokenizer", "the detokenizer")
            told = f"{who} (pid {victim}) was killed by signal 9 (Killed)"
            assert f"] Coxswain: {told}" in server.text()
            assert f"Coxswain: the server ends: {told}" in server.text()


def test_what_was_not_tried_is_refused_at_start(model, tmp_path):
    options, arguments = {"on_death": "restart"}, ["--enable-custom-logit-processor"]
    server = Server(str(tmp_path), model, options, arguments)
    try:
        server.process.wait(300)
        said = "on_death 'restart' was not tried with enable_custom_logit_processor: use on_death"
        assert said in server.text()
    finally:
        server.__exit__()
