#!/bin/bash
# Train the published model on AN4 with 8 workers on 2 machines: qsub examples/cluster/pbs.sh
#PBS -N lstman4
#PBS -l select=2:ncpus=16:mpiprocs=4
#PBS -l walltime=08:00:00
#PBS -j oe
# With GPUs, one for each worker, instead of the first line above:
##PBS -l select=2:ncpus=16:mpiprocs=4:ngpus=4
set -euo pipefail
cd "$PBS_O_WORKDIR"
source .venv/bin/activate

# Compute nodes often have no network: fetch the corpus beforehand, on the login node, with
#   oktopk data an4 --data-dir corpora

# A job that is submitted again with the same run goes on from its last checkpoint:
#   qsub -v RUN=runs/lstman4-1234 examples/cluster/pbs.sh
NUMBER=${PBS_JOBID%%[!0-9]*}
RUN=${RUN:-runs/lstman4-$NUMBER}

# PBS lists a machine once for each of its workers. They meet on the first one, at a port that
# follows from the job's number, so that two jobs on a machine do not collide.
MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")
MASTER_PORT=$((20000 + NUMBER % 20000))
export MASTER_ADDR MASTER_PORT

# Open MPI. Each worker gets 4 cores of its own; -x passes variables on to the other machine.
mpirun --hostfile "$PBS_NODEFILE" -n "$(wc -l < "$PBS_NODEFILE")" --map-by slot:PE=4 \
    -x MASTER_ADDR -x MASTER_PORT -x PATH \
    oktopk train lstman4 --data-dir corpora --run-dir "$RUN" --resume auto
