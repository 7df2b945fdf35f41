#!/bin/sh
# texts.sh BUILD_DIR: what a group on several machines writes is what one process writes: eight ranks on one, two and
# four machines, named and sealed; with a LoRA adapter; after a switch of the weights; with one group that computes
# prompts on a machine and one that decodes on another. A rank is killed after each, and its replacement writes the
# same. Root only; under a minute.
set -eu

[ $# -eq 1 ] || { echo "usage: sh $0 BUILD_DIR" >&2; exit 2; }
build=$(cd "$1" && pwd)
source=$(cd "$(dirname "$0")/../.." && pwd)
. "$(dirname "$0")/cluster.sh"

samples=$(mktemp -d)
trap 'cluster_down; rm -rf "$samples"' EXIT
trap 'exit 1' HUP INT TERM
python3 "$source/tools/samples.py" "$samples" >/dev/null
prompts='27+58= 11+22= 999+1= 40+2='

# The reference: one rank in one process.
# shellcheck disable=SC2086
expected=$(COXSWAIN_RUNTIME_DIR=$samples/run "$build/bin/coxswain" generate -n 1 --quiet $prompts)
alone() { COXSWAIN_RUNTIME_DIR=$samples/run "$build/bin/coxswain" "$@"; }
alone run -n 1 --adapter "tuned=$samples/adapter" alone >/dev/null 2>&1 &
alone status --wait 60 alone >/dev/null
# shellcheck disable=SC2086
tuned=$(alone generate --name alone --quiet --lora tuned $prompts)
alone stop alone 2>/dev/null
wait $!
[ "$expected" != "$tuned" ] || { echo "the adapter changes nothing"; exit 1; }

# same WHAT TEXT ARGS...: generate with the arguments writes TEXT.
same() {
    what=$1
    text=$2
    shift 2
    # shellcheck disable=SC2086
    written=$(cluster_run generate --quiet "$@" $prompts) || { echo "$what: generate failed"; exit 1; }
    [ "$written" = "$text" ] || { echo "$what: expected '$text', got '$written'"; exit 1; }
    echo "$what: the same texts"
}

# kill_rank AGENT_PID: a rank of that agent's.
kill_rank() {
    kill -9 "$(pgrep -P "$1" | head -n 1)"
}

stop() {
    cluster_run stop --name "$1" >/dev/null
    ended() { ! kill -0 "$cluster_lead_pid" 2>/dev/null; }
    cluster_await 10 ended || { echo "the lead of $1 does not end"; exit 1; }
}

cluster_up "$build" 4
for each in a b c d; do
    cluster_node "$each" --stay
    agent=$net_pid
done

for memory in "" "--attach sealed"; do
    for nodes in a:8 a:3,b:5 a:2,b:2,c:2,d:2; do
        # shellcheck disable=SC2086
        cluster_lead "$nodes" --on-death restart $memory
        cluster_ready
        same "$nodes $memory" "$expected" --name big
        case $nodes in
        *d:2)
            kill_rank "$agent"
            same "$nodes $memory, a rank replaced" "$expected" --name big
            cluster_run lora load --name big tuned "$samples/adapter" >/dev/null
            same "$nodes $memory, adapter" "$tuned" --name big --lora tuned
            kill_rank "$agent"
            same "$nodes $memory, adapter, a rank replaced" "$tuned" --name big --lora tuned
            same "$nodes $memory, no adapter" "$expected" --name big
            cluster_run reload --name big "$source/models/sums" >/dev/null
            same "$nodes $memory, weights switched" "$expected" --name big
            ;;
        esac
        stop big
    done
done

# The lead is there before its agents. A machine of seven ranks is lost and comes back: that is one death, of the five
# that --on-death restart allows by default.
cluster_group=lost
cluster_lead a:1,b:7 --on-death restart
cluster_node a
cluster_node b
agent=$net_pid
cluster_ready
same "a:1,b:7" "$expected" --name lost
kill -9 "$agent"
cluster_node b
same "a:1,b:7, node b lost and back" "$expected" --name lost
stop lost

cluster_group=first
cluster_node a
cluster_lead a:2 --role prefill --on-death restart
cluster_ready
cluster_group=second
cluster_node b
agent=$net_pid
cluster_lead b:2 --role decode --on-death restart
cluster_ready
same "prefill on a, decode on b" "$expected" --prefill first --decode second
kill_rank "$agent"
same "prefill on a, decode on b, a rank replaced" "$expected" --prefill first --decode second
stop second
