#!/bin/bash
# A sweep as a Slurm array, one shard a task, and a job that merges when all are done (docs/cluster.md):
#
#     examples/slurm.sh out/r.csv out/t.h5 -p rmm -p h2o -b 10%,25% -L 0:64:x2
#
# The first argument is the output; the rest is what `kvlag sim` takes. The folder must be one that all nodes see. A task
# that was stopped takes up where it was (--resume); one that is done already is left alone. Change the number of shards
# here, or with SBATCH_ARRAY_INX.
#SBATCH --job-name=kvlag
#SBATCH --array=1-8
#SBATCH --cpus-per-task=8
#SBATCH --mem=4G
#SBATCH --time=04:00:00
#SBATCH --requeue
set -eu
out=$1
shift

if [ -n "${KVLAG_MERGE:-}" ]; then # the last job
    kvlag merge "$out".shard-*.csv -o "$out" --force
    rm -f "$out".shard-*
elif [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then # one of the array
    part=$out.shard-$SLURM_ARRAY_TASK_ID.csv
    [ -e "$part" ] || kvlag sim "$@" -o "$part" --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" \
        --threads "$SLURM_CPUS_PER_TASK" --memory 3G --resume
else # at the prompt: send both off
    array=$(sbatch --parsable "$0" "$out" "$@")
    KVLAG_MERGE=1 sbatch --array=1 --cpus-per-task=1 --dependency=afterok:"$array" --kill-on-invalid-dep=yes "$0" "$out" "$@"
fi
