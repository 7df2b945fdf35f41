#!/usr/bin/python3
"""Puts faults into the product, and looks which test finds each.

Usage: mutants.py draw [--count N] [--seed S]   writes list.tsv anew
       mutants.py cover [--tier TIER] [--commit COMMIT]
                                                line and branch coverage of the tests (sh tools/packages clang; llvm)
       mutants.py run [--limit MINUTES]         tries what list.tsv has no verdict for, and writes the verdicts
       mutants.py report                        the score; fails if a fault of list.tsv cannot be put in any more
       mutants.py cases --files RE --tests RE   which case of a test program finds which fault of some product files,
                                                and which cases find nothing that the others do not

list.tsv has a line for each fault: file, function, which of the function's lines with this text, the line before and
after, verdict. A verdict is the name of the test that found the fault, `survived`, `unreached` (no test gets to the
statement), or `equal: REASON` after a person has looked. Verdicts go with the code: a fault in a function that has changed
since is tried again when its verdict is removed.

All faults are compiled into one build, in a copy of the committed tree under build/mutants: a function has its body
once more for each of its faults, and COX_MUTANT=NUMBER in the environment of a test chooses the one that runs, in all
its processes. So a fault costs the time of the tests that reach it, and no build. Tests run in the order of their
recorded times (tests/times.txt), until one fails; a fault counts as found when the test fails with it, passes without
it, and fails with it once more. Each test has a /dev/shm and a folder for sockets of its own (this needs root), and
what it leaves running is killed. The output of a test that fails without a fault stays, in build/mutants/NAME.log.
"""

import argparse
import collections
import ctypes
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests"))
import tiers  # noqa: E402

LIST = os.path.join(ROOT, "tests", "mutants", "list.tsv")
PLACE = os.path.join(ROOT, "build", "mutants")
REACHED = os.path.join(PLACE, "reached.json")
FOLDERS = ("channel", "coordinator", "worker")
SURVIVED = "survived"
UNREACHED = "unreached"
TIERS = ("quick", "all")
# Of a test's recorded time, and at least: a fault may make it hang.
TIMES_MAX, SECONDS_MIN = 5, 40
FAULTS_MAX = 1 << 16
# A test that fails without a fault so many times is not asked.
TRIES = 2
# What the tests that each fault is tried with first take together.
SHORT_SECONDS = 30
SKIPPED = 77
# Where groups put what has a name: without the lock of a group in /dev/shm, others take its socket for a leftover.
OWN_FOLDERS = '''sockets=/tmp/coxswain-$(id -u)
mkdir -p -m 700 $sockets && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs -o mode=700 tmpfs $sockets && exec "$@"'''
PR_SET_CHILD_SUBREAPER = 36
# Tests that a fault in the product is not looked for with: of the text of the tree, of the time of a build.
NOT_ASKED = re.compile(r"^(tree|docs|install|bench|fuzz/|counts|unit/tiers|python/(packaging|docs)|vllm|model)")

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
LABEL = re.compile(r"^\s*(?!default\b)(\w+):$")
# The end of a line that the next statement may follow; the beginnings of lines that belong to a statement above.
STATEMENT_END = re.compile(r"([;{}:]|^)\s*$")
STATEMENT_PART = re.compile(r"^\s*(}|else\b|#|while\b.*;$|(case\b.*|default|\w+):$)")
# The end of an `if` or a loop that has no braces, and the statement that belongs to it.
HEADER_END = re.compile(r"(\)|\belse|\bdo)\s*$")
STATEMENT = re.compile(r"^\s*(?!while\b)[\w*(].*;\s*$")

# What every file of the product is compiled with, and the library that it calls.
CHOICE_H = """\
extern int cox_mutant_chosen;
extern unsigned char *cox_mutants_reached;
#define cox_mutant(number) (cox_mutant_chosen == (number))
#define cox_mutant_reached(number) __atomic_store_n(&cox_mutants_reached[number], 1, __ATOMIC_RELAXED)
"""
CHOICE_C = """\
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
int cox_mutant_chosen = -1;
static unsigned char kept[%d];
unsigned char *cox_mutants_reached = kept;
static __attribute__((constructor)) void choose(void)
{
    const char *chosen = getenv("COX_MUTANT"), *path = getenv("COX_MUTANTS_REACHED");
    if (chosen)
        cox_mutant_chosen = atoi(chosen);
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *map = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(kept), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map != MAP_FAILED)
        cox_mutants_reached = map;
    if (fd >= 0)
        close(fd);
}
""" % FAULTS_MAX

