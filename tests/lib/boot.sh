# Sourced by what boots a virtual machine: tests/service/vm.sh, tests/arm64/machine.sh.
# shellcheck shell=sh

fail() {
    echo "FAIL: $*" >&2
    exit 1
}

# boot CONSOLE MINUTES QEMU OPTION...: boots it, waits for its end, prints what guest.sh found. Exit status 1: not all is well.
boot() {
    console=$1
    minutes=$2
    shift 2
    timeout "${minutes}m" "$@" -smp 2 -nographic -no-reboot -nic none </dev/null >"$console" 2>&1 || true
    sed -i 's/\r//g' "$console"
    grep '^VM' "$console" || true
    grep -q '^VM end: 0 failures$' "$console" || { tail -n 40 "$console" >&2; fail "see $console"; }
}
