#!/usr/bin/env bash
#SBATCH --job-name=inkling-batch
#SBATCH --ntasks=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=4
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# One batch job as static shards, one task and one engine a shard:
#
#   sbatch --ntasks=16 scripts/slurm_batch.sh ENGINE IN.jsonl OUT.jsonl [options of `batch`]
#   cat OUT.jsonl.shard-?????-of-????? > OUT.jsonl
#
# Task i of n writes OUT.jsonl.shard-0000i-of-0000n, so the shards' names sort in the input's order.
# Slurm's SIGTERM lets each task end its step; the same command goes on where it stopped, and tasks
# whose output is there have nothing to do. A task that fails does not end the others.
set -eu

if [ $# -lt 3 ]; then
  echo "error: found $# arguments; expected ENGINE IN.jsonl OUT.jsonl [options]; give them" >&2
  exit 2
fi

# shellcheck disable=SC2016  # the variables are each task's own
exec srun --kill-on-bad-exit=0 bash -c '
set -eu
engine=$1 input=$2
output=$(printf "%s.shard-%05d-of-%05d" "$3" "$SLURM_PROCID" "$SLURM_NTASKS")
shift 3
if [ -e "$output" ]; then
  echo "$output is there" >&2
  exit 0
fi
exec inkling-engine batch "$engine" --input "$input" --output "$output" \
  --shard "$SLURM_PROCID/$SLURM_NTASKS" "$@"
' slurm_batch "$@"
