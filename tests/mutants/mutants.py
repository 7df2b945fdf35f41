#!/usr/bin/python3
"""Puts one fault at a time into the product, and looks which test finds it.

Usage: mutants.py draw [--count N] [--seed S]   writes list.tsv anew
       mutants.py cover [--tier TIER]           which test reaches which line; writes build/mutants/covers.json
       mutants.py run [--limit MINUTES]         tries what list.tsv has no verdict for, and writes the verdicts
       mutants.py report                        the score; fails if a fault of list.tsv cannot be put in any more

list.tsv has a line for each fault: file, function, which of the function's lines with this text, the line before and
after, verdict. A verdict is the name of the test that found the fault, `survived`, `unreached` (no test of the tier that
`cover` ran gets to the line), or `equal: REASON` after a person has looked. Verdicts go with the code: a fault in a
function that has changed since is tried again when its verdict is removed.

Everything happens in a copy of the committed tree under build/mutants. A test that fails is run once more: a fault
counts as found when the test fails twice. Tests are run in the order of their recorded times (tests/times.txt), those
that reach the line alone, if `cover` was run; until one fails.
"""

import argparse
import collections
import json
import os
import random
import re
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests"))
import tiers  # noqa: E402

LIST = os.path.join(ROOT, "tests", "mutants", "list.tsv")
PLACE = os.path.join(ROOT, "build", "mutants")
COVERS = os.path.join(PLACE, "covers.json")
FOLDERS = ("channel", "coordinator", "worker")
SURVIVED = "survived"
UNREACHED = "unreached"
TIERS = ("quick", "all")
# Of a test's recorded time, and at least: a fault may make it hang.
TIMES_MAX, SECONDS_MIN = 10, 60
# Tests that a fault in the product is not looked for with: of the text of the tree, of the time of a build.
NOT_ASKED = re.compile(r"^(tree|docs|install|bench|fuzz/|unit/tiers|python/(lint|packaging|docs)|vllm|model)")

# What a line becomes: (what is looked for, what stands there instead).
OPERATORS = [
    (r"(?<![<>=!-])<(?![<=])", "<="), (r"<=", "<"), (r"(?<![->=])>(?![>=])", ">="), (r"(?<![>])>=", ">"),
    (r"==", "!="), (r"!=", "=="), (r"&&", "||"), (r"\|\|", "&&"),
    (r"(?<=[\w)\]] )\+(?= [\w(])", "-"), (r"(?<=[\w)\]] )-(?= [\w(])", "+"),
    (r"\btrue\b", "false"), (r"\bfalse\b", "true"),
    (r"(?<=[ (\[])0(?=[;,)\]])", "1"), (r"(?<=[ (\[])1(?=[;,)\] ])", "2"),
    (r"(?<=return )r(?=;)", "0"), (r"(?<=if \()(?=[\w>.-]+(?:\)| &&| \|\|))", "!"), (r"(?<=if \()!", ""),
    (r"\+\+(?=[;)])", ""), (r"(?<=return )(?=\w+\()", "!"), (r"\bcontinue\b", "break"),
]
# A call whose value nobody uses: the whole line goes.
CALL = re.compile(r"^\s+[a-z]\w+(\(.*\)|->\w+\(.*\));$")

Fault = collections.namedtuple("Fault", "file function nth before after verdict")


def run(command, **more):
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, **more)


def lines_of(path):
    with open(path) as file:
        return file.read().split("\n")


