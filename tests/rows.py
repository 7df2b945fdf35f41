#!/usr/bin/python3
"""Requirements and the tests named after them: tests/rows.py [FILE].

docs/requirements.md explains every requirement by its id. A test shows a requirement by carrying
the id in front of its name: p4_b50_late_replies... shows P4 and B50. With FILE it writes the table
of both, which is a page of the site. It fails

- when a test carries an id that is not explained, or carries it behind other words, where it counts
  for nothing;
- when a requirement has neither a test nor a reason below;
- when requirements.md, wire.md or architecture.md in docs/ names a file, a folder or a word of the
  code in backquotes that is not in the tree.
"""
import collections
import pathlib
import re
import sys

TESTS = pathlib.Path(__file__).resolve().parent
ROOT = TESTS.parent
REQUIREMENTS = ROOT / "docs" / "requirements.md"
DESCRIPTIONS = [REQUIREMENTS, ROOT / "docs" / "wire.md", ROOT / "docs" / "architecture.md"]
CODE = {".c", ".h", ".proto", ".py", ".cmake"}
# Shown, but not by a test that carries the id.
ELSEWHERE = {
    "B5": "idle and waiting sides sleep on semaphores: `p5_idle_costs_no_wakeup`",
    "B12": "`channel/shm/layout.h`: one writer per 128-byte line, offsets asserted at compile time",
    "B22": "`channel/shm/layout.h`: fixed-width fields, offsets asserted; `unit/wire_messages` compares bytes written by hand",
    "B23": "`m3_a_reply_that_makes_no_sense_is_corrupt`, `m3_an_impossible_length_is_corrupt`, tests/fuzz",
    "B39": "format attributes on every function that takes one, -Wformat in the warnings",
    "B40": "`install/symbols`: the library calls nothing that ends a process or prints",
    "B41": "tests/multi, tests/fault and tests/legacy run real processes",
    "H27": "`install/pkg_config`, `install/find_package`: `examples/domain.c`, built against the installed library alone",
    "P9": "what a dead reader had pinned is released: nobody pins a block of a KV cache any more. Its memory has one "
          "writer, the owner (include/coxswain/kv.h); a dead reader leaves nothing, and the blocks of a dead owner live "
          "with who has them. Pins, and the dead ones' rows, are those of pools",
    "S5": "and `model_reference/check_logits.py` against numpy; for ranks as processes "
          "`s5_tokens_are_the_same_for_every_world_size`",
}
NAME = re.compile(r"^[A-Z_]*TEST[A-Z_]*\(\s*(\w+)|def (test_\w+)|static void (\w+)\(void \*\*"
                  r"|@(?:\w+\.)?test\ndef (\w+)", re.M)
HEADING = re.compile(r"## ([A-Z]): (.+)")
ENTRY = re.compile(r"\*\*([A-Z]\d+[A-Z]?)\*\* ")
ID = re.compile(r"(?:[a-z]|issue)\d+[a-z]?")


def requirements():
    """Titles by letter, and the ids below each, in the order of the file."""
    titles, ids, problems = {}, collections.defaultdict(list), []
    letter = ""
    for line in REQUIREMENTS.read_text().splitlines():
        if match := HEADING.fullmatch(line):
            letter = match[1]
            titles[letter] = match[2]
        elif match := ENTRY.match(line):
            if match[1][0] != letter:
                problems.append(f"{match[1]} is under the heading of {letter or 'nothing'}")
            if match[1] in ids[match[1][0]]:
                problems.append(f"{match[1]} is explained twice")
            ids[match[1][0]].append(match[1])
    return titles, ids, problems


def tests():
    """File and name of each test."""
    for path in sorted(TESTS.rglob("*")):
        if path.suffix not in (".c", ".py") or path.name == "rows.py":
            continue
        found = [next(filter(None, match.groups())) for match in NAME.finditer(path.read_text())]
        for name in dict.fromkeys(found):
            yield str(path.relative_to(TESTS)), name


def tests_by_row(known):
    found, problems = collections.defaultdict(list), []
    for file, name in tests():
        in_front = True
        for part in name.removeprefix("test_").split("_"):
            row = part.upper()
            in_front = in_front and bool(ID.fullmatch(part))
            if in_front and row not in known:
                problems.append(f"{file}: {name}: {row} is not in docs/requirements.md")
            elif in_front and (file, name) not in found[row]:
                found[row].append((file, name))
            elif not in_front and row in known:
                problems.append(f"{file}: {name}: {row} counts in front of the name only")
    return found, problems


def tree_text():
    """The code, and the names of its files."""
    text = []
    for folder in ROOT.iterdir():
        if not folder.is_dir() or folder.name == "docs" or folder.name.startswith((".", "build")):
            continue
        for path in folder.rglob("*"):
            if path.suffix in CODE and path.is_file():
                text += [path.read_text(errors="replace"), path.name]
    return "\n".join(text)


def missing_names():
    """What the descriptions cite and the tree has not. Words in capitals stand for something."""
    code = tree_text()
    words = set(re.findall(r"\w[\w.]*", code))
    problems = []
    for description in DESCRIPTIONS:
        for name in dict.fromkeys(re.findall(r"`([\w.-][\w./-]*)`", description.read_text())):
            if "/" in name:
                there = (ROOT / name).exists()
            else:
                part = "(?<![A-Za-z0-9])" + re.escape(name) + "(?![A-Za-z0-9])"
                there = name.isupper() or name in words or re.search(part, code)
            if not there:
                problems.append(f"docs/{description.name}: `{name}` is not in the tree")
    return problems


def page():
    """The text of the table, and what is wrong."""
    titles, ids, problems = requirements()
    known = {row for rows in ids.values() for row in rows}
    found, more = tests_by_row(known)
    problems += more
    for row in ELSEWHERE:
        if row not in known:
            problems.append(f"tests/rows.py: docs/requirements.md does not explain {row}")
    lines = [
        "# Requirements and tests",
        "",
        "Made of the sources by `tests/rows.py`.",
        "[docs/requirements.md](../docs/requirements.md) explains each id. A requirement without a",
        "test is named with the reason, or with the place that shows it.",
    ]
    for letter, title in titles.items():
        lines += ["", f"## {letter}: {title}", "", "| id | shown by |", "|---|---|"]
        for row in ids[letter]:
            shown = [f"`{name}` ({file})" for file, name in found[row]]
            if row in ELSEWHERE:
                shown.append(ELSEWHERE[row])
            if not shown:
                problems.append(f"docs/requirements.md: {row} has neither test nor reason")
            lines.append(f"| {row} | {'; '.join(shown)} |")
    return "\n".join(lines) + "\n", problems


def main():
    if len(sys.argv) > 2 or sys.argv[1:] == ["--help"]:
        sys.exit(__doc__)
    text, problems = page()
    problems += missing_names()
    if sys.argv[1:]:
        pathlib.Path(sys.argv[1]).write_text(text)
    if problems:
        sys.exit("\n".join(problems))


main()
