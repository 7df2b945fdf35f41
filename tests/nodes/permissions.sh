#!/bin/sh
# Runs permissions_test.py against a nats-server as users get it: sh tests/nodes/permissions.sh [TEST...]
#
# Certificates and configuration are made by packaging/nats/coxswain-certificates; the server runs on
# machine a of a network of its own, the clients on machine b (network.sh). Exit status: the
# program's; 77 if this is not root, or without nats-server.
set -eu

nodes_dir=$(dirname "$(realpath "$0")")
certificates=$nodes_dir/../../packaging/nats/coxswain-certificates

[ "$(id -u)" -eq 0 ] && command -v nats-server >/dev/null && command -v ip >/dev/null || {
    echo "skipped: root, nats-server and iproute2 are needed" >&2
    exit 77
}

. "$nodes_dir/network.sh"
dir=$(mktemp -d)
trap 'net_down; rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
net_up 2
address=$(net_address a)

"$certificates" "$dir/own" --server "$address" --node a --node b >"$dir/log"
"$certificates" "$dir/own" --node expired --not-after 20200101000000Z >>"$dir/log"
"$certificates" "$dir/other" --server "$address" --node b >>"$dir/log"

# The same server with the certificate of node b, on another port.
sed "s/:4222\"/:4223\"/; s/server\(-key\)*\.pem/node-b\1.pem/" "$dir/own/coxswain-nats.conf" \
    >"$dir/impostor.conf"

# start_server NAME CONFIGURATION PORT: returns when it accepts connections.
start_server() {
    net_spawn a nats-server -c "$2" >"$dir/$1.log" 2>&1
    tries=0
    while ! net_exec a ss -Hltn | grep -q ":$3 "; do
        tries=$((tries + 1))
        if [ "$tries" -gt 200 ] || ! kill -0 "$net_pid" 2>/dev/null; then
            cat "$dir/$1.log" >&2
            echo "the server $1 does not start" >&2
            exit 1
        fi
        sleep 0.05
    done
}
start_server own "$dir/own/coxswain-nats.conf" 4222
start_server impostor "$dir/impostor.conf" 4223

r=0
net_exec b /usr/bin/python3 "$nodes_dir/permissions_test.py" "nats://$address:4222" "$dir/own" "$dir/other" \
    "nats://$address:4223" "$@" || r=$?
[ "$r" -eq 0 ] || tail -n 40 "$dir/own.log" >&2
exit "$r"
