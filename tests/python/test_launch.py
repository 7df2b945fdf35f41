"""Every way of starting a program, with every kind of function for its ranks: as with
multiprocessing's "spawn", or better."""

import os
import subprocess
import sys
import zipfile

import coxswain
import pytest
import workers

# A program whose ranks reply what they know. KINDS has some of KINDS below.
MAIN = """
import functools, os, sys
import coxswain

VALUE = 5

def reply(*words, **more):
    text = " ".join(map(str, [*words, *more.values()])).encode()
    coxswain.serve(lambda _: text)

class Engine:
    def __init__(self, value):
        self.value = value

    def run(self, *words):
        reply(self.value, *words)

    def __call__(self):
        reply("called", self.value)

def nested():
    with coxswain.Group(reply, 1, args=("inner",)) as group:
        text = b"outer " + group.call(b"", timeout=60)[0]
    coxswain.serve(lambda _: text)

def start(kind):
    value = VALUE
    function, args, kwargs = {
        "function": (reply, ("a", 1), {"b": 2}),
        "partial": (functools.partial(reply, "p"), ("q",), {}),
        "method": (Engine(7).run, ("m",), {}),
        "object": (Engine(8), (), {}),
        "closure": (lambda *words: reply(value, *words), ("c",), {}),
        "nested": (nested, (), {}),
    }[kind]
    with coxswain.Group(function, 1, args=args, kwargs=kwargs) as group:
        print(group.call(b"", timeout=60)[0].decode())

if __name__ == "__main__":
    for kind in os.environ["KINDS"].split():
        start(kind)
"""
KINDS = {
    "function": "a 1 2",
    "partial": "p q",
    "method": "7 m",
    "object": "called 8",
    "closure": "5 c",
    "nested": "outer inner",
}
# A package whose main module and ranks import by relative names.
PACKAGE = {
    "__init__.py": "",
    "other.py": "from .most import *",
    "most.py": MAIN.partition("if __name__")[0],
    "__main__.py": "import os\nfrom .other import *\nif __name__"
    + MAIN.partition("if __name__")[2],
    "tool.py": MAIN + "\nfrom . import other\n",
}


def run(folder, *command, kinds="function", code=0, text=None):
    """The output of Python with this command."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "KINDS": kinds},
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def expected(kinds="function"):
    return "".join(f"{KINDS[kind]}\n" for kind in kinds.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the program as a script, a package, a folder to run, and an archive."""
    made = tmp_path_factory.mktemp("a folder")
    (made / "script.py").write_text(MAIN)
    (made / "package").mkdir()
    for name, text in PACKAGE.items():
        (made / "package" / name).write_text(text)
    (made / "app").mkdir()
    (made / "app" / "__main__.py").write_text(MAIN)
    with zipfile.ZipFile(made / "app.pyz", "w") as archive:
        archive.write(made / "app" / "__main__.py", "__main__.py")
    return made


WAYS = {
    "script": ["script.py"],
    "package": ["-m", "package"],
    "module of a package": ["-m", "package.tool"],
    "folder": ["app"],
    "archive": ["app.pyz"],
}


@pytest.fixture(scope="module")
def kinds():
    """All that can be started here."""
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        return " ".join(kind for kind in KINDS if kind != "closure")
    return " ".join(KINDS)


@pytest.mark.parametrize("way", WAYS)
def test_ways_and_kinds(folder, way, kinds):
    assert run(folder, *WAYS[way], kinds=kinds) == expected(kinds)


@pytest.mark.parametrize("way", ["-c", "standard input"])
def test_a_program_that_is_no_file(folder, way):
    """Its functions travel by value."""
    pytest.importorskip("cloudpickle")
    command, text = (["-c", MAIN], None) if way == "-c" else (["-"], MAIN)
    kinds = " ".join(kind for kind in KINDS if kind != "nested")
    assert run(folder, *command, kinds=kinds, text=text) == expected(kinds)


def test_without_cloudpickle_the_refusal_says_what_to_install(folder):
    hidden = "import sys; sys.modules['cloudpickle'] = None\n"
    text = run(folder, "-", text=hidden + MAIN, code=1)
    assert "__main__:reply or its arguments cannot be sent to the ranks" in text
    assert "the main module of this process is no file" in text
    assert "install cloudpickle" in text
    (folder / "hidden.py").write_text(hidden + MAIN)
    assert "install cloudpickle" in run(folder, "hidden.py", kinds="closure", code=1)


