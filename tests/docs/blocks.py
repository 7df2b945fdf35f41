#!/usr/bin/python3
"""Runs the code of a page of the documentation, in order, as a reader would paste it.

Usage: blocks.py BUILD_DIR SOURCE_DIR PREFIX PAGE...   PREFIX: an installed tree
       blocks.py --options BUILD_DIR SOURCE_DIR        options of printed commands exist

What a block of a page means is its language:
  c, cpp    a part of the file that its first line names (/* engine.c */ or // engine.cpp); parts of
            one name are joined. Each file compiles alone, without a warning.
  python    a file too (# sums.py). It is run if a block `output` follows.
  sh        is run. All blocks of a page share one shell and one folder, which looks like the
            repository after `sh tools/demo`.
  output    what the block before printed; a line `...` stands for any number of lines.
A block behind `<!-- not run: REASON -->` is not run. Any other language is text. A line of sh that begins a loop which
waits is refused: what it waits for may never come.
"""

import glob
import json
import os
import re
import signal
import subprocess
import sys
import tempfile

BLOCK = re.compile(r"(?:^<!-- not run: ([^\n]+) -->\n+)?^```(\w+)[^\n]*\n(.*?)^```$", re.M | re.S)
FILE = {"c": r"/\* (\S+\.c) \*/\n", "cpp": r"// (\S+\.cpp)\n", "python": r"# (\S+\.py)\n"}
# Ends a page that hangs; a busy machine needs long.
TIMEOUT = 300
COLUMNS = 100


def blocks_of(page):
    with open(page, encoding="utf-8") as file:
        blocks = [(language, text, bool(reason)) for reason, language, text in
                  BLOCK.findall(file.read())]
    for language, text, _ in blocks:
        if language == "sh" and (loop := re.search(r"^(?:until|while) .*", text, re.M)):
            sys.exit("%s: this may wait for ever: coxswain status NAME --wait SEC, or timeout: %s" % (page, loop[0]))
    return blocks


def file_name(page, language, text):
    match = re.match(FILE[language], text)
    if not match:
        sys.exit("%s: a block of %s does not name its file:\n%s" % (page, language, text[:200]))
    return match[1]


def files_of(page, blocks):
    files = {}
    for language, text, not_run in blocks:
        if language in FILE and not not_run:
            name = file_name(page, language, text)
            part = text if name not in files else text.split("\n", 1)[1]
            files[name] = files.get(name, "") + part
    return files


def prepare(folder, build, source):
    """The repository as a reader has it, with the programs of this build."""
    for name in os.listdir(source):
        path, here = os.path.join(source, name), os.path.join(folder, name)
        if name in ("build", ".git"):
            continue
        if not os.path.isdir(path):
            os.symlink(path, here)
            continue
        os.mkdir(here)  # none that a program could be written over
        for inside in os.listdir(path):
            os.symlink(os.path.join(path, inside), os.path.join(here, inside))
    os.makedirs(os.path.join(folder, "build"))
    os.symlink(build, os.path.join(folder, "build", "release"))
    os.mkdir(os.path.join(folder, "run"), 0o700)
    # The interpreter that the build has found, which the package was built for.
    python = os.path.join(folder, "bin", "python3")
    os.mkdir(os.path.dirname(python))
    with open(python, "w", encoding="utf-8") as file:
        file.write('#!/bin/sh\nexec "%s" "$@"\n' % sys.executable)
    os.chmod(python, 0o755)


def script_of(page, blocks, has_python):
    """Each block has its output in a file of its own. Names of groups get a suffix, so that pages
    can be tried at the same time."""
    names = set()
    for language, text, not_run in blocks:
        if language == "sh" and not not_run:
            names |= set(re.findall(r"--name (\w[\w-]*)", text))
    lines = ["set -eu", "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT"]
    expected = []
    for i, (language, text, not_run) in enumerate(blocks):
        runs = i + 1 < len(blocks) and blocks[i + 1][0] == "output"
        if not_run or not (language == "sh" or (language == "python" and runs and has_python)):
            continue
        if language == "python":
            text = "python3 %s\n" % file_name(page, language, text)
        for name in names:
            text = re.sub(r"(?<![\w/.-])%s(?![\w/.-])" % re.escape(name),
                          "%s-%d" % (name, os.getpid()), text)
        lines += ["exec >%d.out" % i, text]
        expected.append((i, blocks[i + 1][1] if runs else None))
    return "\n".join(lines), expected


def matches(expected, printed):
    parts = re.split(r"^\.\.\.\n", expected, flags=re.M)
    return re.fullmatch(".*".join(re.escape(part) for part in parts), printed, re.S)


