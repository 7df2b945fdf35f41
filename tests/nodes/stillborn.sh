#!/bin/sh
# stillborn.sh BUILD_DIR: a rank dies the moment it has attached. In the first start that fails the start, named, long
# before the time for a start is over; later, the rank is replaced once more, and the group answers. Root only; some
# seconds.
set -eu

[ $# -eq 1 ] || { echo "usage: sh $0 BUILD_DIR" >&2; exit 2; }
build=$(cd "$1" && pwd)
. "$(dirname "$0")/cluster.sh"

trap cluster_down EXIT
trap 'exit 1' HUP INT TERM
cluster_up "$build" 2

gone() { ! kill -0 "$1" 2>/dev/null; }
answers() { [ "$(cluster_run generate --name big "27+58=" 2>/dev/null)" = "27+58=85" ]; }
rank_pid() { cluster_run status --name big | sed -n "s/^rank $1 on node [a-z]* pid \([0-9]*\) .*/\1/p"; }
restarted() { cluster_run status --name big | grep -q "^rank 3 on node b pid [0-9]* incarnation 3 alive"; }

fails() { echo "$1"; cat "$cluster_dir/lead.log" "$cluster_dir"/node-*.log; exit 1; }

cluster_node a --stay
COXSWAIN_FAULT=attached:kill:3 cluster_node b
agent=$net_pid
cluster_lead a:2,b:2
cluster_await 30 gone "$cluster_lead_pid" || fails "the lead waits for a rank that has died"
! wait "$cluster_lead_pid" || fails "the lead has started"
# Which of the two it is depends on how far rank 2 has come.
died='coxswain: [a-z: ]*rank 3 (node b, pid [0-9]*) was killed by signal 9 (Killed)\( before the group was complete\)*$'
alone='coxswain: rank 2 (node b) could not be started: rank 3 (pid [0-9]*) was killed by signal 9 (Killed) before the group was complete$'
grep -q "^$died" "$cluster_dir/lead.log" || grep -q "^$alone" "$cluster_dir/lead.log" || fails "rank 3 is not named"
echo "in the first start: $(grep -m 1 'rank 3' "$cluster_dir/lead.log")"
cluster_await 10 gone "$agent" || fails "the agent of node b stays"

COXSWAIN_FAULT=attached:kill:3 COXSWAIN_FAULT_INCARNATION=2 cluster_node b
cluster_lead a:2,b:2 --on-death restart
cluster_ready
answers || fails "no answer"
kill -9 "$(rank_pid 3)"
cluster_await 30 restarted || fails "rank 3 is not replaced a second time"
answers || fails "no answer after two deaths"
echo "after the first start: rank 3 is there again, as its third process"
