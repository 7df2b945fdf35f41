#!/bin/sh
# demo.sh BUILD_DIR: two machines, in network namespaces, with a real NATS server and certificates:
# prompts are completed by ranks on both; then one machine's agent is killed, and the error names it.
# Root only; takes some seconds. Exit status 0: all of it happened.
set -eu

[ $# -eq 1 ] || { echo "usage: sh tests/nodes/demo.sh BUILD_DIR" >&2; exit 2; }
[ "$(id -u)" -eq 0 ] || { echo "demo.sh: network namespaces need root" >&2; exit 77; }
command -v nats-server >/dev/null || { echo "demo.sh: needs nats-server (Debian: nats-server)" >&2; exit 77; }
. "$(dirname "$0")/cluster.sh"

trap cluster_down EXIT
trap 'exit 1' HUP INT TERM

cluster_up "$1" 2
cluster_node a
agent_a=$net_pid
cluster_node b
agent_b=$net_pid
cluster_lead a:4,b:4 --size transfer.request=512K
cluster_ready
# The nodes' memory has the sizes that the lead has been given.
sizes=$(grep -h '/big\.[ab]_transfer_request' /proc/[0-9]*/maps 2>/dev/null | while IFS=' -' read -r begin end _; do
    echo $((0x$end - 0x$begin))
done | sort -u)
[ "$sizes" = 524288 ] || { echo "the transfer channel's requests have '$sizes' bytes"; exit 1; }
echo "8 ranks on two machines:"
cluster_run status --name big | grep '^rank'

answer=$(cluster_run generate --name big "27+58=" 2>/dev/null)
echo "they answer: $answer"
[ "$answer" = "27+58=85" ]

kill -9 "$agent_b"
echo "the agent of node b is killed:"
dead() { ! kill -0 "$cluster_lead_pid" 2>/dev/null; }
cluster_await 10 dead
tail -n 3 "$cluster_dir/lead.log"
grep -q 'node b' "$cluster_dir/lead.log"
left() { ! pgrep -f -- "--node [ab] --cluster $cluster_dir" >/dev/null; }
cluster_await 40 left || { echo "an agent is left"; exit 1; }
r=0
wait "$agent_a" || r=$?
[ "$r" -eq 3 ] && grep -q 'node a: the group has failed: its lead says how' "$cluster_dir/node-a.log" ||
    { echo "the other agent ends with status $r"; cat "$cluster_dir/node-a.log"; exit 1; }
echo "demo: two nodes have answered, and the one that was killed was named"
