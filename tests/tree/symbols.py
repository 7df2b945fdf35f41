"""symbols.py: each library exports what its map in include/ lists, and its headers declare just that.

    python3 tests/tree/symbols.py check [LIBRARY MEMORY_LIBRARY PROTO_LIBRARY]
    python3 tests/tree/symbols.py write

A map is the linker's version script and the list that a reviewer reads: one function a line, sorted.
debian/*.symbols lists the same names, each with the release that brought it.
A function is public if a header of include/coxswain declares it COX_PUBLIC. Those of its memory/ are
libcoxswain-memory's, all others libcoxswain's. `write` brings both lists of both libraries in line with the headers:
new names go into the last version, names that are gone are removed.
`check` compares them, and with the three libraries also their dynamic symbols and versions: LIBRARY is libcoxswain.so,
which does not link libcoxswain-memory.so; PROTO_LIBRARY is libcoxswain-proto.so, which exports coxswain__* alone.
`check` also reads the comments of the headers: what a function returns is a list, one line for each code.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The map, and its list for dpkg-gensymbols.
LIBRARIES = {
    "include/libcoxswain.map": "debian/libcoxswain0.symbols",
    "include/libcoxswain-memory.map": "debian/libcoxswain-memory0.symbols",
}
WRITE = "python3 tests/tree/symbols.py write"
# Of libcoxswain. A new function takes the place of one that can go, or this number is argued anew.
FUNCTIONS_MAX = 125


def read(path):
    return (ROOT / path).read_text()


def public_headers():
    """The paths of the public headers, from the root; generated ones are left out."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "include/coxswain").rglob("*.h"))


def functions_of(text):
    """The functions that a header declares COX_PUBLIC."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"^#define (?:.*\\\n)*.*$", "", text, flags=re.M)
    names = set()
    for declaration in re.findall(r"\bCOX_PUBLIC\b([^;{]*)", text):
        name = re.search(r"\b(\w+)\s*\(", declaration)
        if name:
            names.add(name.group(1))
    return names


def versions_of(text):
    """The map as {version: set of names}, in the order of the file."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    versions = {}
    for version, body in re.findall(r"(\w[\w.]*)\s*\{(.*?)\}[^;]*;", text, re.S):
        versions[version] = set(re.findall(r"\b(cox_\w+)\s*;", body))
    return versions


def exported(library):
    """What a library exports, as {name: version}."""
    lines = subprocess.run(["nm", "-D", "--defined-only", "--with-symbol-versions", library],
                           check=True, capture_output=True, text=True).stdout.splitlines()
    names = {}
    for line in lines:
        kind, symbol = line.split()[-2:]
        if kind != "A":  # the versions themselves
            name, _, version = symbol.partition("@@")
            names[name] = version
    return names


def needed(library):
    """The libraries that the loader loads with a library."""
    text = subprocess.run(["objdump", "-p", library], check=True, capture_output=True, text=True).stdout
    return re.findall(r"^ *NEEDED +(\S+)", text, re.M)


def map_of(header):
    return list(LIBRARIES)[header.startswith("include/coxswain/memory/")]


def compare_headers(map_, declared, versions):
    listed = set().union(*versions.values())
    problems = [f"{name}: declared COX_PUBLIC, but not in {map_}: if it is to be public, run `{WRITE}` and commit the "
                "map; if not, remove COX_PUBLIC" for name in sorted(declared - listed)]
    problems += [f"{name}: in {map_}, but none of its public headers declares it COX_PUBLIC: run `{WRITE}`, and say in CHANGELOG.md "
                 "that it is gone" for name in sorted(listed - declared)]
    return problems


def compare_library(map_, symbols, versions):
    problems = []
    expected = {name: version for version, names in versions.items() for name in names}
    for name in sorted(symbols.keys() - expected.keys()):
        problems.append(f"{name}: exported, but not in {map_}: is the library linked with the map?")
    for name in sorted(expected.keys() - symbols.keys()):
        problems.append(f"{name}: in {map_}, but not exported: define it, or remove its COX_PUBLIC and run `{WRITE}`")
    for name in sorted(symbols.keys() & expected.keys()):
        if symbols[name] != expected[name]:
            problems.append(f"{name}: exported as of {symbols[name] or 'no version'}, expected {expected[name]}: build anew")
    return problems


