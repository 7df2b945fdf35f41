#!/usr/bin/python3 -IS
"""Runs a command on a kernel that lacks, or a seccomp profile that denies, some calls.

Usage: without CALL=ERRNO[,CALL=ERRNO...] COMMAND [ARGUMENT...]

ERRNO: ENOSYS, as an older kernel says; EPERM, as a seccomp profile says; EINVAL.
`CALL<SIZE=ERRNO` fails only where the second argument is less, `CALL>SIZE=ERRNO` only where it is
greater. Exit status 77: filters are not allowed here.
"""

import ctypes
import errno
import os
import platform
import re
import signal
import struct
import sys

# By machine, where the two have different numbers; these are all that tests deny.
NUMBERS = {  # x86_64, aarch64
    "bind": (49, 200), "bpf": (321, 280), "clone3": (435, 435), "close_range": (436, 436), "futex": (202, 98),
    "futex_waitv": (449, 449), "getsockopt": (55, 209), "kcmp": (312, 272), "linkat": (265, 37), "madvise": (28, 233),
    "memfd_create": (319, 279), "mount": (165, 40), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434), "prlimit64": (302, 261), "process_madvise": (440, 440), "process_vm_readv": (310, 270),
    "ptrace": (101, 117), "sched_getaffinity": (204, 123), "setns": (308, 268), "umount2": (166, 39),
    "unshare": (272, 97), "waitid": (247, 95),
}
ERRORS = ("ENOSYS", "EPERM", "EINVAL")
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LOAD, EQUAL, GREATER, AT_LEAST, RETURN = 0x20, 0x15, 0x25, 0x35, 0x06
NUMBER_AT, SECOND_AT = 0, 24  # in struct seccomp_data; of the argument the lower half: little-endian


def step(code, value, jump_true=0, jump_false=0):
    return struct.pack("=HBBI", code, jump_true, jump_false, value)


def denial(text):
    """The instructions for one CALL=ERRNO."""
    parts = re.fullmatch(r"(\w+)(?:([<>])(\d+))?=(\w+)", text)
    if not parts or parts[1] not in NUMBERS or parts[4] not in ERRORS:
        sys.exit("without: '%s' is not known here" % text)
    program = step(LOAD, NUMBER_AT)
    program += step(EQUAL, NUMBERS[parts[1]][platform.machine() == "aarch64"], 0, 3 if parts[2] else 1)
    if parts[2]:
        program += step(LOAD, SECOND_AT)
        program += step(GREATER, int(parts[3]), 0, 1) if parts[2] == ">" else step(AT_LEAST, int(parts[3]), 1, 0)
    return program + step(RETURN, ERRNO | getattr(errno, parts[4]))


def main(arguments):
    if len(arguments) < 2:
        sys.exit("Usage: without CALL=ERRNO,... COMMAND [ARGUMENT...]")
    program = b"".join(map(denial, arguments[0].split(","))) + step(RETURN, ALLOW)
    steps = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("@HP", len(program) // 8, ctypes.addressof(steps))  # struct sock_fprog
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    zero = ctypes.c_ulong(0)
    if prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero) or prctl(
            PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), filters, zero, zero):
        print("without: a filter: " + os.strerror(ctypes.get_errno()), file=sys.stderr)
        return 77
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by the interpreter
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(arguments[1], arguments[1:])
    except OSError as error:
        print("%s: %s" % (arguments[1], error.strerror), file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
