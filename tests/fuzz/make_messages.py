#!/usr/bin/python3
"""Writes the fuzz corpus: make_messages.py tests/fuzz/corpus

To be run again when a message or a layout changes; the files are committed. Each message is written in protobuf's text
format, and packed by protoc-c from the .proto files. What has a layout of the C code is packed with its offsets
(channel/shm/layout.h, channel/socket/hello.h, channel/handle/handle_internal.h).
"""

import os
import struct
import subprocess
import sys

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
root = sys.argv[1]


def pack(name, text):
    """The bytes of a message: coxswain.ExecuteRequest is of proto/executor.proto."""
    file = {
        "coxswain": "proto/executor.proto",
        "coxswain_control": "proto/control.proto",
        "coxswain_recording": "proto/recording.proto",
        "cox_node": "nodes/node.proto",
    }[name.split(".")[0]]
    command = ["protoc-c", "--encode=" + name, "-I" + SOURCE, file]
    return subprocess.run(command, input=text.encode(), stdout=subprocess.PIPE, check=True, cwd=SOURCE).stdout


def save(path, *parts):
    path = os.path.join(root, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(b"".join(bytes(part) if isinstance(part, list) else part for part in parts))


# ---- control connections: how the input is cut, and the messages of a stream ----


def stream(kind, text):
    message = pack("coxswain_control.Control" + kind, text)
    return struct.pack("<I", len(message)) + message


def control_requests():
    complete = stream(
        "Request",
        """complete {
        prompts { index: 0 tokens: [1, 5, 10, 13, 8, 11, 14, 300] }
        prompts { index: 1000 tokens: [1, 5, 10, 13, 8, 11, 14] }
        new_count_max: 20 temperature: 0.5 top_k: 3 stop_tokens: 2 }""",
    )
    save("control_request/status_and_prompts", b"\0\377", stream("Request", "status {}"), complete)
    save("control_request/prompts_and_stop_in_pieces", b"\2\0", complete, stream("Request", "stop {}"))
    save(
        "control_request/replies",
        b"\1\37",
        stream("Reply", "item { index: 3 finish: STOP tokens: [11, 8, 2] }"),
        stream("Reply", "error { code: 10 text: 'too long' }"),
        stream(
            "Reply",
            """status { name: 'group'
            ranks { rank: 0 pid: 4242 death: 'rank 0 (pid 4242) was killed by signal 9 (Killed)' }
            channels { name: 'execute' late_ranks: [0, 7] } }""",
        ),
    )
    save(
        "control_request/recover",
        b"\3\0",
        stream("Request", "recover { command: 5 rank: 2 kill: true timeout_ms: 60000 }"),
    )
    save(
        "control_request/recovered",
        b"\1\7",
        stream(
            "Reply",
            """recover {
            ranks { rank: 0 result: 507 text: 'no answer' } ranks { rank: 1 result: -1 text: 'no answer' }
            error { code: 14 text: 'pause: rank 0 replied 507' } engine_state: 'ABNORMAL' }""",
        ),
        stream("Reply", "status { recovery { on_death: 2 restart_max: 5 doing: 'replacing rank 2' } }"),
    )


# ---- steps and replies ----

ANNOUNCED = """step { base_sequence: 0
    announced { seq_id: 100 slot: 0 tokens: [1, 5, 9, 2] tables { blocks: [3, 4] } }
    announced { seq_id: 101 slot: 3 tokens: [1, 5] tables { blocks: 3 } }
    row_slot: [0, 3] row_position: [0, 0] row_token_count: [4, 1] row_silent: 1 }"""
PROMPTS = (
    "blocks_to_swap_in { num1: 1 num2: 2 } blocks_to_swap_out { num1: 3 num2: 4 } "
    "blocks_to_copy { num1: 5 num2: 6 } forward_type: PREFILL " + ANNOUNCED
)
DECODE = """forward_type: DECODE step { base_sequence: 1
    append_slot: 0 append_block: 7 append_table: 0 token_slot: 3 token: 11
    row_slot: [0, 3] row_position: [4, 1] row_token_count: [1, 2] }"""
FINISHED = """forward_type: DECODE step { base_sequence: 2
    finished: 0 row_slot: 3 row_position: 3 row_token_count: 1 }"""
# A position whose sum with the count is small again, a slot and a block that are as large as can be.
EDGES = f"""forward_type: DECODE step {{ base_sequence: 1
    append_slot: 3 append_block: {2**31 - 1} append_table: 0
    row_slot: 0 row_position: {2**32 - 2} row_token_count: 4 }}"""
# Columns of whole words: eight numbers of one byte, four of two, and some of all widths.
COLUMNS = f"""forward_type: DECODE step {{ base_sequence: {1 << 40}
    append_slot: {list(range(20))} append_block: {list(range(200, 220))} append_table: {[0, 1] * 10}
    row_slot: {list(range(120, 140))} row_position: {list(range(1000, 1020))}
    row_token_count: {[1 if i % 7 else 1 << (i + 3) for i in range(20)]} row_silent: 7 }}"""


def words(*numbers):
    return '"' + "".join(f"\\x{byte:02x}" for byte in struct.pack(f"<{len(numbers)}q", *numbers)) + '"'


def nested(is_prompt, more=""):
    tokens = f"prompt_token_ids: {words(1, 5, 9, 2)}" if is_prompt else ""
    return f"""forward_type: {"PREFILL" if is_prompt else "DECODE"} seq_group_metadata_list {{
        request_id: 'request-1' is_prompt: {str(is_prompt).lower()} seqIds: {words(100)} {tokens}
        block_tables: {words(3, 4)} {more} }}"""


NESTED_PROMPT = nested(True, "is_req_last_chunk: false split_start_pos: 0 split_end_pos: 3")
NESTED_DECODE = nested(False)
NESTED_FINISHED = "forward_type: DECODE finished_requests_ids: 'request-1'"


def request(step):
    return pack("coxswain.ExecuteRequest", f"execute_type: MODEL_INFER execute_model_request {{ {step} }}")


def steps():
    commit, base, cleanup, clear = 1, 2, 4, 8  # step.c

    def record(how, step):
        packed = request(step)
        return struct.pack("<BH", how, len(packed)) + packed

    save(
        "step/packed",
        record(commit, PROMPTS),
        record(base, DECODE),
        record(commit | base, EDGES),
        record(commit | base, DECODE),
        record(commit | base, FINISHED),
    )
    save(
        "step/nested",
        record(commit, NESTED_PROMPT),
        record(0, NESTED_DECODE),
        record(commit, NESTED_DECODE),
        record(commit, NESTED_FINISHED),
    )
    save(
        "step/mixed",
        record(0, PROMPTS),
        record(commit, PROMPTS),
        struct.pack("<BHq", cleanup, 8, 101),
        record(commit, NESTED_PROMPT),
        record(commit | clear, NESTED_PROMPT),
    )
    for name, step in (
        ("packed_prompts", PROMPTS),
        ("packed_decode", DECODE),
        ("packed_columns", COLUMNS),
        ("nested_prompt", NESTED_PROMPT),
        ("nested_decode", NESTED_DECODE),
    ):
        save("wire_request/" + name, [0], request(step))
        save("step_wire/" + name, [1], request(step))


def responses():
    for name, text in (
        (
            "step",
            f"""rank: 1 execute_model_response {{ step {{ tokens: [4, -1, 70000] logprobs: [-0.5, 0, -12.25]
            base_sequence: 9 digests: [7, {0x123456789ABCDEF0}, 1, {2**64 - 1}, 0] }} }}""",
        ),
        ("init", "rank: 1 init_results { init_result_map { key: 'npuBlockNum' value: '1000' } }"),
        ("failure", "rank: 1 error_text: 'out of blocks' error_channel: 0 error_sequence: 12"),
    ):
        status = 77 if name == "failure" else 0
        packed = pack("coxswain.ExecuteResponse", f"msg_type: 0 status: {status} " + text)
        save("wire_response/" + name, [0], packed)
        save("step_wire/" + name, [0], packed)


# ---- frames of nodes: node_frame.c has what the first bytes mean ----

BEAT, ANSWERED = 96, 64
SEEK, WELCOME, REQUEST, LEAD_BEAT, HELLO, ANSWER, AGENT_BEAT, TEXT, REQUEST_ALL = range(1, 10)
TO_ALL = 32
CHANNELS = "channels { through: 1 done: 1 } channels { through: 0 done: 0 }"
PEERS = "peers { node: 'b' address: '10.0.0.1:9' rank_first: 2 rank_count: 3 incarnation: 1 }"
AGENT_BEAT_TEXT = f"""{CHANNELS} ranks {{ incarnation: 1 state: UP pid: 100 }} ranks {{ incarnation: 1 state: UP pid: 101 }}
    ranks {{ incarnation: 1 state: DEAD pid: 102 text: 'was killed' known: true signal: 9 }}
    peers_version: 5 agent: 42"""


def frame(what, payload, sequence=0, previous=0):
    """As the first byte of its kind says: channel, 4 words, payload."""
    return bytes([what, 0, sequence, previous, 0, 0, len(payload)]) + payload


def message(kind, name, text):
    return frame(kind - 1, pack("cox_node." + name, text))


def raw(kind, payload, incarnation=1, sequence=0, deadline=0, asked=0):
    """The same, as it comes from the other side: head and payload (nodes/link/frame.h)."""
    head = b"CXN1" + struct.pack(
        "<BBHII10Q", kind, 0, 0, 0, len(payload), 7, incarnation, sequence, 0, deadline, 10**9, asked, 0, 0, 0
    )
    return bytes([0, 200, len(head) + len(payload)]) + head + payload


def node_frames():
    save(
        "node_frame/gap",
        [0],
        frame(REQUEST - 1, b"x", 2, 1),
        frame(REQUEST - 1, b"y", 1, 0),
        [104],  # they are run
    )
    published = b""
    for i in range(1, 4):  # the lead publishes one
        published += bytes([64, 60]) + frame(TO_ALL | (REQUEST - 1), b"abcd", i, i - 1) + bytes([96])
    save("node_frame/to_all", [0], published, frame(REQUEST - 1, b"abcd", 3, 2))  # it is sent again, to one
    never = 2**64 - 1
    save("node_frame/raw_request", raw(REQUEST, b"abcd", 1, 1, never, 0x1C))
    save("node_frame/raw_request_all", raw(REQUEST_ALL, b"abcd", 5, 1, never, 0x1C))
    beat = pack("cox_node.AgentBeat", AGENT_BEAT_TEXT)
    save("node_frame/raw_beat", raw(AGENT_BEAT, beat, deadline=never))
    answer = struct.pack("<II", 0, 2) + struct.pack("<III", 2, 1, 2) + b"ok" + struct.pack("<III", 3, 2, 0)
    save(
        "node_frame/session",
        [0, 64, 60],  # the lead publishes one
        frame(REQUEST - 1, b"abcd", 1, 0),
        [96],  # it is run
        frame(ANSWER - 1, answer, 1, 0),
        frame(AGENT_BEAT - 1, beat),
        message(LEAD_BEAT, "LeadBeat", f"{CHANNELS} wanted: [1, 1, 1] killed: [0, 0, 0] {PEERS} peers_version: 6"),
        frame(TO_ALL | (REQUEST - 1), b"abcd", 2, 1),  # of the peers that the beat has brought
        [128, 40],  # 160 ms pass
    )
    save(
        "node_frame/messages",
        [0],
        message(
            HELLO,
            "Hello",
            f"""version: '1.1.0' protocol: 1 agent: 42 pid: 100 address: '10.0.0.2:9' facts {{ name: 'model' value: 'x' }}
            epoch: 6 {CHANNELS} lead_address: '10.0.0.1:9'""",
        ),
        message(
            WELCOME,
            "Welcome",
            f"""epoch: 8 agent: 42 incarnation: 1 rank_first: 2 rank_count: 3 world: 8 depth: 4 start_after: [5, 5]
            {PEERS} peers_version: 7 address: '10.0.0.1:9'""",
        ),
        frame(TO_ALL | (REQUEST - 1), b"x", 6, 5),  # of the new lead
        [96],
        message(TEXT, "Text", "rank: 2 is_stderr: false text: 'line'"),
    )


# ---- recordings: which part is told, how many words are written to recorders, these words, and the message ----


def recordings():
    step = 63 | 1 << 32  # MODEL_INFER
    patches = []

    def put(recorder, at, *values):
        """Words of the coordinator's recorder, 0, or of that of rank number - 1 (recorder_layout.h)."""
        for i, value in enumerate(values):
            patches.append(struct.pack("<BBxxIQ", recorder, 0 if at + i < 512 else 0x80, at + i, value))

    for sequence in 1, 2:  # a step of two ranks; the second has not replied
        at = 1000 * sequence
        rank = [sequence, at + 10, step, at + 11, 1 << 48 | 20, at + 90, 84, at + 91]
        put(0, 256 + 16 * sequence, sequence, step, 3, 0, at, at + 1, at + 2, at + 3)
        put(1, 256 + 8 * sequence, *rank)
        put(2, 256 + 8 * sequence, *rank[:4])
        put(1, 19712 + 8 * sequence, sequence, at + 20, 1 << 56, sequence, 1, at + 40, 0, at + 41)
    state = "states { state: 2 sequence: 2 age_ns: 77 }"
    death = "rank 1 (pid 4243) was killed by signal 9 (Killed)"
    message = pack(
        "coxswain_recording.Recording",
        f"""name: 'group' cause: 'death' text: '{death}' realtime_ns: 5000 monotonic_ns: 5000 rank_count: 2
        ranks {{ rank: 0 pid: 4242 liveness: 'alive' {state} }}
        ranks {{ rank: 1 pid: 4243 liveness: 'dead' death: '{death}' last_lines: 'last words' {state} }}
        requests {{ sequence: 2 type: 1 size: 0 asked: 1 pending: 1 }}""",
    )
    save("recording/death", [0, len(patches)], *patches, message)
    save("recording/last", [2 | 1 << 2, len(patches)], *patches, message)


# ---- layouts: the header of a group, frames, reply slots, control sockets, handles ----

GROUP_INCARNATION, PID, START = 0x1234567, 4242, 424242


def control_attach(name, rank_count, depth, flags, object_size, channels):
    """The size of the object, and its header up to the padding."""
    size = 5248 + 2048 * rank_count
    header = struct.pack(
        "<8sIIQIIIIQIIII", b"COXSWAN1", 1, 0x01020304, size, rank_count, depth, PID, flags, START, GROUP_INCARNATION, 0, 0, 0
    )
    save(
        f"control_attach/{name}",
        struct.pack("<I", object_size or size),
        header,
        *(struct.pack("<4Q", *sizes) for sizes in (*channels, (0, 1024, 0, 1024))),
    )


def frames_and_slots():
    for name, depth, sequence, asked, text in (("all", 2, 1, 15, b"echo hello"), ("one", 1, 1000, 4, b"")):
        save(
            f"request_frame/{name}",
            [3, depth, 0],
            struct.pack("<QQiIQQI", sequence, sequence, -1, len(text), asked, 0, len(text)),
            text,
        )
    for name, (ranks, depth, rank, flags), sequence, failed, tag_at, text in (
        ("own", (3, 2, 2, 8), 7, 0, 40, b"hello"),
        ("failed", (1, 0, 1, 8), 3, 1 << 63, 32, b"no"),
        ("legacy_whole", (1, 0, 0, 7), 1, 0, 32, b"hello"),
    ):
        line = bytearray(384)
        struct.pack_into("<QII", line, 16, sequence, GROUP_INCARNATION, 1)
        struct.pack_into("<Q", line, tag_at, sequence | failed)
        save(
            f"reply_slot/{name}",
            [ranks, depth, 0, rank, flags],
            struct.pack("<QII", sequence, 1, (1 << 32) - 1),
            line,
            struct.pack("<I", len(text)),
            text,
        )


def sockets():
    def hello(name, version, role, *more):
        save(f"hello/{name}", struct.pack("<QIIQIIIIQQQ", version, role, *more or (0,) * 9).ljust(1024, b"\0"))

    hello("worker", 1, 1, 3, 0, 8, 32, 2, 0, 1 << 20, 1 << 16, START)
    hello("fd_store", 1, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0)
    hello("later_version", 2, 2, 0, 0, 0, 32, 0, 0, 0, 0, 0)
    save(
        "control_socket/hello_reply",
        [0, 4, 0, 31, 3, 1],
        struct.pack("<QIIIIII", 1, 1, 3, 8, 2, GROUP_INCARNATION, 4).ljust(127, b"\0"),
    )
    reason = b"rank 3 is served by process 4242"
    save("control_socket/refusal", [1, 0, 12, len(reason)], reason)
    save("control_socket/fd_store", [2, 8, 4, 1, 2, 1, 20, 2, 22, 2, 1, 1, 12, 3, 70, 1, 246, 2])
    save("control_socket/fd_store_reply", [3], struct.pack("<QQ", 5, 4242))


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (crc & 1) * 0x82F63B78
    return crc ^ 0xFFFFFFFF


def handles():
    for name, how, kind, fd, size, offset in (
        ("plain", 0, 1, 256, 1000, 0),
        ("elsewhere", 1, 1, 256, 1000, 0),
        ("other_fd", 3, 1, 256, 1000, 0),
        ("own", 7, 1, 256, 1000, 5000),
        ("too_long", 7, 1, 256, 5001, 5000),
        ("overflow", 7, 1, 256, 5001, (1 << 64) - 101),
        ("socket", 3, 2, 2, 0, 0),
    ):
        packed = struct.pack(
            "<HBBIQQIIQQQI", 0x4843, 1, kind, PID, START, 0x0123456789ABCDEF, fd, 1, 4711, size, offset, 7
        )
        save(f"handle/{name}", [how], packed, struct.pack("<I", crc32c(packed)))


KIB, MIB = 1 << 10, 1 << 20
control_attach(
    "default",
    4,
    4,
    4,
    896 * KIB,
    [
        (4 * MIB, MIB, MIB, 64 * KIB),
        (256 * KIB, 256 * KIB, 64 * KIB, 16 * KIB),
        (MIB, 256 * KIB, 256 * KIB, 16 * KIB),
        (16 * KIB, 64 * KIB, 4 * KIB, 4 * KIB),
    ],
)
control_attach(
    "deep",
    1,
    8,
    4,
    228 * KIB,
    [
        (8 * MIB, 512 * KIB, MIB, 64 * KIB),
        (512 * KIB, 128 * KIB, 64 * KIB, 16 * KIB),
        (2 * MIB, 128 * KIB, 256 * KIB, 16 * KIB),
        (32 * KIB, 32 * KIB, 4 * KIB, 4 * KIB),
    ],
)
control_attach(
    "legacy",
    8,
    1,
    1,
    0,
    [(size * MIB, (32 if size > 8 else 8) * MIB, size * MIB, 512 * KIB) for size in (256, 32, 256, 8)],
)
frames_and_slots()
sockets()
handles()
control_requests()
steps()
responses()
recordings()
node_frames()
