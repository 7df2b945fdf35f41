"""What cffi compiles the Python package from.

Usage: declarations.py FOREIGN INCLUDE_FOLDER... < PREPROCESSED > DECLARATIONS

Reads native.h as `cc -E -dD -D'__attribute__(x)=' native.h` writes it, and keeps the declarations
of the headers in the folders: of Coxswain, not of the system. Of functions with a body the
prototype. Numbers that are macros become constants, whose values the compiler fills in. FOREIGN,
foreign.h, comes first.
"""

import os
import re
import sys

# A macro that is a number: also an expression of numbers and other macros.
NUMBER = re.compile(r"#define (COX(?:PY)?_\w+) ([-+*/<>|()\w ]*\d[-+*/<>|()\w ]*)$")


def of_headers(preprocessed, folders):
    """The lines that stand in files of the folders."""
    kept, inside = [], False
    for line in preprocessed.splitlines():
        marker = re.match(r'# \d+ "([^"]*)"', line)
        if marker:
            inside = os.path.realpath(marker[1]).startswith(folders)
        elif inside:
            kept.append(line)
    return kept


def without_bodies(text):
    """The text, of functions that have a body only the prototype."""
    kept = []
    while function := re.search(r"^static inline [^;{]*\{", text, re.M):
        kept.append(
            text[: function.start()]
            + function[0].removeprefix("static inline ").rstrip("{ \n")
            + ";"
        )
        depth, end = 1, function.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = text[end:]
    return "".join([*kept, text])


def declarations(foreign, preprocessed, folders):
    lines = of_headers(preprocessed, folders)
    constants = [match[1] for match in map(NUMBER.match, lines) if match]
    text = without_bodies("\n".join(line for line in lines if line and not line.startswith("#")))
    return "\n".join([foreign, *(f"#define {name} ..." for name in dict.fromkeys(constants)), text])


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as foreign_file:
        foreign_text = foreign_file.read()
    print(
        declarations(
            foreign_text,
            sys.stdin.read(),
            tuple(os.path.realpath(folder) + os.sep for folder in sys.argv[2:]),
        )
    )
