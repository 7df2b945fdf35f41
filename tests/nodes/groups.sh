#!/bin/sh
# groups.sh BUILD_DIR: two groups on the same two machines, one that computes prompts and one that decodes, whose ranks
# pull KV blocks from the other machine. Their texts are those of one process, and once every direct connection is there
# no prompt opens another: the agents of the two groups on one machine, which have one certificate, do not end each
# other's connections. Also when the agents of one group have been started again. Root only; some seconds.
set -eu

[ $# -eq 1 ] || { echo "usage: sh $0 BUILD_DIR" >&2; exit 2; }
build=$(cd "$1" && pwd)
. "$(dirname "$0")/cluster.sh"

trap cluster_down EXIT
trap 'exit 1' HUP INT TERM
cluster_up "$build" 2

prompts='27+58= 11+22= 999+1= 40+2='
# shellcheck disable=SC2086
expected=$(COXSWAIN_RUNTIME_DIR=$cluster_dir/one "$build/bin/coxswain" generate -n 1 --quiet $prompts)

generate() {
    # shellcheck disable=SC2086
    written=$(cluster_run generate --quiet --prefill first --decode second $prompts) || exit 1
    [ "$written" = "$expected" ] || { echo "expected '$expected', got '$written'"; exit 1; }
}

# TCP connections that machines a and b have accepted: direct ones only, the server has a machine of its own.
accepted() {
    for machine in a b; do
        net_exec "$machine" cat /proc/net/snmp
    done | awk '$1 == "Tcp:" && $7 ~ /^[0-9]+$/ { sum += $7 } END { print sum }'
}

# steady WHAT: the first prompts open the connections, those after them none.
steady() {
    before=$(accepted)
    generate
    first=$(($(accepted) - before))
    # Both machines ask the other one for KV blocks, and get them: a connection for each direction of each.
    [ "$first" -ge 4 ] || { echo "$1: only $first connections: the blocks went another way"; exit 1; }
    before=$(accepted)
    for _ in 1 2 3; do
        generate
    done
    opened=$(($(accepted) - before))
    ! grep -h 'a pull from the group\|KV blocks for' "$cluster_dir"/node-?.log || exit 1
    [ "$opened" -eq 0 ] || { echo "$1: 12 prompts opened $opened connections"; exit 1; }
    echo "$1: $first connections, and none more for 12 prompts, the same texts"
}

cluster_group=first
cluster_node a
cluster_node b
cluster_lead a:2,b:2 --role prefill --on-death restart
cluster_ready
cluster_group=second
cluster_node a
agent_a=$net_pid
cluster_node b
agent_b=$net_pid
# The other way round: a rank pulls from the other machine.
cluster_lead b:2,a:2 --role decode --on-death restart
cluster_ready
steady "two groups on two machines"

# Other ports. The connections of the first group stay.
for agent in "$agent_a" "$agent_b"; do
    kill -9 "$agent"
done
wait "$agent_a" "$agent_b" 2>/dev/null || true
cluster_node a
cluster_node b
steady "the agents of one group started again"
