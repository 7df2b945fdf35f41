"""Reads what `coxswain trace -o` writes."""

from harness import check

BEGIN, END = 1, 2
CLOCK_MONOTONIC = 3


def records(message):
    """[(number, value)] of the fields of a protobuf message; groups.parse has one value for each."""
    at, found = 0, []

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 0:
            value = number()
        elif key & 7 == 1:
            value = int.from_bytes(message[at:at + 8], "little")
            at += 8
        else:
            check(key & 7 == 2, "wire type %d" % (key & 7))
            size = number()
            value = message[at:at + size]
            check(len(value) == size, "a field is cut off")
            at += size
        found.append((key >> 3, value))
    return found


class Trace:
    """What Perfetto reads of a trace: processes, threads, slices by track, and flows."""

    def __init__(self, path):
        self.processes, self.threads, self.slices, self.flows = {}, {}, [], {}
        self.clocks = {}
        stacks = {}
        with open(path, "rb") as file:
            packets = records(file.read())
        for number, packet in packets:
            check(number == 1, "field %d of a Trace" % number)
            fields = dict(records(packet))
            if 6 in fields:
                for _, clock in records(fields[6]):
                    values = dict(records(clock))
                    self.clocks[values[1]] = values[2]
            if 60 in fields:
                track = dict(records(fields[60]))
                if 3 in track:
                    process = dict(records(track[3]))
                    self.processes[track[1]] = (process[1], process[6].decode())
                else:
                    thread = dict(records(track[4]))
                    self.threads[track[1]] = (self.processes[track[5]][1], thread[5].decode())
            if 11 in fields:
                check(fields[58] == CLOCK_MONOTONIC, "another clock")
                self.event(fields[8], records(fields[11]), stacks)
        self.open = {track: [made["name"] for made in stack] for track, stack in stacks.items() if stack}

    def event(self, at, fields, stacks):
        one = dict(fields)
        stack = stacks.setdefault(one[11], [])
        check(one[11] in self.threads, "an event of track %d, which is not described" % one[11])
        if one[9] == BEGIN:
            made = {"name": one[23].decode(), "begin": at, "end": None, "depth": len(stack),
                    "process": self.threads[one[11]][0], "thread": self.threads[one[11]][1]}
            check(not stack or at >= stack[-1]["begin"], "a slice begins before the one around it")
            self.slices.append(made)
            stack.append(made)
            for number, value in fields:
                if number in (47, 48):
                    self.flows.setdefault(value, []).append((number == 48, made))
        else:
            check(one[9] == END and stack, "an end without a begin")
            made = stack.pop()
            made["end"] = at
            check(at >= made["begin"], "%s ends before it begins" % made)

    def named(self, name, process=None):
        return [made for made in self.slices if made["name"].split()[0] == name and
                process in (None, made["process"])]
