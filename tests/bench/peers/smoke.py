"""Runs subjects of the benchmark (subject.h) through their protocol: that they start, that every answer is the right
one (they check that themselves), and that nothing of them stays, after a quit and after a SIGKILL. Prints the medians
and judges no time. Arguments: programs with their words, each one argument. A program that is not there is left out.
Exit status 77: none could run here."""
import argparse
import array
import os
import re
import select
import shlex
import signal
import statistics
import subprocess
import sys

LIB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "lib")
sys.path.insert(0, LIB)
import harness  # pylint: disable=wrong-import-position
from harness import Failure  # pylint: disable=wrong-import-position

PATIENCE_S = 50
# Their processes go through many rows.
GO_ON = ("bench-mpi", "pickle_ring.py", "python_subject.py")
# Names with the process id belong to this test alone. iceoryx's names are global; while a subject of it runs, no other does.
FOLDERS = ("/dev/shm", "/tmp")
ICEORYX_NAMES = ("iceoryx_mgmt", "iox-unique-roudi.lock", "roudi", "roudi.lock")


class Subject:
    def __init__(self, words, arguments):
        self.process = subprocess.Popen(
            words + ["--ranks", str(arguments.ranks), "--bytes", str(arguments.bytes), "--reply-bytes", "256"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def read(self, size):
        """Exactly that many bytes, or what came before the end."""
        got = b""
        while len(got) < size:
            if not select.select([self.process.stdout], [], [], PATIENCE_S)[0]:
                raise Failure(f"nothing in {PATIENCE_S} s, after {got!r}")
            more = self.process.stdout.read(size - len(got))
            if not more:
                break
            got += more
        return got

    def line(self):
        line = b""
        while not line.endswith(b"\n"):
            more = self.read(1)
            if not more:
                raise Failure(f"ended after {line!r}")
            line += more
        return line.decode().rstrip("\n")

    def tell(self, line):
        self.process.stdin.write(line.encode() + b"\n")

    def samples(self, line, count):
        self.tell(line)
        answer = self.line()
        if answer != f"done {count}":
            raise Failure(f"'{line}' was answered by '{answer}'")
        samples = array.array("Q", self.read(8 * count))
        if len(samples) != count or (count and not all(0 < sample < 60e9 for sample in samples)):
            raise Failure(f"'{line}': no times: {samples}")
        return samples

    def gone(self):
        """Waits for it and for everything it started."""
        status = self.process.wait(PATIENCE_S)
        harness.check(harness.all_gone(PATIENCE_S), "processes of it are still there")
        return status


def left_behind(subject, words):
    mine = re.compile(rf"coxswain-bench-(mpi-)?{subject.process.pid}\b")
    return [f"{folder}/{name}" for folder in FOLDERS for name in os.listdir(folder)
            if mine.match(name) or ("iceoryx" in words[0] and name in ICEORYX_NAMES)]


def check_rows(subject, words, arguments):
    """More rows by the same processes, of fewer ranks and of as many, and of other sizes."""
    options = [] if words[0].endswith("bench-mpi") else words[1:]
    for ranks, size in (1, 65536), (arguments.ranks, 256):
        subject.tell("end")
        if subject.line() != "done 0":
            raise Failure("a row did not end")
        subject.tell(" ".join(["again", *options, f"--ranks {ranks} --bytes {size} --reply-bytes 256"]))
        if subject.line() != "ready":
            raise Failure(f"no row of {ranks} ranks and {size} bytes")
        subject.samples(f"slice {arguments.rounds}", arguments.rounds)


def check(words, arguments):
    """Returns the median in nanoseconds, or None: cannot run here."""
    subject = Subject(words, arguments)
    answer = subject.line()
    if answer.startswith("skip "):
        print(f"{words[0]}: {answer}")
        subject.gone()
        return None
    if answer != "ready":
        raise Failure(answer)
    samples = subject.samples(f"slice {arguments.rounds}", arguments.rounds)
    subject.samples("rate 5 2000000", 5)
    subject.samples("idle 5", 0)
    again = subject.samples(f"slice {arguments.rounds}", arguments.rounds)
    if os.path.basename(words[0]) in GO_ON:
        check_rows(subject, words, arguments)
    subject.tell("quit")
    if subject.gone() != 0:
        raise Failure(f"exit status {subject.process.returncode}")
    if left_behind(subject, words):
        raise Failure(f"left behind by a quit: {left_behind(subject, words)}")
    if not arguments.no_kill:
        subject = Subject(words, arguments)
        if subject.line() != "ready":
            raise Failure("not ready for the second time")
        subject.tell("slice 1000000")
        subject.process.send_signal(signal.SIGKILL)
        subject.gone()
        if left_behind(subject, words):
            raise Failure(f"left behind by a kill: {left_behind(subject, words)}")
    return statistics.median(list(samples) + list(again))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", default="", help="where the programs are")
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("programs", nargs="+")
    arguments = parser.parse_args()
    status = 77
    for program in arguments.programs:
        words = shlex.split(program)
        words[0] = os.path.join(arguments.folder, words[0])
        if not os.path.exists(words[0]):
            print(f"{words[0]}: not built")
            continue
        name = " ".join([os.path.basename(words[0])] + words[1:])
        try:
            median = check(words, arguments)
        except (Failure, OSError, subprocess.TimeoutExpired) as failure:
            print(f"{name}: {failure}")
            return 1
        if median is not None:
            print(f"{name}: {arguments.ranks} ranks, {arguments.bytes} bytes: {median / 1000:.1f} us", flush=True)
            status = 0
    return status


if __name__ == "__main__":
    harness.script(main)
