"""calls.py: the files of a folder call each other in layers: no more than two of them in a circle.

The calls are those of the sources: a file that calls a function which another file of the folder defines. A function
whose name alone is used, as a pointer, is not called. Run by CTest, or by hand: python3 tests/tree/calls.py [list].
`list` prints the layers of each folder, the lowest first; files that call each other share one, joined by `+`.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("channel", "coordinator", "engine", "memory", "nodes", "program", "proto", "worker")
CIRCLE_MAX = 2
# Comments, texts and includes.
NO_CODE = re.compile(r'/\*.*?\*/|"(?:[^"\\\n]|\\.)*"', re.S)
DEFINITION = re.compile(r"^(?!static|typedef)[a-zA-Z][^;{}=()]*?\b(cox_\w+)\([^;{}]*\)\s*\{", re.M)


def calls_of(texts):
    """{file: {file that it calls}} of {file: source}, and {function: file that defines it}."""
    code = {file: NO_CODE.sub(" ", text) for file, text in texts.items()}
    defined = {name: file for file, text in code.items() for name in DEFINITION.findall(text)}
    return {file: {defined[name] for name in re.findall(r"\b(cox_\w+)\s*\(", text) if name in defined} - {file}
            for file, text in code.items()}, defined


def reached_of(calls):
    """{file: all files that it calls, also by way of others}."""
    reached = {file: set(called) for file, called in calls.items()}
    for middle in calls:
        for called in reached.values():
            if middle in called:
                called |= reached[middle]
    return reached


def layers_of(calls):
    """Lists of circles, each a sorted list of files; most have one file. A circle calls only those of lists before it."""
    reached = reached_of(calls)
    circles = {tuple(sorted({file} | {other for other in reached[file] if file in reached[other]})) for file in calls}
    layers, below = [], set()
    while left := sorted(circle for circle in circles if not below.issuperset(circle)):
        layers.append([circle for circle in left if reached[circle[0]] <= below.union(circle)])
        below |= {file for circle in layers[-1] for file in circle}
    return layers


def circles_of(calls):
    return [circle for layer in layers_of(calls) for circle in layer if len(circle) > CIRCLE_MAX]


def check_folder(folder, texts, problems):
    calls, defined = calls_of(texts)
    circles = circles_of(calls)
    problems += [f"{folder}: these call each other in a circle: {', '.join(circle)}; move what the lower ones need "
                 "into a file of its own" for circle in circles]
    # The check finds calls upwards that close a circle of three.
    reached = reached_of(calls)
    for top, below in reached.items():
        lowest = next((file for file in sorted(below) if top not in reached[file] and reached[file] <= {file}), None)
        name = next((name for name, file in defined.items() if file == top), None)
        if lowest and name and len(below) > 1 and any(lowest in reached[middle] for middle in below - {lowest}):
            changed = {**texts, lowest: texts[lowest] + f"\nvoid x(void)\n{{\n    {name}();\n}}\n"}
            if not any(top in circle and lowest in circle for circle in circles_of(calls_of(changed)[0])):
                problems.append(f"{folder}: not found: a call of {name} in {lowest}")
            return True


def self_check():
    source = {"a.c": "int cox_a(void)\n{\n    return cox_b();\n}\n", "b.c": "int cox_b(void)\n{\n    return cox_c();\n}\n",
              "c.c": "int cox_c(void)\n{\n    return 0; /* cox_a() */\n}\n"}
    assert circles_of(calls_of(source)[0]) == []
    assert circles_of(calls_of({**source, "c.c": "int cox_c(void)\n{\n    return run(cox_a);\n}\n"})[0]) == []
    assert circles_of(calls_of({**source, "c.c": "int cox_c(void)\n{\n    return cox_a();\n}\n"})[0]) == [("a.c", "b.c", "c.c")]
    assert circles_of(calls_of({**source, "b.c": "int cox_b(void)\n{\n    return cox_a();\n}\n"})[0]) == []


def main():
    self_check()
    problems, count, tried = [], 0, 0
    folders = sorted({path.parent for top in PRODUCT for path in (ROOT / top).rglob("*.c")})
    for path in folders:
        folder = str(path.relative_to(ROOT))
        texts = {file.name: file.read_text() for file in sorted(path.glob("*.c"))}
        count += len(texts)
        tried += bool(check_folder(folder, texts, problems))
        if sys.argv[1:] == ["list"]:
            print(folder)
            for layer in layers_of(calls_of(texts)[0]):
                print("   ", " ".join("+".join(circle) for circle in layer))
    if problems:
        sys.exit("\n".join(problems))
    print(f"{count} files in {len(folders)} folders; a circle that is put in is found in {tried} of them")


main()
