"""What the tests commands_*_test.py share: groups that run starts, and what must not be left."""

from harness import check, socket_files


def ready(process, ranks):
    """The group is there, and its init has succeeded."""
    name = started(process)
    pids_of(process, ranks)
    return name


def started(process):
    """The name that run prints; the pids are next."""
    name, socket_path = process.stdout.readline().split(), process.stdout.readline().split()
    check(name and name[0] == "name", "no name was printed")
    check(socket_path and socket_path[0] == "socket", "no control socket was printed")
    return name[1]


def pids_of(process, ranks):
    return [int(process.stdout.readline().split()[3]) for _ in range(ranks)]


def no_socket_is_left():
    check(not socket_files(), "left in the runtime directory: %s" % socket_files())