def compare_proto(symbols):
    problems = [f"{name}: libcoxswain-proto.so exports coxswain__* alone" for name in sorted(symbols)
                if not name.startswith("coxswain__")]
    for name in ("coxswain__execute_request__pack", "coxswain__execute_request__descriptor"):
        if name not in symbols:
            problems.append(f"{name}: not exported by libcoxswain-proto.so: see include/libcoxswain-proto.map")
    return problems


def write(map_, declared, versions):
    last = list(versions)[-1]
    listed = set().union(*versions.values())
    head = read(map_)[:read(map_).index("*/") + 3]
    parts, before = [], None
    for version, names in versions.items():
        names = names & declared | (declared - listed if version == last else set())
        lines = ["global:"] + [f"    {name};" for name in sorted(names)]
        if before is None:
            lines += ["local:", "    *;"]
        parts.append(f"{version} {{\n" + "\n".join(lines) + "\n}" + (f" {before}" if before else "") + ";\n")
        before = version
    (ROOT / map_).write_text(head + "\n".join(parts))


def debian_of(text):
    """A list of dpkg-gensymbols as {name@version: release}, without patterns and the versions themselves."""
    return dict(re.findall(r"^ (cox_\w+@\w[\w.]*) (\S+)", text, re.M))


def compare_debian(map_, text, versions):
    expected = {f"{name}@{version}" for version, names in versions.items() for name in names}
    return [f"{symbol}: not both in {map_} and {LIBRARIES[map_]}: run `{WRITE}`"
            for symbol in sorted(expected ^ debian_of(text).keys())]


def write_debian(text, versions, release):
    """Names keep the release that they have; new ones get this one."""
    known = debian_of(text)
    head, separator, proto = text.partition("\nlibcoxswain-proto")
    lines = head.split("\n")[:2]
    for version, names in versions.items():
        kept = re.search(rf"^ {version}@\S+ (\S+)", text, re.M)
        lines.append(f" {version}@{version} {kept[1] if kept else release}")
        lines += [f" {name}@{version} {known.get(f'{name}@{version}', release)}" for name in sorted(names)]
    return "\n".join(lines) + (separator or "\n") + proto


def crowded(text):
    """The lines of comments that tell of several codes in one sentence, instead of one line for each."""
    lines = []
    for comment in re.finditer(r"/\*.*?\*/", text, re.S):
        prose = re.sub(r"\n \*   [^\n]*", "", comment.group())
        if re.search(r"\bReturns\b[^.;]*\b(0|COX_[A-Z_]+)\b[^.;]*;", prose):
            lines.append(text[:comment.start()].count("\n") + 1)
    return lines


def compare_first(text, declared):
    """The 20 functions of a first program, in the comment on top of coxswain.h."""
    names = re.findall(r"\bcox_\w+", text[:text.index("*/")])
    problems = [f"coxswain.h: {name} is no public function" for name in names if name not in declared]
    return problems if len(names) == 20 else [*problems, f"coxswain.h: a first program needs 20 functions, not {len(names)}"]