FLAGS = """
import sys, coxswain
def flags():
    coxswain.serve(lambda _: repr((sys.flags, sys._xoptions, sys.warnoptions)).encode())
if __name__ == "__main__":
    with coxswain.Group(flags, 1) as group:
        (found,) = group.call(b"", timeout=60)
    assert found.decode() == repr((sys.flags, sys._xoptions, sys.warnoptions)), found
    print("equal")
"""


@pytest.mark.parametrize(
    "flags", [["-O", "-B", "-s", "-W", "ignore", "-X", "dev"], ["-I"], ["-E", "-OO"]]
)
def test_flags_of_the_interpreter(folder, flags):
    # With -I and -E the environment's PYTHONPATH does not count, here as there.
    path = os.path.dirname(os.path.dirname(coxswain.__file__))
    script = folder / "flags.py"
    script.write_text(f"import sys; sys.path.insert(0, {path!r})\n{FLAGS}")
    assert run(folder, *flags, str(script)) == "equal\n"


def test_a_long_module_path(folder):
    """Longer than an argument of a command may be."""
    extra = f"import sys; sys.path += ['/a/{'long/' * 40}' + str(i) for i in range(1500)]\n"
    (folder / "long.py").write_text(extra + MAIN)
    assert run(folder, "long.py") == expected()


def test_a_module_path_that_is_relative_to_where_the_program_began(folder, tmp_path):
    (folder / "helper.py").write_text(MAIN)
    code = f"""import coxswain, os, sys
sys.path.insert(0, "")
import helper
os.chdir({str(tmp_path)!r})
helper.start("function")"""
    assert run(folder, "-c", code) == expected()
    assert run(folder.parent, os.path.join(folder.name, "script.py")) == expected()


@pytest.mark.parametrize("cloudpickle", ["", "raise ImportError"])
def test_a_script_without_the_main_guard_says_so(folder, cloudpickle):
    if cloudpickle:
        (folder / "cloudpickle.py").write_text(cloudpickle)
    (folder / "bare.py").write_text(
        "import coxswain\ndef work():\n    coxswain.serve(bytes)\n"
        "with coxswain.Group(work, 1) as group:\n    print(group.call(b'x'))\n"
    )
    text = run(folder, "bare.py", code=1)
    assert "begin that part with `if __name__ == '__main__':`" in text


def test_large_arguments():
    with coxswain.Group(workers.reply_length, 1, args=(b"x" * 10_000_000,)) as group:
        assert group.call(b"", timeout=60) == [b"10000000"]


def test_what_cannot_be_a_program():
    with pytest.raises(coxswain.Invalid, match="a command has its own arguments"):
        coxswain.Group(["true"], args=(1,))
    with pytest.raises(coxswain.Invalid, match="is a list, as for subprocess"):
        coxswain.Group("worker.py")
    with pytest.raises(coxswain.Invalid, match="cannot be sent to the ranks .*lock"):
        import threading

        coxswain.Group(workers.reply_length, args=(threading.Lock(),))


# ---- environment and working directory ----


def report(*names):
    """Replies its working directory, and these variables."""
    texts = [os.getcwd(), *(os.environ.get(name, "none") for name in names)]
    coxswain.serve(lambda _: " ".join(texts).encode())


COMMAND = """#!/usr/bin/env python3
import sys
sys.path[:0] = {path!r}
import test_launch
test_launch.report("KEPT", "CHANGED", "GONE", "ADDED")
"""
CHANGES = {"CHANGED": "after", "GONE": None, "ADDED": "a=b"}


