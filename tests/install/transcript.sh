#!/bin/sh
# A newcomer's and an operator's first hour, in a bare Debian 12, as root and as an ordinary user: sh tests/install/transcript.sh
# Clone, demo, tests, an own worker (docs/your-engine.md), packages built, installed, a rank killed, status, removed.
# Each command is printed before it runs, and the seconds that it took after it; what it printed is in
# build/transcript/log. A chroot has no systemd: the service is started in a virtual machine (tests/service/vm.sh).
# Needs what tools/root needs. Exit status 77: it cannot be made here.
set -eu

cd "$(dirname "$0")/../.."
work=$PWD/build/transcript
root=$work/root
log=$work/log

trap 'rm -rf --one-file-system "$root"' EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$work"
sh tools/root "$root"
git bundle create -q "$root/srv/coxswain.bundle" HEAD
: >"$log"

# inside USER: runs the script at its standard input, in processes, mounts and a /dev/shm of its own.
inside() {
    unshare --mount --pid --ipc --fork --kill-child sh -euc '
        mount -t proc proc "$1/proc"
        mount --rbind /sys "$1/sys"
        mount --rbind /dev "$1/dev"
        mount -t tmpfs -o mode=1777 tmpfs "$1/dev/shm"
        exec chroot "$1" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
            ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} \
            setpriv --reuid "$2" --regid "$2" --init-groups sh -euc "$3"
    ' sh "$root" "$1" "$(cat "$work/prelude" -)" 3>>"$log"
}

# say COMMAND [LINES]: prints and runs it in this shell. Its output goes to the log; what is long is printed to its last LINES.
cat >"$work/prelude" <<'END'
user=$(id -un)
cd "$(getent passwd "$user" | cut -d: -f6)"
export HOME=$PWD
output=$(mktemp)
say() {
    begin=$(date +%s.%N)
    printf '%s@bare:%s$ %s\n' "$user" "$(pwd | sed "s|^$HOME|~|")" "$1"
    status=0
    eval "$1" >"$output" 2>&1 </dev/null || status=$?
    cat "$output" >&3
    [ "$(wc -l <"$output")" -gt 12 ] && tail -n "${2:-1}" "$output" || cat "$output"
    echo "$(date +%s.%N) $begin" | awk '{ printf "    [%.1f s]\n", $1 - $2 }'
    [ "$status" -eq 0 ] || { tail -n 40 "$output" >&2; echo "FAIL: exit status $status" >&2; exit 1; }
}
END

own_worker='
say "PREFIX=$prefix make install"
[ "$user" != root ] || say ldconfig
# Every block of the page, as a reader would paste it; what it prints is compared with what the page says.
say "python3 tests/docs/blocks.py $PWD/build/release $PWD $prefix docs/your-engine.md"
echo "$(date +%s) $cloned" | awk "{ print \"    from clone to an own worker that answers: \" \$1 - \$2 \" s\" }"
'

inside root <<END
say 'apt-get -q update && apt-get -qy install --no-install-recommends git'
cloned=\$(date +%s)
say 'git clone -q /srv/coxswain.bundle coxswain'
say 'cd coxswain'
say 'sh tools/demo' 3
# For the page's own check, and for manual pages.
say 'apt-get -qy install --no-install-recommends python3'
prefix=/usr/local
$own_worker
say 'make uninstall'
[ -z "\$(find /usr/local -name '*cox*')" ] || { echo "FAIL: make uninstall leaves files" >&2; exit 1; }
# What the ordinary user needs of root: the packages of the tests, and those that building packages needs.
say 'sh tools/packages build test && apt-get -qy build-dep --no-install-recommends ./'
say 'useradd --create-home --shell /bin/sh reader'
END

inside reader <<END
cloned=\$(date +%s)
say 'git clone -q /srv/coxswain.bundle coxswain'
say 'cd coxswain'
say 'sh tools/demo' 3
prefix=\$HOME/coxswain-installed
$own_worker
say 'sh tools/test' 4
say 'dpkg-buildpackage -us -uc -b'
say 'ls ../*.deb'
END

inside root <<'END'
say 'apt-get -qy install --no-install-recommends $(ls /home/reader/*.deb | grep -v dbgsym)'
END

inside reader <<'END'
say 'coxswain --version'
echo "reader@bare:~\$ coxswain run -n 2 --name first --on-death restart &"
coxswain run -n 2 --name first --on-death restart >ready 2>&1 &
until grep -q '^rank 1' ready; do kill -0 $! && sleep 0.1; done
cat ready
say 'coxswain generate --name first "27+58="'
say 'coxswain status --name first'
say 'kill -KILL $(coxswain status --name first | sed -n "s/^rank 0 pid \([0-9]*\).*/\1/p")'
say 'coxswain status --name first --wait 60'
say 'coxswain generate --name first "27+58="'
say 'coxswain stop --name first'
wait
sed 's/^/    /' ready
[ -z "$(ls /dev/shm)" ] || { echo "FAIL: something is left in /dev/shm" >&2; exit 1; }
END

inside root <<'END'
say 'dpkg --purge $(dpkg-query -f "\${Package} " -W "*coxswain*")'
# In /tmp are the runtime directories of the users who ran groups, which are empty.
[ -z "$(find /tmp/coxswain-* ! -type d)" ] || { echo "FAIL: a runtime directory is not empty" >&2; exit 1; }
left=$(find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /root -o -path /home -o -path /srv -o -path /var/log \
    -o -path /var/lib/systemd/deb-systemd-helper-enabled \) -prune -o -name '*coxswain*' -print)
[ -z "$left" ] || { echo "FAIL: these are left: $left" >&2; exit 1; }
END
echo "The service: sh tests/service/vm.sh, since systemd is not process 1 of a chroot."
