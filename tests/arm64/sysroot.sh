#!/bin/sh
# Unpacks packages of another architecture, with all that they depend on, into a folder; this system stays as it is.
#   sh tests/arm64/sysroot.sh FOLDER ARCHITECTURE PACKAGE...
# Nothing in it is configured: a compiler finds headers and libraries there, and a kernel programs. Needs apt and its
# sources. Exit status 77: the packages cannot be had.
set -eu

folder=${1:?usage: $0 FOLDER ARCHITECTURE PACKAGE...}
architecture=$2
shift 2
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
apt=$folder.apt
command -v apt-get >/dev/null || { echo "$0: skipped: no apt-get here" >&2; exit 77; }

rm -rf "$folder" "$apt"
mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial"
: >"$apt/status"
get() {
    apt-get -q -o APT::Architecture="$architecture" -o APT::Architectures="$architecture" -o Dir::State="$apt/state" \
        -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" -o APT::Install-Recommends=false \
        -o Debug::NoLocking=1 -o APT::Sandbox::User=root "$@"
}
get update >"$apt/log" 2>&1 && get -y --download-only install "$@" >>"$apt/log" 2>&1 ||
    { tail -n 5 "$apt/log" >&2; echo "$0: skipped: the packages cannot be had, see $apt/log" >&2; exit 77; }

# Debian's merged /usr: packages still have files in /lib.
mkdir -p "$folder/usr/bin" "$folder/usr/sbin" "$folder/usr/lib"
for name in bin sbin lib; do ln -s usr/$name "$folder/$name"; done
for deb in "$apt"/cache/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -C "$folder" --keep-directory-symlink -xf -
done
rm -rf "$apt/cache" "$apt/state"
