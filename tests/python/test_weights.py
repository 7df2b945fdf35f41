"""Weights that outlive the process that loaded them, with real processes."""

import contextlib
import ctypes
import json
import os
import pathlib
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

import pytest

import coxswain

numpy = pytest.importorskip("numpy")

REQUEST = struct.Struct("<IIQQ8s512s")
GET, PUT, DROP, LIST = 1, 2, 3, 4
CUDA = 3
INVALID, DENIED, TAKEN, EMPTY = 17, 9, 12, 22

# Of a process: `store`, and `weights` with what the key has; prints what it did.
BEGIN = """
import ctypes, sys, time, numpy, coxswain
store = coxswain.WeightStore(keep=float(sys.argv[2]))
weights = store.get(sys.argv[1])
if weights is None:
    print("loads", flush=True)
    LOADING
    w = numpy.arange(100000, dtype=numpy.float32)
    weights = store.put(sys.argv[1], {"b": numpy.ones((3, 0, 2)), "w": w, "tied": w})
else:
    print("maps", flush=True)
assert weights["w"].sum() == numpy.arange(100000, dtype=numpy.float32).sum()
assert weights["b"].shape == (3, 0, 2)
"""
WAITS = "print('ready', flush=True); sys.stdin.readline()\n"


class Script:
    """A process that runs Python; `with` ends it."""

    def __init__(self, text, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-c", text, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self):
        return self.process.stdout.readline().strip()

    def end(self):
        """Returns its exit status."""
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.end()


class Process(Script):
    """A process that uses a key."""

    def __init__(self, key, then=WAITS, keep=60, loading="pass"):
        super().__init__(BEGIN.replace("LOADING", loading) + then, key, str(keep))


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path, monkeypatch, coxswain_command):
    """A runtime directory of the test's own; its holder ends with the test."""
    monkeypatch.setenv("COXSWAIN_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PATH", f"{os.path.dirname(coxswain_command)}:{os.environ['PATH']}")
    yield tmp_path / "run"
    with contextlib.suppress(OSError):
        os.kill(holder_pid(), signal.SIGTERM)


def holder_connect():
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    try:
        connection.connect(os.environ["COXSWAIN_RUNTIME_DIR"] + "/.weights.sock")
    except OSError:
        connection.close()
        raise
    return connection


def holder_pid():
    with holder_connect() as connection:
        return struct.unpack("3i", connection.getsockopt(1, socket.SO_PEERCRED, 12))[0]


def ask(connection, op, key=b"", fds=(), reserved=b"", memory=0, size=0):
    """Returns the status of the answer; None: the connection has ended."""
    request = REQUEST.pack(op, memory, 60000, size, reserved, key)
    socket.send_fds(connection, [request], list(fds))
    answer, received, _, _ = socket.recv_fds(connection, 16, 1)
    for fd in received:
        os.close(fd)
    return struct.unpack("<IIQ", answer)[0] if len(answer) == 16 else None


