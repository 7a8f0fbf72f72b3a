#!/bin/bash
# Train the published model on AN4 with 8 workers on 2 machines: sbatch examples/cluster/slurm.sh
#SBATCH --job-name=lstman4
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=08:00:00
#SBATCH --output=%x-%j.log
# With GPUs, one for each worker:
##SBATCH --gpus-per-node=4
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate

# Compute nodes often have no network: fetch the corpus beforehand, on the login node, with
#   oktopk data an4 --data-dir corpora

# A job that is requeued, or submitted again with the same RUN, goes on from its last checkpoint.
RUN=${RUN:-runs/lstman4-$SLURM_JOB_ID}

# Each task is a worker. It learns its rank, the first machine and a port from Slurm's variables.
# srun does not pass on --cpus-per-task by itself in all versions of Slurm.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    oktopk train lstman4 --data-dir corpora --run-dir "$RUN" --resume auto "$@"
