"""atomics.py: the atomics of channel/shm/layout.h are loaded and stored in channel/shm/state.h alone.

Two exceptions: channel/shm/control.c has the magic number of the control region, channel/attach/sealed/futex_gate.c the words of the wake
memory. Elsewhere, an atomic operation on a field reached through a struct cox_layout_... is refused.
Run by CTest, or by hand: python3 tests/tree/atomics.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("channel", "memory", "worker", "coordinator", "engine", "program")
HOME = "channel/shm/state.h"
EXCEPTIONS = {
    "channel/shm/control.c": {"magic"},
    "channel/attach/sealed/futex_gate.c": {"word", "asleep", "wakeup", "coordinator_sleeps"},
}
FUNCTION = re.compile(r"^[a-z_][^\n;]*\n?[^\n;{}]*\([^;{}]*\)\n\{.*?^\}", re.M | re.S)
ATOMIC = re.compile(r"\batomic_\w+\(\s*&?((?:\w+\([^()]*\)->)?[\w.>\[\]()-]+(?:\([^()]*\))?[\w.>\[\]-]*)\s*[,)]")


def sources():
    return {str(path.relative_to(ROOT)): path.read_text()
            for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.[ch]"))}


def shared(expression, variables):
    """True: the expression goes through a struct of the layout."""
    base = re.match(r"\w+", expression)
    return (base and base.group() in variables and "->" in expression or
            re.search(r"->(layout|lines|identity|hints|fetched|wake|line)\b|\bcox_sealed_reports\(|\bcox_state_(line|channel)\(",
                      expression) is not None)


def check(files):
    problems, count = [], 0
    words = set(re.findall(r"_Atomic \w+\s+(\w+)", files["channel/shm/layout.h"]))
    for path, text in files.items():
        for function in FUNCTION.finditer(text):
            body = function.group()
            variables = set(re.findall(r"\bstruct cox_layout_\w+ \*(?:const )?(\w+)", body))
            for operation in ATOMIC.finditer(body):
                expression = operation.group(1)
                field = re.findall(r"\w+", re.sub(r"\[[^\]]*\]", "", expression))[-1]
                if field not in words or not shared(expression, variables):
                    continue
                if path == HOME or field in EXCEPTIONS.get(path, ()):
                    count += 1
                else:
                    line = text[:function.start() + operation.start()].count("\n") + 1
                    problems.append(f"{path}:{line}: {expression} belongs behind a function of {HOME}")
    return problems, count


def into(files, path, function, statement):
    at = files[path].index(f"{function}(")
    at = files[path].index("{\n", at) + 2
    return {**files, path: files[path][:at] + f"    {statement}\n" + files[path][at:]}


def main():
    files = sources()
    problems, count = check(files)
    changes = [
        ("channel/shm/reply.c", "reply_refuse", "atomic_load_explicit(&line->group_incarnation, memory_order_relaxed);"),
        ("worker/loop/attach.c", "cox_worker_announce",
         "struct cox_layout_identity *identity = cox_worker_identity(worker);\n"
         "    atomic_store_explicit(&identity->state, 1, memory_order_release);"),
        ("coordinator/executor/status.c", "rank_liveness",
         "atomic_load(&executor->control.ranks[rank]->identity.state);"),
        ("channel/shm/control.c", "cox_control_verify", "atomic_load(&control->layout->abort.word);"),
        ("channel/attach/legacy/legacy_bridge.c", "line_store",
         "atomic_load(&cox_state_line(bridge->channel->control, rank, bridge->channel->id)->taken);"),
    ]
    for path, function, statement in changes:
        changed = into(files, path, function, statement)
        if path == "channel/shm/reply.c":
            changed = into(files, path, function, "const struct cox_layout_rank_line *line = 0; " + statement)
        if len(check(changed)[0]) <= len(problems):
            problems.append(f"not found: {path}: {statement}")
    if problems:
        sys.exit("\n".join(problems))
    print(f"{count} atomic operations in {1 + len(EXCEPTIONS)} files; {len(changes)} changed sources were refused")


main()
