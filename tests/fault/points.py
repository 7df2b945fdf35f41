#!/usr/bin/python3
"""points.py: every step of the protocol passes a named fault point (channel/base/fault.h).

A step is whatever another process, or the next start, can see. What is looked for, function by function, comments and
strings left out:

  1. Each constant of COX_FAULT_POINTS is passed somewhere.
  2. channel/shm/state.h: behind each run of stores a point follows before the function ends.
  3. Elsewhere in channel/, memory/, model/, worker/ and coordinator/: behind each EFFECT (below) a point follows before the function
     ends: its own, or that of a function it calls which passes one itself; in the same file also over several calls.
     A store to an atomic word is one when a header of LAYOUTS has a word of that name; so is an assignment through a pointer to a
     struct of channel/shm/layout.h, and whatever fills a frame or a slot.

EXEMPT names what has none, each with its reason. CALLERS: the function is a small part of a step, so a call of it is
an effect of the caller, and the point is asked for there. An exemption that exempts nothing is an error.

The check then checks itself: sources with a point taken away or a step added must not pass.
"""
import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CALLERS = object()
# It is not of this group's processes: an agent writes it, which is the coordinator here, and whose death ends the ranks.
MIRROR = "what ranks of another machine have said"
# The structs of shared memory.
LAYOUTS = ("channel/shm/layout.h", "channel/kv/kv_blocks_layout.h", "memory/pool/pool_layout.h",
           "memory/queue/queue_layout.h",
           "engine/model/model_image_layout.h", "worker/group/group_layout.h")

EFFECTS = [
    # names
    r"\blinkat\(", r"\brename(?:at2?)?\(", r"\bunlink(?:at)?\(", r"\bmkdir(?:at)?\(", r"\brmdir\(", r"\bmkfifo\(",
    r"\bshm_unlink\(", r"\bsem_unlink\(", r"\bsem_open\(", r"\bshm_open\([^;]*O_CREAT",
    # what stands behind them
    r"\bflock\(", r"\bftruncate\(", r"\bposix_fallocate\(", r"\bfallocate\(", r"\bfchmod\(",
    # tokens
    r"\bsem_post\(", r"\bsem_wait\(", r"\bsem_trywait\(", r"\bsem_timedwait\(", r"\bsem_clockwait\(",
    r"\bcox_semaphore_(?:add|remove)\(", r"\bops->(?:post|take|wait)\(",
    # processes
    r"\bSYS_clone3?\b", r"\bclone\(", r"\bv?fork\(", r"\bposix_spawnp?\(", r"\bf?exec(?:v|ve|vp|vpe|l|le|lp|veat)\(", r"\bprctl\(",
    r"\bSYS_pidfd_send_signal\b", r"\bkill\(", r"\btgkill\(",
    # sockets
    r"\bbind\(", r"\blisten\(", r"\bconnect\(", r"\bsendmsg\(", r"\bsend(?:to)?\(",
    # fds by value
    r"\bexporter_dup\(", r"\bcox_fd_store_(?:put|remove)\(", r"\bSYS_pidfd_getfd\b",
    # frames and slots
    r"\bmem(?:cpy|set|move)\((?:request_base|reply_base|frame|slot|base)\b", r"\bcox_(?:parts_join|copy)\((?:frame|slot)\b",
    r"\bcox_wire_(?:request|response)_pack\([^;]*\b(?:frame|slot|base)\b", r"\bcallbacks->opaque\(",
]

