#!/bin/sh
# A NATS server that is configured otherwise: a group that runs goes on, and says so in its log; an
# agent that starts there is refused, with the setting.
# usage: sh tests/nodes/settings.sh BUILD_DIR, as root
set -eu
. "$(dirname "$0")/cluster.sh"
trap cluster_down EXIT
trap 'exit 1' HUP INT TERM
fail() {
    echo "settings: $1" >&2
    cat "$cluster_dir/lead.log" "$cluster_dir"/node-*.log "$cluster_dir/nats.log" >&2
    exit 1
}

cluster_up "$1" 2
cluster_node a
cluster_lead a:2
cluster_ready

kill -KILL "$cluster_nats_pid"
wait "$cluster_nats_pid" 2>/dev/null || :
: >"$cluster_dir/nats.log"
conf=$cluster_dir/certificates/coxswain-nats.conf
sed 's/ping_interval: *"100ms"/ping_interval: "30s"/' "$conf" >"$conf.new"
! cmp -s "$conf" "$conf.new" || fail "the configuration has no ping_interval that can be changed"
mv "$conf.new" "$conf"
cluster_nats

said() {
    grep -q 'configured otherwise: ping_interval is 30000' "$1"
}
cluster_await 10 said "$cluster_dir/node-a.log" || fail "the agent does not say it"
cluster_await 10 said "$cluster_dir/lead.log" || fail "the lead does not say it"
answer=$(cluster_run generate --name "$cluster_group" "27+58=" 2>/dev/null) || fail "no answer"
[ "$answer" = "27+58=85" ] || fail "the answer is '$answer'"

if cluster_node b && wait "$net_pid"; then
    fail "an agent that starts there is not refused"
fi
said "$cluster_dir/node-b.log" || fail "the agent is refused without the setting"
echo "settings: a server that is configured otherwise is named, and refused at the start"
