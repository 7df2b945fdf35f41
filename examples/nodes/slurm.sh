#!/bin/sh
# Completes a file of prompts on all nodes of a Slurm job:
#
#   sbatch --nodes=2 --ntasks-per-node=1 slurm.sh PROMPTS [MODEL]
#
# One NATS server, on the job's first node; one agent on each node. Certificates are made for the job, in a folder that
# all nodes see and no other user can read, and are removed with it. RANKS: of each node, default 4. Answers go to the
# job's output.
#SBATCH --job-name=coxswain
set -eu

prompts=$1
model=${2:-}
ranks=${RANKS:-4}
group=job$SLURM_JOB_ID
server=$(hostname -s)
PATH=$PATH:/usr/sbin

dir=$(mktemp -d "$SLURM_SUBMIT_DIR/coxswain.XXXXXX") # mode 0700
pids=
end() {
    # shellcheck disable=SC2086
    [ -z "$pids" ] || kill $pids 2>/dev/null || true
    wait
    rm -rf "$dir"
}
trap end EXIT
trap 'exit 1' HUP INT TERM

places=
set --
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    places="$places${places:+, }{\"name\": \"$node\", \"ranks\": $ranks}"
    set -- "$@" --node "$node"
done
coxswain-certificates "$dir" --server "$server" --days 30 "$@"

nats-server -c "$dir/coxswain-nats.conf" --log "$dir/nats.log" &
pids=$!

echo "{\"servers\": [\"tls://$server:4222\"], \"certificates\": \"$dir\", \"nodes\": [$places]}" >"$dir/cluster.json"

# shellcheck disable=SC2016
srun --ntasks-per-node=1 --kill-on-bad-exit=0 sh -c '
    # /run/user of a batch job may not be there.
    COXSWAIN_RUNTIME_DIR=$(mktemp -d) && export COXSWAIN_RUNTIME_DIR
    exec coxswain node --node "$SLURMD_NODENAME" "$@"' \
    sh --name "$group" --cluster "$dir/cluster.json" ${model:+--model "$model"} &
pids="$pids $!"

COXSWAIN_RUNTIME_DIR=$(mktemp -d) && export COXSWAIN_RUNTIME_DIR
coxswain run --name "$group" --cluster "$dir/cluster.json" --on-death restart,100/60 ${model:+--model "$model"} \
    >"$dir/ready" &
lead=$!
pids="$pids $lead"
until grep -qs '^name ' "$dir/ready"; do
    kill -0 "$lead" # its log says why
    sleep 1
done

coxswain generate --name "$group" --file "$prompts"
coxswain stop --name "$group"
