#!/bin/sh
# What vm.sh runs in its virtual machine, as root, beside systemd.
. /usr/local/lib/guest.sh

details() { journalctl -u coxswain@main -n 30 --no-pager; }

# As the user of the service, in a login without a variable of it: /run/coxswain is one of the places that are looked at.
coxswain_() {
    runuser -u coxswain -- coxswain "$@"
}

answers() {
    [ "$(coxswain_ generate --name main "27+58=")" = "27+58=85" ]
}

property() {
    systemctl show -P "$1" coxswain@main
}

rank_pid() {
    coxswain_ status --name main | sed -n 's/^rank 0 pid \([0-9]*\).*/\1/p'
}

is_active() { [ "$(property ActiveState)" = active ]; }
was_restarted() { [ "$(property NRestarts)" -ge 1 ] && is_active; }
other_rank() { new=$(rank_pid) && [ -n "$new" ] && [ "$new" != "$1" ]; }
nothing_left() {
    [ -z "$(find /dev/shm -name 'cox*' -o -name '*main*')" ] && [ -z "$(find /run/coxswain -name '*.sock')" ] &&
        ! pgrep -u coxswain
}

check "the unit is sound" systemd-analyze verify --man=no coxswain@main.service
figure "$(systemd-analyze security --no-pager coxswain@main.service | tail -n 1)"
check "the account is there" getent passwd coxswain
check "the runtime directory is there" sh -c '[ "$(stat -c "%U %a" /run/coxswain)" = "coxswain 700" ]'

for attach in named sealed; do
    echo "COXSWAIN_OPTIONS=-n 2 --attach $attach --on-death restart" >/etc/coxswain/main.conf
    begin=$(date +%s.%N)
    check "$attach: start returns when the group is ready" systemctl start coxswain@main
    figure "$attach: ready after $(echo "$(date +%s.%N) $begin" | awk '{ printf "%.1f", $1 - $2 }') s, emulated"
    check "$attach: active" is_active
    check "$attach: it answers" answers
    check "$attach: status" coxswain_ status --name main
    check "$attach: status, as root" coxswain status --socket /run/coxswain/main.sock
    figure "$attach: StatusText '$(property StatusText)'"
    check "$attach: a command that changes it" coxswain_ recover pause --name main
    check "$attach: and back" coxswain_ recover start --name main
    pid=$(rank_pid)
    check "$attach: a rank is killed" kill -KILL "$pid"
    check "$attach: it is replaced" until_ 300 other_rank "$pid"
    check "$attach: it answers after that" answers
    check "$attach: still the same service" sh -c '[ "$(systemctl show -P NRestarts coxswain@main)" = 0 ]'
    check "$attach: the death is a notice in the journal" sh -c \
        'journalctl -u coxswain@main -p notice..notice --no-pager -o cat | grep "rank 0 .* was killed by signal 9"'
    check "$attach: what is no warning is none" sh -c \
        'journalctl -u coxswain@main -p info..info --no-pager -o cat | grep "socket /run/coxswain/main.sock"'
    check "$attach: stop" systemctl stop coxswain@main
    check "$attach: nothing is left" nothing_left
    systemctl reset-failed coxswain@main 2>/dev/null
done

# A watchdog with less patience than the unit's 30 s, for the test.
mkdir -p /etc/systemd/system/coxswain@.service.d
printf '[Service]\nWatchdogSec=12\n' >/etc/systemd/system/coxswain@.service.d/watchdog.conf
systemctl daemon-reload
check "watchdog: start" systemctl start coxswain@main
sleep 15
check "watchdog: fed while the group answers" sh -c \
    '[ "$(systemctl show -P NRestarts coxswain@main)" = 0 ] && systemctl is-active coxswain@main'
kill -STOP "$(rank_pid)"
check "watchdog: a rank that is stopped ends it, and it is started again" until_ 600 was_restarted
check "watchdog: it answers after that" answers
check "watchdog: why is in the journal" sh -c \
    'journalctl -u coxswain@main -p warning --no-pager -o cat | grep "the watchdog is not fed: rank 0"'
kill -STOP "$(property MainPID)"
check "watchdog: a coordinator that is stopped, too" until_ 600 sh -c \
    '[ "$(systemctl show -P NRestarts coxswain@main)" -ge 2 ] && systemctl is-active coxswain@main'
check "watchdog: it answers after that" answers
systemctl stop coxswain@main
check "nothing is left" nothing_left

echo "COXSWAIN_OPTIONS=--depth 0" >/etc/coxswain/main.conf
systemctl start coxswain@main 2>/dev/null
check "options that are refused are not tried again" sh -c \
    'sleep 5; [ "$(systemctl show -P ExecMainStatus coxswain@main)" = 2 ] && [ "$(systemctl show -P ActiveState coxswain@main)" = failed ]'

echo "COXSWAIN_OPTIONS=-n 2" >/etc/coxswain/main.conf
check "a group runs while the package is removed" systemctl start coxswain@main
check "the holder of weights is neither enabled nor started" sh -c \
    '[ "$(systemctl is-enabled coxswain-weights) $(systemctl is-active coxswain-weights)" = "disabled inactive" ]'
check "the holder of weights starts" systemctl start coxswain-weights
check "it answers" sh -c 'runuser -u coxswain -- coxswain weights'
check "an upgrade leaves both running" sh -c 'dpkg -i /root/coxswain_*.deb &&
    systemctl is-active coxswain-weights && systemctl is-active coxswain@main'
check "the package is removed" dpkg --purge coxswain
check "its group was stopped" sh -c '[ "$(systemctl is-active coxswain@main)" != active ]'
check "the holder of weights was stopped" sh -c '[ "$(systemctl is-active coxswain-weights)" != active ]'
check "nothing is left" nothing_left
check "no program is left" sh -c '! command -v coxswain'
end
