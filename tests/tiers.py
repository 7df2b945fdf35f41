"""The time that each tier of tests takes (tests/CMakeLists.txt), by the record tests/times.txt.

Usage: tiers.py check CTEST BUILD_DIR    fails if a tier takes longer than its limit
       tiers.py list CTEST BUILD_DIR     prints tier, seconds and name of each test
       tiers.py renew CTEST BUILD_DIR    writes the record from BUILD_DIR/ctest.log

The record is what each test took on 2 idle cores. No test judges the time of the run that it is
part of: machines are shared. A test without a record counts UNRECORDED seconds.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

TIERS = ("quick", "all", "nightly")
# Minutes from a fresh clone to the verdict, and the part of them that is left for the tests: the
# build takes the rest, 2.5 minutes without ccache, and `all` keeps some minutes in reserve.
MINUTES = {"quick": 5, "all": 30}
LIMITS = {"quick": 150, "all": 1500}
CORES = 2
UNRECORDED = 15.0
RECORD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "times.txt")
HEAD = """\
# Seconds that each test takes on 2 idle cores, for unit/tiers. Written by
#   sh tools/test test && sh tools/compile test times_renew
# Tests that this run did not pass keep what was recorded.
"""


class Test:
    def __init__(self, name, properties):
        self.name = name
        labels = properties.get("LABELS", [])
        self.tier = next((tier for tier in TIERS if "tier-" + tier in labels), None)
        self.processors = min(int(properties.get("PROCESSORS", 1)), CORES)
        if properties.get("RUN_SERIAL"):
            self.processors = CORES


def list_copy(build, folder):
    """Copies the list of the tests, without the tests, to `folder`."""
    for path, _, names in os.walk(build):
        if "CTestTestfile.cmake" in names:
            there = os.path.join(folder, os.path.relpath(path, build))
            os.makedirs(there, exist_ok=True)
            shutil.copy(os.path.join(path, "CTestTestfile.cmake"), there)


def tests_of(ctest, build, options=()):
    """The tests of a build tree that `options` select. Another user, as in tests/anywhere.sh, may not be
    allowed to run the ctest that configured the build, nor to write there, as ctest does even to list."""
    ctest = ctest if os.access(ctest, os.X_OK) else "ctest"
    with tempfile.TemporaryDirectory() as folder:
        if not os.access(os.path.join(build, "Testing", "Temporary"), os.W_OK):
            list_copy(build, folder)
            build = folder
        answer = subprocess.run([ctest, "--test-dir", build, "--show-only=json-v1", *options],
                                check=True, capture_output=True, text=True)
    return [Test(test["name"], {p["name"]: p["value"] for p in test.get("properties", [])})
            for test in json.loads(answer.stdout)["tests"]]


def record():
    if not os.path.exists(RECORD):
        return {}
    with open(RECORD) as file:
        rows = [line.split() for line in file if line.strip() and not line.startswith("#")]
    return {name: float(seconds) for seconds, name in rows}


def seconds_of(tests, times):
    """How long `tests` take together on CORES cores, of which each occupies its `processors`."""
    return sum(times.get(test.name, UNRECORDED) * test.processors / CORES for test in tests)


def longest(tests, times, count):
    chosen = sorted(tests, key=lambda test: -times.get(test.name, UNRECORDED))[:count]
    return ["%8.1f s  %s%s" % (times.get(test.name, UNRECORDED), test.name,
                               "" if test.name in times else " (not recorded)") for test in chosen]


def check(ctest, build):
    tests, times = tests_of(ctest, build), record()
    failed = False
    for number, (tier, limit) in enumerate(LIMITS.items()):
        within = [test for test in tests if test.tier in TIERS[:number + 1]]
        seconds = seconds_of(within, times)
        print("%s: %d tests, %.0f s of at most %d s" % (tier, len(within), seconds, limit))
        if seconds > limit:
            failed = True
            print("FAIL: the tests of %s exceed their limit. Make one shorter, or state the tier %s"
                  " for one of the longest:" % (tier, TIERS[number + 1]))
            print("\n".join(longest(within, times, 10)))
    return 1 if failed else 0


def show(ctest, build):
    times = record()
    for test in tests_of(ctest, build):
        print("%-8s %8.1f  %s" % (test.tier, times.get(test.name, UNRECORDED), test.name))
    return 0


def passed_times(log):
    """Seconds by name of the tests that passed, from the output of ctest."""
    with open(log, errors="replace") as file:
        rows = re.findall(r"^ *\d+/\d+ Test +#\d+: (\S+) \.+ +Passed +([0-9.]+) sec",
                          file.read(), re.M)
    return {name: float(seconds) for name, seconds in rows}


def failures(log, line_count):
    """What the tests that failed printed last, by name, from the output of ctest."""
    found, name = {}, None
    with open(log, errors="replace") as file:
        for line in file.read().splitlines():
            result = re.match(r" *\d+/\d+ Test +#\d+: (\S+) \.*(.*)", line)
            if result:
                failed = result[2].startswith("***") and "Skipped" not in result[2]
                name = result[1] if failed else None
            elif re.match(r" +Start +\d+: ", line):
                name = None
            if name:
                found.setdefault(name, []).append(line)
    return {name: lines[:1] + lines[1:][-line_count:] for name, lines in found.items()}


def renew(ctest, build):
    names = [test.name for test in tests_of(ctest, build)]
    times = {name: seconds for name, seconds in record().items() if name in names}
    times.update(passed_times(os.path.join(build, "ctest.log")))
    with open(RECORD, "w") as file:
        file.write(HEAD)
        for name in sorted(times):
            file.write("%8.2f %s\n" % (times[name], name))
    print("%s: %d of %d tests" % (RECORD, len(times), len(names)))
    return 0


if __name__ == "__main__":
    commands = {"check": check, "list": show, "renew": renew}
    if len(sys.argv) != 4 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    sys.exit(commands[sys.argv[1]](*sys.argv[2:]))
