#!/usr/bin/python3
"""The fields of proto/executor.proto below 1000 are MindIE-LLM's: number, name, type, packing.

contract.txt has them, one message or enum in a paragraph. Numbers from 1000 up are Coxswain's, and are left out; of
enums only ExecuteType has such. tests/unit/wire_messages_test.c compares the bytes.
"""

import pathlib
import re
import sys

TREE = pathlib.Path(__file__).resolve().parent
OWN_FIRST = 1000
WORD = re.compile(r'\[[^]]*\]|map<[^>]*>|"[^"]*"|[\w.]+|[{}=;]')


def paragraphs(text):
    """The name of each message and enum, and its lines, in the order of the numbers."""
    names, kinds, made, statement = [], [], {}, []
    for word in WORD.findall(re.sub(r"//[^\n]*", "", text)):
        if word == "{":
            kinds.append(statement[0])
            names.append(statement[1])
        elif word == "}":
            kinds.pop()
            names.pop()
        elif word == ";":
            owner = ".".join(name for name, kind in zip(names, kinds, strict=True) if kind != "oneof")
            number = int(statement[statement.index("=") + 1]) if kinds else OWN_FIRST
            if number < OWN_FIRST or (kinds[-1:] == ["enum"] and owner != "ExecuteType"):
                made.setdefault(owner, []).append((number, line(statement, kinds[-1], number)))
        else:
            statement.append(word)
            continue
        statement = []
    return {name: [text for _, text in sorted(lines)] for name, lines in made.items()}


def line(statement, kind, number):
    if kind == "enum":
        return f"{statement[0]} {number}"
    name, of = statement[statement.index("=") - 1], statement[statement.index("=") - 2]
    many = {"repeated": "packed " if "[packed=true]" in "".join(statement) else "repeated "}.get(statement[0], "")
    return f"{number} {name} {many}{of.replace(' ', '')}{' (oneof)' if kind == 'oneof' else ''}"


def main():
    is_so = paragraphs((TREE.parent.parent / "proto" / "executor.proto").read_text())
    problems = []
    for paragraph in (TREE / "contract.txt").read_text().split("\n\n"):
        name, *lines = paragraph.splitlines()
        if is_so.get(name) != lines:
            problems += [f"{name}: {text}" for text in sorted(set(lines) ^ set(is_so.get(name, [])))]
    print("\n".join(problems) or "the fields of MindIE-LLM are as they were")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
