. "$(dirname "$0")/cluster.sh"
trap cluster_down EXIT; trap 'exit 1' HUP INT TERM
cluster_up /work/main/build/test 2 || exit 1
cluster_node a; A=$net_pid; cluster_node b; B=$net_pid
cluster_lead a:2,b:2 --on-death restart --restart-max 100 ; cluster_ready || exit 1
i=0; while [ $i -lt ${1:-60} ]; do i=$((i+1)); timeout 20 nsenter --net=/run/netns/$net_prefix-a -- $cluster_bin/coxswain generate --name big "27+58=" "11+22=" "99+1=" "45+45=" 2>/dev/null; done | sort | uniq -c
cluster_run stop --name big
cat $cluster_dir/lead.log
