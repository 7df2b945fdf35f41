"""Other processes for a test: each calls a function of a test's module, and says what it finds as
JSON."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

HERE = str(pathlib.Path(__file__).parent)


def say(value=None):
    """In the other process: a line for the test."""
    print(json.dumps(value), flush=True)


def listen():
    """In the other process: waits for `tell`."""
    return json.loads(sys.stdin.readline())


def find_torch():
    """A Python with PyTorch: that of $COX_TORCH_PYTHON, or of tools/torch; None: there is none."""
    for python in (
        os.environ.get("COX_TORCH_PYTHON"),
        pathlib.Path(HERE).parents[1] / "build/venv-torch/bin/python",
        sys.executable,
    ):
        if python and os.access(python, os.X_OK):
            found = subprocess.run(
                [python, "-c", "import cffi, safetensors, torch"], capture_output=True, check=False
            )
            if found.returncode == 0:
                return str(python)
    return None


class Other:
    """A process that calls function(*arguments), which must be JSON."""

    def __init__(self, function, *arguments):
        code = (
            f"import sys; sys.path.insert(0, {HERE!r}); "
            f"import {function.__module__} as module; module.{function.__name__}(*{arguments!r})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def hear(self):
        """What it says next."""
        line = self.process.stdout.readline()
        assert line, f"the process has ended: {self.process.wait(30)}"
        return json.loads(line)

    def tell(self, value=None):
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def wait(self):
        """Its exit status."""
        return self.process.wait(60)

    def wait_until_asleep(self):
        """Until its main thread blocks in futex or futex_waitv: a wait of the library."""
        futexes = {"x86_64": ("202", "449"), "aarch64": ("98", "449")}[os.uname().machine]
        while pathlib.Path(f"/proc/{self.pid}/syscall").read_text().split()[0] not in futexes:
            assert self.process.poll() is None
            time.sleep(0.001)

    def kill(self):
        """With SIGKILL; it is reaped."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
