"""columns.py: no line of C or of a .proto is longer than 100 columns, comments included.

A line with a string literal may be longer: texts are not broken, so that a message is found by its words.
Fields of a struct have their comment above them. Run by CTest, or by hand: python3 tests/tree/columns.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("channel", "coordinator", "engine", "examples", "include", "memory", "program", "proto", "tests", "worker")
COLUMN_MAX = 100


def check(files):
    problems = []
    for path, text in files.items():
        depth = 0
        for number, line in enumerate(text.split("\n"), 1):
            if len(line) > COLUMN_MAX and '"' not in line:
                problems.append(f"{path}:{number}: {len(line)} columns, {COLUMN_MAX} at most")
            opened = re.match(r"\s*(typedef )?(struct|union)\b[^;()=]*\{", line)
            if depth and re.match(r"\s+[\w*][^/\"(]*;\s*/\*", line):
                problems.append(f"{path}:{number}: the comment of a field stands above it")
            if opened or depth:
                depth += line.count("{") - line.count("}")
    return problems


def main():
    files = {str(path.relative_to(ROOT)): path.read_text()
             for folder in FOLDERS for pattern in ("*.[ch]", "*.proto")
             for path in sorted((ROOT / folder).rglob(pattern))}
    problems = check(files)
    for wrong in ("/* " + "word " * 20 + "*/\n", "struct a {\n    int b; /* of c */\n};\n"):
        if not check({"wrong.c": wrong}):
            problems.append(f"not found: {wrong}")
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(files)} files")


main()
