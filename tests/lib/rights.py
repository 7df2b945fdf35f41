"""What a test is allowed to do, and has room for, where it runs (rights.h does it in C)."""

import functools
import os
import subprocess

OTHER_USER = 65534
# Two legacy workers, whose sizes are fixed, need 657 MiB; Docker gives a container 64 MiB.
LEGACY_BYTES = 700 << 20


@functools.lru_cache(None)
def can_switch_user():
    """Whether this process may become OTHER_USER and give files to it; a line says if not."""
    fd = os.memfd_create("rights")
    try:
        os.fchown(fd, OTHER_USER, -1)
        subprocess.run(["true"], user=OTHER_USER, group=OTHER_USER, extra_groups=[], check=True)
    except OSError as error:
        print("skipped: what needs another user: %s" % error, flush=True)
        return False
    finally:
        os.close(fd)
    return os.geteuid() == 0


def free_shm():
    """Free bytes of /dev/shm; infinite where it has no limit."""
    space = os.statvfs("/dev/shm")
    return space.f_bavail * space.f_frsize if space.f_blocks else float("inf")


@functools.lru_cache(None)
def legacy_fits():
    """Whether /dev/shm has room for a group of two legacy workers; a line says if not."""
    fits = free_shm() >= LEGACY_BYTES
    if not fits:
        print("skipped: legacy workers: /dev/shm has less than %d MiB" % (LEGACY_BYTES >> 20),
              flush=True)
    return fits
