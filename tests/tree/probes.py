"""probes.py: the USDT probes of a program, as its ELF notes have them, are those of docs/tracing.md: probes.py PROGRAM...

Together the programs have every probe of the page, each in the section .note.stapsdt with four arguments, and no other of
the provider coxswain. Every name is object__verb, and every script of tools/*.bt uses probes that there are. Exits with 77 where
the build has none.
"""

import re
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"[a-z]+__[a-z]+$")
TYPE_STAPSDT = 3


def section(path, wanted):
    """The bytes of a section of an ELF file of 64 bits, little-endian."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        sys.exit(f"{path} is no 64-bit little-endian ELF file")
    offset, = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, offset + i * size) for i in range(count)]
    strings = headers[names][4]
    for header in headers:
        begin = strings + header[0]
        if data[begin:data.index(b"\0", begin)] == wanted:
            return data[header[4]:header[4] + header[5]]
    return b""


def notes(path):
    """[(provider, name, arguments)] of a program."""
    data, at = section(path, b".note.stapsdt"), 0
    while at + 12 <= len(data):
        name_size, size, kind = struct.unpack_from("<III", data, at)
        begin = at + 12 + (name_size + 3) // 4 * 4
        at = begin + (size + 3) // 4 * 4
        if kind == TYPE_STAPSDT:
            provider, name, arguments = data[begin + 24:begin + size].split(b"\0")[:3]
            yield provider.decode(), name.decode(), arguments.decode().split()


def documented():
    rows = re.findall(r"^\| `([a-z_]+)` \| ([^|]*) \|", (ROOT / "docs/tracing.md").read_text(), re.M)
    return {name: len(re.split(r", (?![^(]*\))", text.split(":")[0])) for name, text in rows if "__" in name}


def main():
    found = {}
    for path in map(Path, sys.argv[1:]):
        for provider, name, arguments in notes(path):
            if provider == "coxswain":
                found.setdefault(name, set()).add(len(arguments))
    if not found:
        print("this build has no probes: sys/sdt.h is missing (Debian: systemtap-sdt-dev), or COX_PROBES is OFF")
        sys.exit(77)
    table = documented()
    problems = [f"{name}: not in docs/tracing.md" for name in sorted(found.keys() - table.keys())]
    problems += [f"{name}: in docs/tracing.md, but in no program" for name in sorted(table.keys() - found.keys())]
    problems += [f"{name}: {counts} arguments, docs/tracing.md has {table[name]}" for name, counts in sorted(found.items())
                 if name in table and counts != {table[name]}]
    problems += [f"{name} is not object__verb" for name in sorted(found) if not NAME.match(name)]
    scripts = sorted((ROOT / "tools").glob("*.bt"))
    for script in scripts:
        used = set(re.findall(r"usdt:\$[12]:coxswain:([a-z_]+)", script.read_text()))
        problems += [f"tools/{script.name}: there is no probe {name}" for name in sorted(used - found.keys())]
        if not used:
            problems.append(f"tools/{script.name} uses no probe")
    if len(scripts) < 3:
        problems.append(f"tools/ has {len(scripts)} scripts for bpftrace")
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(found)} probes")


main()
