#!/usr/bin/python3
"""Checks what a page of the documentation says of other files, without building anything.

Usage: links.py SOURCE_DIR

  * A relative link leads to a file that exists, and its #part to a heading there.
  * A source that a page names, as `executor/core.h`, is in the tree: with these folders, at least, as the end of its path.
  * docs/README.md, the table of contents, has every page of docs/.
  * README.md has at most 1,300 words, SECURITY.md 1,500; docs/comparison.md 600 and docs/sglang.md 1,200 beside their tables.
    Rows of the comparison name tests that there are.
  * A page that says "pip install" says before how to make a virtual environment: Debian's own Python refuses it elsewhere.
  * Texts in docs/troubleshooting.md, first column, are those of the sources.
  * Every error text of the sources leads to an entry there (errors.py).
"""

import glob
import os
import re
import sys

import errors

WORDS_MAX = {"README.md": 1300, "SECURITY.md": 1500, "docs/comparison.md": 600, "docs/sglang.md": 1200}
# Their tables count.
WHOLE = ("README.md", "SECURITY.md")
LINK = re.compile(r"!?\[(?:[^\]\\]|\\.)*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
SOURCE = re.compile(r"`((?:\w[\w.-]*/)*\w[\w.-]*\.(?:[ch]|py|proto|cmake))`")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
PRODUCT = ("channel", "coordinator", "engine", "memory", "program", "proto", "worker")
FOLDERS = (*PRODUCT, "nodes", "include", "tests", "examples", "models", "packaging")
PIECE = re.compile(r'"(?:[^"\\\n]|\\.)*"|\bPRI\w+')
# Adjacent literals, with the macros of inttypes.h and the like between them.
MERGED = re.compile(r'"(?:[^"\\\n]|\\.)*"(?:\s*(?:"(?:[^"\\\n]|\\.)*"|\bPRI\w+|\b[A-Z][A-Z_]+'
                    r'(?:\([A-Z_0-9]+\))?))*')
CONVERSION = re.compile(r"%[-#0 +']*[\d*]*(?:\.[\d*]*)?(?:hh|h|ll|l|z|j|t)?[a-zA-Z]?")


def anchor(heading):
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text):
    return {anchor(line) for line in re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.M)}


def pages(source):
    found = []
    for pattern in ("*.md", "docs/*.md", "python/*.md", "tools/**/*.md", *(top + "/**/*.md" for top in FOLDERS)):
        found += glob.glob(os.path.join(source, pattern), recursive=True)
    return sorted(found)


def broken_links(source):
    texts = {}
    for page in pages(source):
        with open(page, encoding="utf-8") as file:
            texts[page] = file.read()
    wrong = []
    for page, text in texts.items():
        for target in LINK.findall(FENCE.sub("", text)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, part = target.partition("#")
            there = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
            if not os.path.exists(there):
                wrong.append("%s: %s does not exist" % (page, target))
            elif part and there in texts and part not in anchors(texts[there]):
                wrong.append("%s: %s has no such heading" % (page, target))
    return wrong


def missing_sources(source):
    known = ["/" + os.path.relpath(path, source) for top in (*FOLDERS, "python", "tools", "docs")
             for path in glob.glob(os.path.join(source, top, "**", "*.*"), recursive=True)]
    wrong = []
    for page in pages(source):
        with open(page, encoding="utf-8") as file:
            names = set(SOURCE.findall(FENCE.sub("", file.read())))
        wrong += ["%s: there is no file %s" % (page, name) for name in sorted(names)
                  if not name.startswith("sys/") and not any(path.endswith("/" + name) for path in known)]
    return wrong


def missing_pages(source):
    contents = os.path.join(source, "docs", "README.md")
    with open(contents, encoding="utf-8") as file:
        listed = {target.partition("#")[0] for target in LINK.findall(file.read())}
    return ["docs/README.md does not have %s" % os.path.basename(page)
            for page in sorted(glob.glob(os.path.join(source, "docs", "*.md")))
            if page != contents and os.path.basename(page) not in listed]


def long_pages(source):
    wrong = []
    for page, words_max in WORDS_MAX.items():
        with open(os.path.join(source, page), encoding="utf-8") as file:
            text = file.read()
        if page not in WHOLE:
            text = re.sub(r"^\|.*$", "", text, flags=re.M)
        if len(text.split()) > words_max:
            wrong.append("%s has %d words, over %d" % (page, len(text.split()), words_max))
    return wrong


def rows_without_proof(source):
    """Of the table in docs/comparison.md: the last column has a page, or a test that has been timed."""
    with open(os.path.join(source, "tests", "times.txt"), encoding="utf-8") as file:
        known = set(re.findall(r"\b\w+/\w+\b", file.read()))
    with open(os.path.join(source, "docs", "comparison.md"), encoding="utf-8") as file:
        proofs = re.findall(r"^\| (?!Coxswain)(.*?) \|.*\| ([^|]*) \|$", file.read(), re.M)
    wrong = ["docs/comparison.md has %d rows" % len(proofs)] if len(proofs) < 5 else []
    for row, proof in proofs:
        tests = re.findall(r"`([^`]+)`", proof)
        if not tests and not LINK.search(proof):
            wrong.append("docs/comparison.md: no proof of '%s'" % row)
        wrong += ["docs/comparison.md: there is no test %s" % test for test in tests if test not in known]
    return wrong


def refused_installs(source):
    wrong = []
    for page in pages(source):
        with open(page, encoding="utf-8") as file:
            before, install, _ = file.read().partition("pip install")
        if install and "python3 -m venv" not in before and not page.endswith("CHANGELOG.md"):
            wrong.append("%s: no python3 -m venv before its first pip install" % page)
    return wrong


def plain(text):
    text = CONVERSION.sub("…", text.replace('\\"', '"'))
    return re.sub(r"…+", "…", re.sub(r"\s+", " ", text))


def source_texts(source):
    found = []
    for top in PRODUCT:
        for path in glob.glob(os.path.join(source, top, "**", "*.[ch]"), recursive=True):
            with open(path, encoding="utf-8") as file:
                code = file.read()
            for merged in MERGED.findall(code):
                found.append(plain("".join(piece[1:-1] if piece[0] == '"' else "d"
                                           for piece in PIECE.findall(merged))))
    return "\n".join(found)


def foreign_texts(source):
    with open(os.path.join(source, "docs", "troubleshooting.md"), encoding="utf-8") as file:
        rows = re.findall(r"^\| `([^`]+)` \|", file.read(), re.M)
    if len(rows) < 50:
        return ["docs/troubleshooting.md: only %d texts" % len(rows)]
    known = source_texts(source)
    return ["docs/troubleshooting.md: no source says `%s`" % row for row in rows
            if plain(row) not in known]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    source = os.path.abspath(sys.argv[1])
    wrong = (broken_links(source) + missing_sources(source) + missing_pages(source) + long_pages(source) +
             rows_without_proof(source) + refused_installs(source) + foreign_texts(source) +
             errors.entries(source)[1])
    print("\n".join(wrong) or "%d pages" % len(pages(source)))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
