"""calls.py: the files of memory/ call each other in layers, and never in a circle.

The calls are those of the sources: a file that names a function which another file defines calls that file. Run by
CTest, or by hand: python3 tests/tree/calls.py [list]. `list` prints the layers, the lowest first.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Comments, texts and includes.
NO_CODE = re.compile(r'/\*.*?\*/|"(?:[^"\\\n]|\\.)*"', re.S)
DEFINITION = re.compile(r"^(?!static|typedef)[a-z][^;{}=()]*?\b(cox_\w+)\([^;{}]*\)\s*\{", re.M)


def calls_of(texts):
    """{file: {file that it calls}} of {file: source}, and {function: file that defines it}."""
    code = {file: NO_CODE.sub(" ", text) for file, text in texts.items()}
    defined = {name: file for file, text in code.items() for name in DEFINITION.findall(text)}
    return {file: {defined[name] for name in re.findall(r"\bcox_\w+", text) if name in defined} - {file}
            for file, text in code.items()}, defined


def layers_of(calls):
    """Lists of files, each of which calls only those before it; and what is left: circles, and what calls them."""
    layers, left = [], dict(calls)
    while layer := sorted(file for file, called in left.items() if not called & left.keys()):
        layers.append(layer)
        for file in layer:
            del left[file]
    return layers, sorted(left)


def main():
    texts = {path.name: path.read_text() for path in sorted((ROOT / "memory").rglob("*.c"))}
    calls, defined = calls_of(texts)
    layers, left = layers_of(calls)
    if left:
        sys.exit(f"memory/: these call each other in a circle, or call files that do: {', '.join(left)}")
    # The check finds a call upwards.
    name, above = next((name, file) for name, file in defined.items() if file in layers[1])
    below = min(calls[above])
    if not layers_of(calls_of({**texts, below: texts[below] + f"void x(void) {{ {name}(); }}\n"})[0])[1]:
        sys.exit(f"not found: a call of {name} in {below}")
    if sys.argv[1:] == ["list"]:
        print("\n".join(" ".join(layer) for layer in layers))
    print(f"{len(texts)} files in {len(layers)} layers")


main()