def command(*words, status=0):
    coxswain_path = os.path.join(os.environ["COX_BIN_DIR"], "coxswain")
    result = subprocess.run(
        [coxswain_path, "weights", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == status, result
    return result


def keys():
    return [row["key"] for row in json.loads(command("list", "--json").stdout)]


def wait_until(what, seconds=30):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_weights_outlive_the_process_that_loaded_them():
    with Process("k") as first:
        assert first.line() == "loads"
        assert first.line() == "ready"
        assert first.end() == 0
    with Process("k") as second, Process("k") as third:
        for process in (second, third):
            assert process.line() == "maps"
            assert process.line() == "ready"
        (row,) = coxswain.WeightStore().list()
        assert row["users"] == 2 and row["bytes"] > 400000
        assert row["bytes"] < 500000, "a tied array was put twice"
        assert "2 users" in command().stdout


def test_one_process_loads_and_the_others_wait_for_it():
    all_ask = "while store.list()[0]['users'] < 4: time.sleep(0.01)"
    with contextlib.ExitStack() as stack:
        group = [stack.enter_context(Process("k", loading=all_ask)) for _ in range(4)]
        assert sorted(process.line() for process in group) == ["loads", "maps", "maps", "maps"]


def test_a_loader_that_dies_is_followed_by_one_that_waits():
    with Process("k", loading="time.sleep(1000)") as first:
        assert first.line() == "loads"
        with Process("k") as second, Process("k") as third:
            wait_until(lambda: coxswain.WeightStore().list()[0]["users"] == 3)
            assert coxswain.WeightStore().list()[0]["loading"]
            assert "being loaded" in command().stdout
            first.process.kill()
            assert sorted((second.line(), third.line())) == ["loads", "maps"]


def test_a_stray_write_ends_the_process_and_changes_nothing():
    write = "ctypes.memset(weights['w'].ctypes.data, 7, 4)\n"
    with Process("k") as first:
        assert first.line() == "loads" and first.line() == "ready"
        with Process("k", write) as second:
            assert second.line() == "maps"
            assert second.end() == -signal.SIGSEGV
        with Process("k", "weights['w'][0] = 7\n") as third:
            assert third.end() == 1  # an exception: the array cannot be written
        with Process("k") as fourth:
            assert fourth.line() == "maps" and fourth.line() == "ready"


def test_what_a_process_writes_after_unshare_is_its_own():
    write = "weights.unshare()\nctypes.memset(weights['w'].ctypes.data, 7, 4096)\n"
    check = "assert weights['w'][0] != 0 and weights['w'][2000] == 2000\n"
    with Process("k", write + check + WAITS) as first:
        assert first.line() == "loads" and first.line() == "ready"
        with Process("k") as second:
            assert second.line() == "maps" and second.line() == "ready"
        assert first.end() == 0


def test_mapped_weights_are_no_memory_of_the_process():
    store = coxswain.WeightStore(keep=0)
    made = store.put("k", {"w": numpy.ones(1 << 22, dtype=numpy.uint8)})
    weights = store.get("k")
    assert not weights.loaded and made.loaded
    assert weights["w"].sum() == 1 << 22
    address = weights["w"].ctypes.data // 4096 * 4096
    private = None
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split()[0] and not line.split()[0].endswith(":"):
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                inside = begin <= address < end
            elif line.startswith("Anonymous:") and inside:
                private = int(line.split()[1])
    assert private == 0
    made.close()
    weights.close()


def test_weights_without_a_user_stay_for_their_time():
    store = coxswain.WeightStore(keep=0)
    store.put("gone at once", {"w": numpy.ones(1)}).close()
    wait_until(lambda: not keys())
    with pytest.raises(coxswain.Invalid):
        coxswain.WeightStore(keep=-1)
    kept = coxswain.WeightStore(keep=None)
    kept.put("kept", {"w": numpy.ones(1)}).close()
    store.put("brief", {"w": numpy.ones(1)}).close()
    wait_until(lambda: keys() == ["kept"])
    assert "kept until dropped" in command().stdout
    assert "dropped kept" in command("drop", "kept").stdout
    assert keys() == []
    command("drop", "kept", status=2)


def test_dropped_weights_stay_with_who_has_them():
    store = coxswain.WeightStore()
    weights = store.put("k", {"w": numpy.arange(1000)})
    assert store.drop("k") == 1 and store.drop("k") == 0
    assert store.get("k") is None  # to be loaded anew
    other = store.put("k", {"w": numpy.arange(1000) + 1})
    assert weights["w"][999] == 999 and other["w"][999] == 1000
    assert store.drop() == 1
    weights.close()
    other.close()


def test_users_go_on_when_the_holder_dies_and_the_next_process_loads():
    with Process("k", WAITS + "assert weights['w'][9] == 9\n") as first:
        assert first.line() == "loads" and first.line() == "ready"
        os.kill(holder_pid(), signal.SIGKILL)
        with Process("k") as second:
            assert second.line() == "loads" and second.line() == "ready"
        assert first.end() == 0


def test_a_holder_that_dies_while_weights_are_loaded_is_replaced():
    store = coxswain.WeightStore()
    assert store.get("k") is None
    os.kill(holder_pid(), signal.SIGKILL)
    weights = store.put("k", {"w": numpy.ones(3)})
    assert keys() == ["k"]
    weights.close()


def test_who_waits_too_long_for_a_loader_is_told():
    store = coxswain.WeightStore()
    assert store.get("k") is None
    with pytest.raises(coxswain.TimedOut, match="another process loads them"):
        coxswain.WeightStore().get("k", timeout=0.1)
    store.put("k", {}).close()


def test_two_that_put_the_same_key_have_the_same_weights():
    first, second = coxswain.WeightStore(), coxswain.WeightStore()
    one = first.put("k", {"w": numpy.array([1])})
    two = second.put("k", {"w": numpy.array([2])})
    assert one["w"][0] == two["w"][0] == 1 and not two.loaded
    one.close()
    two.close()


def test_a_key_changes_with_the_files_and_with_what_is_made_of_them(tmp_path):
    key = coxswain.WeightStore.key
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.safetensors").write_bytes(b"1")
    names = {key(folder), key(folder, shard=1, shards=2), key(folder, dtype="bfloat16")}
    names |= {key(folder, quantization="fp8"), key(folder, more={"layers": 2})}
    assert len(names) == 5 and key(folder) in names
    (folder / "w.safetensors").write_bytes(b"2")
    assert key(folder) not in names
    with pytest.raises(coxswain.Invalid, match="revision"):
        key("org/model")
    assert key("org/model", revision="1f3a") != key("org/model", revision="2b4c")
    assert len(key("x" * 5000, revision="1").encode()) <= 512


def test_a_model_that_changed_on_disk_is_loaded_anew(tmp_path):
    """And what has mapped the old one keeps it."""
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "w"
    file.write_bytes(b"1")
    store = coxswain.WeightStore()
    old = store.put(store.key(tmp_path / "model"), {"w": numpy.array([1])})
    file.write_bytes(b"2")  # in place, as many bytes
    key = store.key(tmp_path / "model")
    assert store.get(key) is None
    new = store.put(key, {"w": numpy.array([2])})
    assert (old["w"][0], new["w"][0]) == (1, 2) and len(keys()) == 2
    old.close()
    new.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of other users")
def test_another_user_maps_nothing(monkeypatch):
    """Neither through the directory of a user that is not its own, nor as the peer of a socket that
    it reaches."""
    script = f"""
import os, sys, struct, socket
sys.path[:0] = {[path for path in sys.path if path]!r}
import coxswain
os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    coxswain.WeightStore().get("k")
except coxswain.Error as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
    folder = tempfile.TemporaryDirectory()
    runtime_dir = pathlib.Path(folder.name) / "run"
    monkeypatch.setenv("COXSWAIN_RUNTIME_DIR", str(runtime_dir))
    store = coxswain.WeightStore()
    weights = store.put("k", {"w": numpy.ones(3)})

    def other(**environment):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert other().startswith("Denied: ")
    # A mistake: the directories are open. The holder talks to its own user all the same.
    for path in runtime_dir, runtime_dir.parent:
        path.chmod(0o711)
    (runtime_dir / ".weights.sock").chmod(0o666)
    assert other().startswith("Closed: ")
    assert store.list()[0]["users"] == 1
    weights.close()
    os.kill(holder_pid(), signal.SIGTERM)
    wait_until(lambda: not (runtime_dir / ".weights.sock").exists())
    folder.cleanup()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of other users")
def test_the_directory_of_another_user_is_passed_over(coxswain_command):
    """As that of the service is, /run/coxswain, into which others may not look."""
    script = f"""
import os, sys
sys.path[:0] = {[path for path in sys.path if path]!r}
import coxswain
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(coxswain.WeightStore().list())
"""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        os.mkdir(f"{folder}/coxswain", 0o700)
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        del environment["COXSWAIN_RUNTIME_DIR"]
        options = {"env": environment, "capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run([sys.executable, "-c", script], check=False, **options)
        assert done.stdout == "[]\n", done.stderr
        with contextlib.suppress(PermissionError):  # where others cannot run what was built
            words = [coxswain_command, "weights", "--json"]
            done = subprocess.run(words, user=65534, check=False, **options)
            assert done.stdout == "[]\n", done.stderr


def test_what_is_no_tensor_is_refused():
    store = coxswain.WeightStore()
    for value in (3, [1.0], numpy.array([object()])):
        with pytest.raises(coxswain.Invalid, match="'w'"):
            store.put("k", {"w": value})
    for key in ("", "x" * 513, "a\0b"):
        with pytest.raises(coxswain.Invalid, match="key"):
            store.get(key)


def test_requests_that_are_none_change_nothing():
    store = coxswain.WeightStore()
    weights = store.put("k", {"w": numpy.ones(3)})
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 4096)
    pipe = os.pipe()
    for op, key, fds, status in (
        (0, b"k", [], INVALID),
        (9, b"k", [], INVALID),
        (GET, b"", [], INVALID),
        (PUT, b"other", [], INVALID),
        (PUT, b"other", [plain], DENIED),
        (PUT, b"other", [pipe[0]], DENIED),
        (GET, b"k", [plain], INVALID),
        (GET, b"k\0k", [], INVALID),
    ):
        with holder_connect() as connection:
            assert ask(connection, op, key, fds) == status, (op, key)
    with holder_connect() as connection:
        assert ask(connection, LIST, reserved=b"1") == INVALID
        assert ask(connection, LIST, size=1) == INVALID
    with holder_connect() as connection:
        assert ask(connection, GET, b"k") == 0
        assert ask(connection, GET, b"other") == INVALID  # a connection has one key
    with holder_connect() as connection:
        assert ask(connection, GET, b"mine") == EMPTY
        with holder_connect() as waiting:
            waiting.sendall(REQUEST.pack(GET, 0, 0, 0, b"", b"mine") * 2)  # before its answer
            assert waiting.recv(16) == b""
    with holder_connect() as connection:
        connection.sendall(b"\1\0\0")  # and ends
    with holder_connect() as connection:  # reads no answer
        connection.settimeout(0.2)
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(REQUEST.pack(LIST, 0, 0, 0, b"", b""))
    for fd in (plain, *pipe):
        os.close(fd)
    assert keys() == ["k"]
    weights.close()


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")")[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_holder_without_fds_waits_and_serves_again():
    store = coxswain.WeightStore()
    weights = store.put("k", {"w": numpy.ones(3)})
    pid = holder_pid()
    limit = len(os.listdir(f"/proc/{pid}/fd")) + 2
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
    with contextlib.ExitStack() as stack:
        for _ in range(8):  # more than it has fds for: the rest wait to be accepted
            stack.enter_context(holder_connect())
        before = cpu_seconds(pid)
        threading.Event().wait(1)  # of which it would compute all
        assert cpu_seconds(pid) - before < 0.5
    wait_until(lambda: keys() == ["k"])
    weights.close()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"x" * 16, "another beginning"),
        (b"COXWGTS1" + struct.pack("<Q", 2**63), "ends before its list"),
        (b"COXWGTS1" + struct.pack("<Q", 2) + b"[]", "TypeError|list indices"),
        (b'{"library": "numpy", "tensors": {"w": ["<f4", [9999], 4000]}}', "buffer"),
        (b'{"library": "numpy", "tensors": {"w": ["<f4", [-1], 2**9]}}', ""),
    ],
)
def test_memory_that_is_no_weights_is_told(text, match):
    if text.startswith(b"{"):
        text = b"COXWGTS1" + struct.pack("<Q", len(text)) + text
    fd = os.memfd_create("junk", os.MFD_ALLOW_SEALING)
    os.write(fd, text)
    os.ftruncate(fd, 4096)
    libc = ctypes.CDLL(None)
    assert libc.fcntl(fd, 1033, 15) == 0
    coxswain.WeightStore().put("other", {}).close()  # starts a holder
    with holder_connect() as connection:
        assert ask(connection, PUT, b"junk", [fd]) == 0
        with pytest.raises(coxswain.Corrupt, match=match):
            coxswain.WeightStore().get("junk")
    os.close(fd)


def test_a_user_has_one_holder(coxswain_command):
    coxswain.WeightStore().put("k", {}).close()
    result = subprocess.run(
        [coxswain_command, "weights", "hold"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1 and "is taken" in result.stderr


def test_a_holder_is_no_group(coxswain_command):
    coxswain.WeightStore().put("k", {}).close()
    result = subprocess.run(
        [coxswain_command, "list"], capture_output=True, text=True, timeout=60, check=False
    )
    assert "weights" not in result.stdout and "no group" in result.stderr


def test_words_that_the_command_does_not_know_are_told():
    assert "expected list, drop or hold" in command("load", "x", status=2).stderr
    assert "drop takes keys, or --all" in command("drop", status=2).stderr
    assert "takes no argument" in command("list", "x", status=2).stderr
    assert command("drop", "--all").stdout == "dropped 0\n"  # there is no holder
    assert command().stdout == ""


def test_torch_tensors_come_back_as_they_were():
    torch = pytest.importorskip("torch")
    store = coxswain.WeightStore()
    tensors = {
        "bf16": torch.randn(7, 5).bfloat16(),
        "transposed": torch.randn(4, 6).T,
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "fp8": torch.randn(8).to(torch.float8_e4m3fn),
    }
    weights = store.put("t", tensors)
    for name, tensor in tensors.items():
        mapped = weights[name]
        assert mapped.dtype == tensor.dtype and mapped.shape == tensor.shape
        assert torch.equal(
            mapped.contiguous().view(-1).view(torch.uint8),
            tensor.contiguous().view(-1).view(torch.uint8),
        )
    weights.unshare()
    weights["scalar"].add_(1)
    assert store.get("t")["scalar"] == 3.5
    weights.close()