Fault = collections.namedtuple("Fault", "file function nth before after verdict")


def run(command, **more):
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, **more)


def lines_of(path):
    with open(path) as file:
        return file.read().split("\n")


def write(path, lines):
    with open(path, "w") as file:
        file.write("\n".join(lines))


def code_of(lines):
    """The lines with what is in comments, in string and character literals blanked out."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'",
                  lambda match: re.sub(r"[^\n]", "~", match.group()), "\n".join(lines), flags=re.S)
    return text.split("\n")


def functions_of(lines):
    """(name, first line, last line + 1, whether it returns a value) of each function; clang-format puts its braces in
    column 0."""
    name, begin, value = None, None, True
    for number, line in enumerate(lines):
        match = re.match(r"^(?![#/ }])([\w\s*]*?)\b(\w+)\(", line)
        if match:
            name = match.group(2)
            value = not re.search(r"\bvoid\s+$", match.group(1))
        elif line == "{" and name:
            begin = number + 1
        elif line.startswith("}") and begin is not None:
            yield name, begin, number, value
            name, begin = None, None


def candidates_of(path):
    lines = lines_of(os.path.join(ROOT, path))
    code = code_of(lines)
    for function, begin, end, _ in functions_of(lines):
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


def find(lines, fault):
    """Where a fault goes: (its function's first line, last line + 1, whether it returns a value, the line that the
    fault changes); None: the line is gone."""
    for function, begin, end, value in functions_of(lines):
        if function == fault.function:
            found = [number for number in range(begin, end) if lines[number] == fault.before]
            if len(found) > fault.nth:
                return begin, end, value, found[fault.nth]
    return None


def body_with(lines, place, after, number):
    """The body of a function once more, with a fault, for when it is chosen."""
    begin, end, value, at = place
    body = lines[begin:at] + [after] + lines[at + 1:end]
    labels = [match.group(1) for match in map(LABEL.match, body) if match]
    return ["    if (cox_mutant(%d)) {" % number, *(["__label__ %s;" % ", ".join(labels)] if labels else []),
            *body, *([] if value else ["    return;"]), "    }"]


def statement_of(code, begin, at):
    """The line of a function that a statement before the one at a line can be put before: the statement's first, or
    that of the `if` or loop around it where there are no braces."""
    indent = len(code[at]) - len(code[at].lstrip())
    while at > begin and (STATEMENT_PART.match(code[at]) or not STATEMENT_END.search(code[at - 1].rstrip("~ ")) or
                          len(code[at]) - len(code[at].lstrip()) > indent):
        at -= 1
        if code[at].strip():
            indent = min(indent, len(code[at]) - len(code[at].lstrip()))
    return at


def with_faults(lines, faults):
    """The lines of a file with its faults, {number: fault}; and {line of the result: number of the fault}."""
    added, marked, code = collections.defaultdict(list), collections.defaultdict(str), code_of(lines)
    for number, fault in faults.items():
        place = find(lines, fault)
        if place:
            added[place[0]].append((number, body_with(lines, place, fault.after, number)))
            mark, at = "cox_mutant_reached(%d);" % number, place[3]
            if STATEMENT.match(code[at].rstrip("~ ")) and HEADER_END.search(code[at - 1].rstrip("~ ")):
                marked[at] += mark
            else:
                added[statement_of(code, place[0], at)].append((number, [mark]))
    written, owners = [], {}
    for index, line in enumerate(lines):
        for number, body in added.get(index, ()):
            for text in body:
                written.append(text)
                owners[len(written)] = number
        written.append("{ %s %s }" % (marked[index], line) if index in marked else line)
    return written, owners


class Tree:
    """A copy of a committed tree, configured."""

    def __init__(self, name, cflags="", ldflags="", preset="test", commit="HEAD"):
        self.root = os.path.join(PLACE, name)
        self.build = os.path.join(self.root, "build", preset)
        if not os.path.isdir(self.root):
            os.makedirs(PLACE, exist_ok=True)
            subprocess.run(["git", "clone", "-q", "--shared", ROOT, self.root], check=True)
        subprocess.run(["git", "fetch", "-q", "origin"], cwd=self.root, check=True)
        commit = run(["git", "rev-parse", commit], cwd=ROOT).stdout.strip()
        subprocess.run(["git", "reset", "-q", "--hard", commit], cwd=self.root, check=True)
        # A fault may leave a variable or a function that nothing uses.
        subprocess.run(["cmake", "--preset", preset, "-D", "COX_WERROR=OFF", "-D", "CMAKE_C_FLAGS=" + cflags,
                        *("-D CMAKE_%s_LINKER_FLAGS=%s" % (kind, ldflags) for kind in ("EXE", "SHARED", "MODULE"))],
                       cwd=self.root, check=True, stdout=subprocess.DEVNULL)

    def make(self, *targets):
        return run(["ninja", *targets], cwd=self.build).returncode == 0

    def tests(self):
        answer = run(["ctest", "--show-only=json-v1", "-L", "^tier-(%s)$" % "|".join(TIERS)], cwd=self.build)
        found = {}
        for test in json.loads(answer.stdout)["tests"]:
            if not NOT_ASKED.match(test["name"]):
                values = {entry["name"]: entry["value"] for entry in test["properties"]}
                found[test["name"]] = (test["command"], values.get("WORKING_DIRECTORY"),
                                       dict(pair.split("=", 1) for pair in values.get("ENVIRONMENT", ())))
        return found

    def objects(self):
        """The target that compiles each file."""
        with open(os.path.join(self.build, "compile_commands.json")) as commands:
            return {os.path.relpath(entry["file"], self.root):
                    os.path.relpath(os.path.join(entry["directory"], entry["output"]), self.build)
                    for entry in json.load(commands)}

    def machine_code(self, target):
        """What the file compiles to; None: it does not compile."""
        if not self.make(target):
            return None
        return run(["objdump", "-dr", "-s", "-j", ".text", "-j", ".rodata", "-j", ".data", "-j", "cox_hot",
                    os.path.join(self.build, target)]).stdout


class FaultyTree(Tree):
    """A copy of the tree with all of some faults in it."""

    def __init__(self, name, faults):
        choice = os.path.join(PLACE, name + "-choice")
        os.makedirs(choice, exist_ok=True)
        write(os.path.join(choice, "choice.h"), [CHOICE_H])
        write(os.path.join(choice, "choice.c"), [CHOICE_C])
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", os.path.join(choice, "libcoxmutant.so"),
                        os.path.join(choice, "choice.c")], check=True)
        super().__init__(name, "-include %s/choice.h" % choice,
                         "-Wl,--no-as-needed -L%s -lcoxmutant -Wl,-rpath,%s" % (choice, choice))
        self.faults = dict(enumerate(faults))
        self.put()

    def put(self):
        """Writes the faults, and builds. A fault that does not compile is dropped."""
        files = {fault.file for fault in self.faults.values()}
        originals = {file: lines_of(os.path.join(self.root, file)) for file in files
                     if os.path.exists(os.path.join(self.root, file))}
        while True:
            owners = {}
            for file, lines in originals.items():
                here = {number: fault for number, fault in self.faults.items() if fault.file == file}
                written, owners[file] = with_faults(lines, here)
                write(os.path.join(self.root, file), written)
            answer = run(["ninja", "-k", "0"], cwd=self.build)
            if answer.returncode == 0:
                break
            bad = set()
            for path, line in re.findall(r"^([^\s:]+):(\d+):\d+: (?:fatal )?error:", answer.stdout, re.M):
                file = os.path.relpath(os.path.normpath(os.path.join(self.build, path)), self.root)
                bad.add(owners.get(file, {}).get(int(line)))
            if not bad - {None}:
                sys.exit("the tree with its faults does not build:\n" + answer.stdout[-3000:])
            self.faults = {number: fault for number, fault in self.faults.items() if number not in bad}
        put = {number for lines in owners.values() for number in lines.values()}
        self.faults = {number: fault for number, fault in self.faults.items() if number in put}


def output():
    return os.path.join(PLACE, "output-%d" % os.getpid())


def end_children():
    """Kills what a test has left, whose parent this process is now."""
    while True:
        for entry in os.listdir("/proc/self/task"):
            try:
                with open("/proc/self/task/%s/children" % entry) as file:
                    for pid in file.read().split():
                        os.kill(int(pid), signal.SIGKILL)
            except (OSError, ProcessLookupError):
                pass
        try:
            os.wait()
        except ChildProcessError:
            return


def reap_until(child, seconds):
    """Waits for the end of a child, and of those whose parent this process becomes meanwhile: a test may wait until a
    process is gone, and nobody else reaps it. Returns the child's status; None: it has not ended in so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode
        if pid == 0:
            time.sleep(0.01)
    return None


