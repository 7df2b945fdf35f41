#!/usr/bin/python3
"""tools/supervised.py: whatever a command has started ends with it. tools/run_tests.py: progress on a terminal alone.

Usage: supervised_test.py SOURCE_DIR
"""
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

SOURCE = sys.argv.pop(1)
SCRIPT = os.path.join(SOURCE, "tools", "supervised.py")
# A process in a session of its own that ignores SIGTERM, one that is stopped, one whose parent is
# gone. Each prints its id; the first one leaves a name in /dev/shm.
COMMAND = """
setsid sh -c 'trap "" TERM INT; >/dev/shm/test_$$_supervised; echo $$; while :; do sleep 1; done' &
sh -c 'echo $$; kill -STOP $$; while :; do sleep 1; done' &
sh -c "sh -c 'echo \\$\\$; while :; do sleep 1; done' &"
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Supervised(unittest.TestCase):
    def start(self, command):
        process = subprocess.Popen([sys.executable, SCRIPT, "sh", "-c", command],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.stdout.close)
        return process

    def ends_by(self, *numbers):
        process = self.start(COMMAND + "wait")
        pids = [int(process.stdout.readline()) for _ in range(3)]
        # Stopped meanwhile, so that it gets all of them at once.
        for number in (signal.SIGSTOP, *numbers, signal.SIGCONT):
            process.send_signal(number)
        process.wait(60)
        self.assertIn(process.returncode, [-number for number in numbers])
        self.assertNotIn("Traceback", process.stderr.read())
        self.assertEqual([pid for pid in pids if alive(pid)], [])
        self.assertEqual([name for name in os.listdir("/dev/shm")
                          if name in ["test_%d_supervised" % pid for pid in pids]], [])

    def test_sigterm_ends_all(self):
        self.ends_by(signal.SIGTERM)

    def test_sigint_ends_all(self):
        self.ends_by(signal.SIGINT)

    def test_a_second_signal_disturbs_nothing(self):
        self.ends_by(signal.SIGINT, signal.SIGTERM)

    def test_a_command_that_ends_leaves_nothing(self):
        process = self.start("sleep 1000 & echo $!; exit 3")
        pid = int(process.stdout.readline())
        self.assertEqual(process.wait(60), 3)
        self.assertFalse(alive(pid))


class Progress(unittest.TestCase):
    """A tree with three tests, of which one fails; nothing is built in it."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="coxswain-progress-")
        self.addCleanup(shutil.rmtree, self.folder)
        for name in ("tools/run_tests.py", "tools/supervised.py", "tools/compile", "tools/packages",
                     "tools/packages.txt", "tests/tiers.py", "tests/times.txt"):
            os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
            shutil.copy(os.path.join(SOURCE, name), self.path(name))
        self.write("CMakePresets.json", """{"version": 6,
            "configurePresets": [{"name": "test", "generator": "Ninja", "binaryDir": "${sourceDir}/build/test"}],
            "testPresets": [{"name": "test", "configurePreset": "test", "output": {"outputOnFailure": true}}]}""")
        self.write("build/test/CTestTestfile.cmake",
                   'add_test(one "true")\nadd_test(two "false")\nadd_test(three "true")\n')
        self.write("bin/cmake", "#!/bin/sh\n")
        os.chmod(self.path("bin/cmake"), 0o755)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)

    def start(self, stdout):
        path = os.pathsep.join([self.path("bin"), os.environ["PATH"]])
        return subprocess.Popen([sys.executable, self.path("tools/run_tests.py"), "test"], stdout=stdout,
                                env={**os.environ, "PATH": path, "COXSWAIN_PACKAGES": "check"})

    def test_a_terminal_has_one_line_and_one_for_each_failure(self):
        end, terminal = pty.openpty()
        process = self.start(terminal)
        os.close(terminal)
        text = b""
        try:
            while more := os.read(end, 65536):
                text += more
        except OSError:  # all that had the terminal have ended
            pass
        os.close(end)
        self.assertNotEqual(process.wait(), 0)
        text = text.decode()
        bars = re.findall(r"\r\x1b\[K(\d)/3 tests, ETA \d+ s", text)
        self.assertEqual(bars, ["1", "2", "3"], text)
        # Removed at the end, when the summary comes.
        self.assertIn("\r\x1b[K", text[text.rindex("3/3 tests"):])
        self.assertRegex(text, r"\r\x1b\[K *\d/3 Test #2: two .*\*\*\*Failed")
        self.assertNotIn("Start", text[:text.rindex("3/3 tests")])
        self.assertIn("---- two failed", text)

    def test_a_file_has_none(self):
        process = self.start(subprocess.PIPE)
        text = process.communicate()[0].decode()
        self.assertNotEqual(process.returncode, 0)
        self.assertNotIn("\r", text)
        self.assertRegex(text, r"3/3 Test +#\d")


if __name__ == "__main__":
    unittest.main()