def environment(folder, build, prefix):
    library = next(iter(glob.glob(os.path.join(prefix, "lib*", "pkgconfig"))), "")
    variables = {
        **os.environ,
        "XDG_RUNTIME_DIR": os.path.join(folder, "run"),
        "PATH": os.pathsep.join([os.path.join(folder, "bin"), os.path.join(build, "bin"),
                                 os.environ["PATH"]]),
        "PKG_CONFIG_PATH": library,
        "LD_LIBRARY_PATH": os.path.dirname(library),
        "PYTHONPATH": os.path.join(build, "python"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for name in [name for name in variables if name.startswith("COXSWAIN_")]:
        del variables[name]
    return variables


def compile_alone(name, folder, variables):
    """With warnings, which the commands of a page need not ask for."""
    flags = subprocess.run(["pkg-config", "--cflags", "coxswain"], env=variables, check=True,
                           capture_output=True, text=True).stdout.split()
    compiler = ["g++", "-std=c++17"] if name.endswith(".cpp") else ["cc", "-std=gnu11"]
    subprocess.run([*compiler, "-Wall", "-Wextra", "-Werror", *flags, "-fsyntax-only", name],
                   cwd=folder, env=variables, check=True)


def try_page(page, build, source, prefix):
    blocks = blocks_of(page)
    with tempfile.TemporaryDirectory(prefix="coxswain-docs-") as folder:
        prepare(folder, build, source)
        variables = environment(folder, build, prefix)
        for name, text in files_of(page, blocks).items():
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
            if not name.endswith(".py"):
                if max(map(len, text.splitlines())) > COLUMNS:
                    sys.exit("%s: %s has a line of over %d columns" % (page, name, COLUMNS))
                compile_alone(name, folder, variables)
        has_python = os.path.isdir(os.path.join(build, "python"))
        script, expected = script_of(page, blocks, has_python)
        with subprocess.Popen(["bash", "-c", script], cwd=folder, env=variables,
                              stdin=subprocess.DEVNULL, start_new_session=True) as shell:
            try:
                status = shell.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                status = -1
                print("FAIL: %s: not done in %d s" % (page, TIMEOUT))
            finally:
                try:
                    os.killpg(shell.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        failed = False
        begun = [(i, text) for i, text in expected
                 if os.path.exists(os.path.join(folder, "%d.out" % i))]
        for i, text in begun:
            with open(os.path.join(folder, "%d.out" % i), encoding="utf-8") as file:
                printed = file.read()
            ended_here = status != 0 and i == begun[-1][0]
            if ended_here or (text is not None and not matches(text, printed)):
                failed = True
                print("FAIL: %s, in this block:\n%s\nprinted:\n%s" %
                      (page, blocks[i][1], printed))
                if text is not None:
                    print("expected:\n%s" % text)
        print("%s: %d blocks run, %d files compiled, exit status %d" %
              (page, len(expected), len(files_of(page, blocks)), status))
        return not failed and status == 0


def pages_of(source):
    return sorted(glob.glob(os.path.join(source, "*.md")) +
                  glob.glob(os.path.join(source, "docs", "*.md")))


def check_options(build, source):
    """Every `coxswain COMMAND --option` that a page prints, run or not, is one of that command."""
    coxswain, helps, wrong = os.path.join(build, "bin", "coxswain"), {}, []
    for page in pages_of(source):
        if page.endswith("CHANGELOG.md"):
            continue
        with open(page, encoding="utf-8") as file:
            text = file.read()
        printed = r"\bcoxswain ((?:[a-z]+-)?[a-z]+)((?: [^\n`#&|;]*)?)"
        for command, rest in re.findall(printed, text):
            options = re.findall(r"(?<= )--?[a-z][a-z-]*", re.split(r' -- | "', rest)[0])
            if not options:
                continue
            if command not in helps:
                done = subprocess.run([coxswain, command, "--help"], capture_output=True, text=True,
                                      check=False)
                helps[command] = done.stdout if done.returncode == 0 else ""
            wrong += ["%s: coxswain %s %s" % (page, command, option) for option in options
                      if not re.search(r"(?<![\w-])%s(?![\w-])" % option, helps[command])]
    tables = subprocess.run([coxswain, "__tables"], capture_output=True, text=True, check=True)
    with open(os.path.join(source, "docs", "commands.md"), encoding="utf-8") as file:
        listed = re.split(r"^## ", file.read().partition("## All commands")[2], flags=re.M)[0]
    wrong += ["docs/commands.md lacks the command %s" % command["name"]
              for command in json.loads(tables.stdout)
              if "`%s`" % command["name"] not in listed]
    print("\n".join(wrong) or "the options of %d commands exist" % len(helps))
    return not wrong


def main():
    if sys.argv[1:2] == ["--options"]:
        sys.exit(0 if check_options(*sys.argv[2:]) else 1)
    build, source, prefix, *pages = sys.argv[1:]
    done = [try_page(os.path.join(source, page), build, source, prefix) for page in pages]
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
