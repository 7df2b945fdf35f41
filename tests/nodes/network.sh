# shellcheck shell=sh
# A network of several machines on one: functions for a POSIX shell, which sources this file. Root
# only. `sh tests/nodes/network.sh` checks the functions themselves.
#
#   net_up N                    N machines (1 to 34) named a, b, ... z, aa, ab, ...: one network namespace each,
#                               one veth pair each to a bridge, which has a namespace of its own
#   net_down                    kills every process in the namespaces and removes all of them
#   net_address NODE            prints the IPv4 address of a machine
#   net_exec NODE CMD...        runs a command on a machine
#   net_spawn NODE CMD...       the same in the background; its process id is in $net_pid
#   net_cut NODE, net_heal NODE the cable is pulled at the bridge, and plugged in again
#   net_partition_to NODE       drops every frame to the machine, and none from it
#   net_partition_from NODE     drops every frame from the machine, and none to it
#   net_unpartition NODE        ends both
#   net_blip NODE MS            net_cut, MS milliseconds, net_heal
#
# Call net_down from a trap that is set before net_up:
#
#   trap net_down EXIT
#   trap 'exit 1' HUP INT TERM
#
# Addresses are 10.77.X.1, 10.77.X.2, ... where X follows from the process id of the shell; the
# namespaces are cox-PID-a, ..., cox-PID-switch. Two shells do not disturb each other. The host has
# no interface, address, rule or route of this network. If the shell is killed with SIGKILL, the
# namespaces stay: `for n in /run/netns/cox-PID-*; do ip netns del "${n##*/}"; done`.
#
# Drops are silent. Every machine knows the hardware addresses of all others for good, so that a
# partition never turns into "no route to host" because ARP has failed. The bridge drops frames, not
# a machine, so that no sender sees an error from its own filter.

net_prefix=cox-$$
net_subnet=10.77.$(($$ % 254 + 1))
net_switch=$net_prefix-switch
net_names="a b c d e f g h i j k l m n o p q r s t u v w x y z aa ab ac ad ae af ag ah"
net_nodes=
net_pid=

# The place of a machine in the list, from 1: the last byte of its addresses.
net_index() {
    net_i=0
    for net_each in $net_names; do
        net_i=$((net_i + 1))
        [ "$net_each" != "$1" ] || return 0
    done
    echo "network.sh: no machine is named '$1'" >&2
    return 1
}

net_address() {
    net_index "$1" && echo "$net_subnet.$net_i"
}

# nsenter and not `ip netns exec`, which would hide /sys/fs/cgroup from the command.
net_exec() {
    net_node=$1
    shift
    nsenter --net="/run/netns/$net_prefix-$net_node" -- "$@"
}

net_spawn() {
    net_node=$1
    shift
    nsenter --net="/run/netns/$net_prefix-$net_node" -- "$@" &
    net_pid=$!
}

# Router solicitations and duplicate address detection would be traffic that no test sent.
net_quiet() {
    net_exec "$1" sh -c 'cd /proc/sys/net/ipv6/conf 2>/dev/null || exit 0
        echo 1 >all/disable_ipv6; echo 1 >default/disable_ipv6'
}

net_up() {
    case $1 in
    [1-9] | [12][0-9] | 3[0-4]) ;;
    *)
        echo "network.sh: net_up wants a number of machines from 1 to 34, not '$1'" >&2
        return 1
        ;;
    esac
    net_nodes=
    for net_each in $net_names; do
        net_nodes="$net_nodes $net_each"
        [ "$(echo $net_nodes | wc -w)" -lt "$1" ] || break
    done
    ip netns add "$net_switch" && net_quiet switch &&
        net_exec switch sh -c 'cd /proc/sys/net/bridge 2>/dev/null || exit 0
            echo 0 >bridge-nf-call-iptables; echo 0 >bridge-nf-call-arptables' &&
        ip -n "$net_switch" link add name bridge index 1000 type bridge forward_delay 0 \
            mcast_snooping 0 &&
        ip -n "$net_switch" link set dev bridge up || return 1
    for net_this in $net_nodes; do
        net_index "$net_this" && ip netns add "$net_prefix-$net_this" && net_quiet "$net_this" &&
            net_link "$net_this" "$net_i" || return 1
    done
}

# Interface indexes of the two ends differ: of equal ones, the kernel takes the interface for one
# that is stacked on nothing, and may report its carrier up to one second late.
net_link() {
    net_mac=02:77:00:00:00
    ip -n "$net_switch" link add name "$1" index $((100 + $2)) type veth peer name eth0 index 10 \
        address "$net_mac:$(printf %02x "$2")" netns "$net_prefix-$1" || return 1
    printf 'link set dev %s master bridge\nlink set dev %s up\n' "$1" "$1" |
        ip -n "$net_switch" -batch - || return 1
    {
        echo link set dev lo up
        echo link set dev eth0 up
        echo "address add $net_subnet.$2/24 dev eth0"
        for net_other in $net_nodes; do
            net_index "$net_other"
            [ "$net_i" -eq "$2" ] || echo "neighbour add $net_subnet.$net_i lladdr" \
                "$net_mac:$(printf %02x "$net_i") dev eth0 nud permanent"
        done
    } | ip -n "$net_prefix-$1" -batch -
}

