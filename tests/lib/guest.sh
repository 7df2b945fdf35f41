# Sourced by what runs inside a virtual machine, tests/service/guest.sh and tests/arm64/guest.sh. On the console: a line
# "VM ok: ..." or "VM FAILED: ..." for each check, "VM figure: ..." for what is reported, at last "VM end: N failures".
# shellcheck shell=sh
failures=0

# What a failure prints beside the output; a script that sources this may define it anew.
details() { :; }

# failed NAME: counts, and prints the first errors and the end of what was printed.
failed() {
    echo "VM FAILED: $1"
    { grep -n -m 6 -i -e error -e fail /tmp/output; tail -n 30 /tmp/output; details; } | sed 's/^/    /'
    failures=$((failures + 1))
}

check() {
    what=$1
    shift
    if "$@" >/tmp/output 2>&1; then echo "VM ok: $what"; else failed "$what"; fi
}

figure() { echo "VM figure: $*"; }

# until_ SECONDS COMMAND...
until_() {
    end=$(($(date +%s) + $1))
    shift
    until "$@"; do
        [ "$(date +%s)" -lt "$end" ] || return 1
        sleep 0.5
    done
}

end() { echo "VM end: $failures failures"; }
