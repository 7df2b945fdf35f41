#!/usr/bin/python3
"""Every error text of the product leads to an entry of docs/troubleshooting.md.

Usage: errors.py [FILE]     with FILE: also writes the page of all texts, docs/errors.md of the site and of Debian's coxswain-doc

A text is what a program, the library or the Python package gives to a user as an error, or logs as a warning or worse.
It is found in the sources: the format of the functions of SINKS, and what Python raises. Its entry is the row of a
table of docs/troubleshooting.md whose first column it is, or has in it; else the first heading there with a rule for
it. Rules are lines of a comment below the heading:

    <!-- texts
    code COX_CORRUPT in channel            all conditions of a line hold
    code -errno text : …$                  text: a regular expression, to the end of the line
    -->

code has a word of the source's expression for the code (Python: the exception's name; `log` of log lines), in the
start of a path; both may be lists (a|b). A text without an entry, and a rule without a text, is an error; so is a text
which advises to remove what may be another program's or user's.
"""

import ast
import glob
import os
import re
import sys

PRODUCT = ("channel", "coordinator", "engine", "memory", "nodes", "program", "proto", "worker")
# Functions whose argument of that number, from 0 on, is the text or its format; and the argument that is its code, or one
# for all: `last` is a line of what a dead rank had reported, `notice` a line of a command about what goes on, `stderr`
# what is printed there without more.
SINKS = {
    "cox_fail": (2, 1),
    "cox_last_errors_add": (2, "last"),
    "cox_client_connection_refuse": (3, 2),
    "cox_client_connection_turn_away": (2, 1),
    "cox_cuda_fail": (3, 2),
    "cox_console_say": (0, "notice"),
    "error_put": (2, 1),
    "fail_corrupt": (1, "COX_CORRUPT"),
    "item_fail": (2, 1),
    "link_fail": (2, 1),
    "pull_fail": (4, 3),
    "fprintf": (1, "stderr"),
    "dprintf": (1, "stderr"),
}
# The same for lines of a log, with the argument that is the level: these count from warnings (4) up.
LOGS = {"cox_log_write": (2, 1), "cox_log_limit_write": (4, 1), "cox_console_log": (1, 0)}
# Their names look like those of sinks; what they are given is only a part of a text.
NO_SINKS = ("fail", "fail_as", "fail_no_way", "refuse", "cox_worker_fail", "cox_init_fail")
PAGE = "docs/troubleshooting.md"

STRING = r'"(?:[^"\\\n]|\\.)*"'
COMMENT = re.compile(STRING + r"|/\*.*?\*/|//[^\n]*", re.S)
TOKEN = re.compile(STRING + r"|'(?:[^'\\]|\\.)*'|[^\"'()\[\]{},?:]+|.", re.S)
PIECE = re.compile(STRING + r"|\b[A-Z]\w+")
# Of sinks, and of what looks like one.
CALL = re.compile(r"(?<![\w.>])(%s|(?:[a-z]\w*_)?(?:fail|refuse))\(" % "|".join([*SINKS, *LOGS]))
PYTHON_LOG = re.compile(r"(?:log|logger)\.(?:warning|error|exception)|warnings\.warn")
CONVERSION = re.compile(r"%[-#0 +']*[\d*]*(?:\.[\d*]*)?(?:hh|h|ll|l|z|j|t)?[a-zA-Z]")
REMOVAL = re.compile(r"(?<!to )\bremove (?:it|them|that|this|the)\b|\brm -")


def short(text):
    """What stands for names and numbers is one sign."""
    return re.sub(r"…+", "…", re.sub(r"\s+", " ", text)).strip()


def without_comments(code):
    return COMMENT.sub(lambda match: match[0] if match[0][0] == '"' else re.sub(r"[^\n]", " ", match[0]), code)


def arguments(code, begin):
    """Those of the call whose parenthesis is at `begin`."""
    depth, found = 0, [""]
    for match in TOKEN.finditer(code, begin):
        token = match[0]
        depth += (token in "([{") - (token in ")]}") if len(token) == 1 else 0
        if depth == 0:
            return [argument.strip() for argument in found]
        if token == "," and depth == 1:
            found.append("")
        elif depth > 1 or token != "(":
            found[-1] += token
    return found


def alternatives(argument):
    """The texts that an argument can be: a literal, or some with ? and : between them."""
    parts, part = [], ""
    for match in TOKEN.finditer(argument):
        if match[0] in "?:":
            parts.append(part)
            part = ""
        else:
            part += match[0]
    for part in parts + [part]:
        if '"' in part:
            pieces = [piece[1:-1] if piece[0] == '"' else "d" if piece.startswith("PRI") else "…"
                      for piece in PIECE.findall(part)]
            yield short(CONVERSION.sub("…", "".join(pieces).replace("%%", "%").replace('\\"', '"').replace("\\n", " ")))


def texts_of_c(path, code):
    code = without_comments(code)
    for match in CALL.finditer(code):
        name = match[1]
        if name not in SINKS and name not in LOGS:
            if name not in NO_SINKS:
                given = arguments(code, match.end() - 1)
                if any(argument.startswith('"') and " " in argument for argument in given):
                    yield None, None, "%s gives a text: it belongs to SINKS or NO_SINKS" % name
            continue
        given = arguments(code, match.end() - 1)
        number, at = SINKS.get(name) or LOGS[name]
        if len(given) <= number or (name in ("fprintf", "dprintf") and given[0] not in ("stderr", "STDERR_FILENO")):
            continue
        value = at if isinstance(at, str) else given[at]
        if name in LOGS and value.isdigit() and int(value) > 4:
            continue
        for text in alternatives(given[number]):
            yield (value if name in SINKS else "log"), path, text


