#!/usr/bin/python3
"""Prompts on a group that is kept alive, while its ranks are killed, stopped, paused, reinitialized and replaced: each client
gets the bytes that it gets undisturbed, in bounded time, and nothing grows.
Requirements M12, P8 and A23 to A26.

Usage: recovery_soak.py BIN_DIR SOURCE_DIR [--seconds S] [--seed S] [--ranks N] [--attach named|sealed] [--clients N]
           [--pause MIN,MAX] [--deadline S] [--faults KIND,...]

One fault at a time, of a random kind, MIN to MAX seconds (0.3,1.5) after the one before is over. The last line is one JSON object:
how often each fault was there, prompts and clients, what was wrong (nothing), and fds, threads and memory of
coordinator and workers, before and after. The long way is --seconds 1800.
"""

import collections
import json
import os
import random
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "lib"))
import harness  # pylint: disable=wrong-import-position
from harness import (MODEL, Failure, Process, all_gone, check, children, socket_files, kill_all, names_of,
                     sums, temporary, test)

parser = harness.parser(__doc__, seed=True)
parser.add_argument("--seconds", type=float, default=20)
parser.add_argument("--ranks", type=int, default=4)
parser.add_argument("--attach", choices=("named", "sealed"), default="named")
parser.add_argument("--clients", type=int, default=2)
parser.add_argument("--pause", default="0.3,1.5")
parser.add_argument("--deadline", type=float, default=60, help="of a client and of a command; longer is a hang")
parser.add_argument("--faults", default="", help="only these")
options = harness.begin(parser, adopt=True)
dice = random.Random(options.seed)
PAUSE = [float(part) for part in options.pause.split(",")]

COXSWAIN = harness.program("coxswain")
NAME = harness.fresh_name("soak")
# Of resident memory and of memory without a name: what an allocator keeps is no leak; each fault that leaves some is.
GROWTH_KIB_MAX = 6 << 10

history = collections.deque(maxlen=40)  # of faults, for a failure
faults = collections.Counter()
summary = {"prompts": 0, "clients": 0, "wrong": 0, "hangs": 0, "leaks": 0, "other_failures": 0}


class Wrong(Failure):
    """Another text."""


class Hang(Failure):
    """It did not end, or the group did not come back."""


class Leak(Failure):
    """Something is left, or has grown."""


def command(*arguments):
    process = Process([COXSWAIN, *arguments])
    process.begun = time.monotonic()
    return process


def ended(process):
    harness.reap()
    if process.ended:
        return True
    check(time.monotonic() - process.begun < options.deadline,
          "no end after %.0f s: %s" % (options.deadline, " ".join(process.arguments)), kind=Hang)
    return False


def in_time(process, *expected):
    """Outside of the loop of main, where nothing else is to be done meanwhile."""
    while not ended(process):
        time.sleep(0.002)
    status = process.status
    check(status in expected, "status %d, expected %s: %s" % (status, expected, process.describe()))
    return process


def note(text, *values):
    history.append("%9.3f %s" % (time.monotonic() - begun, text % values))


# ---- clients ----


class Job:
    """Prompts and options, and their output in an undisturbed run."""

    def __init__(self, prompts, *arguments):
        self.count = len(prompts)
        path = temporary("".join(prompt + "\n" for prompt in prompts))
        self.arguments = ["--quiet", "--file", path, *arguments]
        process = in_time(command("generate", "-n", "1", "--model", MODEL, *self.arguments), 0)
        self.out = process.out
        check(self.out.count("\n") == self.count, "the undisturbed run is not complete")
        process.close()

    def start(self):
        process = command("generate", "--name", NAME, *self.arguments)
        process.job = self
        return process


def jobs_make():
    prompts = sums()[0]
    pick = random.Random(7).sample
    return [Job(pick(prompts, 1)), Job(pick(prompts, 20)), Job(pick(prompts, 20), "--json"),
            Job(pick(prompts, 200)), Job(prompts, "--sequences", "32"),
            Job(pick(prompts, 300), "--temperature", "2", "--seed", "3", "--json"),
            Job(pick(prompts, 40), "--sequences", "1")]


clients, jobs, client_seconds = [], [], []


def client_done(client):
    status = client.status
    check(status == 0, "a client ended with status %d: %s" % (status, client.err[-2000:]))
    out = client.out
    if out != client.job.out:
        lines, right = out.splitlines(), client.job.out.splitlines()
        at = [(line, other) for line, other in zip(lines, right) if line != other][:3]
        raise Wrong("another text: %d lines, expected %d; e.g. %s" % (len(lines), len(right), at))
    summary["prompts"] += client.job.count
    summary["clients"] += 1
    client_seconds.append(time.monotonic() - client.begun)
    clients.remove(client)
    client.close()


