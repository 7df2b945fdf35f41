#!/usr/bin/python3
"""Writes the reference of the C headers as Markdown, a page each: c_reference.py FOLDER

Takes the public headers, include/coxswain/. A page has the comment on top of the header, which is its
contract, and then its declarations with their comments, as they stand in the header.
"""

import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
INCLUDE = os.path.join(ROOT, "include", "coxswain")


def headers():
    """Paths of the headers with declarations: all but those that only include others."""
    names = [*sorted(os.listdir(INCLUDE)), *(f"memory/{name}" for name in sorted(os.listdir(f"{INCLUDE}/memory")))]
    return [name for name in names if name.endswith(".h") and name not in ("coxswain.h", "memory.h")]


def without_frame(text):
    """Without the include guard, the includes, and the braces of C++."""
    text = re.sub(r'#ifdef __cplusplus\n(extern "C" \{|\})\n#endif\n', "", text)
    text = re.sub(r"^#include .*\n", "", text, flags=re.M)
    text = re.sub(r"^#ifndef (COX_\w+_H)\n#define \1\n", "", text, flags=re.M)
    return re.sub(r"\n#endif\s*$", "\n", text)


def plain(comment):
    body = re.sub(r"^/\*\s?|\s*\*/$", "", comment.strip())
    return "\n".join(re.sub(r"^ ?\* ?", "", line) for line in body.split("\n")).strip("\n")


def page(path):
    with open(os.path.join(INCLUDE, path), encoding="utf-8") as file:
        text = file.read()
    top = re.match(r"/\*.*?\*/", text, re.S)
    contract = plain(top[0]) if top else ""
    rest = without_frame(text[len(top[0]):]).strip("\n")
    rest = re.sub(r"\n{3,}", "\n\n", rest)
    rest = re.sub(r"^COX_PUBLIC ", "", rest, flags=re.M)
    functions = re.findall(r"^[a-z][\w *]*?\b(cox_\w+)\(", rest, re.M)
    lines = ["# coxswain/%s" % path, "", "```text", contract, "```", ""]
    if functions:
        names = ", ".join("`%s`" % name for name in dict.fromkeys(functions))
        lines += ["Functions: %s." % names, ""]
    return "\n".join([*lines, "## Declarations", "", "```c", rest, "```", ""])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    names = []
    for path in headers():
        name = path.replace("/", "-")[:-2]
        names.append((name, path))
        with open(os.path.join(folder, name + ".md"), "w", encoding="utf-8") as file:
            file.write(page(path))
    with open(os.path.join(folder, "index.md"), "w", encoding="utf-8") as file:
        file.write("# Reference of the C headers\n\nMade from the headers by tools/c_reference.py. "
                   "Most programs include `<coxswain/coxswain.h>`,\nwhich includes all but those of "
                   "`<coxswain/memory.h>`.\n\n")
        for name, path in names:
            file.write("* [%s](%s.md)\n" % (path, name))


if __name__ == "__main__":
    main()
