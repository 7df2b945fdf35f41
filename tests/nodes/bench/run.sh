#!/bin/sh
# Measures the transports between machines: `make bench-nodes`. As root; options are run.py's.
# Machine a is the lead, b has the server, the nodes follow.
# usage: run.sh --folder PROGRAMS [OPTION...]
set -eu
here=$(dirname "$0")
. "$here/../network.sh"
case " $* " in *" --help "*) exec python3 "$here/run.py" --help ;; esac
[ "$(id -u)" -eq 0 ] || {
    echo 'network namespaces are for root: nothing is measured' >&2
    exit 77
}
trap net_down EXIT
trap 'exit 1' HUP INT TERM
net_up 10
python3 "$here/run.py" --network "$net_prefix" --subnet "$net_subnet" "$@"
