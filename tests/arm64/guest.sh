#!/bin/bash
# Process 1 of machine.sh's virtual machine: the demo, a rank that is killed, the unit tests.
export PATH=/usr/sbin:/usr/bin HOME=/root LC_ALL=C XDG_RUNTIME_DIR=/run
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/shm /tmp
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t tmpfs -o mode=0700 run /run
ln -sf /proc/self/fd /dev/fd
ulimit -n 4096
cd "$(cat /build-folder)" || exit 1
passed=0 skipped=0
. /guest-lib.sh

answers() { [ "$(bin/coxswain generate "$@" "27+58=")" = "27+58=85" ]; }
run_test() {
    name=$1
    shift
    timeout -k 10 600 "$@" >/tmp/output 2>&1
    case $? in
    0) passed=$((passed + 1)) ;;
    77) skipped=$((skipped + 1)) ;;
    *) failed "$name" ;;
    esac
}
left_out() { skipped=$((skipped + 1)); }

model=$(dirname "$(dirname "$(dirname "$PWD")")")/models/sums
figure "$(uname -srm), $(nproc) processors"
check "the demo, named" answers --model "$model" --quiet -n 4
bin/coxswain run -n 2 --name one --attach sealed --model "$model" --on-death restart >/tmp/ready 2>/tmp/log &
check "a sealed group starts" until_ 300 grep -q '^rank 1' /tmp/ready
pid=$(sed -n 's/^rank 1 pid //p' /tmp/ready)
check "a group answers" answers --name one
kill -KILL "$pid"
check "it answers after the death of a rank" answers --name one
check "that rank was replaced" sh -c 'bin/coxswain status --name one | grep -q "deaths 1, restarts 1"'
check "it stops" bin/coxswain stop --name one
check "nothing is left" sh -c '[ -z "$(ls /dev/shm)" ]'
# shellcheck disable=SC1091
. /tests.sh
figure "unit tests: $passed passed, $skipped skipped or left out"
check "most unit tests ran" test "$passed" -ge 50
end
sync
echo o >/proc/sysrq-trigger
sleep 60
