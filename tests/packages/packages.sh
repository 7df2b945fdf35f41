#!/bin/sh
# Builds the Debian packages of what is committed, without the network, and tries them in a new Debian:
#   sh tests/packages/packages.sh [build|try]      both, without a word
# build: dpkg-buildpackage in a clean clone, and lintian. try: installs, runs debian/tests, removes, and compares all
# files with those before. The packages are left in build/packages. Needs root. Exit status 77: it cannot be done here.
set -eu

cd "$(dirname "$0")/../.."
work=$PWD/build/packages
root=$work/root
path=/usr/sbin:/usr/bin:/sbin:/bin
jobs=${JOBS:-$(nproc)}

fail() {
    echo "FAIL: $*" >&2
    exit 1
}

build() {
    sh tools/packages build test packages || { echo "$0: skipped: packages are missing" >&2; exit 77; }
    rm -rf --one-file-system "$work/coxswain" "$work"/*.deb "$work"/*.changes "$work"/*.buildinfo
    mkdir -p "$work"
    git clone -q --no-hardlinks . "$work/coxswain"
    (
        cd "$work/coxswain"
        # The loopback interface alone, and that is down. What PATH has of this user's own is no part of a build.
        unshare --net env -i PATH=$path HOME=/nonexistent LC_ALL=C.UTF-8 \
            DEB_BUILD_OPTIONS="parallel=$jobs" dpkg-buildpackage -us -uc -b
    ) >"$work/build.log" 2>&1 || { tail -n 40 "$work/build.log" >&2; fail "dpkg-buildpackage, see $work/build.log"; }
    left=$(git -C "$work/coxswain" status --short)
    [ -z "$left" ] || fail "the build leaves files that git does not ignore: $left"
    env PATH=$path lintian --allow-root --fail-on error,warning --suppress-tags bogus-mail-host \
        --tag-display-limit 0 "$work"/*.changes || fail "lintian"
    for deb in "$work"/*.deb; do
        case $deb in *coxswain-nodes_* | *-dbgsym_*) continue ;; esac
        ! dpkg-deb -f "$deb" Depends | grep -E 'libnats|libssl' || fail "${deb##*/} needs what coxswain-nodes alone may need"
    done
    ls -l "$work"/*.deb
}

# All files of the new system but for apt's and dpkg's own.
files() {
    (cd "$root" && find . -xdev \( -path ./proc -o -path ./sys -o -path ./dev -o -path ./var/cache -o -path ./var/lib/apt \
        -o -path ./var/lib/dpkg -o -path ./var/log -o -path ./tmp -o -path ./run \
        -o -path ./var/lib/systemd/deb-systemd-helper-enabled \) -prune -o -print | sort)
}

# inside COMMAND...: in the new system, with its own processes, /dev/shm and the network.
inside() {
    unshare --mount --pid --ipc --fork --kill-child sh -euc '
        root=$1
        shift
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
        mount --bind "$PWD" "$root/mnt"
        exec chroot "$root" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 \
            DEBIAN_FRONTEND=noninteractive ${http_proxy:+http_proxy="$http_proxy"} \
            ${https_proxy:+https_proxy="$https_proxy"} "$@"
    ' sh "$root" "$@"
}

# Before coxswain-nodes is installed, what concerns several machines says so, and the rest works.
without_nodes() {
    grep -v coxswain-nodes_ "$work/debs" >"$work/debs_without"
    inside sh -c 'cd /mnt && apt-get -qy install --no-install-recommends $(cat build/packages/debs_without)' \
        >>"$work/try.log" 2>&1 || { tail "$work/try.log" >&2; fail "install without coxswain-nodes"; }
    inside coxswain node --help >>"$work/try.log" || fail "coxswain node --help without coxswain-nodes"
    answer=$(inside coxswain generate --quiet "27+58=") && [ "$answer" = "27+58=85" ] ||
        fail "coxswain generate without coxswain-nodes"
    # shellcheck disable=SC2016
    if inside sh -c 'echo "$1" >/tmp/cluster.json && coxswain run --name missing --cluster /tmp/cluster.json' sh \
        '{"servers": ["nats://127.0.0.1:4222"], "insecure_loopback": true, "nodes": [{"name": "a", "ranks": 1}]}' \
        2>"$work/missing"; then
        fail "coxswain run --cluster works without coxswain-nodes"
    fi
    grep 'Debian: coxswain-nodes' "$work/missing" || fail "coxswain run --cluster says: $(cat "$work/missing")"
}

try() {
    ls "$work"/coxswain_*.deb >/dev/null || fail "no packages in $work: build them first"
    sh tools/root "$root"
    inside apt-get -q update >"$work/try.log" 2>&1 || { tail "$work/try.log" >&2; exit 77; }
    # What the tests need beside the packages is there before and after.
    inside apt-get -qy install --no-install-recommends systemd apt-utils build-essential cmake pkg-config python3 \
        python3-cffi-backend libprotobuf-c-dev libjansson4 libncurses6 libnats3.4 nats-server \
        openssl >>"$work/try.log" 2>&1
    files >"$work/before"
    for deb in "$work"/*.deb; do
        case $deb in *-dbgsym_*) ;; *) echo "./build/packages/${deb##*/}" ;; esac
    done >"$work/debs"
    without_nodes
    inside sh -c 'cd /mnt && apt-get -qy install --no-install-recommends $(cat build/packages/debs)' \
        >>"$work/try.log" 2>&1 || { tail "$work/try.log" >&2; fail "install"; }
    files >"$work/installed"
    [ -d "$root/run/coxswain" ] || fail "/run/coxswain was not made"
    [ -f "$root/lib/systemd/system/coxswain-weights.service" ] || fail "the unit of the holder of weights is missing"
    [ -z "$(find "$root/etc/systemd" -name '*coxswain*')" ] || fail "an installation enables a service"
    [ ! -e "$root/var/lib/dpkg/info/coxswain.preinst" ] || ! grep coxswain-weights "$root/var/lib/dpkg/info/coxswain.preinst" ||
        fail "an upgrade stops the holder of weights"
    # The tests of debian/tests, by Debian's own program, as a user.
    inside useradd --create-home someone
    unshare --mount --pid --ipc --fork --kill-child sh -euc '
        root=$1
        shift
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
        exec env PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@" -- chroot "$root"
    ' sh "$root" autopkgtest --no-built-binaries --user someone --timeout-factor 10 \
        $(sed "s|^|./|" "$work/debs") "$work/coxswain/" >"$work/autopkgtest.log" 2>&1 ||
        { tail -n 40 "$work/autopkgtest.log" >&2; fail "autopkgtest, see $work/autopkgtest.log"; }
    sed -n '/ @@@@* summary/,$p' "$work/autopkgtest.log"
    inside sh -c 'userdel --remove someone; rm -rf /tmp/*
        [ -z "$(find /dev/shm -name "*cox*")" ] &&
        dpkg --purge $(dpkg-query -f "\${Package}\n" -W "*coxswain*")' >>"$work/try.log" 2>&1 ||
        { tail "$work/try.log" >&2; fail "purge"; }
    files >"$work/after"
    echo "$(comm -13 "$work/before" "$work/installed" | wc -l) files and folders were installed"
    # Accounts stay, as Debian keeps them: a later account must not own what this one has left.
    if diff "$work/before" "$work/after" | grep -q '^> .*cox'; then
        fail "something is left"
    fi
    [ ! -e "$root/run/coxswain" ] || fail "/run/coxswain is left"
    echo "none of them is left"
}

case ${1:-} in
build) build ;;
try) try ;;
'') build && try ;;
*) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "$0" >&2; exit 2 ;;
esac