EXEMPT = {
    # (file, function, what): why
    ("channel/base/semaphore.h", "cox_semaphore_post", "cox_semaphore_add("): CALLERS,
    ("channel/base/semaphore.h", "cox_semaphore_wake", "cox_semaphore_add("): CALLERS,
    ("channel/base/semaphore.h", "cox_semaphore_take", "cox_semaphore_remove("): CALLERS,
    ("channel/base/semaphore.h", "cox_semaphore_wait", "cox_semaphore_wait_signals("): CALLERS,
    ("channel/base/semaphore.h", "cox_semaphore_wait_signals", "cox_semaphore_take("): CALLERS,
    ("channel/base/semaphore.h", "cox_semaphore_wait_signals", "cox_semaphore_remove("): CALLERS,
    ("channel/base/semaphore.c", "cox_semaphore_unlink", "sem_unlink("): CALLERS,
    ("channel/base/semaphore.c", "cox_semaphore_create", "unlink("): "undoes the link before it; as killed just before",
    ("channel/attach/named/semaphore_gate.c", "cox_gate_create_semaphores", "cox_semaphore_unlink("): "undoes; as killed just before",
    ("channel/attach/sealed/futex_gate.c", "word_sleep", "atomic asleep"): "a hint, and only where ranks have processors of their own; killed within, it stays too high, which costs calls",
    ("channel/attach/named/semaphore_gate.c", "semaphores_wait", "atomic taken"): "the wakeup's count, private memory",
    ("channel/shm/region.c", "cox_region_reserve_part", "posix_fallocate("): CALLERS,
    ("channel/shm/region.c", "cox_region_reserve", "cox_region_reserve_part("): CALLERS,
    ("channel/shm/region.c", "region_name", "fchmod("): CALLERS,
    ("channel/shm/region.c", "region_resize", "ftruncate("): CALLERS,
    ("channel/attach/named/windows.c", "window_reserve", "cox_region_reserve_part("): CALLERS,
    ("channel/attach/named/windows.c", "windows_punch", "fallocate("): CALLERS,
    ("channel/shm/region.c", "region_memfd", "posix_fallocate("): CALLERS,
    ("channel/shm/region.c", "region_memfd", "fchmod("): CALLERS,
    ("channel/shm/region.c", "cox_region_unlink", "shm_unlink("): CALLERS,
    ("channel/attach/named/named_channel.c", "cox_channel_create", "cox_region_unlink("): "undoes; as killed just before",
    ("channel/shm/geometry.c", "cox_geometry_resolve", "through channel"): "the caller's memory",
    ("channel/shm/control.c", "cox_control_fill", "atomic magic"): CALLERS,
    ("channel/shm/control.c", "cox_control_fill", "through header"): CALLERS,
    ("worker/loop/stack_writer.c", "helper_connect", "connect("): "a connection to a helper, outside the protocol; it ends with the rank",
    ("worker/loop/stack_writer.c", "bytes_send", "send("): "a connection to a helper, outside the protocol; it ends with the rank",
    ("coordinator/stacks/stacks.c", "listener_make", "bind("): "a socket of its own, which ends with it",
    ("coordinator/stacks/stacks.c", "listener_make", "listen("): "a socket of its own, which ends with it",
    ("program/stacks/rank_connection.c", "cox_rank_connection_ask", "send("): "of the helper, to the rank's writer",
    ("program/stacks/rank_connection.c", "cox_rank_connection_ask_torch", "send("): "of the helper, to the rank's writer",
    ("worker/loop/stack_writer.c", "helper_serve", "prctl("): "who may trace the rank, which is of the rank's process",
    ("worker/loop/stack_writer.c", "reply", "ftruncate("): "a memfd of the rank's own, which is done with",
    ("worker/loop/stack_writer.c", "doorbell_make", "ftruncate("): "a memfd of the rank's own; without it no stacks are read",
    ("coordinator/stacks/helper_process.c", "cox_helper_process_start", "cox_launch_clone("): "a helper outside the protocol, which the kernel kills with its parent",
    ("coordinator/stacks/helper_process.c", "cox_helper_process_ask", "SYS_pidfd_send_signal"): "the helper's end; the kernel kills it with its parent",
    ("coordinator/stacks/helper_process.c", "cox_helper_process_end", "SYS_pidfd_send_signal"): "the helper's end; as killed just before",
    ("program/stacks/tracer.c", "child_watch", "kill("): "the helper's own child; it lets go of all threads when it ends",
    ("program/stacks/tracer.c", "cox_tracer_copy", "fork("): "the helper's own child; it lets go of all threads when it ends",
    ("program/stacks/tracer.c", "cox_tracer_copy", "prctl("): "the child's end with the helper",
    ("channel/socket/socket_name.c", "cox_socket_listen", "fchmod("): "a socket of the caller's own, no part of a group",
    ("channel/socket/socket_name.c", "cox_socket_listen", "bind("): "a socket of the caller's own, no part of a group",
    ("channel/socket/socket_name.c", "cox_socket_listen", "listen("): "a socket of the caller's own, no part of a group",
    ("channel/socket/socket_name.c", "cox_socket_listen", "unlinkat("): "a socket of the caller's own, no part of a group",
    ("channel/socket/socket_name.c", "cox_socket_unlink", "unlinkat("): "a socket of the caller's own, no part of a group",
    ("channel/handle/handle_probe.c", "probe_child_getfd", "SYS_clone"): "a child of the query's own, gone on return",
    ("channel/handle/handle_probe.c", "probe_child_getfd", "kill("): "a child of the query's own, gone on return",
    ("channel/handle/handle_probe.c", "probe_getfd", "SYS_pidfd_getfd"): "of a child of the query's own",
    ("channel/handle/handle_probe.c", "hidden_reason", "kill("): "asks",
    ("channel/handle/handle_probe.c", "cox_handle_query", "prctl("): "asks",
    ("channel/handle/handle_probe.c", "cox_ptrace_policy_set", "prctl("): "of this process alone, and ends with it",
    ("channel/base/peer.c", "peer_missing", "kill("): "asks",
    ("channel/recorder/recorder.c", "recorder_new", "atomic incarnation"): "for display; nothing waits for it",
    ("channel/recorder/recorder.c", "recorder_new", "atomic start"): "for display; nothing waits for it",
    ("channel/recorder/recorder.c", "recorder_new", "atomic pid"): "for display; nothing waits for it",
    ("channel/recorder/recorder.c", "cox_recorder_file_create", "unlink("): "a file of the crash directory, which the next start replaces; no part of the protocol",
    ("channel/recorder/recorder.c", "file_create", "unlink("): "a file of the crash directory, which the next start replaces; no part of the protocol",
    ("channel/recorder/recorder.c", "file_create", "posix_fallocate("): "a file of the crash directory, which the next start replaces; no part of the protocol",
    ("coordinator/recording/recording.c", "cox_recording_lock", "flock("): "the kernel ends the lock with the process; multi/trace kills the coordinator",
    ("coordinator/recording/recording.c", "cox_recording_unlock", "unlink("): "a lock file that is left is locked by the next group that records there",
    ("program/service/leftovers.c", "is_dead", "flock("): "asks whether a group is dead; nothing is changed",
    ("program/command/trace_command.c", "trace_write", "unlink("): "a file of the command's user",
    ("coordinator/recording/recording.c", "cox_recording_folder_make", "mkdir("): "a folder of the operator's, which stays",
    ("coordinator/recording/recording.c", "cox_recording_rings_remove", "unlink("): "what is left is read by postmortem, and removed by the next stop; multi/trace kills the coordinator",
    ("coordinator/recording/recording.c", "files_prune", "unlink("): "files beyond the limit, which the next write removes",
    ("coordinator/recording/recording.c", "cox_recording_write", "rename("): "a whole file, or none",
    ("coordinator/recording/recording.c", "cox_recording_write", "unlink("): "undoes; as killed just before",
    ("channel/socket/hello.c", "cox_hello_format", "memset(frame"): "the caller's memory, no shared frame",
    ("worker/group/group_round.c", "say_dead", "atomic said_dead"): CALLERS,
    ("worker/loop/report.c", "worker_write_fault", "cox_wire_response_pack("): CALLERS,
    ("worker/loop/serve.c", "call_opaque", "callbacks->opaque("): CALLERS,
    ("worker/loop/attach.c", "worker_ends_with_parent", "prctl("): "asks",
    ("worker/loop/attach.c", "worker_follow_wrapper", "prctl("): "of this process alone; before attach.control",
    ("worker/loop/worker.c", "cox_worker_free", "prctl("): "of this process alone",
    ("channel/attach/legacy/legacy_shim.c", "cox_legacy_shim_create", "through layout"): "private memory, of nobody else",
    ("coordinator/executor/worker_hello.c", "on_worker", "atomic pid"): "the slot holder, private memory",
    ("coordinator/executor/worker_hello.c", "on_worker", "atomic incarnation"): "the slot holder, private memory",
    ("coordinator/process/rank.h", "cox_rank_set_pid", "atomic pid"): "the record of the rank, private memory",
    ("coordinator/collector/fault_reports.c", "cox_fault_reports_take", "memset(base"): CALLERS,
    ("channel/shm/reply.c", "cox_reply_erase", "memset("): "for the coordinator alone, before the request that gate.opened follows",
    ("coordinator/collector/error_channel.c", "error_channel_main", "atomic ended"): "for stop to sleep on, private memory",
    ("coordinator/executor/submit.c", "payload_pack", "cox_copy(frame"): CALLERS,
    ("coordinator/executor/submit.c", "payload_pack", "cox_parts_join(frame"): CALLERS,
    ("worker/loop/take_reply.c", "cox_worker_reply_parts", "cox_parts_join(slot"): "cox_channel_thread_send behind it commits, and is in another file",
    ("coordinator/executor/submit.c", "payload_pack", "cox_wire_request_pack("): CALLERS,
    ("coordinator/executor/submit.c", "payload_pack_out_of_line", "cox_wire_request_pack("): CALLERS,
    ("coordinator/executor/submit.c", "payload_write", "payload_pack("): CALLERS,
    ("coordinator/executor/submit.c", "payload_pack_away", "payload_pack("): "private memory, which the transport copies",
    ("coordinator/process/launch.c", "cox_launch_clone", "clone("): CALLERS,
    ("coordinator/process/launch.c", "cox_launch_clone", "SYS_clone"): CALLERS,
    ("program/process_one.c", "cox_process_one", "fork("): "process 1 and the command; neither has a group yet",
    ("program/process_one.c", "cox_process_one", "kill("): "a signal that is passed on",
    ("coordinator/process/launch.c", "child_main", "execve("): "behind it is another program; attach.control is its first",
    ("engine/rank/engine.c", "engine_bend", "unlink("): "a file by which a test asks; not in a release",
    ("coordinator/process/launch.c", "cox_launch_kill_group", "SYS_pidfd_send_signal"): "what others see of it is the end of a process",
    ("coordinator/process/launch.c", "cox_launch_kill_group", "kill("): "what others see of it is the end of a process",
    ("coordinator/process/launch.c", "cox_launch", "SYS_pidfd_send_signal"): "ends a process that nobody has heard of yet",
    ("program/command/doctor_checks.c", "cox_doctor_unnamed_file", "linkat("): "a file of doctor's own, no part of a group",
    ("program/command/doctor_checks.c", "cox_doctor_unnamed_file", "unlink("): "a file of doctor's own, no part of a group",
    ("program/command/doctor_checks.c", "memory_make", "ftruncate("): "memory of doctor's own, no part of a group",
    ("program/command/doctor_checks.c", "runtime_dir_bind", "bind("): "a socket of doctor's own, no part of a group",
    ("program/command/doctor_checks.c", "runtime_dir_bind", "unlinkat("): "a socket of doctor's own, no part of a group",
    ("program/command/doctor_checks.c", "cox_doctor_child_pidfd", "SYS_clone"): "a child of doctor's own, no part of a group",
    ("program/command/doctor_checks.c", "cox_doctor_pidfd_getfd", "fork("): "children of doctor's own, no part of a group",
    ("program/command/doctor_checks.c", "cox_doctor_pidfd_getfd", "prctl("): "children of doctor's own, no part of a group",
    ("program/command/doctor_checks.c", "fetch", "SYS_pidfd_getfd"): "of a child of doctor's own",
    ("program/metrics/http_address.c", "remove_dead", "connect("): "the socket of the HTTP server, no part of a group",
    ("program/metrics/http_address.c", "remove_dead", "unlink("): "the socket of the HTTP server, no part of a group",
    ("program/metrics/http_address.c", "cox_http_address_listen", "fchmod("): "the socket of the HTTP server, no part of a group",
    ("program/metrics/http_address.c", "cox_http_address_listen", "bind("): "the socket of the HTTP server, no part of a group",
    ("program/metrics/http_address.c", "cox_http_address_listen", "listen("): "the socket of the HTTP server, no part of a group",
    ("program/metrics/http.c", "cox_metrics_server_free", "unlink("): "the socket of the HTTP server, no part of a group",
    ("program/metrics/http.c", "send_more", "send("): "to a client of the HTTP server, no part of a group",
    ("program/service/notify.c", "socket_open", "connect("): "to the service manager, no part of a group",
    ("program/service/notify.c", "cox_notify_send", "send("): "to the service manager, no part of a group",
    ("worker/group/group_peer.c", "cox_group_known_pid_is_dead", "kill("): "asks",
    ("worker/group/group_fd_exchange.c", "fd_take", "SYS_pidfd_getfd"): CALLERS,
    ("worker/group/group_fd_exchange.c", "fds_take", "fd_take("): CALLERS,
    ("worker/group/group_memory.c", "cox_group_parts_reset", "atomic mirror"): CALLERS,
    ("worker/group/group_memory.c", "cox_group_parts_reset", "atomic name_hash"): CALLERS,
    ("worker/group/group_memory.c", "cox_group_parts_reset", "atomic members_hash"): CALLERS,
    ("worker/group/group_memory.c", "cox_group_parts_reset", "atomic aborted"): CALLERS,
    ("worker/group/group_memory.c", "cox_group_parts_reset", "atomic because"): CALLERS,
    ("worker/group/group_memory.c", "cox_group_parts_reset", "atomic arrived"): CALLERS,
    ("worker/group/group_memory.c", "cox_group_parts_reset", "atomic what"): CALLERS,
    ("worker/group/group_mirror.c", "rank_reset", "atomic holder"): MIRROR,
    ("worker/group/group_mirror.c", "rank_reset", "cox_group_parts_reset("): MIRROR,
    ("worker/group/group_mirror.c", "cox_group_mirror_wake", "atomic mirror"): MIRROR,
    ("worker/group/group_mirror.c", "apply_identity", "atomic incarnation"): MIRROR,
    ("worker/group/group_mirror.c", "apply_identity", "atomic said_count"): MIRROR,
    ("worker/group/group_mirror.c", "apply_identity", "atomic said_size"): MIRROR,
    ("worker/group/group_mirror.c", "apply_identity", "atomic said_dead"): MIRROR,
    ("worker/group/group_mirror.c", "apply_identity", "atomic holder"): MIRROR,
    ("worker/group/group_mirror.c", "apply_epoch", "atomic mirror"): MIRROR,
    ("worker/group/group_mirror.c", "apply_epoch", "atomic arrived"): MIRROR,
    ("worker/group/group_private.h", "cox_group_tell_mirror", "atomic mirror"): CALLERS,
    ("coordinator/collector/collector.c", "cox_collector_begin_after", "atomic news"): "before the first request",
    ("coordinator/executor/transport.c", "cox_executor_kill_remote", "kill("): "a function of the transport, of that name",
    ("coordinator/executor/transport.c", "reply_out_of_line", "cox_wire_response_pack("): CALLERS,
    ("coordinator/executor/transport.c", "reply_refusal", "cox_wire_response_pack("): CALLERS,
    ("coordinator/process/child.c", "cox_child_kill", "kill("): "a hook of that name: the transport's",
    ("coordinator/process/child.c", "cox_pidfd_signal", "SYS_pidfd_send_signal"):
        "what others see of it is the end of a process, which the matrix has at every step",
}

