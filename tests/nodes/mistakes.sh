#!/bin/sh
# mistakes.sh BUILD_DIR: what a user does wrong with two machines: an address that others cannot reach, a wrong file of
# --cluster, a server without TLS, a wrong port, another layout for ranks that wait for their lead, a signal at each wait.
# Each is told with what to do, and ends nothing that was right. Root only; under a minute.
set -eu

[ $# -eq 1 ] || { echo "usage: sh $0 BUILD_DIR" >&2; exit 2; }
build=$(cd "$1" && pwd)
. "$(dirname "$0")/cluster.sh"

trap cluster_down EXIT
trap 'exit 1' HUP INT TERM
cluster_up "$build" 2
said=$cluster_dir/said

gone() { ! kill -0 "$1" 2>/dev/null; }
tells() { grep -q -e "$1" "$2"; }
fails() {
    echo "$1"
    cat "$cluster_dir"/*.log "$said" 2>/dev/null
    exit 1
}

# ends STATUS TEXT FILE PID: the process has that exit status, and the file the text.
ends() {
    cluster_await 30 gone "$4" || fails "a process goes on that should say: $2"
    r=0
    wait "$4" || r=$?
    [ "$r" -eq "$1" ] || fails "status $r in place of $1: $2"
    tells "$2" "$3" || fails "not said: $2"
    echo "status $r: $(grep -m 1 -e "$2" "$3")"
}

# refused STATUS TEXT COMMAND...: coxswain on machine a.
refused() {
    status=$1 text=$2
    shift 2
    r=0
    cluster_run "$@" >"$said" 2>&1 || r=$?
    [ "$r" -eq "$status" ] || fails "status $r in place of $status: $text"
    tells "$text" "$said" || fails "not said: $text"
    echo "status $r: $(grep -m 1 -e "$text" "$said")"
}

# as_node: options of the agent of machine a.
as_node() { echo "--name big --node a --cluster $(cluster_file node-a.json "$cluster_members")"; }

# written LINE...: a file of --cluster with these lines.
written() {
    printf '%s\n' "$@" >"$cluster_dir/cluster.json"
    echo "$cluster_dir/cluster.json"
}

# ---- options; what a file can have wrong is in multi/commands_wrong_input ----

nodes='"nodes": [{"name": "a", "ranks": 2}]'
# shellcheck disable=SC2046
{
    refused 2 "cannot execute the worker's program '/nonexist'" node $(as_node) --worker /nonexist
    cluster_right=$cluster_url cluster_url=tls://127.0.0.1:abc
    refused 2 "expected tls://HOST:PORT" node $(as_node)
    cluster_url=$cluster_right
    refused 2 "cannot execute the worker's program '/nonexist'" node $(as_node) -- /nonexist
    refused 1 '/proc/x' node $(as_node) --crash-dir /proc/x
}

# ---- servers ----

net_spawn a nats-server -a 127.0.0.1 -p 4333 >"$cluster_dir/plain.log" 2>&1
cluster_await 10 tells 'Server is ready' "$cluster_dir/plain.log" || fails "no plain server"
cluster_url=tls://127.0.0.1:4333
# shellcheck disable=SC2046
refused 1 'has no TLS: start it with coxswain-nats.conf' node $(as_node)
cluster_url=$cluster_right
sh "$cluster_source/packaging/nats/coxswain-certificates" "$cluster_dir/other" --server x --node a >"$cluster_dir/other.log"
cluster_certificates=other
# shellcheck disable=SC2046
refused 1 "does not accept the server of the cluster .*local issuer certificate.*of the CA in $cluster_dir/other/ca.pem" \
    node $(as_node)
cluster_certificates=certificates
insecure=$(written "{\"servers\": [\"nats://127.0.0.1:4222\"], \"insecure_loopback\": true, $nodes}")
net_spawn "$cluster_server" "$cluster_bin/coxswain" node --name big --node a --cluster "$insecure" >"$said" 2>&1
ends 1 'wants TLS: give tls://HOST:PORT and certificates' "$said" "$net_pid"
cluster_url=tls://127.0.0.1:4444
cluster_node a
cluster_await 10 tells 'waiting for the cluster: tls://127.0.0.1:4444: Connection refused' "$cluster_dir/node-a.log" ||
    fails "an agent does not say that nobody listens"
kill -TERM "$net_pid"
ends 143 'ended by signal 15' "$cluster_dir/node-a.log" "$net_pid"
cluster_lead a:2,b:2
cluster_await 10 tells 'waiting for the cluster: tls://127.0.0.1:4444: Connection refused' "$cluster_dir/lead.log" ||
    fails "a lead does not say that nobody listens"
kill -TERM "$cluster_lead_pid"
ends 143 'ended by signal 15' "$cluster_dir/lead.log" "$cluster_lead_pid"
cluster_url=$cluster_right

# ---- addresses ----

: >"$cluster_dir/node-a.log"
cluster_node a --stay
agent_a=$net_pid
cluster_listen=127.0.0.1:0
cluster_node b
cluster_listen=
agent_b=$net_pid
cluster_lead a:2,b:2
ends 2 'node b listens at 127.0.0.1:[0-9]*, which other machines cannot reach .*: give it a HOST:PORT to listen at' \
    "$cluster_dir/lead.log" "$cluster_lead_pid"
ends 2 'node b listens at 127.0.0.1:[0-9]*, which other machines cannot reach .*: give it a HOST:PORT to listen at' \
    "$cluster_dir/node-b.log" "$agent_b"
cluster_node b --stay
agent_b=$net_pid
cluster_listen=127.0.0.1:0
cluster_lead a:2,b:2
cluster_listen=
ends 2 'the lead listens at 127.0.0.1:[0-9]*, which node [ab] at .* cannot reach' "$cluster_dir/lead.log" "$cluster_lead_pid"
kill -0 "$agent_a" && kill -0 "$agent_b" || fails "a lead's address has ended an agent"

# ---- nodes that do not come, and ranks for another lead ----

cluster_lead a:2,c:2,d:2
cluster_await 10 tells 'waiting: node c has not come, nor have d: run there' "$cluster_dir/lead.log" ||
    fails "the nodes that are missing are not named"
waits() {
    ! cluster_run status --name big >"$said" 2>&1 && tells 'not attached yet: ranks 2-5 (of 6)' "$said"
}
cluster_await 10 waits || fails "status does not show a lead that waits"
kill -TERM "$cluster_lead_pid"
ends 143 'ended by signal 15' "$cluster_dir/lead.log" "$cluster_lead_pid"
cluster_lead a:2,b:2 --on-death restart
cluster_ready
workers() { cluster_run status --name big | sed -n 's/^rank \([0-9]*\) on node [a-z]* pid \([0-9]*\) .*/\1 \2/p'; }
before=$(workers)
[ "$(echo "$before" | wc -l)" -eq 4 ] || fails "not four ranks: $before"
cluster_run top --once --name big >"$said" || fails "top --name"
tells ' 3 .*big' "$said" || fails "top --name does not show rank 3"
kill -9 "$cluster_lead_pid"
wait "$cluster_lead_pid" || :
cluster_lead a:2,b:1
cluster_await 10 tells 'waiting: node a has 2 ranks, from 0 on, of 4, loaded for a lead that is lost; this lead gives it 2 of 3' \
    "$cluster_dir/lead.log" || fails "a lead with another layout does not wait"
kill -TERM "$cluster_lead_pid"
ends 143 'ended by signal 15' "$cluster_dir/lead.log" "$cluster_lead_pid"
cluster_lead a:2,b:2 --on-death restart
cluster_ready
[ "$(workers)" = "$before" ] || fails "mistyped nodes have ended ranks: $before, now $(workers)"
[ "$(cluster_run generate --name big --quiet 27+58=)" = "27+58=85" ] || fails "no answer"
echo "ranks have outlived a lead that had another layout"

# ---- a second lead ----

first=$cluster_lead_pid
mkdir -m 700 "$cluster_dir/elsewhere"
COXSWAIN_RUNTIME_DIR=$cluster_dir/elsewhere
: >"$cluster_dir/lead.log"
cluster_lead a:2,b:1
cluster_await 10 tells "waiting: node a follows another lead of the group 'big', at $(net_address a):[0-9]*, heard" \
    "$cluster_dir/lead.log" || fails "a second lead does not say where the first is"
# The same node is waited for, for another reason.
kill -9 "$first"
cluster_await 10 tells 'waiting: node a has 2 ranks, from 0 on, of 4' "$cluster_dir/lead.log" ||
    fails "a lead that waits does not say that its reason has changed"
kill -TERM "$cluster_lead_pid"
ends 143 'ended by signal 15' "$cluster_dir/lead.log" "$cluster_lead_pid"
COXSWAIN_RUNTIME_DIR=$cluster_dir/run
cluster_lead a:2,b:2 --on-death restart
cluster_ready
[ "$(workers)" = "$before" ] || fails "a second lead has ended ranks: $before, now $(workers)"

# ---- a node that has gone ----

kill -9 "$agent_b"
cluster_await 10 tells 'rank 2 waits for node b: run there: coxswain node --name big --node b' "$cluster_dir/lead.log" ||
    fails "what to do about a lost node is not said"
cluster_node b
answers() { [ "$(cluster_run generate --name big --quiet 27+58= 2>/dev/null)" = "27+58=85" ]; }
cluster_await 30 answers || fails "no answer after a node came back"
cluster_run stop --name big >/dev/null
echo "mistakes are told, with what to do"
