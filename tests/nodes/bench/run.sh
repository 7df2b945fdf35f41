#!/bin/sh
# Measures the transports between machines, `make bench-nodes`; or a group of many nodes, `make bench-scale`. As root;
# options are those of run.py or scale.py. Machine a is the lead, b has the server, the nodes follow.
# usage: run.sh [scale] --folder PROGRAMS [OPTION...]
set -eu
here=$(dirname "$0")
. "$here/../network.sh"
script=run.py machines=10
[ "${1-}" != scale ] || {
    script=scale.py machines=34
    shift
}
case " $* " in *" --help "*) exec python3 "$here/$script" --help ;; esac
[ "$(id -u)" -eq 0 ] || {
    echo 'network namespaces are for root: nothing is measured' >&2
    exit 77
}
trap net_down EXIT
trap 'exit 1' HUP INT TERM
net_up $machines
python3 "$here/$script" --network "$net_prefix" --subnet "$net_subnet" "$@"