GATE = "channel/shm/gate.h"
GATE_OPS = ("arm", "reply", "post", "wake", "wait", "take", "absorb")
STORE = re.compile(r"\batomic_(?:store|exchange|fetch_\w+?|compare_exchange_\w+?)(?:_explicit)?\(\s*&?([^,]*)")
POINT = re.compile(r"\bcox_fault_point(?:_of)?\(")
CALL = re.compile(r"\b(\w+)\(")
CONSTANT = re.compile(r"cox_fault_point(?:_of)?\(COX_FAULT_(\w+)[,)]")
OF_WAKEUP = "cox_fault_point((enum cox_fault_point)(COX_FAULT_POSTED_REQUEST_PRODUCE + (int)wakeup))"
FUNCTION = re.compile(r"^[^\s{};#][^;{}#]*?\b(\w+)\([^;{}]*\)\n\{\n(.*?)^\}", re.M | re.S)


@functools.cache
def plain(text):
    """Without comments and the inside of strings; every position stays."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match.group())
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.S)


@functools.cache
def functions(text):
    return {match.group(1): match.group(2) for match in FUNCTION.finditer(plain(text))}


@functools.cache
def calls_in_order(body):
    """(position, name) of each call, the last one first."""
    return [(match.start(), match.group(1)) for match in CALL.finditer(body)][::-1]


@functools.cache
def calls_of(body):
    return frozenset(name for _, name in calls_in_order(body))


@functools.cache
def with_point(text):
    """The functions of a file that pass a point themselves."""
    return frozenset(name for name, body in functions(text).items() if POINT.search(body))


def sources():
    files = {}
    for folder in ("channel", "memory", "engine", "worker", "coordinator", "program"):
        for path in sorted((ROOT / folder).rglob("*.[ch]")):
            files[str(path.relative_to(ROOT))] = path.read_text()
    # A gate calls the function of its kind: it passes a point where that of either kind does.
    files[GATE] = re.sub(rf"gate->ops->(?:{'|'.join(GATE_OPS)})\(", "cox_fault_point_of(", files[GATE])
    return files


def last_field(expression):
    names = re.findall(r"\w+", re.sub(r"\[[^\]]*\]", "", expression))
    return names[-1] if names else ""


@functools.cache
def effects(body, shared_words, by_callers):
    """(position behind it, what) of each effect."""
    found = []
    for match in STORE.finditer(body):
        if last_field(match.group(1)) in shared_words:
            found.append((match.end(), f"atomic {last_field(match.group(1))}"))
    for variable in set(re.findall(r"(?<!const )\bstruct cox_layout_\w+ \*(\w+)", body)):
        for match in re.finditer(rf"\b{variable}->[\w.\[\]>-]+\s*(?:[-+|&]?=(?!=)|\+\+|--)"
                                 rf"|[(,]\s*&{variable}->\w+\s*[,)]|\bmemcpy\({variable}->", body):
            if "atomic_" not in body[max(0, match.start() - 40):match.start() + 1]:
                found.append((match.end(), f"through {variable}"))
    for pattern in EFFECTS:
        for match in re.finditer(pattern, body):
            word = re.match(r"\w+(?:->\w+)?\(?(?:frame|slot|base)?", match.group()).group()
            found.append((match.end(), word))
    for name in by_callers:
        found += [(match.end(), name + "(") for match in re.finditer(rf"\b{name}\(", body)]
    return sorted(found)


def passes(texts):
    """file -> names whose call is a point there."""
    direct = set().union(*map(with_point, texts.values()))
    reached = {}
    for file, text in texts.items():
        names = set(direct)
        while True:
            more = {name for name, body in functions(text).items()
                    if name not in names and not names.isdisjoint(calls_of(body))}
            if not more:
                break
            names |= more
        reached[file] = names
    return reached


def last_point(body, names, function):
    """Its position; a call of one of `names` is a point, but not the function's of itself."""
    return next((position for position, name in calls_in_order(body)
                 if name in names and name != function or name.startswith("cox_fault_point")), -1)


