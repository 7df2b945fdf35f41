#!/bin/sh
# Runs a test where a cluster of machines can be made on this one: sh tests/nodes/possible.sh COMMAND...
#
# Exit status: the command's; 77, with the reason, where one of these is missing: root, the programs of the packages'
# group test (tools/packages.txt), network namespaces with bridges and pairs of interfaces.
set -eu

skip() {
    echo "skipped: $*" >&2
    exit 77
}

[ $# -gt 0 ] || { echo "usage: sh $0 COMMAND..." >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || skip "network namespaces are root's"
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
for program in nats-server openssl ip ss nsenter ebtables pgrep; do
    command -v "$program" >/dev/null || skip "no $program; sh tools/packages test installs it"
done

probe=cox-$$-probe
trap 'ip netns del "$probe" 2>/dev/null || :' EXIT
trap 'exit 1' HUP INT TERM
{
    ip netns add "$probe" && ip -n "$probe" link add name bridge type bridge &&
        ip -n "$probe" link add name one type veth peer name two && nsenter --net="/run/netns/$probe" true
} || skip "no network namespaces here"
ip netns del "$probe"
trap - EXIT HUP INT TERM

exec "$@"
