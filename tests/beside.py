#!/usr/bin/env python3
"""Uses /dev/shm as other programs do, until it is terminated: tests/beside.py COXSWAIN

Names come and go all the time: those of Python's multiprocessing and of torch. Names that look
like those of a group or of a test stay, and so does a running group with its names. At the end
everything that stayed must still be there, unchanged: exit status 1 if it is not. The script
removes its names.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile

SHM = "/dev/shm"
# Names of tests begin with a pid that no process has.
NO_PID = 4194304 + 17
ALIKE = [name % NO_PID for name in (
    "test_%d_0_control", "sem.test_%d_0_execute_request_produce_0", "%d_0_control",
    "sem.%d_0_execute_error_response_consume_1", "coxt%d_g_control",
    "sem.coxt%d_g_execute_request_produce_0")]
FOREIGN = ("psm_%06x", "sem.mp-%06x", "torch_%06x_1_0", "nccl-%06x", "sem.%06x_lock")


def make(name, text):
    fd = os.open(os.path.join(SHM, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(fd, text)
    os.close(fd)


def remove(name):
    try:
        os.unlink(os.path.join(SHM, name))
    except FileNotFoundError:
        return False
    return True


def read(name):
    try:
        with open(os.path.join(SHM, name), "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def names_of(group):
    prefixes = (group + "_", "sem." + group + "_")
    return sorted(name for name in os.listdir(SHM) if name.startswith(prefixes))


def come_and_go(ends):
    """Sixteen names at a time, several hundred new ones in a second."""
    present = []
    try:
        for number in itertools.count(os.getpid() << 24):
            present.append(FOREIGN[number % len(FOREIGN)] % number)
            make(present[-1], b"x" * 4096)
            if len(present) > 16:
                remove(present.pop(0))
            if signal.sigtimedwait(ends, 0.002):
                return
    finally:
        for name in present:
            remove(name)


def main(coxswain):
    ends = [signal.SIGTERM, signal.SIGINT]
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    stays = ["%s_beside_%d" % (name, os.getpid()) for name in ("psm", "sem.mp-", "torch")] + ALIKE
    group = "beside_%d" % os.getpid()
    bad = []
    with tempfile.TemporaryDirectory(prefix="beside_") as folder:
        env = dict(os.environ, XDG_RUNTIME_DIR=folder, COXSWAIN_TEST_KEEP_NAMES="1")
        command = [coxswain, "run", "--name", group, "--attach", "named"]
        with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              text=True) as running:
            try:
                while not running.stdout.readline().startswith("name "):
                    if running.poll() is not None:
                        sys.exit("beside: no group runs")
                before = names_of(group)
                for name in stays:
                    make(name, name.encode())
                print("ready", flush=True)
                come_and_go(ends)
                bad += ["%s was changed" % name for name in stays if read(name) != name.encode()]
                if running.poll() is not None or names_of(group) != before:
                    bad.append("the group %s is not what it was" % group)
            finally:
                for name in stays:
                    remove(name)
                if running.poll() is None:
                    running.terminate()
    for text in bad:
        print("beside: " + text, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
