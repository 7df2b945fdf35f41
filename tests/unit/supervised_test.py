#!/usr/bin/python3
"""tools/supervised.py: whatever a command has started ends with it.

Usage: supervised_test.py SOURCE_DIR
"""
import os
import signal
import subprocess
import sys
import unittest

SCRIPT = os.path.join(sys.argv.pop(1), "tools", "supervised.py")
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

    def ends_by(self, number):
        process = self.start(COMMAND + "wait")
        pids = [int(process.stdout.readline()) for _ in range(3)]
        process.send_signal(number)
        process.wait(60)
        self.assertEqual(process.returncode, -number)
        self.assertEqual([pid for pid in pids if alive(pid)], [])
        self.assertEqual([name for name in os.listdir("/dev/shm")
                          if name in ["test_%d_supervised" % pid for pid in pids]], [])

    def test_sigterm_ends_all(self):
        self.ends_by(signal.SIGTERM)

    def test_sigint_ends_all(self):
        self.ends_by(signal.SIGINT)

    def test_a_command_that_ends_leaves_nothing(self):
        process = self.start("sleep 1000 & echo $!; exit 3")
        pid = int(process.stdout.readline())
        self.assertEqual(process.wait(60), 3)
        self.assertFalse(alive(pid))


if __name__ == "__main__":
    unittest.main()
