"""Writes the reference of the Python package from its docstrings: python_reference.py OUTPUT

The package has to be importable: PYTHONPATH=build/test/python.
"""

import dataclasses
import inspect
import pathlib
import re
import sys

import coxswain

# Made by the package alone.
LENT = {
    "Batch",
    "Block",
    "Future",
    "Import",
    "InitRequest",
    "Message",
    "Pool",
    "Queue",
    "RankGroup",
    "Request",
}

HEAD = """# Reference of the Python package

Made from the docstrings by tools/python_reference.py; [python.md](python.md) explains the package.
"""


def paragraph(text: str) -> str:
    """A docstring as Markdown: a `::` begins an indented example, which Markdown knows too."""
    text = inspect.cleandoc(text)
    text = re.sub(r"^::\n\n", "", text, flags=re.M)
    return re.sub(r"::$", ":", text, flags=re.M)


def signature(value: object) -> str:
    try:
        text = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    defaults = re.sub(r"= '(\w*)'", r"= \1", text)
    return re.sub(r"['\"]", "", defaults).replace("self, ", "").replace("(self)", "()")


def source(cls: type) -> str:
    """inspect.getsource looks where a class is imported from."""
    begin = re.compile(rf"^class {cls.__name__}\b.*?(?=^\S|\Z)", re.M | re.S)
    folder = pathlib.Path(coxswain.__file__).parent
    found = (begin.search(path.read_text()) for path in sorted(folder.glob("_internal/*.py")))
    return next(match[0] for match in found if match)


def field_notes(cls: type) -> dict[str, str]:
    """The comments `#: ...` above the fields of a dataclass."""
    notes: dict[str, str] = {}
    note = ""
    for line in source(cls).splitlines():
        line = line.strip()
        if line.startswith("#: "):
            note = line[3:]
        elif match := re.match(r"(\w+): ", line):
            notes[match[1]] = note
            note = ""
    return notes


def describe_class(name: str, cls: type) -> list[str]:
    lines = [f"### {name}", "", paragraph(cls.__doc__ or ""), ""]
    if dataclasses.is_dataclass(cls):
        notes = field_notes(cls)
        for field in dataclasses.fields(cls):
            kind = str(field.type).replace("|", "or")
            note = notes.get(field.name, "")
            lines.append(f"* `{field.name}`: {kind}" + (f"; {note}" if note else ""))
        return [*lines, ""]
    if not issubclass(cls, BaseException) and "__init__" in vars(cls) and name not in LENT:
        lines += [f"`{name}{signature(cls)}`", ""]
    members: dict[str, object] = {}
    for base in cls.__mro__:  # and what it has of classes that have no section of their own
        if base.__module__.startswith("coxswain") and (
            base is cls or base.__name__ not in coxswain.__all__
        ):
            members = {**members, **{k: v for k, v in vars(base).items() if k not in members}}
    for member, value in members.items():
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            text = paragraph(value.__doc__ or "").replace("\n", "\n  ")
            lines += [f"* `{member}`: {text}"]
        elif isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value):
            function = getattr(cls, member)
            text = paragraph(function.__doc__ or "").replace("\n", "\n  ")
            kind = "async " if inspect.iscoroutinefunction(function) else ""
            lines += [f"* `{kind}{member}{signature(function)}`  ", f"  {text}"]
    return [*lines, ""]


def main() -> None:
    groups: dict[str, list[str]] = {"Functions": [], "Classes": [], "Exceptions": []}
    for name in coxswain.__all__:
        value = getattr(coxswain, name)
        if inspect.isclass(value):
            kind = "Exceptions" if issubclass(value, BaseException) else "Classes"
            groups[kind] += describe_class(name, value)
        else:
            groups["Functions"] += [
                f"### {name}",
                "",
                f"`{name}{signature(value)}`",
                "",
                paragraph(value.__doc__ or ""),
                "",
            ]
    parts = [HEAD]
    for title, lines in groups.items():
        parts += [f"## {title}", "", *lines]
    text = "\n".join(line.rstrip() for part in parts for line in part.split("\n")).rstrip() + "\n"
    pathlib.Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
