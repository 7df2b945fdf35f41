#!/bin/sh
# Builds the image of packaging/container from what is committed, and runs it: sh tests/container/image.sh
# The base image is a new Debian of tools/root, since no registry is needed for it then; podman does the rest, with crun.
# The image's own health check is tried: healthy, unhealthy while the group is paused or a rank is stopped, and healthy
# again. All is below build/container. Needs root. Exit status 77: it cannot be done here.
set -eu

cd "$(dirname "$0")/../.."
work=$PWD/build/container
image=coxswain:test

skip() {
    echo "$0: skipped: $1" >&2
    exit 77
}

# In a mount namespace: what is mounted below ends with this script. crun refuses a machine with both versions of cgroups,
# so that there the second covers the first.
if [ -z "${COX_IMAGE_NAMESPACE-}" ]; then
    [ "$(id -u)" -eq 0 ] || skip "only root can make a system"
    sh tools/packages container || skip "packages are missing"
    exec unshare --mount env COX_IMAGE_NAMESPACE=1 sh "$PWD/tests/container/image.sh"
fi
# podman keeps its locks there, also after its containers are gone.
mount -t tmpfs -o mode=1777 none /dev/shm || skip "no mount is allowed here"
[ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ] || mount -t cgroup2 none /sys/fs/cgroup || skip "no cgroups here"

podman_() {
    podman --root "$work/store" --runroot "$work/run" --cgroup-manager cgroupfs --runtime crun "$@"
}

# Neither a network, nor limits or cgroups of its own: what a container is given is not what is tried here.
run() {
    podman_ run --network none --cgroups disabled --ulimit nofile=4096:4096 --ulimit nproc=4096:4096 "$@"
}

fail() {
    echo "FAIL: $*" >&2
    podman_ logs one 2>&1 | tail -n 20 >&2 || true
    exit 1
}

# ok WHAT COMMAND...
ok() {
    what=$1
    shift
    "$@" >"$work/output" 2>&1 || { cat "$work/output" >&2; fail "$what"; }
    echo "ok: $what"
}

# until_ COMMAND...: two minutes, which a busy machine needs.
until_() {
    end=$(($(date +%s) + 120))
    until "$@"; do
        [ "$(date +%s)" -lt "$end" ] || return 1
        sleep 0.5
    done
}

healthy() { podman_ healthcheck run one; }
unhealthy() { ! podman_ healthcheck run one; }
answers() { [ "$(podman_ exec one coxswain generate --name main '27+58=')" = 27+58=85 ]; }
rank() { podman_ exec one coxswain status --name main | sed -n 's/^rank 1 pid \([0-9]*\).*/\1/p'; }

clean() {
    podman_ rm --force --all --time 5 >/dev/null 2>&1 || true
    podman_ rmi --force --all >/dev/null 2>&1 || true
    rm -rf --one-file-system "$work/store" "$work/run" "$work/base" "$work/context"
}

trap clean EXIT
trap 'exit 1' HUP INT TERM
mkdir -p "$work"
clean
sh tools/root "$work/base"
tar -C "$work/base" -c . | podman_ import -q - docker.io/library/debian:bookworm-slim >/dev/null
git clone -q --no-hardlinks . "$work/context"
podman_ run --rm --network none --cgroups disabled --ulimit nofile=4096:4096 --ulimit nproc=4096:4096 docker.io/library/debian:bookworm-slim true \
    >"$work/try.log" 2>&1 || { cat "$work/try.log" >&2; skip "no container can be run here"; }

podman_ build --format docker --isolation chroot --network host --pull-never \
    -f "$work/context/packaging/container/Containerfile" -t "$image" "$work/context" >"$work/build.log" 2>&1 ||
    { tail -n 30 "$work/build.log" >&2; fail "see $work/build.log"; }
echo "ok: the image is built, $(podman_ image inspect --format '{{.Size}}' "$image" | awk '{ printf "%.0f MB", $1 / 1e6 }')"

for attach in named sealed; do
    # Sealed groups need no /dev/shm.
    shm=$([ $attach = named ] && echo 256m || echo 64k)
    ok "$attach: a container starts" run --detach --name one --shm-size "$shm" "$image" --ranks 2 --attach $attach
    ok "$attach: it gets healthy" until_ healthy
    ok "$attach: it answers" answers
    ok "$attach: nobody in it is root" sh -c '[ "$1" = coxswain ]' sh "$(podman_ exec one id -un)"
    ok "$attach: pause" podman_ exec one coxswain recover pause --name main
    ok "$attach: paused: unhealthy" unhealthy
    ok "$attach: its check tells why" podman_ exec one sh -c 'coxswain status --name main; [ $? = 4 ]'
    ok "$attach: start" podman_ exec one coxswain recover start --name main
    ok "$attach: healthy again" healthy
    pid=$(rank)
    ok "$attach: a rank is stopped by a signal" podman_ exec one sh -c "kill -STOP $pid"
    ok "$attach: unhealthy" until_ unhealthy
    ok "$attach: it is continued" podman_ exec one sh -c "kill -CONT $pid"
    ok "$attach: healthy again" until_ healthy
    ok "$attach: stop" podman_ stop --time 60 one
    ok "$attach: it ended in order" sh -c '[ "$1" = 0 ]' sh "$(podman_ inspect --format '{{.State.ExitCode}}' one)"
    podman_ logs one >"$work/log" 2>&1
    ok "$attach: its log is lines of JSON" python3 -c 'import json, sys
lines = [json.loads(line) for line in open(sys.argv[1]) if line.startswith("{")]
assert lines and all("level" in line for line in lines), lines' "$work/log"
    podman_ rm one >/dev/null 2>&1
done
status=0
run --rm --shm-size 64k "$image" >"$work/refusal" 2>&1 || status=$?
ok "a /dev/shm that is too small is refused, with the remedy" \
    sh -c 'cat "$2"; [ "$1" = 1 ] && grep -q "bytes of /dev/shm, .* use --attach sealed" "$2"' sh "$status" "$work/refusal"
