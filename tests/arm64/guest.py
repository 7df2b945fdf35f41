"""Writes the script that runs tests without CTest: guest.py TESTS_JSON BUILD

TESTS_JSON is what `ctest --show-only=json-v1` prints. Tests that are no program of the build, or whose program was not
built, are counted as left out.
"""

import json
import os
import shlex
import sys


def main(path, build):
    with open(path, encoding="utf-8") as file:
        tests = json.load(file)["tests"]
    for test in tests:
        properties = {item["name"]: item["value"] for item in test.get("properties", [])}
        command = test.get("command", [])
        if not command or not command[0].startswith(build) or not os.path.exists(command[0]):
            print("left_out %s" % shlex.quote(test["name"]))
            continue
        words = ["env", *properties.get("ENVIRONMENT", []), *command]
        print("run_test %s %s" % (shlex.quote(test["name"]), " ".join(shlex.quote(word) for word in words if word)))


main(*sys.argv[1:])