def texts_of_python(path, code):
    """Those of exceptions, which are the last argument, and of logs, the first."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            status, argument = ast.unparse(node.exc.func).split(".")[-1], node.exc.args[-1]
        elif isinstance(node, ast.Call) and PYTHON_LOG.fullmatch(ast.unparse(node.func)) and node.args:
            status, argument = "log", node.args[0]
        else:
            continue
        for part in ast.walk(argument):
            if isinstance(part, ast.JoinedStr):
                yield status, path, short("".join(piece.value if isinstance(piece, ast.Constant) else "…"
                                                  for piece in part.values))
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield status, path, short(CONVERSION.sub("…", argument.value))


def texts(source):
    """[(code, path, text)] of all that have words of their own, and what is wrong with the sources."""
    found, wrong = set(), []
    paths = [path for top in PRODUCT for path in glob.glob(os.path.join(source, top, "**", "*.[ch]"), recursive=True)]
    for path in paths + glob.glob(os.path.join(source, "python", "coxswain", "**", "*.py"), recursive=True):
        with open(path, encoding="utf-8") as file:
            code = file.read()
        name = os.path.relpath(path, source)
        for status, where, text in (texts_of_python if path.endswith(".py") else texts_of_c)(name, code):
            if where is None:
                wrong.append("%s: %s" % (name, text))
            elif re.search(r"[A-Za-z]{2}", text):
                found.add((status, where, text))
    return sorted(found, key=lambda item: (re.sub(r"\W+", " ", item[2]).strip().lower(), item)), wrong


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


class Rule:
    def __init__(self, line, heading):
        self.line, self.heading, self.used = line, heading, False
        match = re.fullmatch(r"(?:code (\S+) ?)?(?:in (\S+) ?)?(?:text (.+))?", line)
        if not match or not any(match.groups()):
            sys.exit("%s: '%s' is no rule" % (PAGE, line))
        self.code = match[1] and re.compile(r"(?<![\w-])(?:%s)(?!\w)" % match[1])
        self.places = match[2] and tuple(match[2].split("|"))
        self.text = match[3] and re.compile(match[3])

    def fits(self, code, path, text):
        return ((not self.code or bool(self.code.search(code))) and (not self.places or path.startswith(self.places))
                and (not self.text or bool(self.text.search(text))))


def page(source):
    """The rows [(text, heading)] of its tables, and its rules, both in the page's order."""
    with open(os.path.join(source, PAGE), encoding="utf-8") as file:
        lines = file.read().split("\n")
    rows, rules, heading, inside = [], [], "", False
    for line in lines:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        row = re.match(r"\| `([^`]+)` \|", line)
        if row:
            rows.append((short(CONVERSION.sub("…", row[1])), heading))
        if inside and line != "-->":
            rules.append(Rule(line.strip(), heading))
        inside = line == "<!-- texts" or (inside and line != "-->")
    return rows, rules


def entries(source):
    """[(code, path, text, heading)] and what is wrong."""
    found, wrong = texts(source)
    rows, rules = page(source)
    placed = []
    wrong += ["%s: `%s` advises to remove something" % (path, text) for _, path, text in found if REMOVAL.search(text)]
    for code, path, text in found:
        named = [row for row in rows if row[0] in text]
        if named:
            placed.append((code, path, text, max(named, key=lambda row: len(row[0]))[1]))
            continue
        rule = next((rule for rule in rules if rule.fits(code, path, text)), None)
        if rule:
            rule.used = True
            placed.append((code, path, text, rule.heading))
        else:
            wrong.append("%s: no entry for `%s` (%s): name it in a table there, or in a rule" % (path, text, code))
    wrong += ["%s, %s: no text for the rule '%s'" % (PAGE, rule.heading, rule.line)
              for rule in rules if not rule.used]
    return placed, wrong


def index(placed):
    lines = ["# All error texts", "",
             "Each text, in alphabetical order, and where [troubleshooting](troubleshooting.md) has its cause and remedy. `…` "
             "stands for",
             "names, numbers, and what another part or the system adds. Search this page for some words of the text that you "
             "have.",
             "This page is made of the sources by `tests/docs/errors.py`.", "",
             "| text | entry |", "|---|---|"]
    done = set()
    for _, _, text, heading in placed:
        if (text, heading) not in done:
            done.add((text, heading))
            lines.append("| %s | [%s](troubleshooting.md#%s) |" %
                         ("``%s``" % text.replace("|", "\\|"), heading, anchor(heading)))
    return "\n".join(lines) + "\n"


def main():
    if len(sys.argv) > 2 or sys.argv[1:2] == ["--help"]:
        sys.exit(__doc__)
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    placed, wrong = entries(source)
    for path in sys.argv[1:]:
        with open(path, "w", encoding="utf-8") as file:
            file.write(index(placed))
    print("\n".join(wrong) or "%d texts" % len({text for _, _, text, _ in placed}))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
