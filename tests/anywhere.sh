#!/bin/sh
# Runs tests of a build as they run elsewhere: sh tests/anywhere.sh PLACE [CTEST OPTION...]
#
#   user       as an ordinary user without a name or a home, which owns nothing of the tree; umask 000
#   container  in a container of an ordinary user: new user, mount, pid and ipc namespaces; uid 0
#              alone is mapped; umask 077. The engine runs as process 1 of it, too.
#   docker     as root with the capabilities that Docker grants, behind a filter like Docker's of
#              the system calls that matter here; only for root
#   beside     as an ordinary user, beside other programs that use /dev/shm (tests/beside.py): unit
#              tests of root have a /dev/shm of their own
#   all        one after the other
#
# Both containers have a read-only /, 64 MiB of /dev/shm, empty /tmp and /run, and no HOME. Without
# options the unit tests run (-L unit). The build is build/test, or $BUILD. Exit status: CTest's;
# 1 if something is left in /dev/shm or a place cannot be had.
set -eu

script=$(realpath "$0")
tree=$(dirname "$(dirname "$script")")
build=$(realpath "${BUILD:-$tree/build/test}")
# A uid without an account.
uid=54321
docker_bounds=-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap
docker_bounds=$docker_bounds,+net_bind_service,+net_raw,+sys_chroot,+mknod,+audit_write,+setfcap
docker_filter=pidfd_getfd=EPERM,kcmp=EPERM,process_madvise=EPERM,unshare=EPERM,setns=EPERM
docker_filter=$docker_filter,mount=EPERM,umount2=EPERM,bpf=EPERM,perf_event_open=EPERM,clone3=ENOSYS

usage() {
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p;}' "$script" >&2
    exit 2
}

# The list of the tests, which CTest wants to write beside.
list_tests() {
    (cd "$build" && find . -name CTestTestfile.cmake -exec cp --parents {} "$1" \;)
}

# In the environment of a service: nothing but what is needed.
run_ctest() {
    folder=$1
    shift
    cd /
    env -i PATH=/usr/bin:/bin LANG=C.UTF-8 ctest --test-dir "$folder" --output-on-failure -j2 "$@"
}

ordinary() {
    if [ "$(id -u)" -eq 0 ]; then
        setpriv --reuid "$uid" --regid "$uid" --clear-groups --inh-caps=-all "$@"
    else
        "$@"
    fi
}

left_in_shm() {
    left=$(find /dev/shm -mindepth 1 "$@" | head -n 20)
    [ -z "$left" ] || echo "left in /dev/shm:" $left >&2
    [ -z "$left" ]
}

# ---- inside ----

as_user() {
    status=0
    umask 000
    run_ctest "$@" || status=$?
    left_in_shm -user "$(id -u)" || status=1
    exit "$status"
}

# The mounts of a container.
furnish() {
    mount -t tmpfs -o mode=1777,size=64m,nosuid,nodev,noexec tmpfs /dev/shm
    mount -t tmpfs -o mode=755 tmpfs /run
    list_tests /run
    mount -t tmpfs -o mode=1777 tmpfs /tmp
    mount --bind "$tree" "$tree"
    for part in / "$tree"; do
        mount -o remount,bind,ro "$part"
    done
    ! touch "$tree/build" "$tree/anywhere" /anywhere 2> /tmp/refused || exit 1
    rm /tmp/refused
}

in_container() {
    status=0
    furnish
    umask 077
    run_ctest /run "$@" || status=$?
    left_in_shm || status=1
    exit "$status"
}

# Is process 1 from here on.
first_process() {
    furnish
    exec env -i PATH=/usr/bin:/bin "$build/bin/coxswain" generate --quiet 1+1=
}

in_docker() {
    status=0
    furnish
    cd /
    env -i PATH=/usr/bin:/bin LANG=C.UTF-8 setpriv --bounding-set "$docker_bounds" --inh-caps=-all \
        "$build/bin/without" "$docker_filter" \
        ctest --test-dir /run --output-on-failure -j2 "$@" || status=$?
    left_in_shm || status=1
    exit "$status"
}

# ---- outside ----

again() {
    env BUILD="$build" sh "$script" "$@"
}

go_user() {
    folder=$(mktemp -d /tmp/anywhere.XXXXXX)
    status=0
    list_tests "$folder"
    [ "$(id -u)" -ne 0 ] || chown -R "$uid:$uid" "$folder"
    ordinary env BUILD="$build" sh "$script" inside_user "$folder" "$@" || status=$?
    rm -r "$folder"
    return "$status"
}

go_container() {
    status=0
    ordinary env BUILD="$build" unshare -Urmpif --mount-proc \
        sh "$script" inside_container "$@" || status=$?
    text=$(ordinary env BUILD="$build" timeout 120 unshare -Urmpif --mount-proc \
        sh "$script" inside_first < /dev/null) || true
    if [ "$text" != 1+1=2 ]; then
        echo "as process 1 of a container: $text" >&2
        status=1
    fi
    return "$status"
}

go_docker() {
    if [ "$(id -u)" -ne 0 ]; then
        echo "docker: only for root" >&2
        return 1
    fi
    env BUILD="$build" unshare -mpif --mount-proc sh "$script" inside_docker "$@"
}

go_beside() {
    folder=$(mktemp -d /tmp/anywhere.XXXXXX)
    status=0
    list_tests "$folder"
    mkfifo "$folder/ready"
    python3 "$tree/tests/beside.py" "$build/bin/coxswain" > "$folder/ready" &
    beside=$!
    read -r _ < "$folder/ready" || status=1
    if [ "$status" -ne 0 ]; then
        :
    elif [ "$(id -u)" -eq 0 ]; then
        chown -R "$uid:$uid" "$folder"
        ordinary env BUILD="$build" sh "$script" inside_user "$folder" "$@" || status=$?
    else
        (run_ctest "$folder" "$@") || status=$?
    fi
    kill "$beside" 2> /dev/null || true
    wait "$beside" || status=1
    rm -r "$folder"
    return "$status"
}

[ "$#" -gt 0 ] || usage
place=$1
shift
case $place in
inside_user) as_user "$@" ;;
inside_container) in_container "$@" ;;
inside_first) first_process ;;
inside_docker) in_docker "$@" ;;
esac

[ "$#" -gt 0 ] || set -- -L unit
case $place in
user | container | docker | beside) "go_$place" "$@" ;;
all)
    result=0
    for place in user container docker beside; do
        echo "== $place"
        again "$place" "$@" || result=$?
    done
    exit "$result"
    ;;
*) usage ;;
esac
