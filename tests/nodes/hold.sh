#!/bin/sh
# hold.sh BUILD_DIR NODES: a cluster of machines (cluster.sh) for a test in another language: prints a
# line with the prefix of the namespaces, the URL of the NATS server and the folder of certificates,
# and keeps all of it until standard input ends.
set -eu
. "$(dirname "$0")/cluster.sh"
trap cluster_down EXIT
trap 'exit 1' HUP INT TERM
cluster_up "$1" "$2"
echo "$net_prefix $cluster_url $cluster_dir/certificates $(net_address a)"
cat >/dev/null || true
