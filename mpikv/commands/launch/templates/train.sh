#!/bin/bash
# Train as one Grid Engine job in a parallel environment: mpirun starts the ranks on the hosts that the job was given.
#     qsub train.sh                           the program named below
#     qsub train.sh python train.py --lr 0.1  another one
#     qsub -pe mpi 16 train.sh                options of qsub replace the lines below
@directives
@part traps.sh
@settings
@part call.sh
. "$TEMPLATES/job.sh" sge-mpirun
