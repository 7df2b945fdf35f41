"""includes.py: the folders of the product include each other as FOLDERS says, and no other way.

  1. A folder includes only the folders listed for it. The list has no cycle, and each entry is used.
  2. The folders at the top stand in layers (LAYERS).
  3. Files include each other in a circle only within a unit of UNITS, which lies in one folder.
  4. A folder has at most 24 files, and a README.md that says what it is for, as have those at the top.
  5. Examples include the public headers alone.
  6. The reference engine is written on what is installed: the folders of ENGINE include of the library only
     public headers, and those of HEADERS_ALONE, which have no function behind them.
  7. A folder includes a public header only where it may include the folder whose functions that declares (PUBLIC),
     and public headers include nothing but each other.

A file stands for its pair: x.c and x.h are one. Run by CTest, or by hand: python3 tests/tree/includes.py
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = "include/coxswain"
FILE_COUNT_MAX = 24

# What each folder includes.
FOLDERS = {
    "channel/base": "",
    "channel/text": "",
    "channel/recorder": "channel/base",
    "channel/attach": "",
    "channel/attach/named": "channel/base channel/shm",
    "channel/attach/sealed": "channel/base channel/attach/named channel/shm",
    "channel/attach/legacy": "channel/base channel/attach/named channel/shm",
    "channel/shm": "channel/base channel/recorder channel/attach",
    "channel/stacks": "",
    "channel/socket": "channel/base channel/shm",
    "channel/handle": "channel/base channel/socket",
    "channel/memory": "channel/base channel/shm channel/handle",
    "channel/kv": "channel/base channel/shm channel/memory",
    "memory/domain": "channel/base channel/shm channel/memory",
    "memory/pool": "channel/base channel/shm channel/handle channel/memory memory/domain",
    "memory/queue": "channel/base channel/shm channel/handle channel/memory memory/pool",
    "proto": "channel/base channel/text channel/memory",
    "proto/legacy": "proto",
    "worker/sequences": "channel/base proto",
    "worker/group": "channel/base channel/attach/sealed channel/recorder channel/shm channel/socket channel/handle",
    "worker/loop": "channel/base channel/stacks channel/attach/sealed channel/recorder channel/shm channel/socket channel/memory proto proto/legacy worker/sequences worker/group",
    "coordinator/process": "channel/base channel/socket",
    "coordinator/transport": "channel/shm",
    "coordinator/recording": "channel/base channel/recorder",
    "coordinator/stacks": "channel/base coordinator/process",
    "coordinator/collector": "channel/base channel/attach/sealed channel/recorder channel/shm channel/memory proto proto/legacy coordinator/process "
                             "coordinator/stacks coordinator/transport",
    "coordinator/executor": "channel/base channel/attach channel/attach/sealed channel/recorder channel/shm channel/socket proto coordinator/transport "
                            "coordinator/process coordinator/collector coordinator/recording coordinator/stacks",
    "coordinator/recovery": "channel/base coordinator/collector coordinator/executor",
    "coordinator/server": "channel/base channel/recorder channel/shm channel/socket proto coordinator/collector coordinator/executor coordinator/stacks "
                          "coordinator/recovery",
    "nodes/link": "channel/base channel/text channel/memory channel/recorder channel/shm coordinator/transport",
    "nodes/direct": "channel/base channel/memory channel/socket",
    "nodes/lead": "channel/base nodes nodes/link",
    "nodes/agent": "channel/base channel/memory channel/recorder channel/socket proto coordinator/executor coordinator/recording nodes nodes/link",
    "nodes": "channel/base channel/kv worker/group nodes/link nodes/direct coordinator/transport",
    "engine/model": "channel/base",
    "engine/compute": "channel/base engine/model",
    "engine/rank": "channel/base engine/model engine/compute",
    "engine/batching": "channel/base engine/model",
    "program/client": "channel/base channel/text channel/shm channel/socket proto coordinator/executor coordinator/server",
    "program/trace": "channel/recorder channel/shm proto channel/base",
    "program/metrics": "channel/base coordinator/executor coordinator/recovery coordinator/server program/client program/weights",
    "program/service": "channel/base channel/text program/client channel/shm",
    "program/cli": "channel/base channel/attach channel/shm coordinator/executor coordinator/recovery coordinator/server "
                   "program/client program/service",
    "program/stacks": "channel/base channel/socket channel/stacks program/client program/cli",
    "program/weights": "channel/base channel/socket program/cli program/service",
    "program/command": "program/stacks channel/base channel/attach/named channel/text channel/shm channel/socket channel/handle channel/memory coordinator/executor "
                       "coordinator/recording coordinator/recovery coordinator/server program/client program/cli "
                       "program/metrics program/service program/trace program/weights coordinator/collector",
    "program/engine": "channel/base channel/shm proto coordinator/server program/client program/service program/cli "
                      "program/metrics coordinator/transport engine/model engine/batching coordinator/executor",
    "program": "channel/base program/client program/cli program/engine program/stacks",
}

# The folder at the top whose functions a public header declares: <coxswain/NAME.h> is for it and those above it.
PUBLIC = {
    "base": "channel", "handle": "channel", "kv": "channel", "version": "channel",
    "worker": "worker", "group": "worker",
    "executor": "coordinator", "requests": "coordinator", "server": "coordinator",
    "memory/domain": "memory", "memory/domain_cuda": "memory", "memory/pool": "memory", "memory/queue": "memory",
}

# The folders at the top: each includes itself and those named.
LAYERS = {
    "channel": "",
    "memory": "channel",
    "proto": "channel",
    "worker": "channel proto",
    "coordinator": "channel proto",
    "nodes": "channel proto worker coordinator",
    "engine": "channel proto worker coordinator",
    "program": "channel proto coordinator engine",
}

ENGINE = ("engine/model", "engine/compute", "engine/rank", "engine/batching")
HEADERS_ALONE = ("channel/base/fault.h", "channel/base/hash.h", "channel/base/idioms.h", "channel/base/thread.h")

# Circles of includes: one noun each, cut into files that share a private header.
UNITS = {
    "channel/socket": ["client_connection control_socket hello runtime_dir socket_file"],
    "proto": ["step_wire wire"],
    "worker/sequences": ["table table_private"],
    "worker/loop": ["lending pause serve_internal worker_internal"],
    "coordinator/process": ["launch supervise supervise_internal"],
    "coordinator/collector": ["collector collector_internal replies report"],
    "coordinator/executor": ["core executor_internal forward group_handles recorders"],
    "coordinator/recovery": ["recovery recovery_internal"],
    "coordinator/transport": ["nodes nodes_library"],
    "nodes/direct": ["direct direct_address direct_object direct_stream direct_tls"],
    "engine/model": ["checkpoint digest safetensors"],
    "engine/compute": ["cache cache_private"],
    "engine/batching": ["pull_message transfers"],
}



def sources(root):
    """{path: [included path of the product]} of every .c and .h below the folders of FOLDERS, and of the public headers."""
    tops = sorted({folder.split("/")[0] for folder in FOLDERS} | {"include"})
    paths = {str(path.relative_to(root)) for top in tops for path in (root / top).rglob("*.[ch]")}
    files = {}
    for path in sorted(paths):
        found = []
        for quote, name in re.findall(r'^#include ("|<coxswain/)([^">]+)', (root / path).read_text(), re.M):
            beside = os.path.normpath(os.path.join(os.path.dirname(path), name))
            found += [file for file in ((beside, name) if quote == '"' else (f"{INCLUDE}/{name}",)) if file in paths][:1]
        files[path] = found
    return files


def circles(edges):
    """The strongly connected parts of {node: {node}} that have more than one node."""
    order, low, stack, found = {}, {}, [], []

    def visit(node):
        order[node] = low[node] = len(order)
        stack.append(node)
        for after in sorted(edges.get(node, ())):
            if after not in order:
                visit(after)
            if after in stack:
                low[node] = min(low[node], low[after])
        if low[node] == order[node]:
            part = stack[stack.index(node):]
            del stack[stack.index(node):]
            if len(part) > 1:
                found.append(sorted(part))

    for node in sorted(edges):
        if node not in order:
            visit(node)
    return found


def top(folder):
    return folder.split("/")[0]


def check_folders(files, problems):
    allowed = {folder: set(names.split()) for folder, names in FOLDERS.items()}
    for part in circles(allowed):
        problems.append(f"FOLDERS has a circle: {', '.join(part)}")
    for folder, names in allowed.items():
        for name in sorted(names):
            layered = top(name) == top(folder) or top(name) in LAYERS[top(folder)].split()
            if not layered:
                problems.append(f"{folder} may include {name}: {top(folder)}/ stands below {top(name)}/")
    used = set()
    for path, found in files.items():
        folder = os.path.dirname(path)
        if folder.startswith(INCLUDE):
            continue
        if folder not in allowed:
            problems.append(f"{path}: folder {folder} is not in FOLDERS")
            continue
        for other in map(os.path.dirname, found):
            used.add((folder, other))
            if other != folder and other not in allowed[folder] and not other.startswith(INCLUDE):
                problems.append(f"{path} includes a file of {other}: FOLDERS does not allow that to {folder}")
    for folder, names in allowed.items():
        problems += [f"FOLDERS: {folder} no longer includes {name}" for name in sorted(names)
                     if (folder, name) not in used]


def check_circles(files, problems):
    edges = {}
    for path, found in files.items():
        pair = os.path.splitext(path)[0]
        edges.setdefault(pair, set()).update({os.path.splitext(file)[0] for file in found} - {pair})
    units = {tuple(f"{folder}/{name}" for name in unit.split()) for folder, list_ in UNITS.items() for unit in list_}
    for part in circles(edges):
        if tuple(part) in units:
            units.discard(tuple(part))
        else:
            problems.append(f"these include each other in a circle, and are no unit: {', '.join(part)}")
    problems += [f"UNITS: no circle any more: {', '.join(unit)}" for unit in sorted(units)]


def check_sizes(root, problems):
    for folder in FOLDERS:
        count = sum(path.is_file() for path in (root / folder).iterdir())
        if count > FILE_COUNT_MAX:
            problems.append(f"{folder} has {count} files: {FILE_COUNT_MAX} at most")
    for folder in {*FOLDERS, *LAYERS, "include", "tests"}:
        if not (root / folder / "README.md").is_file():
            problems.append(f"{folder} has no README.md that says what it is for")


def check_examples(root, problems):
    for path in sorted((root / "examples").glob("*.c")):
        for name in re.findall(r'^#include ["<]([^">]*)[">]', path.read_text(), re.M):
            if "/" in name and not name.startswith("sys/") and not (root / "include" / name).is_file():
                problems.append(f"{path.relative_to(root)} includes {name}, which is no public header")


def check_public(files, problems):
    names = {f"{INCLUDE}/{name}.h": name for name in PUBLIC}
    umbrellas = {f"{INCLUDE}/{name}.h" for name in ("coxswain", "memory")}
    known = set(names) | umbrellas
    problems += [f"PUBLIC lacks {path}" for path in files if path.startswith(INCLUDE) and path not in known]
    for path, found in files.items():
        public = [name for name in found if name.startswith(INCLUDE)]
        if path.startswith(INCLUDE):
            problems += [f"{path} includes {name}, which is private" for name in found if name not in known]
        problems += [f"{path} includes {name}: programs include that, the product what it needs of it"
                     for name in public if name in umbrellas and top(path) != "include"]
        if path not in umbrellas:
            problems += [f"{path} includes {name}, which is for {PUBLIC[names[name]]}/ and those above it"
                         for name in public if name in names and PUBLIC[names[name]] not in public_of(path)]


def public_of(path):
    """The folders whose public headers a file may include."""
    room = PUBLIC[path.removeprefix(f"{INCLUDE}/").removesuffix(".h")] if path.startswith(INCLUDE) else top(path)
    return [room, *LAYERS[room].split()]


def check_engine(files, problems):
    for path, found in files.items():
        if os.path.dirname(path) in ENGINE:
            problems += [f"{path} includes {name}, which is not installed: an engine of others could not" for name in found
                         if top(name) not in ("engine", "include") and name not in HEADERS_ALONE]


def check(files, root):
    problems = []
    check_folders(files, problems)
    check_circles(files, problems)
    check_sizes(root, problems)
    check_examples(root, problems)
    check_public(files, problems)
    check_engine(files, problems)
    return problems


def mutations(files):
    """Includes that have to be refused."""
    def into(path, name):
        return {**files, path: files[path] + [name]}

    yield "an include upwards", into("channel/base/base.c", "channel/shm/gate.h")
    yield "worker and coordinator", into("worker/loop/worker.c", "include/coxswain/executor.h")
    yield "the library and the engine", into("coordinator/executor/submit.c", "engine/model/model_image.h")
    yield "a circle within a folder", into("channel/shm/geometry.h", "channel/shm/gate.h")
    yield "what is not installed", into("engine/rank/engine.c", "worker/loop/pause.h")
    yield "a public header upwards", into("channel/base/base.c", "include/coxswain/executor.h")
    yield "a private header in a public one", into("include/coxswain/kv.h", "channel/shm/region.h")
    yield "an umbrella", into("worker/loop/worker.c", "include/coxswain/coxswain.h")
    yield "a folder of its own", {**files, "channel/other/file.c": []}
    yield "an edge that is gone", {path: found for path, found in files.items() if not path.startswith("program/")}


def main():
    files = sources(ROOT)
    problems = check(files, ROOT)
    problems += [f"not found: {what}" for what, changed in mutations(files) if not check(changed, ROOT)]
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(files)} files in {len(FOLDERS)} folders")


main()
