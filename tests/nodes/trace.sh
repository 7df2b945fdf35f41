#!/bin/sh
# trace.sh BUILD_DIR: coxswain trace, status, top and metrics show the ranks of all machines: two machines with two ranks
# each, of which b has another CLOCK_MONOTONIC, 11 days ahead. What its ranks did is in the trace at the lead's times.
# Then b cannot send, and its agent is stopped: it is named, what there is is shown, and the command ends. Root only;
# some seconds.
set -eu

[ $# -eq 1 ] || { echo "usage: sh $0 BUILD_DIR" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
. "$here/cluster.sh"
# Another name than that of other tests, which may run at the same time.
cluster_group=trace-$$
ahead=1000000 # seconds
unshare --time --monotonic "$ahead" --fork true 2>/dev/null || { echo "skipped: no time namespaces here" >&2; exit 77; }

trap cluster_down EXIT
trap 'exit 1' HUP INT TERM

fail() {
    echo "$*" >&2
    exit 1
}

# has WHAT PATTERN FILE
has() {
    grep -Eq "$2" "$3" || { cat "$3" >&2; fail "$1: no line has '$2'"; }
}

# take FILE: a trace; what it says is in $cluster_dir/said.
take() {
    cluster_run trace --name "$cluster_group" -o "$cluster_dir/$1" 2>"$cluster_dir/said" ||
        { cat "$cluster_dir/said" >&2; fail "trace: failed"; }
}

# whole FILE: a trace in which nothing is missing. On a busy machine a node may be suspect for a moment.
whole_once() {
    take "$1" && [ ! -s "$cluster_dir/said" ]
}
whole() {
    cluster_await 10 whole_once "$1" || { cat "$cluster_dir/said" >&2; fail "trace: something is missing"; }
}

check() {
    file=$1
    shift
    /usr/bin/python3 "$here/trace_check.py" "$cluster_dir/$file" "$@"
}

cluster_up "$1" 2
cluster_node a --stay
# As the agent of a machine that has been up for longer.
bin=$cluster_bin
mkdir "$cluster_dir/bin"
printf '#!/bin/sh\nexec unshare --time --monotonic %s --fork --kill-child %s/coxswain "$@"\n' "$ahead" "$bin" \
    >"$cluster_dir/bin/coxswain"
chmod +x "$cluster_dir/bin/coxswain"
cluster_bin=$cluster_dir/bin
cluster_node b --stay
wrapper=$net_pid
cluster_bin=$bin
cluster_lead a:2,b:2 --on-death restart
cluster_ready
agent=$(pgrep -P "$wrapper")
cluster_run generate --name "$cluster_group" --quiet 27+58= 11+22= 999+1= 40+2= >/dev/null
cluster_run generate --name "$cluster_group" --quiet 27+58= 11+22= 999+1= 40+2= >/dev/null

whole all
check all "rank 0 on node a" "rank 1 on node a" "rank 2 on node b" "rank 3 on node b"
cluster_run trace --name "$cluster_group" --json >"$cluster_dir/summary"
has "trace --json" '"rank":2,"node":"b",.*"recorded":true.*"rank":3' "$cluster_dir/summary"
has "trace --json" '"problems":null' "$cluster_dir/summary"

# Processor time and memory: the rank's own, told once a second.
usage() {
    cluster_run status --name "$cluster_group" --json >"$cluster_dir/status" &&
        /usr/bin/python3 "$here/trace_check.py" --usage "$cluster_dir/status" 2>"$cluster_dir/said"
}
cluster_await 10 usage || { cat "$cluster_dir/said" >&2; fail "status: not so in 10 s"; }
cluster_run metrics --name "$cluster_group" >"$cluster_dir/metrics"
[ "$(grep -c '^coxswain_rank_resident_bytes{.*} [1-9]' "$cluster_dir/metrics")" -eq 4 ] || fail "metrics: no memory"
cluster_run status --name "$cluster_group" >"$cluster_dir/status"
has status '^rank 3 on node b .*' "$cluster_dir/status"
tr -d '\n' <"$cluster_dir/status" >"$cluster_dir/line"
has status 'rank 3 on node b [^|]*; *cpu [0-9.]+ s' "$cluster_dir/line"
cluster_run top --once "$cluster_group" >"$cluster_dir/top"
has top 'CPU +MEMORY +DEATHS +NODE +GROUP' "$cluster_dir/top"
has top "^ +3 .* [0-9.]+[KMG]iB +0  b +$cluster_group\$" "$cluster_dir/top"
echo "processor time and memory are those of the ranks"

# Node b reaches the NATS server, and not the lead.
net_exec b ip route add blackhole "$(net_address a)"
mute() {
    take mute && grep -q 'ranks 2 to 3: node b has not sent its recorder in 2' "$cluster_dir/said"
}
cluster_await 10 mute || { cat "$cluster_dir/said" >&2; fail "trace: node b, which cannot send, is not named"; }
check mute "rank 0 on node a" "rank 1 on node a"
net_exec b ip route del blackhole "$(net_address a)"
whole heard
echo "a node that cannot send is named"

# An agent that does not answer is named, at once or when it is dead; the others are there.
kill -STOP "$agent"
begin=$(date +%s)
take stopped
has "trace of a stopped agent" 'ranks 2 to 3: node b ' "$cluster_dir/said"
check stopped "rank 0 on node a" "rank 1 on node a"
dead() { cluster_run status --name "$cluster_group" 2>/dev/null | grep -q '^rank 3 .* dead'; }
cluster_await 10 dead || fail "status: rank 3 is not dead"
take dead
has "trace of a dead node" 'ranks 2 to 3: node b has not been heard' "$cluster_dir/said"
[ $(($(date +%s) - begin)) -le 10 ] || fail "trace: 10 s, with an agent that is stopped"
kill -CONT "$agent"
echo "an agent that is stopped is named"

cluster_await 30 whole_once back || { cat "$cluster_dir/said" >&2; fail "trace: node b is not back"; }
cluster_run generate --name "$cluster_group" --quiet 27+58= >/dev/null
take again
check again "rank 0 on node a" "rank 3 on node b"
cluster_run stop --name "$cluster_group" >/dev/null
echo "trace: the ranks of both machines, on one clock"
