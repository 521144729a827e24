#!/bin/bash
# Train with parameter servers as one Grid Engine job. The slots of the job are workers and servers together: of 6 slots
# and SERVERS=2, 4 work and 2 serve. Which ranks serve is chosen from the hosts that Grid Engine gave (PLACEMENT).
#     qsub train-servers.sh                           the program named below
#     qsub train-servers.sh python train.py --lr 0.1  another one
#     qsub -pe mpi 16 train-servers.sh                options of qsub replace the lines below
@directives
@part traps.sh
@settings
@part call.sh
. "$TEMPLATES/job.sh" sge-mpirun