@functools.cache
def constants_passed(text):
    text = plain(text)
    return frozenset(CONSTANT.findall(text)), OF_WAKEUP in text


def check_constants(files, problems):
    constants = re.findall(r'\bX\((\w+), "', files["channel/base/fault.h"])
    wakeups = re.findall(r"^    COX_WAKEUP_(?!COUNT)(\w+)", plain(files["channel/shm/geometry.h"]), re.M)
    used = set()
    for file, text in files.items():
        if file.startswith("channel/base/fault."):
            continue
        passed, of_wakeup = constants_passed(text)
        used |= passed
        if of_wakeup:
            used |= {f"POSTED_{wakeup}" for wakeup in wakeups}
    first = constants.index("POSTED_REQUEST_PRODUCE")
    if constants[first:first + len(wakeups)] != [f"POSTED_{wakeup}" for wakeup in wakeups]:
        problems.append("channel/base/fault.h: the POSTED_ constants are not those of enum cox_wakeup, in its order")
    problems += [f"channel/base/fault.h: nobody passes COX_FAULT_{name}" for name in constants if name not in used]
    return len(constants)


def check(files):
    """Returns (problems, number of points, number of steps)."""
    problems, steps, idle = [], 0, set(EXEMPT)
    point_count = check_constants(files, problems)
    shared_words = frozenset(word for layout in LAYOUTS
                             for word in re.findall(r"_Atomic \w+\s+(\w+)", plain(files[layout])))
    texts = {file: text for file, text in files.items() if not file.startswith("channel/base/fault.")}
    by_callers = frozenset(function for (_, function, _), why in EXEMPT.items() if why is CALLERS)
    reached = passes(texts)
    everywhere = set().union(*reached.values())
    problems += [f"{GATE}: no kind of gate has a point in {name}" for name in GATE_OPS
                 if not {f"semaphores_{name}", f"futexes_{name}"} & everywhere]
    for file, text in texts.items():
        for name, body in functions(text).items():
            if file == "channel/shm/state.h":
                stores = [match.end() for match in STORE.finditer(body)]
                if stores and last_point(body, (), name) < stores[-1]:
                    problems.append(f"{file}: {name} stores, and no point follows")
                steps += len(stores)
                continue
            found = effects(body, shared_words, by_callers - {name} if name in by_callers else by_callers)
            last = last_point(body, reached[file], name) if found else -1
            for position, what in found:
                steps += 1
                if (file, name, what) in EXEMPT:
                    idle.discard((file, name, what))
                elif last < position:
                    problems.append(f"{file}: {name}: {what}: no point follows")
    problems += [f"EXEMPT has {key}, which is no longer there" for key in sorted(idle)]
    return problems, point_count, steps


