#!/usr/bin/python3
"""What our objects import, against the list: countdown_symbols.py NM LIST SOURCES_FOLDER library.a...

Fails when an object imports a symbol that countdown_symbols.txt does not speak of, when a function named like a
constructor is called by no countdown*_test.c, or when a plain symbol has no reason.
"""
import pathlib
import re
import subprocess
import sys

CONSTRUCTOR = re.compile(r"^cox_\w+_(new|init|create|attach|start|load|open|launch|semaphores)$|^cox_launch$")
# Put there by compilers for sanitizers, coverage and position-independent code.
INSTRUMENTATION = re.compile(r"^(__asan_|__ubsan_|__tsan_|__sanitizer_|__lsan_|__gcov_|__llvm_|__cyg_)")


def names(nm, option, library):
    """Symbols and their types; the names of members, which end in a colon, are none."""
    text = subprocess.run([nm, option, "--format=posix", library], check=True, capture_output=True, text=True).stdout
    rows = (line.split() for line in text.splitlines() if not line.endswith(":"))
    return {(row[0], row[1]) for row in rows if len(row) >= 2}


def read_list(path):
    wrapped, plain, constructors, wrong = set(), set(), set(), []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if words[0] == "wrap" and len(words) == 2:
            wrapped.add(words[1])
        elif words[0] in ("plain", "constructor") and len(words) >= 3:
            (plain if words[0] == "plain" else constructors).add(words[1])
        else:
            wrong.append(f"{path}:{number}: neither 'wrap SYMBOL' nor 'plain|constructor NAME REASON': {line}")
    return wrapped, plain, constructors, wrong


def main():
    nm, list_path, folder, libraries = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), sys.argv[4:]
    wrapped, plain, constructors, wrong = read_list(list_path)
    wraps = (folder / "countdown_wraps.c").read_text()
    for symbol in sorted(wrapped):
        if not re.search(rf"(__wrap_|\b(?:WRAP|FAILABLE)\([^,]*, |\bTAKES_BACK\(){symbol}\b", wraps):
            wrong.append(f"{symbol} is listed as wrapped and is not in countdown_wraps.c")
    imported, defined = {}, set()
    for library in libraries:
        for symbol, _ in names(nm, "--undefined-only", library):
            imported.setdefault(symbol, pathlib.Path(library).name)
        defined |= names(nm, "--defined-only", library)
    own = {symbol for symbol, _ in defined}
    foreign = {s: l for s, l in imported.items() if s not in own and not INSTRUMENTATION.match(s)}
    if not foreign or not own:
        wrong.append("nm found nothing: wrong libraries?")
    for symbol, library in sorted(foreign.items()):
        if symbol not in wrapped | plain:
            wrong.append(f"{library} imports {symbol}: what if it fails? Wrap it or list it in countdown_symbols.txt")
    sources = "".join(path.read_text() for path in sorted(folder.glob("countdown_*_test.c")))
    for symbol, kind in sorted(defined):
        if kind == "T" and CONSTRUCTOR.match(symbol) and symbol not in constructors:
            if not re.search(rf"\b{symbol}\(", sources):
                wrong.append(f"{symbol} is called by no countdown_*_test.c")
    print("\n".join(wrong) if wrong else f"{len(foreign)} imports, {len(wrapped)} of them wrapped")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
