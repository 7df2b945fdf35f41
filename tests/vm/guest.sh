#!/bin/sh
# What machine.sh runs in its virtual machine, as root, beside systemd.
. /usr/local/lib/guest.sh

logs=/run/logs
mkdir -p $logs
PYTHONPATH=$(echo /usr/lib/python3*/site-packages)
export PYTHONPATH
details() { tail -n 5 $logs/*; }

# A session of logind, over PAM.
login() { ssh -n alice@localhost "$@"; }
alice() { runuser -u alice -- "$@"; }
rank_pid() { alice coxswain status --name "$1" | sed -n 's/^rank 1 pid \([0-9]*\).*/\1/p'; }
is_replaced() { alice coxswain status --name "$1" | grep -q '^rank 1 .* incarnation 2 alive'; }
said() { grep -q "$2" "$logs/$1"; }
answers() { [ "$(alice coxswain generate --name "$1" "27+58=")" = "27+58=85" ]; }
# serves NAME ATTACH [VARIABLE=VALUE...]: a group of alice's that no session has.
serves() {
    name=$1 attach=$2
    shift 2
    systemd-run -q --collect --unit="$name" --uid=alice ${1:+--setenv="$1"} -p StandardError=file:"$logs/$name" \
        coxswain run -n 2 --name "$name" --attach "$attach" --on-death restart
}
is_closing() { [ "$(loginctl show-user alice -P State 2>/dev/null)" = closing ]; }
has_no_directory() { [ ! -e /run/user/"$(id -u alice)" ]; }

figure "$(uname -srm), $(systemctl --version | head -n 1), ptrace_scope $(cat /proc/sys/kernel/yama/ptrace_scope)"

# A group that a login has started, and left running: its session closes, and keeps the directory.
check "a login starts a group" login 'setsid nohup coxswain run -n 2 --name left >/tmp/left 2>&1 </dev/null &
    coxswain status --name left --wait 300'
check "its session is closing" until_ 60 is_closing
sleep 12 # UserStopDelaySec is 10 s
check "it has its socket still" alice coxswain status --socket "/run/user/$(id -u alice)/coxswain/left.sock"
check "another login reaches it" login 'coxswain status --name left && coxswain stop --name left'
check "logind removes the directory after it" until_ 120 has_no_directory

for attach in named sealed; do
    login 'until [ -e /tmp/leave ]; do sleep 1; done' &
    until_ 60 test -d /run/user/"$(id -u alice)"
    serves away $attach XDG_RUNTIME_DIR=/run/user/"$(id -u alice)"
    check "$attach: a group in the directory of a login" until_ 300 alice coxswain status --name away
    pid=$(rank_pid away)
    touch /tmp/leave
    check "$attach: logind removes the directory at logout" until_ 120 has_no_directory
    check "$attach: it is told" until_ 60 said away "no command reaches the group until it can be made anew"
    kill -KILL "$pid"
    check "$attach: a rank is replaced without" until_ 300 said away "replaced by process"
    rm /tmp/leave
    check "$attach: the next login reaches it" login 'for i in $(seq 60); do
        coxswain status --name away && exec coxswain generate --name away 1+1=; sleep 1; done; exit 1'
    check "$attach: one line tells it" [ "$(grep -c 'is made anew$' $logs/away)" = 1 ]
    systemctl stop away
    until_ 120 has_no_directory

    serves aged $attach
    check "$attach: a group in /tmp" until_ 300 alice coxswain status --name aged
    pid=$(rank_pid aged)
    echo 'e /tmp/coxswain-* - - - 1s' >/run/clean.conf
    sleep 2
    check "$attach: systemd-tmpfiles removes the folder" sh -c 'SYSTEMD_LOG_LEVEL=debug systemd-tmpfiles --clean \
        /run/clean.conf 2>&1 | grep "Removing.*aged.sock"'
    kill -KILL "$pid"
    check "$attach: it is found again, its rank is replaced" until_ 300 is_replaced aged
    check "$attach: one line tells it" [ "$(grep -c 'is made anew$' $logs/aged)" = 1 ]

    # The second version of control groups.
    mkdir /sys/fs/cgroup/frozen
    rank_pid aged >/sys/fs/cgroup/frozen/cgroup.procs
    echo 1 >/sys/fs/cgroup/frozen/cgroup.freeze
    answers aged &
    check "$attach: a frozen rank is named" until_ 120 sh -c 'runuser -u alice -- coxswain status --name aged |
        grep -q "^degraded: rank 1: has not taken execute .*frozen by its control group"'
    echo 0 >/sys/fs/cgroup/frozen/cgroup.freeze
    check "$attach: it goes on" wait $!
    systemctl stop aged
    rmdir /sys/fs/cgroup/frozen
    rm -rf /tmp/coxswain-*
done

# A disk that does not reply.
modprobe -a loop dm-mod
truncate -s 32M /run/image
mke2fs -q -t ext4 /run/image
disk=$(losetup -f --show /run/image)
dmsetup create hangs --table "0 $(blockdev --getsz "$disk") linear $disk 0"
mount /dev/mapper/hangs /mnt
head -c 4M /dev/urandom >/mnt/file
check "a rank in the kernel is named" python3 /usr/local/lib/reading_rank.py hangs /mnt/file
umount /mnt
dmsetup remove hangs
losetup -d "$disk"

for attach in named sealed; do
    for how in fork subprocess clone; do
        check "$attach, $how: the host's child keeps no name" python3 /usr/local/lib/forked_host.py $how $attach
    done
done
coxswain clean

# Scope 3 cannot be left again.
install -d -o alice -m 700 /run/alice
COXSWAIN_RUNTIME_DIR=/run/alice/traced
export COXSWAIN_RUNTIME_DIR
for scope in 0 1 2 3; do
    echo $scope >/proc/sys/kernel/yama/ptrace_scope
    serves traced sealed COXSWAIN_RUNTIME_DIR=$COXSWAIN_RUNTIME_DIR
    check "Yama $scope: a group runs" until_ 300 alice coxswain status --name traced
    check "Yama $scope: stacks" alice coxswain stacks --name traced
    figure "Yama $scope: $(grep -c ' + 0x' /tmp/output) native frames; $(sed -n 's/^not there: //p' /tmp/output | tr '\n' ' ')"
    pid=$(rank_pid traced)
    rm -r $COXSWAIN_RUNTIME_DIR
    touch $COXSWAIN_RUNTIME_DIR
    check "Yama $scope: the runtime directory is gone for good" until_ 60 said traced "until it can be made anew"
    kill -KILL "$pid"
    check "Yama $scope: a rank that shares weights is replaced" until_ 300 said traced "replaced by process"
    rm $COXSWAIN_RUNTIME_DIR
    check "Yama $scope: it answers" until_ 60 answers traced
    systemctl stop traced
    rm -f $logs/traced
done
unset COXSWAIN_RUNTIME_DIR

check "nothing is left" [ -z "$(find /dev/shm -name 'cox*' -o -name '*_control')" ]
end