def clients_look(more):
    for client in [client for client in clients if ended(client)]:
        client_done(client)
    while more and len(clients) < options.clients:
        clients.append(dice.choice(jobs).start())


# ---- the group ----


class Group:
    def __init__(self):
        self.process = command("run", "-n", str(options.ranks), "--name", NAME, "--model", MODEL, "--attach", options.attach,
                               "--on-death", "restart,1000/1")
        self.process.begun = float("inf")  # it has no deadline
        while self.process.out.count("\n") < 2 + options.ranks:
            harness.reap()
            check(not self.process.ended, "the group did not start: " + self.process.describe())
            time.sleep(0.005)

    def alive(self):
        harness.reap()
        check(not self.process.ended, "the group has ended")

    def status(self):
        process = in_time(command("status", "--name", NAME, "--json", "--timeout", "%g" % options.deadline), 0, 4)
        answer = json.loads(process.out)
        process.close()
        return answer

    def pids(self):
        """By rank, as far as they live."""
        return {rank["rank"]: rank["pid"] for rank in self.status()["ranks"] if rank["liveness"] == "alive"}

    def well(self):
        """Every rank is there and can take steps."""
        status = self.status()
        return (status["engine_state"] in ("NORMAL", "BUSY") and not status["recovery"]["doing"] and
                all(rank["liveness"] == "alive" and not rank["stopped"] for rank in status["ranks"]))


group = None


def send(pid, number):
    """Only to a process of the group: a number that was reused meanwhile is not in its family."""
    if pid not in children(group.process.pid):
        return False
    return bool(kill_all([pid], number))


def family(pids):
    """Those ranks, in any order."""
    ranks = list(pids)
    dice.shuffle(ranks)
    return ranks


# ---- faults: generators that yield what is waited for: seconds, or a process ----


def recover(what, *arguments):
    """Until it succeeds: while a rank is dead there is no result of that rank, which is a failure that says so."""
    end = time.monotonic() + options.deadline
    while True:
        process = command("recover", what, "--name", NAME, *arguments, "--timeout", "%g" % options.deadline)
        yield process
        status = process.status
        note("recover %s %s: %d", what, " ".join(arguments), status)
        if status == 0:
            process.close()
            return
        told = "killed by signal 9" in process.err
        check(status == 3 and told, "recover %s: status %d: %s" % (what, status, process.describe()))
        check(time.monotonic() < end,
              "recover %s does not succeed: %s" % (what, process.describe()), kind=Hang)
        faults["recover failed of a death, and was done again"] += 1
        process.close()
        yield 0.05


def kill(count):
    pids = group.pids()
    for rank in family(pids)[:count]:
        note("kill rank %d, %d", rank, pids[rank])
        faults["SIGKILL"] += send(pids[rank], signal.SIGKILL)
    yield 0


def fault_kill():
    yield from kill(1)


def fault_kill_two():
    yield from kill(2)


def fault_kill_all():
    yield from kill(options.ranks)


def fault_kill_and_kill_its_successor():
    before = set(children(group.process.pid))
    pids = group.pids()
    rank = dice.choice(list(pids) or [None])
    if rank is None or not send(pids[rank], signal.SIGKILL):
        return
    faults["SIGKILL"] += 1
    note("kill rank %d, %d", rank, pids[rank])
    for _ in range(dice.choice((1, 1, 2, 3))):
        end = time.monotonic() + options.deadline
        while not set(children(group.process.pid)) - before:
            group.alive()
            check(time.monotonic() < end, "nobody comes for rank %d" % rank, kind=Hang)
            yield 0
        successor = (set(children(group.process.pid)) - before).pop()
        before.add(successor)
        yield dice.choice((0, dice.uniform(0, 0.01), dice.uniform(0, 0.1)))
        note("kill its successor %d", successor)
        faults["SIGKILL during a replacement"] += send(successor, signal.SIGKILL)


def fault_kill_and_kill_another_meanwhile():
    pids = group.pids()
    for rank in family(pids)[:2]:
        note("kill rank %d, %d", rank, pids[rank])
        faults["SIGKILL during a replacement"] += send(pids[rank], signal.SIGKILL)
        yield dice.choice((0.002, dice.uniform(0, 0.05), dice.uniform(0, 0.2)))


