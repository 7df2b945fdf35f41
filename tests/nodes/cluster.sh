# shellcheck shell=sh
# A cluster of machines on one: functions for a POSIX shell, on top of network.sh. Root only.
#
#   cluster_up BUILD_DIR NODES   namespaces for machines a, b, ... and one for the NATS server;
#                                certificates; the server; everything in $cluster_dir
#   cluster_node NODE [ARGS]     an agent on a machine; its process id is in $net_pid
#   cluster_lead NODES [ARGS]    the lead on machine a, as in a:4,b:4; its process id in $net_pid
#   cluster_ready                waits until the lead has printed its name, or fails with its log
#   cluster_run CMD...           a command of coxswain on the lead's machine
#   cluster_file NAME NODES      writes the file NAME of --cluster; prints its path
#   cluster_await SECONDS CMD... until the command succeeds
#   cluster_down                 ends everything; use it in a trap
#
# The NATS server has a machine of its own, the one after the nodes, unless $cluster_server names one. In the files are
# $cluster_url, $cluster_certificates (a directory below $cluster_dir), and where it is set $cluster_listen: HOST:PORT.

. "$(dirname "$0")/network.sh"

cluster_dir=
cluster_group=big
cluster_certificates=certificates
cluster_listen=

cluster_await() {
    cluster_left=$(($1 * 20))
    shift
    until "$@"; do
        cluster_left=$((cluster_left - 1))
        [ $cluster_left -gt 0 ] || return 1
        sleep 0.05
    done
}

cluster_listens() {
    grep -q 'Server is ready' "$cluster_dir/nats.log" 2>/dev/null
}

cluster_nats() {
    net_spawn "$cluster_server" nats-server -c "$cluster_dir/certificates/coxswain-nats.conf" \
        >>"$cluster_dir/nats.log" 2>&1
    cluster_nats_pid=$net_pid
    cluster_await 10 cluster_listens
}

cluster_up() {
    cluster_bin=$(cd "$1/bin" && pwd)
    cluster_source=$(cd "$(dirname "$0")/../.." && pwd)
    cluster_dir=$(mktemp -d)
    COXSWAIN_RUNTIME_DIR=$cluster_dir/run
    export COXSWAIN_RUNTIME_DIR
    net_up "$(($2 + 1))" || return 1
    cluster_server=
    for cluster_each in $net_names; do
        cluster_server=$cluster_each
        [ "$(net_address "$cluster_each")" != "$net_subnet.$(($2 + 1))" ] || break
    done
    cluster_url=tls://$(net_address "$cluster_server"):4222
    cluster_members=
    set --
    for cluster_each in $net_nodes; do
        [ "$cluster_each" = "$cluster_server" ] && continue
        set -- "$@" --node "$cluster_each"
        cluster_members=$cluster_members${cluster_members:+,}$cluster_each:1
    done
    sh "$cluster_source/packaging/nats/coxswain-certificates" "$cluster_dir/certificates" \
        --server "$(net_address "$cluster_server")" "$@" >"$cluster_dir/certificates.log" || return 1
    cluster_nats
}

cluster_file() {
    cluster_lead_address="\"lead_listen\": \"$cluster_listen\""
    cluster_address=${cluster_listen:+", \"listen\": \"$cluster_listen\""}
    # shellcheck disable=SC2046,SC2059
    cluster_places=$(printf "{\"name\": \"%s\", \"ranks\": %s$cluster_address}, " $(echo "$2" | tr ',:' '  '))
    cat >"$cluster_dir/$1" <<END
{
  "servers": ["$cluster_url"],
  "certificates": "$cluster_certificates",
  "nodes": [${cluster_places%, }]${cluster_listen:+,}
  ${cluster_listen:+$cluster_lead_address}
}
END
    echo "$cluster_dir/$1"
}

cluster_node() {
    cluster_name=$1
    shift
    net_spawn "$cluster_name" "$cluster_bin/coxswain" node --name "$cluster_group" --node "$cluster_name" \
        --cluster "$(cluster_file "node-$cluster_name.json" "$cluster_members")" "$@" \
        >>"$cluster_dir/node-$cluster_name.log" 2>&1
}

cluster_lead() {
    cluster_list=$1
    shift
    : >"$cluster_dir/lead.out"
    net_spawn a "$cluster_bin/coxswain" run --name "$cluster_group" \
        --cluster "$(cluster_file lead.json "$cluster_list")" "$@" \
        >"$cluster_dir/lead.out" 2>>"$cluster_dir/lead.log"
    cluster_lead_pid=$net_pid
}

cluster_printed() {
    grep -q '^name ' "$cluster_dir/lead.out" || ! kill -0 "$cluster_lead_pid" 2>/dev/null
}

cluster_ready() {
    cluster_await 60 cluster_printed && grep -q '^name ' "$cluster_dir/lead.out" && return 0
    echo "the lead is not ready:" >&2
    cat "$cluster_dir/lead.log" "$cluster_dir"/node-*.log >&2
    return 1
}

cluster_run() {
    net_exec a "$cluster_bin/coxswain" "$@"
}

cluster_down() {
    net_down
    [ -z "$cluster_dir" ] || rm -rf "$cluster_dir"
}
