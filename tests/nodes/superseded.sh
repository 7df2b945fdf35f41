#!/bin/sh
# superseded.sh BUILD_DIR: a lead is stopped for longer than dead_after, and a second one of the same name takes its
# nodes over. The first one, going on, ends within 2 s, and its error names the second, whatever it does about deaths; the
# second goes on answering right. A node that alone names a later lead ends no group. A node of another release is refused,
# and named. Root only; under a minute.
set -eu

[ $# -eq 1 ] || { echo "usage: sh $0 BUILD_DIR" >&2; exit 2; }
build=$(cd "$1" && pwd)
. "$(dirname "$0")/cluster.sh"

old=
other=$(mktemp -d)
trap '[ -z "$old" ] || kill -CONT "$old" 2>/dev/null || :; cluster_down; rm -rf "$other"' EXIT
trap 'exit 1' HUP INT TERM

answers() {
    answer=$(cluster_run generate --name big "27+58=" 2>/dev/null) || { echo "$1: generate failed"; exit 1; }
    [ "$answer" = "27+58=85" ] || { echo "$1: wrote '$answer'"; exit 1; }
}

gone() { ! kill -0 "$1" 2>/dev/null; }

# Programs of another release: the same, but for the version that they say.
mkdir "$other/bin" "$other/lib"
cp "$build/bin/coxswain" "$build/bin/coxswain-worker" "$other/bin"
cp "$build"/lib/libcoxswain-nodes.so.0 "$other/lib"
version=$("$build/bin/coxswain" --version | sed -n '1s/coxswain //p')
python3 - "$version" "$other/bin/coxswain" "$other/lib/libcoxswain-nodes.so.0" <<'END'
import sys
is_now = sys.argv[1].encode()
for path in sys.argv[2:]:
    with open(path, "rb+") as file:
        was = file.read()
        changed = was.replace(b"\0" + is_now + b"\0", b"\0" + is_now[:-1] + b"9\0")
        if changed == was:
            sys.exit(f"{path} does not say {sys.argv[1]}")
        file.seek(0)
        file.write(changed)
END
other_version=${version%?}9

cluster_up "$build" 2
cluster_node a --stay
cluster_node b --stay

for policy in fail wait restart restart-all; do
    cluster_lead a:2,b:2 --on-death $policy
    cluster_ready
    answers "the first lead"
    old=$cluster_lead_pid
    kill -STOP "$old"
    mv "$cluster_dir/lead.log" "$cluster_dir/old.log" # which it goes on writing
    # Another machine's: a name is taken once on each.
    export COXSWAIN_RUNTIME_DIR="$other/$policy"
    cluster_lead a:2,b:2 --on-death restart
    cluster_ready
    answers "--on-death $policy: the second lead"
    kill -CONT "$old"
    cluster_await 2 gone "$old" || { echo "--on-death $policy: the first lead goes on"; cat "$cluster_dir/old.log"; exit 1; }
    r=0
    wait "$old" || r=$?
    [ "$r" -ne 0 ] && [ "$r" -ne 127 ] || { echo "--on-death $policy: the first lead ended with status $r"; exit 1; }
    old=
    grep -q "another lead of the group 'big' has taken over (epoch [0-9]*, at [0-9.]*:[0-9]*, says node [ab]).*the group ends" \
        "$cluster_dir/old.log" ||
        { echo "--on-death $policy: the first lead wrote"; cat "$cluster_dir/old.log"; exit 1; }
    echo "--on-death $policy, status $r: $(tail -n 1 "$cluster_dir/old.log")"
    answers "--on-death $policy: the second lead, alone again"
    ! grep -q 'suspect\|dead' "$cluster_dir/lead.log" || { echo "the second lead was disturbed"; cat "$cluster_dir/lead.log"; exit 1; }
    cluster_run stop --name big >/dev/null
    cluster_await 10 gone "$cluster_lead_pid" || { echo "the second lead does not end"; exit 1; }
    export COXSWAIN_RUNTIME_DIR="$cluster_dir/run"
    rm "$cluster_dir/lead.log"
done

# One node, or who has its key, cannot end a group that others follow.
cluster_lead a:2,b:2 --on-death fail
cluster_ready
COXSWAIN_VERSION=$version net_exec b python3 "$(dirname "$0")/hello.py" big b "$cluster_dir/certificates" \
    "$(net_address "$cluster_server")" "$(net_address b):1" $(( ($(date +%s) + 3600) * 1000000000 ))
answers "after a hello of one node with a later epoch"
echo "one node names a later epoch: the group goes on"
cluster_run stop --name big >/dev/null
cluster_await 10 gone "$cluster_lead_pid" || { echo "the lead does not end"; exit 1; }

cluster_group=releases
cluster_bin=$other/bin
cluster_node b --model "$cluster_source/models/sums"
agent=$net_pid
cluster_bin=$build/bin
cluster_node a
cluster_lead a:2,b:2
cluster_await 10 gone "$cluster_lead_pid" || { echo "a node of another release is taken"; cat "$cluster_dir/lead.log" "$cluster_dir"/node-b.log; exit 1; }
r=0
wait "$cluster_lead_pid" || r=$?
refusal="node b has Coxswain $other_version, the lead has $version: install the same version"
[ "$r" -ne 0 ] && grep -q "$refusal" "$cluster_dir/lead.log" || { echo "status $r:"; cat "$cluster_dir/lead.log"; exit 1; }
cluster_await 10 gone "$agent" && grep -q "$refusal" "$cluster_dir/node-b.log" || { echo "node b:"; cat "$cluster_dir/node-b.log"; exit 1; }
echo "status $r: $refusal"
