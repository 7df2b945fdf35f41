"""docs/python.md: its programs run and print what stands below them; the reference is current."""

import inspect
import os
import pathlib
import pydoc
import re
import subprocess
import sys

import coxswain
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "python.md").read_text()
BLOCK = re.compile(r"```python\n# (\S+)\n(.*?)```(?:\n\n```output\n(.*?)```)?", re.DOTALL)
PROGRAMS = {name: (text, output) for name, text, output in BLOCK.findall(TEXT)}
IDLE = {"worker.py", "engine_worker.py"}  # started by others


def write_all(folder):
    for name, (text, _) in PROGRAMS.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - IDLE))
def test_a_program_prints_what_stands_below_it(tmp_path, name):
    write_all(tmp_path)
    done = subprocess.run(
        [sys.executable, name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # before.py and after.py share an output
    assert done.stdout == (PROGRAMS[name][1] or PROGRAMS["after.py"][1])


def test_the_engine_worker_serves_generate(tmp_path, coxswain_command):
    pytest.importorskip("numpy")
    write_all(tmp_path)
    worker = tmp_path / "worker"
    worker.write_text(f"#!{sys.executable}\n" + PROGRAMS["engine_worker.py"][0])
    worker.chmod(0o755)
    done = subprocess.run(
        [
            coxswain_command,
            "generate",
            "-n",
            "2",
            "--worker",
            str(worker),
            "--tokens",
            "--max-tokens",
            "4",
            "--quiet",
            "3",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "7", "11", "5", "9"], done.stdout


def test_the_reference_is_current(tmp_path):
    made = tmp_path / "api.md"
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "python_reference.py"), str(made)],
        check=True,
        env=os.environ,
    )
    assert made.read_text() == (ROOT / "docs" / "python-api.md").read_text(), (
        "write it anew: PYTHONPATH=build/test/python python3 tools/python_reference.py "
        "docs/python-api.md"
    )


def test_help_begins_with_what_a_user_needs():
    text = pydoc.plain(pydoc.render_doc(coxswain))
    described = text[: text.index("PACKAGE CONTENTS")]
    places = [described.index(f"\n    {name} ") for name in ("Group", "  call", "serve")]
    assert places == sorted(places)
    assert "SUBMODULES" not in text
    # What is public has the name by which it is imported.
    for name in coxswain.__all__:
        assert getattr(coxswain, name).__module__ == "coxswain", name
    assert repr(coxswain.RankDied) == "<class 'coxswain.RankDied'>"


def test_what_is_a_coroutine_is_shown_as_one():
    assert inspect.iscoroutinefunction(coxswain.Group.room)
    assert "\n* `async room() -> None`\n" in (ROOT / "docs" / "python-api.md").read_text()
