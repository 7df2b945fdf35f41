"""Weights in the memory of a device, and processes that load, map, write and die: weights.py DEVICE MIB

Prints one line of what was found. Exit status 1, with the reason, where something is not as it should be."""

import contextlib
import signal
import subprocess
import sys
import time

import coxswain
import torch

# Of a process: what it is told, a line each, and what it prints for that.
MAIN = """
import sys, time, coxswain, torch
device, count = torch.device(sys.argv[1]), int(sys.argv[2])
weights = None
def wait():
    if device.type == "cuda":
        torch.cuda.synchronize(device)
def do(order):
    global weights
    store = coxswain.WeightStore(device=device)
    if order == "context":
        return float(torch.ones(1, device=device).sum())
    if order == "load":
        tensor = torch.arange(count, dtype=torch.float32, device=device) % 1000
        assert store.get("gpu-check") is None
        weights = store.put("gpu-check", {"w": tensor})
        del tensor
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return weights.bytes
    if order == "map":
        begin = time.monotonic()
        weights = store.get("gpu-check")
        wait()
        return time.monotonic() - begin
    if order == "sum":
        return weights["w"].double().sum().item()
    if order == "write":
        weights["w"][: 1 << 10].fill_(7)
        wait()
        return "written"
    if order == "unshare":
        weights.unshare()
        return "unshared"
    if order == "drop":
        return store.drop("gpu-check")
for line in sys.stdin:
    print(do(line.strip()), flush=True)
"""


class Failed(Exception):
    """Something is not as it should be."""


class Process:
    """One that uses weights; `with` ends it."""

    def __init__(self, device, count):
        self.process = subprocess.Popen([sys.executable, "-c", MAIN, device, str(count)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, order):
        """What it prints; "": it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(order + "\n")
            self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self):
        """How it has ended by itself: -11, by SIGSEGV."""
        return self.process.wait(timeout=30)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def check(condition, what):
    if not condition:
        raise Failed(what)


def free_mib(device):
    """Of the device; 0 on a CPU, which is not measured."""
    return torch.cuda.mem_get_info(device)[0] / 2**20 if device != "cpu" else 0.0


def freed(device, wanted, seconds=20):
    """Waits until about so much is free, since a process's memory is freed after its end."""
    deadline = time.monotonic() + seconds
    while free_mib(device) < wanted - 64:
        check(time.monotonic() < deadline, f"{free_mib(device):.0f} MiB are free, of {wanted:.0f} before")
        time.sleep(0.1)


def compare(device, mib):
    count = mib << 18
    with contextlib.ExitStack() as stack:
        def start():
            return stack.enter_context(Process(device, count))

        before = free_mib(device)
        first, other = start(), start()
        check(other.do("context"), "the device cannot be used")
        context = before - free_mib(device)
        check(int(first.do("load") or 0) >= mib << 20, "nothing was loaded")
        loaded, second = free_mib(device), start()
        took = float(second.do("map") or "nan")
        expected = second.do("sum")
        extra = loaded - free_mib(device) - context
        check(expected and expected == first.do("sum"), "the second process sees other bytes")
        first.kill()
        check(second.do("sum") == expected, "other bytes after the death of the process that had loaded")
        check(other.do("map") and other.do("sum") == expected, "a later process maps other bytes")
        writer = start()
        check(writer.do("map"), "a writer maps nothing")
        is_refused = writer.do("write") != "written"
        death = writer.end() if is_refused else 0
        check(is_refused or second.do("sum") != expected, "a write went nowhere")
        if is_refused:
            check(second.do("sum") == expected, "a write that failed has changed the bytes")
            own = start()
            check(own.do("map") and own.do("unshare") == "unshared" and own.do("write") == "written",
                  "a copy of its own cannot be written")
            check(own.do("sum") != expected and second.do("sum") == expected, "a copy is no copy")
        check(coxswain.WeightStore(device=device).drop("gpu-check") == 1, "it was not held")
    freed(device, before)
    memory = f", which takes {extra:.0f} MiB more of the device than a process without" if device != "cpu" else ""
    death = "SIGSEGV" if death == -signal.SIGSEGV else f"an error ({death})"
    return (f"{mib} MiB: mapped in {1e3 * took:.1f} ms{memory}; the same bytes after kill -9 of the loader; "
            + (f"a write ends in {death}" if is_refused else "THE DEVICE HAS NO READ-ONLY MAPPINGS: a write goes through"))


def main():
    try:
        print(compare(sys.argv[1], int(sys.argv[2])))
    except (Failed, coxswain.Error) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