def code_of(lines):
    """The lines with what is in comments, in string and character literals blanked out."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'",
                  lambda match: re.sub(r"[^\n]", "~", match.group()), "\n".join(lines), flags=re.S)
    return text.split("\n")


def functions_of(lines):
    """(name, first line, last line + 1) of each function; clang-format puts its braces in column 0."""
    name, begin = None, None
    for number, line in enumerate(lines):
        match = re.match(r"^(?![#/ }])[\w\s*]*?\b(\w+)\(", line)
        if match:
            name = match.group(1)
        elif line == "{" and name:
            begin = number + 1
        elif line.startswith("}") and begin is not None:
            yield name, begin, number
            name, begin = None, None


def candidates_of(path):
    lines = lines_of(os.path.join(ROOT, path))
    code = code_of(lines)
    for function, begin, end in functions_of(lines):
        for number in range(begin, end):
            nth = lines[begin:number].count(lines[number])
            for pattern, other in OPERATORS:
                for match in re.finditer(pattern, code[number]):
                    after = lines[number][:match.start()] + other + lines[number][match.end():]
                    yield Fault(path, function, nth, lines[number], after, "")
            if CALL.match(code[number]) and "cox_fault_point" not in code[number]:
                yield Fault(path, function, nth, lines[number], "", "")


def read_list():
    with open(LIST) as file:
        rows = [line.rstrip("\n").split("\t") for line in file if not line.startswith("#")]
    return [Fault(row[0], row[1], int(row[2]), row[3], row[4], row[5]) for row in rows]


def write_list(faults):
    with open(LIST + ".new", "w") as file:
        file.write("# file\tfunction\tnth\tbefore\tafter\tverdict; see mutants.py\n")
        for fault in faults:
            file.write("\t".join(map(str, fault)) + "\n")
    os.replace(LIST + ".new", LIST)


def find(root, fault):
    """The number of the line that the fault changes; None: it is gone."""
    path = os.path.join(root, fault.file)
    lines = lines_of(path) if os.path.exists(path) else []
    for function, begin, end in functions_of(lines):
        if function == fault.function:
            found = [number for number in range(begin, end) if lines[number] == fault.before]
            if len(found) > fault.nth:
                return found[fault.nth]
    return None


class Tree:
    """A copy of the committed tree, configured."""

    def __init__(self, name, cflags=""):
        self.root = os.path.join(PLACE, name)
        self.build = os.path.join(self.root, "build", "test")
        if not os.path.isdir(self.root):
            os.makedirs(PLACE, exist_ok=True)
            subprocess.run(["git", "clone", "-q", "--shared", ROOT, self.root], check=True)
        subprocess.run(["git", "fetch", "-q", "origin"], cwd=self.root, check=True)
        head = run(["git", "rev-parse", "HEAD"], cwd=ROOT).stdout.strip()
        subprocess.run(["git", "reset", "-q", "--hard", head], cwd=self.root, check=True)
        # A fault may leave a variable or a function that nothing uses.
        subprocess.run(["cmake", "--preset", "test", "-D", "COX_WERROR=OFF", "-D", "CMAKE_C_FLAGS=" + cflags],
                       cwd=self.root, check=True, stdout=subprocess.DEVNULL)

    def make(self, *targets):
        return run(["ninja", *targets], cwd=self.build).returncode == 0

    def tests(self):
        answer = run(["ctest", "--show-only=json-v1", "-L", "^tier-(%s)$" % "|".join(TIERS)], cwd=self.build)
        return {test["name"]: test for test in json.loads(answer.stdout)["tests"]
                if not NOT_ASKED.match(test["name"])}

    def target(self, test):
        """What has to be built for a test; None: all."""
        program = test["command"][0]
        return os.path.relpath(program, self.build) if program.startswith(self.build + "/tests/test_unit") else None

    def passes(self, name, seconds, **environment):
        status = run(["ctest", "-R", "^%s$" % re.escape(name), "--timeout",
                      str(int(max(SECONDS_MIN, TIMES_MAX * seconds)))], cwd=self.build,
                     env={**os.environ, **environment}).returncode
        return status == 0

    def put(self, fault):
        """Returns what undoes it; None: the line is gone."""
        number = find(self.root, fault)
        if number is None:
            return None
        path = os.path.join(self.root, fault.file)
        lines = lines_of(path)

        def write(text):
            with open(path, "w") as file:
                file.write(text)

        before = "\n".join(lines)
        lines[number] = fault.after
        write("\n".join(lines))
        return lambda: write(before)

    def object(self, file):
        """The target that compiles a file."""
        with open(os.path.join(self.build, "compile_commands.json")) as commands:
            for entry in json.load(commands):
                if entry["file"] == os.path.join(self.root, file):
                    return os.path.relpath(os.path.join(entry["directory"], entry["output"]), self.build)
        return None

    def machine_code(self, target):
        """What the file compiles to; None: it does not compile."""
        if not self.make(target):
            return None
        return run(["objdump", "-dr", "-s", "-j", ".text", "-j", ".rodata", "-j", ".data", "-j", "cox_hot",
                    os.path.join(self.build, target)]).stdout


def command_draw(options):
    files = run(["git", "ls-files", "--", *("%s/*.c" % folder for folder in FOLDERS)], cwd=ROOT).stdout.split()
    dice = random.Random(options.seed)
    candidates = [fault for file in files for fault in candidates_of(file)]
    dice.shuffle(candidates)
    tree, drawn, originals = Tree("tree"), [], {}
    for fault in candidates:
        if len(drawn) == options.count:
            break
        target = tree.object(fault.file)
        if not target:
            continue
        if target not in originals:
            originals[target] = tree.machine_code(target)
        undo = tree.put(fault)
        code = tree.machine_code(target)
        undo()
        # What does not compile, or compiles to the same, is no fault.
        if code is not None and code != originals[target]:
            drawn.append(fault)
    write_list(sorted(drawn))
    print("%d of %d candidates drawn" % (len(drawn), len(candidates)))


def covered_lines(folder, tree):
    """What the .gcda files below a folder tell of lines, "file:line", and of branches, "file:line:index": two
    dictionaries to whether it was run."""
    lines, branches = {}, {}
    for path, _, names in os.walk(folder):
        data = [name for name in names if name.endswith(".gcda")]
        where = os.path.join("/", os.path.relpath(path, folder))
        for name in data:
            notes = os.path.join(where, name[:-5] + ".gcno")
            if os.path.exists(notes) and not os.path.exists(os.path.join(path, name[:-5] + ".gcno")):
                os.symlink(notes, os.path.join(path, name[:-5] + ".gcno"))
        if not data:
            continue
        answer = run(["gcov", "--json-format", "--stdout", "--branch-probabilities", *data], cwd=path)
        for text in answer.stdout.splitlines():
            for file in json.loads(text)["files"] if text.startswith("{") else ():
                relative = os.path.relpath(os.path.join(path, file["file"]), tree.root)
                if not relative.startswith(FOLDERS):
                    continue
                for line in file["lines"]:
                    place = "%s:%d" % (relative, line["line_number"])
                    lines[place] = lines.get(place) or line["count"] > 0
                    for index, branch in enumerate(line["branches"]):
                        side = "%s:%d" % (place, index)
                        branches[side] = branches.get(side) or branch["count"] > 0
    return lines, branches


def command_cover(options):
    tree = Tree("cover", "--coverage -fprofile-update=atomic -O1")
    if not tree.make():
        sys.exit("the tree with --coverage does not build: ninja -C %s" % tree.build)
    times, tests = tiers.record(), tree.tests()
    reached, branches = collections.defaultdict(list), {}
    for name in sorted(tests, key=lambda name: times.get(name, tiers.UNRECORDED)):
        if options.tier != "all" and "tier-" + options.tier not in str(tests[name]):
            continue
        folder = os.path.join(PLACE, "gcda")
        subprocess.run(["rm", "-rf", folder], check=True)
        if not tree.passes(name, 3 * times.get(name, tiers.UNRECORDED), GCOV_PREFIX=folder):
            print("%s fails with --coverage: its lines count all the same" % name, flush=True)
        lines, more = covered_lines(folder, tree)
        for line, was_run in lines.items():
            reached[line] += [name] if was_run else []
        for branch, was_run in more.items():
            branches[branch] = branches.get(branch) or was_run
        print("%-40s %6d lines; of all %s" % (name, sum(lines.values()), ", ".join(
            "%d of %d %s (%.1f %%)" % (sum(map(bool, all_of)), len(all_of), what,
                                       100 * sum(map(bool, all_of)) / len(all_of))
            for what, all_of in (("lines", reached.values()), ("branches", branches.values())) if all_of)), flush=True)
    with open(COVERS, "w") as file:
        json.dump(reached, file)


def verdict(tree, tests, times, reaching):
    """Which test finds the fault that is in the tree."""
    built_all = False
    for name in sorted(set(reaching) & set(tests), key=lambda name: times.get(name, tiers.UNRECORDED)):
        target = tree.target(tests[name])
        if target is None and not built_all:
            if not tree.make():
                return "does not build"
            built_all = True
        if target is not None and not built_all:
            tree.make(target)
        seconds = times.get(name, tiers.UNRECORDED)
        if not tree.passes(name, seconds) and not tree.passes(name, seconds):
            return name
    return SURVIVED


def command_run(options):
    end = time.monotonic() + 60 * options.limit
    faults, tree, times = read_list(), Tree("tree"), tiers.record()
    if not tree.make():
        sys.exit("the tree does not build: ninja -C %s" % tree.build)
    tests = tree.tests()
    covers = None
    if os.path.exists(COVERS):
        with open(COVERS) as file:
            covers = json.load(file)
    for index, fault in enumerate(faults):
        if fault.verdict or time.monotonic() > end:
            continue
        number = find(tree.root, fault)
        undo = tree.put(fault)
        if not undo:
            print("gone: %s %s: %s" % (fault.file, fault.function, fault.before.strip()), flush=True)
            continue
        reaching = covers.get("%s:%d" % (fault.file, number + 1), []) if covers else list(tests)
        found = verdict(tree, tests, times, reaching) if reaching else UNREACHED
        undo()
        faults[index] = fault._replace(verdict=found)
        write_list(faults)
        print("%s %s: %s -> %s: %s" % (fault.file, fault.function, fault.before.strip(), fault.after.strip(), found),
              flush=True)


def command_report(_):
    faults = read_list()
    gone = [fault for fault in faults if find(ROOT, fault) is None]
    equal = sum(fault.verdict.startswith("equal") for fault in faults)
    survived = [fault for fault in faults if fault.verdict in (SURVIVED, UNREACHED)]
    tried = sum(bool(fault.verdict) for fault in faults) - equal
    print("%d faults: %d tried, %d found, %d survived or unreached, %d equal, %d gone" %
          (len(faults), tried, tried - len(survived), len(survived), equal, len(gone)))
    for fault in survived:
        print("%s: %s %s: %s -> %s" % (fault.verdict, fault.file, fault.function, fault.before.strip(),
                                       fault.after.strip()))
    for fault in gone:
        print("gone: %s %s: %s" % (fault.file, fault.function, fault.before.strip()))
    return 1 if gone else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw")
    draw.add_argument("--count", type=int, default=200)
    draw.add_argument("--seed", type=int, default=41)
    commands.add_parser("cover").add_argument("--tier", choices=TIERS, default="all")
    commands.add_parser("run").add_argument("--limit", type=float, default=60, metavar="MINUTES")
    commands.add_parser("report")
    options = parser.parse_args()
    sys.exit(globals()["command_" + options.command](options))


if __name__ == "__main__":
    main()
