#!/usr/bin/python3
"""Rows of the specification and the tests named after them: tests/rows.py write | check.

A test shows a row by carrying its id in its name: p4_b50_late_replies... shows P4 and B50. `write` makes
tests/ROWS.md; `check` fails when that file is not what `write` would make.
"""
import collections
import pathlib
import re
import sys

TESTS = pathlib.Path(__file__).resolve().parent
COUNTS = {"M": 19, "P": 11, "K": 28, "A": 30, "L": 22, "H": 28, "B": 54, "S": 5}
TITLES = {
    "M": "the executor channel",
    "P": "what users of today's systems suffer from",
    "K": "the rank group",
    "A": "the door and the queues",
    "L": "by-value handles",
    "H": "zero-copy queues and allocators",
    "B": "hazards, each to be impossible",
    "S": "steps as deltas",
}
# Shown, but not by a test that carries the id.
ELSEWHERE = {
    "B5": "idle and waiting sides sleep on semaphores: `p5_idle_costs_no_wakeup`",
    "B12": "`channel/shm/layout.h`: one writer per 128-byte line, offsets asserted at compile time",
    "B22": "`channel/shm/layout.h`: fixed-width fields, offsets asserted; `unit/wire` compares bytes written by hand",
    "B23": "`m3_a_reply_that_makes_no_sense_is_corrupt`, `m3_an_impossible_length_is_corrupt`, tests/fuzz",
    "B39": "format attributes on every function that takes one, -Wformat in the warnings",
    "B40": "`install/symbols`: the library calls nothing that ends a process or prints",
    "B41": "tests/multi, tests/fault and tests/legacy run real processes",
    "H27": "`install/pkg_config`, `install/find_package`: `examples/domain.c`, built against the installed library alone",
    "P9": "what a dead reader had pinned is released: nobody pins a block of a KV cache any more. Its memory has one "
          "writer, the owner (channel/memory/pool/kv_blocks.h); a dead reader leaves nothing, and the blocks of a dead owner live "
          "with who has them. Pins, and the dead ones' rows, are those of pools",
    "S5": "and `model_reference/check_logits.py` against numpy; for ranks as processes "
          "`s5_tokens_are_the_same_for_every_world_size`",
}
NAME = re.compile(r"cmocka_unit_test\w*\(\s*(\w+)|def (test_\w+)|static void (\w+)\(void \*\*")


def row_ids():
    return [f"{letter}{n}" for letter, count in COUNTS.items() for n in range(1, count + 1)]


def tests_by_row():
    found = collections.defaultdict(dict)
    known = {row.lower() for row in row_ids()}
    for path in sorted(TESTS.rglob("*")):
        if path.suffix not in (".c", ".py") or path.name == "rows.py":
            continue
        for match in NAME.finditer(path.read_text()):
            name = next(group for group in match.groups() if group)
            for part in name.split("_"):
                if part in known:
                    found[part.upper()].setdefault((str(path.relative_to(TESTS)), name))
                elif part != "test":
                    break
    return found


def page():
    found = tests_by_row()
    lines = [
        "# Rows and tests",
        "",
        "Made by `tests/rows.py write`; a test fails when it is out of date. Rows without a test are named with the reason, or",
        "with the place that shows them.",
    ]
    for letter, count in COUNTS.items():
        lines += ["", f"## {letter}: {TITLES[letter]}"]
        table, absent = [], []
        for number in range(1, count + 1):
            row = f"{letter}{number}"
            shown = [f"`{name}` ({file})" for file, name in found.get(row, {})]
            if row in ELSEWHERE:
                shown.append(ELSEWHERE[row])
            if shown:
                table.append(f"| {row} | {'; '.join(shown)} |")
            else:
                absent.append(row)
        if table:
            lines += ["", "| row | shown by |", "|---|---|"] + table
        if absent:
            lines += ["", "Not yet: " + ", ".join(absent) + "."]
    return "\n".join(lines) + "\n"


def main():
    file = TESTS / "ROWS.md"
    if sys.argv[1:] == ["write"]:
        file.write_text(page())
    elif sys.argv[1:] == ["check"]:
        if not file.exists() or file.read_text() != page():
            sys.exit("tests/ROWS.md is not what the tests' names say: run tests/rows.py write")
    else:
        sys.exit(__doc__)


main()
