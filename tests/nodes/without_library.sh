#!/bin/sh
# The programs without libcoxswain-nodes.so: without_library.sh BUILD_DIR
#
# On a copy of BUILD_DIR/bin, one machine is served as ever, and what concerns several says which library and which
# package is missing. Exit status 77: the library is installed on this machine, where every program finds it.
set -eu

[ $# -eq 1 ] || { echo "usage: sh $0 BUILD_DIR" >&2; exit 2; }
source=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "$1" && pwd)
unset LD_LIBRARY_PATH
PATH=$PATH:/usr/sbin:/sbin
if ldconfig -p 2>/dev/null | grep -q libcoxswain-nodes; then
    echo "skipped: libcoxswain-nodes is installed here" >&2
    exit 77
fi

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
export COXSWAIN_RUNTIME_DIR="$dir/run"
mkdir "$dir/bin"
cp "$build/bin/coxswain" "$build/bin/coxswain-worker" "$dir/bin/"
coxswain=$dir/bin/coxswain

fail() {
    cat "$dir/output" >&2
    echo "FAIL: $*" >&2
    exit 1
}

# Neither program has an unresolved name of the library, or of what that needs.
for program in coxswain coxswain-worker; do
    ldd "$dir/bin/$program" >"$dir/output"
    ! grep -E 'not found|libnats|libssl|libcoxswain-nodes' "$dir/output" || fail "$program needs the library"
done

"$coxswain" node --help >"$dir/output" 2>&1 || fail "node --help ends with status $?"
grep -q '^Usage: coxswain node ' "$dir/output" || fail "node --help prints something else"

# missing COMMAND...: it fails, and names library and package.
missing() {
    r=0
    timeout 30 "$coxswain" "$@" >"$dir/output" 2>&1 || r=$?
    [ "$r" -eq 1 ] || fail "coxswain $1 ends with status $r"
    for word in libcoxswain-nodes.so.0 'Debian: coxswain-nodes' 'cannot open shared object file'; do
        grep -q -e "$word" "$dir/output" || fail "coxswain $1 does not say '$word'"
    done
}
model=$source/models/sums
echo '{"servers": ["nats://127.0.0.1:4222"], "insecure_loopback": true, "nodes": [{"name": "a", "ranks": 1}]}' \
    >"$dir/cluster.json"
missing node --name without --node a --cluster "$dir/cluster.json" --model "$model"
missing run --name without --cluster "$dir/cluster.json" --model "$model"

"$coxswain" generate --quiet -n 2 --model "$model" '27+58=' >"$dir/output" 2>&1 || fail "generate ends with status $?"
[ "$(cat "$dir/output")" = '27+58=85' ] || fail "generate answers something else"
