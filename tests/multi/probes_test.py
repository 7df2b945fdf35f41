#!/usr/bin/python3
"""The scripts of tools/*.bt on a running group, by Debian's bpftrace.

Usage: probes_test.py BIN_DIR SOURCE_DIR [TEST...]
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from groups import Group  # pylint: disable=wrong-import-position
from harness import SOURCE_DIR, check, expect, program, skip, test, wait_until  # pylint: disable=wrong-import-position

harness.begin(harness.parser(__doc__))
# What each prints of a few steps of two ranks.
PRINTED = {
    "phases": ("@pack_us:", "@wake_us:", "@ranks_us:", "@handler_us:", "@execute_us:", "@serve_us:"),
    "last": (r"@last\[\d+\]: \d+", "@spread_us:"),
    "sleeps": (r"@wait_us\[\d\]:", r"@group_wait_us\[\d+\]:"),
}


def traced(name, group):
    """What the script prints when it is interrupted after some prompts."""
    files = [program("coxswain"), program("coxswain-worker")]
    with tempfile.TemporaryFile("w+") as output:
        tracer = subprocess.Popen(["bpftrace", os.path.join(SOURCE_DIR, "tools", name + ".bt"), *files],
                                          stdout=output, stderr=output, text=True)

        def said():
            output.seek(0)
            return output.read()
        try:
            wait_until(lambda: "Attaching" in said() or tracer.poll() is not None, "bpftrace")
            # It says so before it has attached, and then takes no signal: so it may take more than one.
            while tracer.poll() is None:
                for _ in range(10):
                    expect(group.generate("--quiet", "27+58=", "3+4="), 0)
                tracer.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    tracer.wait(1)
        finally:
            tracer.kill()
            tracer.wait()
        return said()


@test
def test_m18_the_scripts_print_phases_last_ranks_and_waits():
    if not shutil.which("bpftrace") or os.geteuid() != 0:
        skip("bpftrace runs as root, where it is installed")
    with Group(arguments=("--attach", "sealed")) as group:
        for name, patterns in PRINTED.items():
            text = traced(name, group)
            if "Attaching" not in text and not re.search("couldn't get argument|usdt probe", text):
                skip("bpftrace does not run here: " + text)
            for pattern in patterns:
                check(re.search(pattern, text), "%s.bt does not print %s: %s" % (name, pattern, text))


if __name__ == "__main__":
    sys.exit(harness.main())
