#!/bin/sh
# arguments: what to do
. "$(dirname "$0")/cluster.sh"
trap cluster_down EXIT; trap 'exit 1' HUP INT TERM
cluster_up /work/main/build/test 2 || exit 1
cluster_node a; A=$net_pid; cluster_node b; B=$net_pid
cluster_lead a:2,b:2 --on-death restart --restart-max 100 ; cluster_ready || exit 1
gen() { timeout 20 nsenter --net=/run/netns/$net_prefix-a -- $cluster_bin/coxswain generate --name big "27+58=" "11+22=" 2>&1; }
gen
case $1 in
worker) kill -9 $(pgrep -P $B | head -1);;
agent) kill -9 $B; sleep ${2:-0.3}; cluster_node b; B=$net_pid;;
cut) net_cut b; sleep ${2:-1.5}; date +%s.%N; net_heal b;;
stop) kill -STOP $B; sleep ${2:-1.5}; kill -CONT $B;;
blip) net_blip b 150;;
pto) net_partition_to b; sleep ${2:-1.5}; net_unpartition b;;
pfrom) net_partition_from b; sleep ${2:-1.5}; net_unpartition b;;
lead) kill -9 $cluster_lead_pid; sleep 1; cluster_lead a:2,b:2 --on-death restart; cluster_ready || exit 1;;
nats) kill -9 $cluster_nats_pid; sleep ${2:-0.5}; cluster_nats;;
natsstop) kill -STOP $cluster_nats_pid; sleep ${2:-0.5}; kill -CONT $cluster_nats_pid;;
esac
gen; gen
cluster_run status --name big | grep ^rank
sleep 1
gen
cluster_run stop --name big
sleep 1
cat $cluster_dir/lead.log; echo == a; cat $cluster_dir/node-a.log; echo == b; cat $cluster_dir/node-b.log
pgrep -af "coxswain" | grep -v t1.sh | head -5; ls /dev/shm