def fault_stop_and_continue():
    pids = group.pids()
    for rank in family(pids)[:dice.choice((1, 1, 2))]:
        note("stop rank %d, %d", rank, pids[rank])
        faults["SIGSTOP"] += send(pids[rank], signal.SIGSTOP)
    yield dice.uniform(0.1, 3) if options.seconds > 60 else dice.uniform(0.1, 1)
    for pid in pids.values():
        send(pid, signal.SIGCONT)
    note("continue")


def fault_stop_and_replace():
    pids = group.pids()
    rank = dice.choice(list(pids) or [0])
    if rank in pids:
        note("stop rank %d, %d", rank, pids[rank])
        faults["SIGSTOP"] += send(pids[rank], signal.SIGSTOP)
    yield dice.uniform(0, 0.3)
    faults["recover restart --kill"] += 1
    yield from recover("restart", "--rank", str(rank), "--kill")


def fault_replace():
    faults["recover restart --kill"] += 1
    yield from recover("restart", "--rank", str(dice.randrange(options.ranks)), "--kill")


def fault_replace_whom_nothing_is_the_matter_with():
    faults["recover restart"] += 1
    yield from recover("restart")


def fault_stop_coordinator():
    faults["SIGSTOP of the coordinator"] += 1
    note("stop the coordinator")
    group.process.kill(signal.SIGSTOP)
    yield dice.uniform(0.05, 0.5)
    group.process.kill(signal.SIGCONT)
    note("continue")


def commands(*whats):
    for what in whats:
        yield dice.choice((0, 0, dice.uniform(0, 0.3)))
        faults["recover " + what] += 1
        yield from recover(what)


def fault_pause_start():
    yield from commands("pause", "start")


def fault_pause_reinit_start():
    yield from commands("pause", "reinit", "start")


def fault_every_command():
    yield from commands("pause", "pause", "pause-net", "clear", "reinit", "reinit", "start", "start")


def fault_clear():
    yield from commands("clear")


def fault_pause_a_stopped_rank():
    """It notices once it is continued."""
    pids = group.pids()
    rank = dice.choice(list(pids) or [None])
    if rank is None:
        return
    note("stop rank %d, %d", rank, pids[rank])
    faults["SIGSTOP"] += send(pids[rank], signal.SIGSTOP)
    faults["recover pause"] += 1
    pausing = recover("pause")
    process = next(pausing)
    yield dice.uniform(0.1, 0.6)
    send(pids[rank], signal.SIGCONT)
    note("continue")
    yield process
    yield from pausing
    yield from commands(*dice.choice((("start",), ("reinit", "start"))))


def fault_kill_while_paused():
    """Its replacement is in the group again by start at the latest, which may have to be repeated."""
    faults["recover pause"] += 1
    yield from recover("pause")
    yield dice.uniform(0, 0.1)
    yield from kill(dice.choice((1, 1, 2)))
    yield dice.uniform(0, 0.3)
    yield from commands(*dice.choice((("start",), ("reinit", "start"))))


KINDS = {function[len("fault_"):]: globals()[function] for function in sorted(globals()) if function.startswith("fault_")}
if options.faults:
    KINDS = {kind: KINDS[kind] for kind in options.faults.split(",")}
ORDER = []


def next_fault():
    """Each kind once in random order, then again in another one: a short run has them all."""
    if not ORDER:
        ORDER.extend(KINDS)
        dice.shuffle(ORDER)
    kind = ORDER.pop()
    note("-- %s", kind)
    faults["rounds, " + kind] += 1
    return KINDS[kind]()


def awaited(what):
    """Whether that for which a fault waits is there."""
    return ended(what) if isinstance(what, Process) else time.monotonic() >= what


def run_fault(fault):
    """To its end, while clients come and go."""
    for what in fault:
        what = what if isinstance(what, Process) else time.monotonic() + what
        while not awaited(what):
            group.alive()
            clients_look(True)
            time.sleep(0.002)


def serve(seconds):
    run_fault(iter([seconds]))


# ---- what must not grow ----


def memory_kib(pid):
    """Resident, without what is shared with others by a mapping."""
    with open("/proc/%d/status" % pid, encoding="ascii") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("RssAnon:"))


def unnamed_kib(pid):
    """Of the memory behind its fds, however it is shared."""
    seen = {}
    for fd in os.listdir("/proc/%d/fd" % pid):
        path = "/proc/%d/fd/%s" % (pid, fd)
        try:
            if os.readlink(path).startswith(("/memfd:", harness.SHM)):
                found = os.stat(path)
                seen[found.st_ino] = found.st_blocks // 2
        except OSError:
            continue
    return sum(seen.values())