def unmarked(text):
    """The functions that users see and cannot link: those that are not COX_PUBLIC."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    prototypes = re.findall(r"^(?!COX_PUBLIC|static|typedef)([a-z][^;{}#=]*?\b(cox_\w+)\s*\([^;{}]*\)[^;{}]*);", text, re.M)
    return [name for _, name in prototypes]


def self_check():
    """The comparisons find what they are there for."""
    text = ("#define COX_PUBLIC x\n/* COX_PUBLIC int cox_no(void); */\nCOX_PUBLIC const struct a *\ncox_yes(int (*f)(void));\n"
            "int cox_own(void);\n")
    assert functions_of(text) == {"cox_yes"}, functions_of(text)
    versions = versions_of("V_1 {\nglobal:\n    cox_a;\nlocal:\n    *;\n};\nV_2 {\nglobal:\n    cox_b;\n} V_1;\n")
    assert versions == {"V_1": {"cox_a"}, "V_2": {"cox_b"}}, versions
    assert compare_headers("map", {"cox_a", "cox_b"}, versions) == []
    assert len(compare_headers("map", {"cox_a", "cox_c"}, versions)) == 2
    assert compare_library("map", {"cox_a": "V_1", "cox_b": "V_2"}, versions) == []
    assert len(compare_library("map", {"cox_a": "V_2", "cox_c": "V_2"}, versions)) == 3
    assert len(compare_proto({"cox_a": ""})) == 3
    assert compare_debian(list(LIBRARIES)[0], " V_1@V_1 1\n cox_a@V_1 1\n cox_b@V_2 2\n", versions) == []
    assert len(compare_debian(list(LIBRARIES)[0], " cox_a@V_2 1\n cox_b@V_2 2\n", versions)) == 2
    assert write_debian("l\n*\n cox_a@V_1 1\n\nlibcoxswain-proto", versions, "2") == (
        "l\n*\n V_1@V_1 2\n cox_a@V_1 1\n V_2@V_2 2\n cox_b@V_2 2\nlibcoxswain-proto")
    assert unmarked("int cox_a(void);\nCOX_PUBLIC int\ncox_c(void);\n"
                    "static inline int cox_d(int x)\n{\n    return x;\n}\n") == ["cox_a"]
    assert len(compare_first("/* cox_a, cox_b */", {"cox_a"})) == 2
    assert crowded("int a;\n/* Opens. Returns 0; COX_A: no; -errno. */\n") == [2]
    assert crowded("/* Opens; closes.\n * Returns\n *   0; and\n *   COX_A: no; never\n */\n") == []


def main():
    if sys.argv[1:] != ["write"] and (sys.argv[1:2] != ["check"] or len(sys.argv) not in (2, 5)):
        sys.exit(__doc__)
    self_check()
    headers = public_headers()
    declared = {map_: set() for map_ in LIBRARIES}
    for path in headers:
        declared[map_of(path)] |= functions_of(read(path))
    if sys.argv[1] == "write":
        release = re.search(r"project\(coxswain\s+VERSION (\S+)", read("CMakeLists.txt"))[1]
        for map_, debian in LIBRARIES.items():
            write(map_, declared[map_], versions_of(read(map_)))
            (ROOT / debian).write_text(write_debian(read(debian), versions_of(read(map_)), release))
        return
    problems = []
    for number, (map_, debian) in enumerate(LIBRARIES.items(), 2):
        versions = versions_of(read(map_))
        problems += compare_headers(map_, declared[map_], versions) + compare_debian(map_, read(debian), versions)
        if len(sys.argv) > 2:
            problems += compare_library(map_, exported(sys.argv[number]), versions)
    if len(declared["include/libcoxswain.map"]) > FUNCTIONS_MAX:
        problems.append(f"libcoxswain has {len(declared['include/libcoxswain.map'])} public functions, {FUNCTIONS_MAX} at most")
    problems += compare_first(read("include/coxswain/coxswain.h"), declared["include/libcoxswain.map"])
    for path in headers:
        problems += [f"{path}: {name} is not COX_PUBLIC: users would see it, and fail to link" for name in unmarked(read(path))]
    for folder in ("channel", "coordinator", "engine", "memory", "program", "proto", "worker"):
        for path in sorted((ROOT / folder).rglob("*.h")):
            name = str(path.relative_to(ROOT))
            problems += [f"{name}: {function} is COX_PUBLIC: its place is include/coxswain/"
                         for function in sorted(functions_of(path.read_text()))]
    for path in headers:
        problems += [f"{path}:{line}: what it returns is a list after `Returns`, one line for each code"
                     for line in crowded(read(path))]
    if len(sys.argv) > 2:
        problems += compare_proto(exported(sys.argv[4]))
        problems += [f"libcoxswain links {name}: groups use no pool, queue or domain" for name in needed(sys.argv[2])
                     if name.startswith("libcoxswain-memory")]
    if problems:
        sys.exit("\n".join(problems))
    print(", ".join(f"{map_}: {len(names)} functions" for map_, names in declared.items()))


main()
