"""Names of a group: what they may be, what is in their way, and what a worker finds there."""

import itertools
import os
import pathlib
import stat

import pytest

import coxswain
import workers
from processes import Other, listen, say

SHM = pathlib.Path("/dev/shm")
OTHER_USER = 65534
_numbers = itertools.count()


def new_name():
    """That no other test has; the fixture of all tests looks for those of this process."""
    return f"names_{os.getpid()}_{next(_numbers)}"


def names_with(text):
    return [path for path in SHM.iterdir() if text in path.name]


def can_be_another_user():
    if os.geteuid():
        return False
    path = SHM / new_name()
    path.touch()
    try:
        os.chown(path, OTHER_USER, OTHER_USER)
        return True
    except OSError:
        return False
    finally:
        path.unlink()


@pytest.mark.parametrize(
    "name", ["", "a/b", "/a", "..", ".hidden", "with space", "new\nline", "ä", "x" * 129]
)
def test_m16_names_are_checked(name):
    with pytest.raises(coxswain.Invalid) as caught:
        coxswain.Group(workers.echo, 2, name=name).start()
    said = "129 characters: at most 128" if len(name) > 128 else "group name"
    assert said in str(caught.value)


def test_m16_the_longest_name_works():
    name = new_name().ljust(128, "x")
    with coxswain.Group(workers.echo, 2, name=name) as group:
        assert group.name == name
        assert group.call(b"x", timeout=30) == [b"x", b"x"]


def seen(path):
    """What stands there, in full."""
    found = path.lstat()
    data = path.read_bytes() if stat.S_ISREG(found.st_mode) else None
    return found.st_ino, found.st_mode, found.st_uid, found.st_size, data


def place(stranger, path, elsewhere):
    if stranger == "directory":
        path.mkdir(0o700)
    elif stranger == "fifo":
        os.mkfifo(path, 0o600)
    elif stranger in ("symlink", "dangling"):
        path.symlink_to(elsewhere)
    else:
        path.touch(0o600)
    file = {"symlink": elsewhere, "directory": None, "fifo": None, "dangling": None}
    file = file.get(stranger, path)
    if file:
        more = b"more" if stranger == "size" else b""
        file.write_bytes(b"a stranger's bytes, thirty-two.." + more)
        file.chmod(0o644 if stranger == "mode" else 0o600)
    if stranger == "owner":
        os.chown(path, OTHER_USER, OTHER_USER)


@pytest.mark.parametrize(
    "stranger", ["owner", "mode", "size", "directory", "fifo", "symlink", "dangling", "ours"]
)
@pytest.mark.parametrize(
    "suffix",
    [
        "_control",
        "_execute_request",
        "_execute_error_response",
        "_recover_command_response_consume_1",
    ],
)
def test_m16_b9_b43_b44_a_stranger_in_the_way_is_left_alone(suffix, stranger):
    if stranger == "owner" and not can_be_another_user():
        pytest.skip("no right to give a file away")
    name = new_name()
    path = SHM / f"{'sem.' if 'consume' in suffix else ''}{name}{suffix}"
    elsewhere = SHM / f"else_{name}"
    place(stranger, path, elsewhere)
    try:
        before = seen(path)
        with pytest.raises((coxswain.Taken, coxswain.Denied), match=suffix):
            coxswain.Group(workers.echo, 2, name=name, attach="named").start()
        assert seen(path) == before
        # Nothing but the stranger is left; a dangling link was not followed.
        assert len(names_with(name)) == (2 if stranger == "symlink" else 1)
    finally:
        path.rmdir() if stranger == "directory" else path.unlink()
        elsewhere.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "change, says",
    [
        ("chmod 0644 /dev/shm/${P}_execute_request", "mode 0644, expected 0600"),
        ("chmod 0660 /dev/shm/sem.${P}_transfer_request_produce_0", "mode 0660, expected 0600"),
        ("ln /dev/shm/${P}_transfer_response /dev/shm/${P}_second", "2 links"),
        (
            "mv /dev/shm/${P}_control /dev/shm/${P}_second; "
            "ln -s ${P}_second /dev/shm/${P}_control",
            "symbolic link",
        ),
        ("truncate -s 100 /dev/shm/${P}_recover_command_request", "100 bytes"),
        ("truncate -s 33 /dev/shm/sem.${P}_execute_response_produce_0", "33 bytes"),
        ("rm /dev/shm/${P}_shared_sync_link_request", "does not exist"),
        (f"chown {OTHER_USER} /dev/shm/${{P}}_control", "belongs to user"),
    ],
)
def test_m16_b44_a_worker_refuses_what_is_not_the_group(change, says):
    """Here a process changes the names between coordinator and worker."""
    if "chown" in change and not can_be_another_user():
        pytest.skip("no right to give a file away")
    name = new_name()
    worker = os.path.join(os.environ["COX_BIN_DIR"], "scripted_worker")
    script = f"P=${{COXSWAIN_PREFIX#/}}; {change}; exec {worker}"
    with pytest.raises(coxswain.RankDied, match=says):
        coxswain.Group(["/bin/sh", "-c", script], 1, name=name, attach="named").start()
    (SHM / f"{name}_second").unlink(missing_ok=True)
    assert not names_with(name)


@pytest.mark.parametrize("attach", ["named", "sealed"])
@pytest.mark.parametrize("bad", range(4))
def test_p2_the_rank_that_did_not_attach_is_named(bad, attach):
    worker = os.path.join(os.environ["COX_BIN_DIR"], "scripted_worker")
    script = f"[ $COXSWAIN_RANK = {bad} ] && {{ echo no accelerator; exit 9; }}; exec {worker}"
    with pytest.raises(coxswain.RankDied, match="no accelerator") as caught:
        coxswain.Group(["/bin/sh", "-c", script], 4, attach=attach).start()
    assert f"rank {bad} (pid " in str(caught.value)


def call_often(name):
    with coxswain.Group(workers.echo, 2, name=name) as group:
        say()
        listen()
        for i in range(200):
            data = f"{os.getpid()}.{i}".encode()
            assert group.call(data, timeout=30) == [data, data]


def test_m17_b1_groups_in_two_processes():
    names = [new_name(), new_name()]
    with Other(call_often, names[0]) as first, Other(call_often, names[1]) as second:
        for process in first, second:
            process.hear()
        with pytest.raises(coxswain.Taken, match=f"is taken: process {first.pid}"):
            coxswain.Group(workers.echo, 2, name=names[0]).start()
        for process in first, second:
            process.tell()
        assert (first.wait(), second.wait()) == (0, 0)