def measure():
    pids = children(group.process.pid)
    measured = {
        "coordinator_fds": len(os.listdir("/proc/%d/fd" % group.process.pid)),
        "coordinator_threads": len(os.listdir("/proc/%d/task" % group.process.pid)),
        "coordinator_rss_kib": memory_kib(group.process.pid),
        "unnamed_kib": unnamed_kib(group.process.pid),
        "workers": len(pids),
        "worker_fds": max(len(os.listdir("/proc/%d/fd" % pid)) for pid in pids),
        "worker_threads": max(len(os.listdir("/proc/%d/task" % pid)) for pid in pids),
        "worker_rss_kib": max(memory_kib(pid) for pid in pids),
        "names": len(names_of(NAME)),
        "sockets": len(socket_files()),
    }
    return measured


def quiet():
    """All clients have their text, all ranks are there; then what there is is looked at."""
    end = time.monotonic() + options.deadline
    while clients:
        group.alive()
        clients_look(False)
        time.sleep(0.002)
    while not group.well():
        check(time.monotonic() < end, "the group does not come back: %s" % group.status(),
              kind=Hang)
        time.sleep(0.01)
    # One that proves it, and that the connection of the last one is gone.
    clients.append(jobs[1].start())
    while clients:
        clients_look(False)
        time.sleep(0.002)
    last, since = None, time.monotonic()
    while True:
        # What is on its way out a moment longer, the connection of a client for one, is no leak.
        measured = measure()
        if measured != last:
            last, since = measured, time.monotonic()
        if time.monotonic() - since > 0.3:
            return measured
        check(time.monotonic() < end, "it does not come to rest: %s" % measured, kind=Hang)
        time.sleep(0.02)


def compare(before, after):
    for what, number in before.items():
        bound = number + GROWTH_KIB_MAX if what.endswith("_kib") else number
        check(after[what] <= bound, "%s: %d before, %d after" % (what, number, after[what]),
              kind=Leak)
    check(after["workers"] == options.ranks and after["sockets"] == 1, "odd: %s" % after,
          kind=Leak)


def warm_up():
    """Each kind of command and of death once: what is allocated by the first is no leak."""
    for kind in ("kill", "pause_reinit_start", "replace"):
        note("-- %s, to warm up", kind)
        run_fault(globals()["fault_" + kind]())
        serve(0.3)


def end_group():
    process = in_time(command("stop", "--name", NAME), 0)
    process.close()
    status = group.process.wait(options.deadline)
    check(status == 0, "the group ended with status %d" % status)
    check(all_gone(), "processes are left", kind=Leak)
    check(not names_of(NAME), "left in /dev/shm: %s" % names_of(NAME), kind=Leak)
    check(not socket_files(), "sockets: %s" % socket_files(), kind=Leak)
    group.process.close()


def soak():
    global group
    jobs.extend(jobs_make())
    group = Group()
    serve(0.2)
    warm_up()
    before = quiet()
    faults.clear()
    end = time.monotonic() + options.seconds
    look = time.monotonic() + 60
    while time.monotonic() < end:
        serve(dice.uniform(*PAUSE))
        run_fault(next_fault())
        if time.monotonic() > look:  # a leak is reported close to its cause
            compare(before, quiet())
            look = time.monotonic() + 60
    after = quiet()
    summary.update(before=before, after=after)
    compare(before, after)
    end_group()


@test
def told_soak():
    try:
        soak()
    except Failure as failure:
        kind = {Wrong: "wrong", Hang: "hangs", Leak: "leaks"}.get(type(failure), "other_failures")
        summary[kind] += 1
        raise
    finally:
        seconds = sorted(client_seconds) or [0]
        summary.update(
            seconds=round(time.monotonic() - begun, 1), seed=options.seed, ranks=options.ranks, attach=options.attach,
            faults={kind: count for kind, count in sorted(faults.items()) if not kind.startswith("rounds, ")},
            rounds={kind[len("rounds, "):]: count for kind, count in sorted(faults.items()) if kind.startswith("rounds, ")},
            client_seconds={"p50": round(seconds[len(seconds) // 2], 3), "p99": round(seconds[len(seconds) * 99 // 100], 3),
                            "max": round(seconds[-1], 3)})


def describe():
    text = "\n".join(history) + "\n"
    for process in harness.unclosed:
        text += "%s\nstatus %s\n%s\n" % (" ".join(process.arguments), process.status,
                                         process.err[-6000:])
    if group and not group.process.ended:
        process = Process([COXSWAIN, "status", "--name", NAME, "--timeout", "5"])
        process.wait()
        text += process.out + process.err
        process.close()
    return text


def main():
    status = harness.main(tell=describe)
    print(json.dumps(summary))
    return status


begun = time.monotonic()
if __name__ == "__main__":
    sys.exit(main())