def change(files, file, old, new):
    if files[file].count(old) < 1:
        sys.exit(f"points.py: no '{old}' in {file} to change")
    return {**files, file: files[file].replace(old, new, 1)}


def into(files, file, function, statement):
    """The statement as the last of the function."""
    match = re.search(rf"^[^\n;]*\b{function}\([^;{{}}]*\)\n\{{\n.*?^\}}", files[file], re.M | re.S)
    if not match:
        sys.exit(f"points.py: no function {function} in {file} to change")
    end = match.end() - 1
    return {**files, file: files[file][:end] + "    " + statement + "\n" + files[file][end:]}


def mutations(files):
    """(what was done, sources that must not pass)."""
    for file, text in files.items():
        for call in sorted(set(re.findall(r"cox_fault_point\([^;]*\);", plain(text)))):
            everywhere = sum(plain(other).count(call) for other in files.values())
            if not file.startswith("channel/base/fault.") and everywhere == 1:
                yield f"{file} without {call}", change(files, file, call, "")
    for file, function, statement in (
            ("channel/shm/state.h", "cox_state_set_done", "atomic_store_explicit(&line->taken, 1, memory_order_release);"),
            ("channel/shm/state.h", "cox_state_published", "atomic_store(&shared->published, 1);"),
            ("channel/shm/control.c", "cox_control_verify", "atomic_store(&layout->abort.word, 1);"),
            ("channel/shm/control.c", "cox_control_verify", "layout->header.group_incarnation = 1;"),
            ("channel/shm/region.c", "cox_region_attach", "shm_unlink(name);"),
            ("channel/shm/region.c", "cox_region_attach", "shm_open(name, O_RDWR | O_CREAT, 0600);"),
            ("channel/shm/region.c", "cox_region_detach", "cox_region_unlink(name);"),
            ("channel/shm/reply.c", "cox_reply_fetch", "memset(slot, 0, 4);"),
            ("channel/shm/reply.c", "cox_reply_commit", "memcpy(reply_base(channel, rank, sequence), &prefix, 4);"),
            ("worker/loop/reply_message.c", "cox_channel_thread_slot", "atomic_store(&thread->line->stamp_ns, 1);"),
            ("worker/loop/serve.c", "thread_copy", "sem_post(wakeup);"),
            ("worker/loop/attach.c", "worker_check_group", "atomic_store(&identity->state, COX_IDENTITY_LEFT);"),
            ("worker/loop/worker.c", "cox_worker_free", "flock(fd, LOCK_EX);"),
            ("coordinator/collector/collector_internal.h", "collector_returned", "collector->channel->gate.ops->post(wakeup);"),
            ("coordinator/process/supervise.c", "cox_supervisor_adopt", "kill(pid, SIGKILL);"),
            ("coordinator/process/supervise.c", "cox_supervisor_free", "unlink(path);"),
            ("coordinator/process/launch.c", "program_find", "fork();"),
            ("coordinator/collector/error_channel.c", "error_channel_fetch", "memset(base, 0, sizeof prefix);")):
        yield f"{file}: {function} with {statement}", into(files, file, function, statement)
    yield "a constant more", change(files, "channel/base/fault.h", 'X(STOPPED, "stopped")',
                                    'X(STOPPED, "stopped") X(NEVER, "never")')


def main():
    files = sources()
    problems, points, steps = check(files)
    if problems:
        sys.exit("\n".join(problems))
    count = 0
    for what, changed in mutations(files):
        count += 1
        if not check(changed)[0]:
            problems.append(f"not found: {what}")
    if problems:
        sys.exit("\n".join(problems))
    print(f"{points} points behind {steps} steps; {count} changed sources were all refused")


main()
