#!/usr/bin/python3
"""Writes the reference of the C headers as Markdown, a page each: c_reference.py FOLDER

Takes the public headers from include/coxswain/ and what these include. A page has the comment on
top of the header, which is its contract, and then its declarations with their comments, as they
stand in the header. Declarations under COX_INTERNAL are left out. Comments are prose, lists with
two more columns, and listings: the latter two are shown as they stand.
"""

import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
PUBLIC = ("coxswain.h", "memory.h", "ipc.h")
# Written by programs, or without declarations of a user.
LEFT_OUT = ("channel/base/version.h", "proto/executor.pb-c.h")


def headers():
    """Paths of the included headers, in order of the public ones that include them."""
    found = []
    for public in PUBLIC:
        with open(os.path.join(ROOT, "include", "coxswain", public), encoding="utf-8") as file:
            for path in re.findall(r'^#include "([^"]+)"', file.read(), re.M):
                if path not in found and path not in LEFT_OUT:
                    found.append(path)
    # Those that a public header includes and that have public functions of their own.
    for path in list(found):
        with open(os.path.join(ROOT, path), encoding="utf-8") as file:
            text = file.read()
        for other in re.findall(r'^#include "([^"]+)"', text, re.M):
            other = os.path.normpath(os.path.join(os.path.dirname(path), other))
            if other not in found and other not in LEFT_OUT and "idioms" not in other:
                found.append(other)
    return found


def without_internal(text):
    kept, depth, hidden = [], 0, None
    for line in text.split("\n"):
        if re.match(r"#\s*if", line):
            depth += 1
            if hidden is None and re.match(r"#ifdef COX_INTERNAL", line):
                hidden = depth
        if hidden is None:
            kept.append(line)
        if re.match(r"#\s*endif", line):
            if hidden == depth:
                hidden = None
            depth -= 1
    return "\n".join(kept)


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
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        text = file.read()
    top = re.match(r"/\*.*?\*/", text, re.S)
    contract = plain(top[0]) if top else ""
    rest = without_frame(without_internal(text[len(top[0]):])).strip("\n")
    rest = re.sub(r"\n{3,}", "\n\n", rest)
    rest = re.sub(r"^COX_PUBLIC ", "", rest, flags=re.M)
    functions = re.findall(r"^[a-z][\w *]*?\b(cox_\w+)\(", rest, re.M)
    lines = ["# %s" % path, "", "```text", contract, "```", ""]
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
                   "Programs include `<coxswain/coxswain.h>`,\n`<coxswain/memory.h>` or "
                   "`<coxswain/ipc.h>`; the paths below are not part of the interface.\n\n")
        for name, path in names:
            file.write("* [%s](%s.md)\n" % (path, name))


if __name__ == "__main__":
    main()
