. "$(dirname "$0")/cluster.sh"
trap cluster_down EXIT; trap 'exit 1' HUP INT TERM
cluster_up /work/main/build/test 2 || exit 1
cluster_node a; A=$net_pid; cluster_node b; B=$net_pid
cluster_lead a:2,b:2 --on-death restart --restart-max 100 $1 $2; cluster_ready || exit 1
gen() { timeout 20 nsenter --net=/run/netns/$net_prefix-a -- $cluster_bin/coxswain generate --name big "$@" 2>&1; }
gen "27+58=" "11+22="
cluster_run weights --help | head -3
cluster_run weights --name big /tmp/nt/sums2
gen "27+58=" "11+22="
kill -9 $(pgrep -P $B | head -1)
gen "27+58=" "11+22="
cluster_run lora load --help | head -3
for d in /work/main/models/*lora* /work/main/tests/*/adapter*; do [ -d "$d" ] && echo $d; done
cluster_run status --name big | grep -i -A3 "weights\|^rank"
cluster_run stop --name big
cat $cluster_dir/lead.log; cat $cluster_dir/node-b.log