def passes(test, seconds, extra=(), **environment):
    """Whether a test passes, in folders of its own. What it printed is in output()."""
    command, folder, own = test
    with open(output(), "wb") as file:
        child = subprocess.Popen(["unshare", "--mount", "sh", "-c", OWN_FOLDERS, "sh", *command, *extra], cwd=folder,
                                 env={**os.environ, **own, **environment}, start_new_session=True,
                                 stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    status = reap_until(child, max(SECONDS_MIN, TIMES_MAX * seconds))
    if status is None:
        child.kill()
        child.wait()
    end_children()
    return status in (0, SKIPPED)


def passes_by_name(job):
    test, seconds, name = job
    return name, passes(test, seconds)


def become_reaper():
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reached_by(test, seconds, count, extra=()):
    """The faults, by number, whose statement a test gets to; and whether it passes without any."""
    path = os.path.join(PLACE, "reached-%d" % os.getpid())
    with open(path, "wb") as file:
        file.truncate(FAULTS_MAX)
    passed = passes(test, seconds, extra, COX_MUTANTS_REACHED=path)
    with open(path, "rb") as file:
        marks = file.read(count)
    os.unlink(path)
    return {number for number, mark in enumerate(marks) if mark}, passed


def command_draw(options):
    files = run(["git", "ls-files", "--", *("%s/*.c" % folder for folder in FOLDERS)], cwd=ROOT).stdout.split()
    candidates = [fault for file in files for fault in candidates_of(file)]
    random.Random(options.seed).shuffle(candidates)
    tree, drawn, originals = Tree("draw"), [], {}
    objects = tree.objects()
    for fault in candidates:
        if len(drawn) == options.count:
            break
        target, path = objects.get(fault.file), os.path.join(tree.root, fault.file)
        if not target:
            continue
        if target not in originals:
            originals[target] = tree.machine_code(target)
        lines = lines_of(path)
        at = find(lines, fault)[3]
        write(path, lines[:at] + [fault.after] + lines[at + 1:])
        code = tree.machine_code(target)
        write(path, lines)
        # What does not compile, or compiles to the same, is no fault.
        if code is not None and code != originals[target]:
            drawn.append(fault)
    write_list(sorted(drawn))
    print("%d of %d candidates drawn" % (len(drawn), len(candidates)))


class CoveredTree(Tree):
    """A copy of a tree that counts what its processes run. The counters are files that are mapped, since most of the
    processes in question are killed: they write nothing when they end."""

    def __init__(self, name, commit):
        self.profiles = os.path.join(PLACE, name + "-profiles")
        super().__init__(name, "-O1 -fprofile-instr-generate=%s/%%m%%c.profraw -fcoverage-mapping "
                         "-mllvm -runtime-counter-relocation" % self.profiles, preset="clang", commit=commit)
        if not self.make():
            sys.exit("the tree that counts does not build: ninja -C %s" % self.build)
        subprocess.run(["rm", "-rf", self.profiles], check=True)
        os.makedirs(self.profiles)

    def programs(self):
        for path, _, names in os.walk(self.build):
            for name in (os.path.join(path, name) for name in names):
                if os.access(name, os.X_OK) and not os.path.islink(name):
                    with open(name, "rb") as file:
                        if b"__llvm_covmap" in file.read():
                            yield name

    def covered(self):
        """Of lines, "file:line", and of branches, "file:line:block:branch": two dictionaries to whether it was run."""
        lines, branches, relative = {}, {}, ""
        data = os.path.join(self.profiles, "data")
        raw = [os.path.join(self.profiles, name) for name in os.listdir(self.profiles)]
        subprocess.run(["llvm-profdata", "merge", "-o", data, *raw], check=True)
        first, *more = self.programs()
        answer = run(["llvm-cov", "export", "-format=lcov", "-instr-profile", data, first,
                      *("-object=" + name for name in more)])
        for line in answer.stdout.splitlines():
            what, _, rest = line.partition(":")
            parts = rest.split(",")
            if what == "SF":
                relative = os.path.relpath(rest, self.root)
            elif relative.startswith(FOLDERS) and what == "DA":
                place = "%s:%s" % (relative, parts[0])
                lines[place] = lines.get(place) or int(parts[1]) > 0
            elif relative.startswith(FOLDERS) and what == "BRDA":
                place = "%s:%s:%s:%s" % (relative, *parts[:3])
                branches[place] = branches.get(place) or parts[3] not in ("-", "0")
        return lines, branches


def command_cover(options):
    tree = CoveredTree("cover", options.commit)
    times, tests = tiers.record(), tree.tests()
    quick = set(run(["ctest", "-N", "-L", "^tier-quick$"], cwd=tree.build).stdout.split())
    jobs = [(tests[name], 3 * times.get(name, tiers.UNRECORDED), name)
            for name in sorted(tests, key=lambda name: -times.get(name, tiers.UNRECORDED))
            if options.tier == "all" or name in quick]
    for name, passed in in_processes(passes_by_name, jobs):
        if not passed:
            print("%s fails: its lines count all the same" % name, flush=True)
    for what, all_of in zip(("lines", "branches"), tree.covered(), strict=True):
        print("%d of %d %s (%.1f %%)" % (sum(map(bool, all_of.values())), len(all_of), what,
                                         100 * sum(map(bool, all_of.values())) / len(all_of)))


class Trial:
    """What the processes that try faults share: the tree, its tests and their times."""

    def __init__(self, tree):
        self.tests, self.times, self.count = tree.tests(), tiers.record(), max(tree.faults) + 1
        self.end = None

    def seconds(self, name):
        return self.times.get(name, tiers.UNRECORDED)

    def reach(self, name):
        reached, passed = reached_by(self.tests[name], self.seconds(name), self.count)
        if not passed:
            os.rename(output(), os.path.join(PLACE, name.replace("/", "_") + ".log"))
        return name, (reached, passed)

    def verdict(self, job):
        """(number of the fault, which test finds it; "": there was no time for all)."""
        number, reaching = job
        for name in reaching:
            if time.monotonic() > self.end:
                return number, ""
            test, seconds = self.tests[name], self.seconds(name)
            if not (passes(test, seconds, COX_MUTANT=str(number)) or not passes(test, seconds) or
                    passes(test, seconds, COX_MUTANT=str(number))):
                return number, name
        return number, SURVIVED if reaching else UNREACHED


def in_processes(call, jobs):
    # Most of a test's time is waiting.
    with multiprocessing.get_context("fork").Pool(2 * os.cpu_count(), become_reaper) as pool:
        yield from pool.imap_unordered(call, jobs)


def who_reaches(trial):
    """The faults that each test reaches; of tests that fail without a fault none. Kept for as long as the commit and
    the list are the same."""
    key = run(["git", "rev-parse", "HEAD"], cwd=ROOT).stdout + str(trial.count)
    if os.path.exists(REACHED):
        with open(REACHED) as file:
            kept = json.load(file)
        if kept["key"] == key:
            return kept["tests"]
    tests, left = {}, sorted(trial.tests, key=trial.seconds)
    for _ in range(TRIES):
        for name, (reached, passed) in in_processes(trial.reach, left):
            tests[name] = sorted(reached) if passed else None
        left = [name for name in left if tests[name] is None]
    for name in left:
        print("%s fails without a fault: it is not asked" % name, flush=True)
        tests[name] = []
    with open(REACHED, "w") as file:
        json.dump({"key": key, "tests": tests}, file)
    return tests


def command_run(options):
    faults = read_list()
    tree = FaultyTree("tree", faults)
    trial = Trial(tree)
    trial.end = time.monotonic() + 60 * options.limit
    wanted = [number for number in tree.faults if not faults[number].verdict]
    reaching = {number: [] for number in wanted}
    for name, reached in who_reaches(trial).items():
        for number in set(reached) & set(wanted):
            reaching[number].append(name)
    # First the short tests for each fault, then the rest for those that live: most are found at once.
    tests = {number: sorted(reaching[number], key=trial.seconds) for number in wanted}
    short = {number: [name for index, name in enumerate(names)
                      if sum(map(trial.seconds, names[:index])) < SHORT_SECONDS] for number, names in tests.items()}
    rest = {number: names[len(short[number]):] for number, names in tests.items()}
    live = try_all(trial, faults, short, [number for number in wanted if rest[number]])
    try_all(trial, faults, {number: rest[number] for number in live}, [])


def try_all(trial, faults, tests, more):
    """Tries faults with these tests each, {number: names}, and writes the verdicts. Returns those of `more`, for which
    there are more tests, that none has found."""
    live = []
    for number, found in in_processes(trial.verdict, sorted(
            tests.items(), key=lambda job: sum(map(trial.seconds, job[1])))):
        if found == SURVIVED and number in more:
            live.append(number)
            continue
        fault = faults[number] = faults[number]._replace(verdict=found)
        write_list(faults)
        print("%s %s: %s -> %s: %s" % (fault.file, fault.function, fault.before.strip(), fault.after.strip(),
                                       found or "no time"), flush=True)
    return live


def command_report(_):
    faults = read_list()
    paths = {fault.file: os.path.join(ROOT, fault.file) for fault in faults}
    gone = [fault for fault in faults
            if not os.path.exists(paths[fault.file]) or find(lines_of(paths[fault.file]), fault) is None]
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


def drawn_from(pattern, each, seed):
    """At most `each` faults of each function of the product files whose path matches."""
    files = [file for file in run(["git", "ls-files", "*.c"], cwd=ROOT).stdout.split()
             if re.search(pattern, file) and not file.startswith("tests/")]
    functions = collections.defaultdict(list)
    for file in files:
        for fault in candidates_of(file):
            functions[file, fault.function].append(fault)
    dice = random.Random(seed)
    return [fault for faults in functions.values() for fault in sorted(dice.sample(faults, min(each, len(faults))))]


class Cases:
    """The cases of some test programs, and the faults that each finds."""

    def __init__(self, tree, pattern):
        self.count, self.programs = max(tree.faults) + 1, {}
        for name, test in tree.tests().items():
            if re.search(pattern, name) and "/tests/test_" in test[0][0]:
                self.programs[name] = test

    def list(self, name):
        command, folder, own = self.programs[name]
        answer = run(command, cwd=folder, env={**os.environ, **own}, stdin=subprocess.DEVNULL)
        return re.findall(r"^\[ RUN      \] (\S+)", answer.stdout + answer.stderr, re.M)

    def found(self, case):
        """(case, the faults it reaches, the faults it finds)."""
        test, extra = self.programs[case[0]], (case[1],)
        begin = time.monotonic()
        reached, passed = reached_by(test, 6, self.count, extra)
        if not passed:
            return case, None, ()
        seconds = (time.monotonic() - begin) / 2
        return case, reached, {number for number in reached
                               if not passes(test, seconds, extra, COX_MUTANT=str(number))}


def command_cases(options):
    faults = drawn_from(options.files, options.each, options.seed)
    tree = FaultyTree("cases", faults)
    cases = Cases(tree, options.tests)
    finds = {}
    for case, reached, found in in_processes(
            cases.found, [(name, case) for name in cases.programs for case in cases.list(name)]):
        if reached is None:
            print("%s %s fails without a fault" % case)
            continue
        finds[case] = found
        print("%s %s: reaches %d, finds %d" % (*case, len(reached), len(found)), flush=True)
    finders = collections.Counter(number for found in finds.values() for number in found)
    print("%d of %d faults found by %d cases" % (len(finders), len(tree.faults), len(finds)))
    # Whoever finds least goes first, while all that it finds has another finder.
    for case in sorted(finds, key=lambda case: len(finds[case])):
        if all(finders[number] > 1 for number in finds[case]):
            finders.subtract(finds[case])
            print("finds nothing that the others do not: %s %s (%d)" % (*case, len(finds[case])))
    found = sorted(list(tree.faults[number][:5]) for number in finders)
    if options.compare:
        with open(options.compare) as file:
            lost = [fault for fault in json.load(file) if fault not in found]
        print("%d faults are not found any more" % len(lost))
        for fault in lost:
            print("lost: %s" % fault)
    if options.write:
        with open(options.write, "w") as file:
            json.dump(found, file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw")
    draw.add_argument("--count", type=int, default=200)
    draw.add_argument("--seed", type=int, default=41)
    cover = commands.add_parser("cover")
    cover.add_argument("--tier", choices=TIERS, default="all")
    cover.add_argument("--commit", default="HEAD")
    commands.add_parser("run").add_argument("--limit", type=float, default=60, metavar="MINUTES")
    commands.add_parser("report")
    cases = commands.add_parser("cases")
    cases.add_argument("--files", required=True, help="product files, a regular expression")
    cases.add_argument("--tests", required=True, help="names of tests in C, a regular expression")
    cases.add_argument("--each", type=int, default=6, help="faults of a function, at most")
    cases.add_argument("--seed", type=int, default=41)
    cases.add_argument("--write", metavar="FILE", help="the faults found go there, as JSON")
    cases.add_argument("--compare", metavar="FILE", help="tells which faults of FILE are not found any more")
    options = parser.parse_args()
    sys.exit(globals()["command_" + options.command](options))


if __name__ == "__main__":
    main()
