#!/bin/sh
# Installs below DESTDIR, and removes that again: uninstall_test.sh CMAKE SOURCE BUILD
set -eu
cmake=$1 source=$2 build=$3

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
trap 'exit 1' HUP INT TERM
fail() {
    echo "FAIL: $*" >&2
    exit 1
}

mkdir -p "$root/opt/pack/share/man" "$root/opt/pack/bin"
echo mine >"$root/opt/pack/bin/mine"
DESTDIR=$root "$cmake" --install "$build" --prefix /opt/pack >"$root/log"
for file in bin/coxswain bin/coxswain-worker include/coxswain/coxswain.h \
    share/coxswain/models/sums/config.json share/bash-completion/completions/coxswain \
    share/zsh/site-functions/_coxswain lib/systemd/system/coxswain@.service lib/tmpfiles.d/coxswain.conf \
    lib/sysusers.d/coxswain.conf; do
    [ -e "$root/opt/pack/$file" ] || fail "$file is not installed"
done
grep -q '^ExecStart=/opt/pack/bin/coxswain run ' "$root/opt/pack/lib/systemd/system/coxswain@.service" ||
    fail "the service does not run the program below the prefix"
[ ! -e /opt/pack ] || fail "something was installed outside DESTDIR"
# It runs there, as installed, with the model beside it.
answer=$("$root/opt/pack/bin/coxswain" generate --quiet -n 2 "27+58=")
[ "$answer" = "27+58=85" ] || fail "the installed program says '$answer'"

DESTDIR=$root "$cmake" -D BUILD_DIR="$build" -P "$source/cmake/uninstall.cmake"
rm "$root/log"
left=$(find "$root" ! -type d)
[ "$left" = "$root/opt/pack/bin/mine" ] || fail "left: $left"
left=$(find "$root" -type d -name coxswain)
[ -z "$left" ] || fail "left: $left"
[ -d "$root/opt/pack/share/man" ] || fail "a folder of others is gone"
