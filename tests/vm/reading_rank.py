"""A rank that waits for a disk, and what `coxswain status` tells: reading_rank.py DEVICE FILE

DEVICE is the device mapper's, FILE on it. Exit status 0: the rank is named with its state, and no other.
"""

import os
import re
import subprocess
import sys
import time

import coxswain

NAME = "reading"


def serve(path):
    def handle(data):
        if coxswain.rank() == 1 and bytes(data) == b"read":
            with open(path, "rb") as file:
                file.read()
        return b"done"

    coxswain.serve(handle)


def degraded():
    out = subprocess.run(["coxswain", "status", "--name", NAME], stdout=subprocess.PIPE, text=True, check=False).stdout
    print(out)
    return "".join(re.findall(r"^degraded: .*", out, re.M))


def main(device, path):
    with coxswain.Group(serve, ranks=2, name=NAME, args=(path,), timeout=300) as group:
        group.call(b"hello", timeout=300)
        os.sync()
        with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as file:
            file.write("3")
        subprocess.run(["dmsetup", "suspend", "--noflush", "--nolockfs", device], check=True)
        try:
            future = group.submit(b"read", timeout=300)
            end, line = time.monotonic() + 200, ""
            while "rank 1" not in line and time.monotonic() < end:
                time.sleep(1)
                line = degraded()
        finally:
            subprocess.run(["dmsetup", "resume", device], check=True)
        future.result()
    return 0 if "in the kernel (state D" in line and "rank 0" not in line else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