# Exits 1 if something could not be removed. A second call does nothing.
net_down() {
    net_left=0
    for net_path in /run/netns/"$net_prefix"-*; do
        [ -e "$net_path" ] || continue
        net_name=${net_path##*/}
        net_tries=0
        # A process may fork between the list and the signal.
        while net_pids=$(ip netns pids "$net_name") && [ -n "$net_pids" ]; do
            # shellcheck disable=SC2086
            kill -KILL $net_pids 2>/dev/null || :
            net_tries=$((net_tries + 1))
            [ "$net_tries" -le 100 ] || break
            sleep 0.02
        done
        ip netns del "$net_name" || net_left=1
        [ "$net_tries" -le 100 ] || {
            echo "network.sh: processes of $net_name do not end:" $net_pids >&2
            net_left=1
        }
    done
    return $net_left
}

net_cut() {
    ip -n "$net_switch" link set dev "$1" down
}

net_heal() {
    ip -n "$net_switch" link set dev "$1" up
}

# This kernel has no action of tc that drops; ebtables (nf_tables) drops on the bridge.
net_filter() {
    net_exec switch ebtables "$@"
}

net_partition_to() {
    net_index "$1" && net_filter -A FORWARD -o "$1" -j DROP
}

net_partition_from() {
    net_index "$1" && net_filter -A FORWARD -i "$1" -j DROP
}

net_unpartition() {
    net_index "$1" || return 1
    while net_filter -D FORWARD -o "$1" -j DROP 2>/dev/null; do :; done
    while net_filter -D FORWARD -i "$1" -j DROP 2>/dev/null; do :; done
}

net_blip() {
    net_cut "$1" && sleep "$(printf '%d.%03d' $(($2 / 1000)) $(($2 % 1000)))" && net_heal "$1"
}

# ---- its own test ----

# net_say FROM TO WORD: a datagram. An error of the sender ends the check: a drop is silent.
net_say() {
    net_exec "$1" python3 -c 'import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(3):
    s.sendto(sys.argv[2].encode(), (sys.argv[1], 7777))' "$(net_address "$2")" "$3" || exit 1
}

# net_expect STATE A-TO-B B-TO-A: what arrives of three datagrams in each direction.
net_expect() {
    net_case=$((net_case + 1))
    for net_way in "a b $2" "b a $3"; do
        # shellcheck disable=SC2086
        set -- "$1" $net_way
        net_say "$2" "$3" "$net_case-$2-$3"
        # What is delivered at all is in the file within milliseconds; then the drops are counted.
        net_tries=0
        while [ "$(grep -c "^$net_case-$2-$3\$" "$net_dir/$3")" -ne "$4" ] &&
            [ "$net_tries" -lt 20 ]; do
            sleep 0.05
            net_tries=$((net_tries + 1))
        done
        [ "$4" -ne 0 ] || sleep 0.2
        net_got=$(grep -c "^$net_case-$2-$3\$" "$net_dir/$3") || :
        [ "$net_got" -eq "$4" ] || {
            echo "FAILED: $1: $2 to $3: $net_got datagrams instead of $4" >&2
            exit 1
        }
    done
    echo "ok: $1"
}

net_check() {
    set -eu
    net_dir=$(mktemp -d)
    net_case=0
    trap 'net_down; rm -rf "$net_dir"' EXIT
    trap 'exit 1' HUP INT TERM
    ip link >"$net_dir/links"
    ip address | grep inet >"$net_dir/addresses" || :
    net_up 3
    for net_machine in a b; do
        : >"$net_dir/$net_machine"
        net_spawn "$net_machine" python3 -c 'import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 7777))
with open(sys.argv[2], "a", buffering=1) as f:
    while True:
        f.write(s.recv(99).decode() + "\n")' "$(net_address $net_machine)" "$net_dir/$net_machine"
        while ! net_exec "$net_machine" ss -Hlun | grep -q :7777; do sleep 0.05; done
    done
    net_expect "connected" 3 3
    net_partition_to b
    net_expect "net_partition_to b" 0 3
    net_partition_to b
    net_unpartition b
    net_expect "net_unpartition b" 3 3
    net_partition_from b
    net_expect "net_partition_from b" 3 0
    net_partition_to b
    net_expect "both" 0 0
    net_unpartition b
    net_expect "net_unpartition b" 3 3
    net_cut b
    net_expect "net_cut b" 0 0
    net_heal b
    net_expect "net_heal b" 3 3
    net_blip b 150
    net_expect "net_blip b 150" 3 3
    ! net_partition_to z 2>/dev/null
    net_down
    for net_path in /run/netns/"$net_prefix"-*; do
        [ ! -e "$net_path" ] || {
            echo "FAILED: $net_path is left" >&2
            exit 1
        }
    done
    ip link | cmp - "$net_dir/links"
    ip address | grep inet | cmp - "$net_dir/addresses"
    echo "ok: net_down leaves nothing"
}

case ${0##*/} in
network.sh) net_check ;;
esac
