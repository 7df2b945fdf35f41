#!/bin/sh
# The cases of docs/at-3am.md, with real processes: at_3am.sh BUILD_DIR [hang|death|slow|divergence|full]
#
# Each case makes its failure and runs the commands of the page. A command, the line that decides in its output, and the
# alert must be in the page as well, so that it says what is true. Without a case all run. Exit status 77: what the only
# case needs is not here.
#
# COX_SHOW=1 prints what the commands print.
set -eu

build=$(cd "$1" && pwd)
only=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
name=mine-$$
work=$(mktemp -d)
page=$work/page
crashes=$work/crashes
pids=
skipped=
mkdir "$work/run" "$crashes"
chmod 700 "$work/run"
sed 's/^    //' "$source/docs/at-3am.md" >"$page" # code is indented
PATH=$build/bin:$PATH
COXSWAIN_RUNTIME_DIR=$work/run
COXSWAIN_WORKER=$build/bin/coxswain-worker
export PATH COXSWAIN_RUNTIME_DIR COXSWAIN_WORKER
unset COXSWAIN_CRASH_DIR
# Tries of a tenth of a second and more; a busy machine needs long.
TRIES=1200

finish() {
    rm -f "$work/busy"
    coxswain stop --name "$name" >/dev/null 2>&1 || true
    # shellcheck disable=SC2086
    [ -z "$pids" ] || kill -9 $pids 2>/dev/null || true
    wait
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

fail() {
    echo "FAIL, $case: $*" >&2
    for file in "$work/log" "$work/out"; do
        [ ! -s "$file" ] || { echo "--- $file" >&2; tail -n 40 "$file" >&2; }
    done
    exit 1
}

# skip REASON
skip() {
    echo "skip $case: $1"
    skipped=1
}

in_page() {
    grep -qF -- "$1" "$page" || fail "docs/at-3am.md does not have: $1"
}

# start OPTION...: the group of the page
start() {
    rm -f "$work/group" "$work/log"
    coxswain run -n 4 --name "$name" --model "$source/models/sums" --on-death restart --crash-dir "$crashes" "$@" \
        >"$work/group" 2>"$work/log" &
    group=$!
    pids="$pids $group"
    tries=0
    until grep -qs '^rank 3 ' "$work/group"; do
        kill -0 "$group" 2>/dev/null || fail "the group did not start"
        [ $((tries += 1)) -lt $TRIES ] || fail "the group is not ready"
        sleep 0.1
    done
    coxswain metrics --name "$name" >"$work/before"
}

pid_of() {
    awk -v rank="$1" '$1 == "rank" && $2 == rank { print $4 }' "$work/group"
}

# await PATTERN COMMAND...: runs it until a line of its output matches
await() {
    pattern=$1
    shift
    tries=0
    until "$@" >"$work/out" 2>&1 || true; grep -qE -- "$pattern" "$work/out"; do
        [ $((tries += 1)) -lt $TRIES ] || fail "no line '$pattern' from: $*"
        sleep 0.1
    done
}

# shows COMMAND PATTERN: a command of the page, and the line that decides
shows() {
    in_page "$1"
    grep -qE -- "$2" "$page" || fail "docs/at-3am.md has no line like: $2"
    command=$(printf '%s\n' "$1" | sed "s/mine/$name/g; s|/var/lib/crashes|$crashes|g")
    await "$2" sh -c "$command"
    [ -z "${COX_SHOW:-}" ] || { printf '$ %s\n' "$1"; sed "s/$name/mine/g; s|$crashes|/var/lib/crashes|g" "$work/out"; }
}

# log PATTERN: a line of the coordinator's log
log() {
    grep -qE -- "$1" "$page" || fail "docs/at-3am.md has no line like: $1"
    await "$1" cat "$work/log"
    [ -z "${COX_SHOW:-}" ] || sed "s/$name/mine/g; s|$crashes|/var/lib/crashes|g" "$work/out"
}

# prompt: the group computes
prompt() {
    [ "$(coxswain generate --name "$name" --quiet 27+58= 2>"$work/out")" = 27+58=85 ] || fail "the group does not compute"
}

series() {
    awk -v used="$1" 'NR == FNR { before[$1] = $2; next }
        { metric = $1; sub(/[{].*/, "", metric) }
        /^[^#]/ && index(used, metric) {
            first = $1 in before ? before[$1] : 0
            printf "      - series: '\''%s'\''\n        values: '\''%s %s %s %s %s %s'\''\n", \
                $1, first, first, first, $2, $2, $2
        }' "$work/before" "$work/after"
}

# alert EXPRESSION: Prometheus does not fire it by the numbers at the start of the group, and does by those of now
alert() {
    in_page "$1"
    command -v promtool >/dev/null || { echo "$case: no promtool, the alert is not tried"; return 0; }
    coxswain metrics --name "$name" >"$work/after"
    cat >"$work/alert.yml" <<END
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
$(series "$1")
    promql_expr_test:
      - expr: count($1)
        eval_time: 2m
        exp_samples: []
      - expr: count($1) > bool 0
        eval_time: 5m
        exp_samples:
          - labels: '{}'
            value: 1
END
    promtool test rules "$work/alert.yml" >"$work/out" 2>&1 || fail "the alert does not fire as it should: $1"
}

stop() {
    coxswain stop --name "$name" >"$work/out" 2>&1 || fail "coxswain stop"
    wait "$group" || fail "the group ended with $?"
}

postmortem='coxswain postmortem "$(ls -t /var/lib/crashes/mine.*.crash | head -n 1)"'

hang() {
    start --timeout 15
    prompt
    await 'coxswain_in_flight\{channel="execute"\} 0' coxswain metrics --name "$name"
    kill -STOP "$(pid_of 2)"
    coxswain generate --name "$name" --quiet 27+58= >"$work/prompt" 2>&1 &
    prompt=$!
    await 'coxswain_in_flight\{channel="execute"\} [1-9]' coxswain metrics --name "$name"
    shows 'coxswain status --name mine | grep degraded' '^degraded: rank 2 \(pid [0-9]+\) is stopped by a signal'
    shows 'coxswain top --once mine' '^   2 stopped '
    alert 'coxswain_rank_stopped == 1 or coxswain_late_ranks > 0'
    await 'coxswain_late_ranks\{channel="execute"\} 1' coxswain metrics --name "$name"
    alert 'coxswain_rank_stopped == 1 or coxswain_late_ranks > 0'
    log 'what the group did is in .*\.timeout\.crash: '
    shows "$postmortem" 'waits for rank 2, which is in phase wake since [1-9]'
    shows "$postmortem" 'rank 2 \(pid [0-9]+\), alive, stopped by a signal, has not taken execute [0-9]+ since [0-9:]+ UTC: waits for a request since'
    shows 'coxswain stacks mine --rank 2' '^rank 2 \(pid [0-9]+\), at its request since .*: .* stopped by a signal'
    wait $prompt || true
    shows 'coxswain recover restart --rank 2 --kill --name mine' '^rank 2: '
    shows 'coxswain status --name mine --wait 60' '^rank 2 pid [0-9]+ incarnation 2 alive'
    prompt
    stop
}

death() {
    start
    head -n 200 "$source/models/sums/heldout.txt" | sed 's/=.*/=/' >"$work/prompts"
    coxswain generate --name "$name" --quiet --file "$work/prompts" >"$work/expected" 2>"$work/out" || fail "generate"
    : >"$work/busy"
    while [ -e "$work/busy" ]; do
        coxswain generate --name "$name" --quiet --file "$work/prompts" >"$work/found" 2>"$work/prompt" || exit 1
        cmp "$work/expected" "$work/found" >"$work/prompt" 2>&1 || exit 1
    done &
    load=$!
    await 'coxswain_in_flight\{channel="execute"\} [1-9]' coxswain metrics --name "$name"
    kill -9 "$(pid_of 2)"
    await 'coxswain_restarts_total 1' coxswain metrics --name "$name"
    rm "$work/busy"
    wait $load || fail "prompts failed, or have other texts than without the death: $(cat "$work/prompt")"
    alert 'increase(coxswain_deaths_total[10m]) > 0'
    log 'rank 2 \(pid [0-9]+\) was killed by signal 9 \(Killed\): replaced by process [0-9]+ \(incarnation 2\)'
    shows 'coxswain status --name mine | grep -A 1 deaths' 'last error, .* rank 2 \(pid [0-9]+\) was killed by signal 9'
    shows "$postmortem" '^Recorded because of: death'
    grep -qE '^  rank 2 \(pid [0-9]+\) was killed by signal 9 \(Killed\)' "$work/out" || fail "postmortem: no cause"
    grep -qE '^  rank 2 \(pid [0-9]+\), dead: ' "$work/out" || fail "postmortem: not what rank 2 did"
    [ "$(grep -c 'was killed by signal 9' "$work/out")" = 1 ] || fail "postmortem tells the death more than once"
    stop
}

# Rank 1 computes under valgrind, some tens of times as slowly as the others.
slow() {
    command -v valgrind >/dev/null || { skip "valgrind is missing"; return 0; }
    cat >"$work/worker" <<'END'
#!/bin/sh
[ "$COXSWAIN_RANK" != 1 ] || exec valgrind -q --tool=none --trace-children=yes "$REAL_WORKER" "$@" 2>/dev/null
exec "$REAL_WORKER" "$@"
END
    chmod +x "$work/worker"
    REAL_WORKER=$COXSWAIN_WORKER
    export REAL_WORKER
    start --timeout 600 --start-timeout 600 --worker "$work/worker"
    : >"$work/busy"
    while [ -e "$work/busy" ]; do
        coxswain generate --name "$name" --quiet 27+58= 3+4= >/dev/null 2>&1 || true
    done &
    load=$!
    await 'coxswain_completions_total\{channel="execute"\} [2-9][0-9]' coxswain metrics --name "$name"
    alert 'min without (rank) (rate(coxswain_rank_group_wait_seconds_total[5m])) < 0.5 * max without (rank) (rate(coxswain_rank_group_wait_seconds_total[5m]))'
    shows 'coxswain top --once --sort wait mine' \
        '^   1 (running|idle) +[^ ]+ +[0-9]+ +[^ ]+ +[^ ]+ +[^ ]+ +[1-3]?[0-9]% '
    shows "coxswain trace --name mine --last 20 --json | grep -o '\"critical_rank\":[0-9]*' | sort | uniq -c | sort -rn" \
        '^ +(1[1-9]|20) "critical_rank":1$'
    rm "$work/busy"
    wait $load || true
    stop
}

divergence() {
    grep -q COXSWAIN_TEST_BEND "$COXSWAIN_WORKER" || { skip "a build without COX_TESTING"; return 0; }
    COXSWAIN_TEST_BEND=$work/bend
    export COXSWAIN_TEST_BEND
    start
    unset COXSWAIN_TEST_BEND
    prompt
    await 'coxswain_in_flight\{channel="execute"\} 0' coxswain metrics --name "$name"
    : >"$work/bend1"
    coxswain generate --name "$name" --quiet 27+58= >"$work/out" 2>&1 && fail "the prompt did not fail"
    await 'coxswain_divergences_total\{channel="execute"\} [1-9]' coxswain metrics --name "$name"
    alert 'increase(coxswain_divergences_total[10m]) > 0'
    shows 'coxswain status --name mine | grep differ' \
        'they differ in block tables: ranks 0,2-3 have [0-9a-f]+, rank 1 has [0-9a-f]+; first in step [0-9]+'
    shows "$postmortem" '^Recorded because of: divergence'
    grep -q '^  execute .* they differ in block tables: ranks 0,2-3 have [0-9a-f]*, rank 1 has' "$work/out" ||
        fail "postmortem: no cause"
    shows 'coxswain recover restart --rank 1 --kill --name mine' '^rank 1: '
    prompt
    stop
}

# In a mount namespace of its own, with 16 MiB of /dev/shm.
full() {
    for how in -m -rm; do
        # shellcheck disable=SC2016
        if unshare $how sh -c 'mount -t tmpfs -o size=1m,mode=1777 tmpfs /dev/shm' 2>/dev/null; then
            unshare $how sh "$0" "$build" full-inside
            return 0
        fi
    done
    skip "a small /dev/shm needs a mount namespace"
}

full_inside() {
    mount -t tmpfs -o size=16m,mode=1777 tmpfs /dev/shm
    start --on-death restart,5/3600
    prompt
    dd if=/dev/zero of=/dev/shm/filler bs=4k 2>/dev/null || true
    kill -9 "$(pid_of 2)"
    log 'the group is not recovered yet, .*: No space left on device: '
    alert 'coxswain_recovering == 1'
    shows 'coxswain status --name mine | grep degraded' 'degraded: .* waiting for what a replacement needs: .* No space left'
    shows 'coxswain doctor -n 4 | grep -A 1 BAD' '^BAD   /dev/shm +0.0 of 16.0 MiB free'
    shows 'du -a /dev/shm | sort -n | tail -n 3' '^[0-9]+.*/dev/shm/filler'
    coxswain generate --name "$name" --quiet 27+58= >"$work/found" 2>"$work/prompt" &
    prompt=$!
    await 'coxswain_prompts_(waiting|running) 1' coxswain metrics --name "$name"
    rm /dev/shm/filler
    shows 'coxswain status --name mine --wait 60' '^rank 2 pid [0-9]+ incarnation [0-9]+ alive'
    wait $prompt || fail "the prompt did not survive: $(cat "$work/prompt")"
    [ "$(cat "$work/found")" = 27+58=85 ] || fail "another text: $(cat "$work/found")"
    stop
}

for case in ${only:-hang death slow divergence full}; do
    case $case in
    hang | death | slow | divergence | full) $case ;;
    full-inside) full_inside ;;
    *) echo "there is no case '$case': hang, death, slow, divergence or full" >&2; exit 2 ;;
    esac
    [ "$case" = full-inside ] || echo "$case: done"
done
[ -z "$only" ] || [ -z "$skipped" ] || exit 77