@pytest.mark.parametrize("how", ["function", "relative command", "in PATH"])
def test_env_and_cwd(tmp_path, monkeypatch, how):
    """They are those of a replacement, too. env adds to what is inherited."""
    for name in ("KEPT", "CHANGED", "GONE"):
        monkeypatch.setenv(name, "before")
    path = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(coxswain.__file__))]
    (tmp_path / "bin").mkdir()
    for script in (tmp_path / "work", tmp_path / "bin" / "found"):
        script.write_text(COMMAND.format(path=path))
        script.chmod(0o755)
    # What a rank imports is not what lies in its working directory.
    (tmp_path / "pickle.py").write_text("raise ImportError('of the working directory')")
    program, args, more = {
        "function": (report, ("KEPT", "CHANGED", "GONE", "ADDED"), {}),
        "relative command": (["./work"], (), {}),
        "in PATH": (["found"], (), {"PATH": f"bin:{os.environ['PATH']}"}),
    }[how]
    if how != "function":
        (tmp_path / "pickle.py").unlink()
    with coxswain.Group(program, 2, args=args, env=CHANGES | more, cwd=tmp_path) as group:
        expected = f"{tmp_path} before after none a=b".encode()
        assert group.call(b"", timeout=60) == [expected] * 2
        group.restart(1, kill=True, timeout=60)
        assert group.call(b"", timeout=60) == [expected] * 2
    assert os.environ["CHANGED"] == "before"


def paths(*names):
    import extra  # in a folder of PYTHONPATH

    report(*names, extra.__name__)


def test_variables_of_the_interpreter(tmp_path, monkeypatch):
    """The function reaches its ranks whatever these say."""
    (tmp_path / "extra.py").write_text("")
    changes = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1"}
    with coxswain.Group(paths, 1, args=tuple(changes), env=changes) as group:
        (text,) = group.call(b"", timeout=60)
    assert text.decode().split()[1:] == [*changes.values(), "none"]
    monkeypatch.setenv("PYTHONPATH", "/of/the/coordinator")
    gone = {"PYTHONPATH": None, "PYTHONHASHSEED": "7"}
    with coxswain.Group(report, 1, args=tuple(gone), env=gone, cwd="/") as group:
        assert group.call(b"", timeout=60) == [b"/ none 7"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"env": ["A=b"]}, "env is list; it may be a mapping"),
        ({"env": {"A": 1}}, "env has 'A': 1; it may have names and values that are str"),
        ({"env": {b"A": "1"}}, "env has b'A': '1'; it may have"),
        ({"env": {"A=B": "1"}}, "env has 'A=B', which is no name"),
        ({"env": {"": "1"}}, "env has '', which is no name"),
        ({"env": {"A\0": None}}, r"env has 'A\\x00', which is no name"),
        ({"env": {"A": "b\0"}}, "the value of A in env has a NUL"),
        ({"cwd": 3}, "cwd is int; it may be a path"),
        ({"cwd": ""}, "cwd is '', which is no directory"),
        ({"cwd": "/no/such/folder"}, "cwd is '/no/such/folder', which is no directory"),
        ({"cwd": "/dev/null"}, "cwd is '/dev/null', which is no directory"),
    ],
)
def test_what_cannot_be_an_environment_or_a_directory(given, text):
    with pytest.raises(coxswain.Invalid, match=text):
        coxswain.Group(["true"], **given)


def test_env_and_cwd_are_for_ranks_that_the_group_starts():
    cluster = coxswain.Cluster("nats://127.0.0.1:4222", insecure_loopback=True)
    for given in ({"env": {"A": "b"}}, {"cwd": "/"}):
        with pytest.raises(
            coxswain.Invalid, match="external ones have what they were started with"
        ):
            coxswain.Group(external=True, **given)
        with pytest.raises(coxswain.Invalid, match="what `coxswain node` was started with"):
            coxswain.Group(name="env", nodes="a:1", cluster=cluster, **given)


def test_variables_that_the_group_sets_are_refused_and_a_folder_may_go(tmp_path):
    with pytest.raises(coxswain.Invalid, match="COXSWAIN_RANK, which the group sets itself"):
        coxswain.Group(["true"], env={"COXSWAIN_RANK": "1"}).start()
    folder = tmp_path / "folder"
    folder.mkdir()
    with coxswain.Group(report, 1, cwd=folder) as group:
        folder.rmdir()
        with pytest.raises(coxswain.Error, match="entering its working directory .*No such file"):
            group.restart(0, kill=True, timeout=60)


# ---- programs that are no workers ----


def test_a_program_that_is_no_worker_says_so():
    with pytest.raises(coxswain.RankDied, match="may be no Coxswain worker: .*coxswain.serve"):
        coxswain.Group([sys.executable, "-c", "print('done')"]).start()
