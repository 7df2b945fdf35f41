"""A host that has made a process and is killed; its name is free: forked_host.py fork|subprocess|clone named|sealed

clone: a copy of the host that runs no handler of pthread_atfork(3).
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

import coxswain

NAME = "host"
SYS_clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]


def serve():
    coxswain.serve(bytes)


def host(how, attach):
    group = coxswain.Group(serve, ranks=1, name=NAME, attach=attach, timeout=300)
    group.start()
    group.call(b"hello", timeout=300)
    if how == "subprocess":
        with subprocess.Popen(["sleep", "1000"], close_fds=False) as process:
            print(process.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork() if how == "fork" else ctypes.CDLL(None).syscall(SYS_clone, signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        time.sleep(1000)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main(how, attach):
    command = [sys.executable, __file__, how, attach, "host"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        process.wait()
    try:
        os.kill(child, 0)
        with subprocess.Popen(["coxswain", "run", "--name", NAME, "-n", "1", "--attach", attach],
                              stdout=subprocess.PIPE, text=True) as run:
            ready = run.stdout.readline()
            print(ready)
            if ready:
                subprocess.run(["coxswain", "stop", "--name", NAME], check=True)
            return 0 if run.wait() == 0 and ready else 1
    finally:
        os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(host(*sys.argv[1:3]) if len(sys.argv) > 3 else main(*sys.argv[1:]))
