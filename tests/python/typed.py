"""What mypy --strict makes of the package. It is checked, not run; what is ignored has to occur."""

import asyncio
from typing import Any, assert_type

import coxswain


def calls(group: coxswain.Group) -> None:
    assert_type(group.call(b"x"), list[bytes])
    assert_type(group.call(bytearray(2), gather="all"), list[bytes])
    assert_type(group.call(memoryview(b""), gather="rank0"), bytes)
    group.call(b"", gather="none")
    assert_type(group.submit(b"", gather="rank0").result(), bytes)
    group.call("text")  # type: ignore[call-overload]
    group.call(5)  # type: ignore[call-overload]
    group.call(b"", gather="one")  # type: ignore[call-overload]


async def awaits(group: coxswain.Group) -> None:
    assert_type(await group.submit(b"x"), list[bytes])
    both = await asyncio.gather(group.submit(b"x"), group.submit(b"y", gather="rank0"))
    assert_type(both, tuple[list[bytes], bytes])
    await group.room()


class Engine:
    def __init__(self, scale: int) -> None: ...


def methods(group: coxswain.Group) -> None:
    coxswain.Group(Engine, args=(1,), codec="pickle")
    coxswain.Group({"programs": programs}, codec="pickle")
    coxswain.Group(asyncio, codec="pickle")
    coxswain.Group(Engine, codec="json")  # type: ignore[arg-type]
    assert_type(group.call_method("step", [1], scale=2), list[Any])
    assert_type(group.call_method("step", gather="all", timeout=None), list[Any])
    assert_type(group.call_method("step", ranks=[0], gather="rank0"), Any)
    group.call_method("step", gather="none")
    assert_type(group.submit_method("step", 1, wait=True), coxswain.Future[list[Any]])
    assert_type(group.submit_method("step", gather="none").result(), None)
    group.call_method(5)  # type: ignore[call-overload]
    group.call_method("step", timeout="5")  # type: ignore[call-overload]
    coxswain.serve(Engine(1), codec="pickle")
    coxswain.serve(Engine(1))  # type: ignore[call-overload]


def programs(path: str) -> None:
    coxswain.Group(programs, ranks=2, args=(path,), kwargs={"x": 1}, on_line=None)
    coxswain.Group(["python3", "worker.py"], on_line="log")
    coxswain.Group(["true"], on_line="quiet")  # type: ignore[arg-type]
    coxswain.serve(lambda data: data)
    coxswain.serve(lambda data: 5)  # type: ignore[arg-type, return-value]
