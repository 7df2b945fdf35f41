"""attach.py: only channel/attach knows in which way a group's processes come by its memory and gates.

Elsewhere a name of a mode (named, sealed, legacy, shim) in a condition, a field or a constant is refused: code asks what a group
can do (struct cox_attach_limits), or calls a function of its mode (channel/attach/attach.h). EXEMPT has the lines that hand
a user's choice, or a byte of a wire, on.
Run by CTest, or by hand: python3 tests/tree/attach.py
"""

import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("channel", "worker", "coordinator", "engine", "program", "nodes")
HOME = "channel/attach/"
ASKS = re.compile(
    r"\bCOX_ATTACH_(?:NAMED|SEALED)\b|\bCOX_LAYOUT_(?:SEALED|LEGACY)\b"  # constants of a mode
    r"|\bcox_attach_(?:named|sealed|legacy|shim)\b"  # the modes
    r"|\b\w*is_(?:sealed|legacy|legacy_shim)\b"
    r"|(?:->|\.)(?:sealed|legacy|legacy_workers|legacy_shim)\b(?!\")"  # a field that says which
    r"|\bbool (?:sealed|legacy|legacy_workers)\b"
    r"|\bmode->(?:name|attach|layout_flags) [!=]=|\bstrcmp\([^;]*(?:\"named\"|\"sealed\")")

OPTION = "the user's option: it is parsed, and handed on to cox_attach_choose"
WIRE = "a byte or field of a message, whose numbers stay"
SHOWN = "what status shows"
GIVEN = "a field of coxswain/group.h: memory that the caller gives"
EXEMPT = {
    # (file, part of the line): why
    ("channel/shm/layout.h", "COX_LAYOUT_LEGACY = 1"): WIRE,
    ("channel/shm/layout.h", "COX_LAYOUT_SEALED = 2"): WIRE,
    ("channel/socket/hello.c", "attach != COX_ATTACH_NAMED && attach != COX_ATTACH_SEALED"): WIRE,
    ("nodes/lead/lead_hello.c", "COX_SET(&welcome, sealed, "): WIRE,
    ("nodes/agent/agent.c", "attach = welcome->sealed ? "): WIRE,
    ("coordinator/server/control_reply.c", "COX_SET(reply, legacy, status->legacy);"): WIRE,
    ("coordinator/executor/status.c", ".legacy = !executor->geometry.mode->limits.extensions"): SHOWN,
    ("program/command/status_command.c", 'status->legacy ? " (legacy workers)"'): SHOWN,
    ("coordinator/executor/executor.c", ".legacy_workers = options->workers.legacy"): OPTION,
    ("program/cli/group_options.h", "bool legacy_workers;"): OPTION,
    ("program/engine/prompt_job.c", "COX_FLAG(struct cox_prompt_job, group.legacy_workers)"): OPTION,
    ("program/cli/group_options.c", '"named") != 0'): OPTION,
    ("program/cli/group_options.c", "? COX_ATTACH_SEALED : COX_ATTACH_NAMED"): OPTION,
    ("program/cli/group_options.c", ".legacy_workers = options->legacy_workers"): OPTION,
    ("program/cli/group_options.c", "attach = options->legacy_workers ? COX_ATTACH_NAMED"): OPTION,
    ("program/cli/foreground.c", ".workers.legacy = group->legacy_workers"): OPTION,
    ("program/cli/foreground.c", ".memory.attach = from->nodes ? COX_ATTACH_NAMED"): OPTION,
    ("program/cli/foreground.c", "uint64_t cox_foreground_fd_count("): "doctor shows the number of both",
    ("program/cli/foreground.h", "uint64_t cox_foreground_fd_count("): "doctor shows the number of both",
    ("worker/group/group.c", "options->sealed"): GIVEN,
    ("worker/group/group_join.c", "options->sealed"): GIVEN,
    ("worker/loop/serve_init.c", "&init->sealed"): GIVEN,
    ("engine/rank/engine.c", "options->sealed"): GIVEN,
}


def sources():
    return {str(path.relative_to(ROOT)): path.read_text()
            for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.[ch]"))}


@functools.cache
def questions(text):
    """(number, line) of each line that asks, comments aside."""
    plain = re.sub(r"/\*.*?\*/|//[^\n]*", lambda match: re.sub(r"[^\n]", " ", match.group()), text, flags=re.S)
    return [(number, line) for number, line in enumerate(plain.split("\n"), 1) if ASKS.search(line)]


def check(files):
    problems, idle = [], set(EXEMPT)
    for path, text in files.items():
        if path.startswith(HOME):
            continue
        for number, line in questions(text):
            reasons = {key for key in EXEMPT if key[0] == path and key[1] in line}
            idle -= reasons
            if not reasons:
                problems.append(f"{path}:{number}: asks for a mode: {line.strip()}")
    problems += [f"EXEMPT has {key}, which is no longer there" for key in sorted(idle)]
    return problems


def mutations(files):
    """Questions that have to be refused."""
    for path, line in (
            ("coordinator/executor/submit.c", "if (executor->geometry.mode == &cox_attach_legacy) return 0;"),
            ("coordinator/collector/pass.c", "bool legacy = false;"),
            ("worker/loop/report.c", "if (worker->is_legacy_shim) return 0;"),
            ("channel/shm/reply.c", "if (geometry->sealed) return 0;"),
            ("program/command/layout.c", 'if (!strcmp(geometry.mode->name, "sealed")) return 0;'),
            ("nodes/lead/lead.c", "if (nodes->attach == COX_ATTACH_SEALED) return 0;"),
            ("engine/batching/engine_loop.c", "if (status.legacy) return 0;")):
        yield f"{path}: {line}", {**files, path: files[path] + line + "\n"}


def main():
    files = sources()
    problems = check(files)
    problems += [f"not found: {what}" for what, changed in mutations(files) if not check(changed)]
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(files)} files, {len(EXEMPT)} exempt lines; {len(list(mutations(files)))} questions put in were refused")


main()
