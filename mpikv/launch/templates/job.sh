# What a batch script does once it runs. `mpikv batch` becomes this shell, so that the scheduler's signals arrive here.
#
#     bash job.sh KIND N OPTION... PROGRAM...   KIND: slurm-mpirun, slurm-srun or sge-mpirun; N: how many OPTIONs of the
#                                               launcher there are. The settings of the script are in the environment.
PARTS=${BASH_SOURCE[0]%/*}/parts
KIND=$1
LAUNCH_OPTIONS=("${@:3:$2}")
PROGRAM=("${@:3+$2}")
export -n PYTHON_ENV RANKS SERVERS PLACEMENT DISTRIBUTION REQUEUE STOP_AFTER STOP_FILE ENV_FILE
[ "$KIND" = sge-mpirun ] || STOP_AFTER='' # Slurm itself warns of its limit
. "$PARTS/common.sh"
. "$PARTS/${KIND%-*}.sh"
. "$PARTS/environment.sh"
. "$PARTS/mpi.sh"
. "$PARTS/$KIND.sh"
. "$PARTS/marks.sh"
. "$PARTS/run.sh"
