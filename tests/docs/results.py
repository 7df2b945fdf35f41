#!/usr/bin/python3
"""Results that are more than 200 commits old are called old in docs/bench.md.

usage: results.py [--write] SOURCE_DIR

Between two comments the page has a line for each JSON of results: when it was measured, at which commit, and whether that
is old. Fails if a line is missing or says the wrong thing; --write puts the right ones there. A JSON without a commit is
taken for one of the last commit of its day. Skipped without git, or in a clone without that much history.
"""

import datetime
import json
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lib"))
import harness  # pylint: disable=wrong-import-position

NAMES = ("bench.json", "bench-python.json", "bench-vllm.json", "bench-nodes.json")
BEGIN, END = "<!-- results: tests/docs/results.py --write -->\n", "<!-- end of results -->"
COMMITS_MAX = 200
OLD = ", **old**: the tree has changed by more than %d commits since" % COMMITS_MAX


def git(root, *words):
    try:
        run = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def commits_since(root, machine):
    """How many commits there are on HEAD since the results; None: unknown."""
    commit = machine.get("commit")
    if not commit:
        day = datetime.date.fromisoformat(machine["date"]) + datetime.timedelta(days=1)
        commit = git(root, "rev-list", "-1", f"--before={day}T00:00:00Z", "HEAD")
    count = git(root, "rev-list", "--count", f"{commit}..HEAD") if commit else None
    return None if count is None else int(count)


def line_of(name, machine, is_old):
    commit = machine.get("commit")
    at = " at commit %s" % commit[:12] if commit else ""
    others = " Other programs had %.0f %% of the processors' time." % (100 * machine["elsewhere"]) if "elsewhere" in machine else ""
    return "* [%s](%s): of %s%s%s.%s\n" % (name, name, machine["date"], at, OLD if is_old else "", others)


def main():
    root = pathlib.Path(sys.argv[-1]).resolve()
    page = root / "docs" / "bench.md"
    lines = []
    for name in NAMES:
        machine = json.loads((root / "docs" / name).read_text())["machine"]
        count = commits_since(root, machine)
        if count is None:
            harness.skip(f"git does not tell how many commits there are since docs/{name} was measured")
        lines.append(line_of(name, machine, count > COMMITS_MAX))
    text, wanted = page.read_text(), BEGIN + "".join(lines) + END
    found = re.search(re.escape(BEGIN) + ".*?" + re.escape(END), text, re.S)
    if not found:
        sys.exit(f"docs/bench.md: '{BEGIN.strip()}' and its end are missing")
    if "--write" in sys.argv[1:]:
        page.write_text(text.replace(found[0], wanted))
    elif found[0] != wanted:
        sys.exit(f"docs/bench.md says\n{found[0]}\nbut it is\n{wanted}\npython3 tests/docs/results.py --write .")
    print("".join(lines), end="")
    return 0


if __name__ == "__main__":
    harness.script(main)
