#!/bin/bash
# Train as one Grid Engine job in a parallel environment: mpirun starts the ranks on the hosts that the job was given.
#     qsub train.sh                           the program named below
#     qsub train.sh python train.py --lr 0.1  another one
#     qsub -pe mpi 16 train.sh                options of qsub replace the lines below
#$ -N train
#$ -pe mpi 4
#$ -l h_rt=0:30:00
#$ -notify
#$ -o train-$JOB_ID.out
#$ -S /bin/bash -cwd -j y
#$ -v PATH,LD_LIBRARY_PATH,PYTHONPATH,VIRTUAL_ENV,CONDA_PREFIX
ASKED=''; trap 'ASKED=${ASKED:-USR1}' USR1; trap 'ASKED=USR2' USR2; trap 'ASKED=TERM' TERM  # kept, for the ranks, from here on
PYTHON_ENV=  # the Python environment's folder; empty: the active one, else .venv here
PROGRAM=(python examples/train_mnist.py)  # what every rank runs
RANKS=  # how many; empty: one in each slot of the job
SERVERS=0  # how many of them are parameter servers; 0: none, the workers own the weights
PLACEMENT=spread  # of the servers: spread over the hosts, hosts of their own, or last
DISTRIBUTION=block  # block: ranks fill host after host; cyclic: each host in turn gets one
RESTARTS=0  # how often they are started again, from their last snapshot, where one dies
REQUEUE=no  # yes: stopped and saved before its limit, it goes on later
STOP_AFTER=1740  # seconds until the ranks are asked to stop: below h_rt; empty: never
STOP_FILE=${MPIKV_STOP_FILE:-train-$JOB_ID.state}  # where a Trainer saves everything then
ENV_FILE=  # a file with lines export NAME=VALUE: more variables for all ranks
LAUNCH_OPTIONS=()  # more words for mpirun
# ---- The rest works as it is: it finds mpikv, whose job.sh starts the ranks and passes the scheduler's signals on ----
fail() { printf 'mpikv: error: %s\n' "$1"; exit 2; }
end() { [ -z "$SLURM_JOB_ID$JOB_ID" ] || printf 'mpikv: job %s ends with %s\n' "${SLURM_JOB_ID:-$JOB_ID}" "${RESULT:-status $1}"; }
RESULT=''; trap 'end $?' EXIT
[ $# = 0 ] || PROGRAM=("$@")
[ -n "$PYTHON_ENV" ] || for PYTHON_ENV in "$VIRTUAL_ENV" "$CONDA_PREFIX" "$PWD/.venv" ''; do
    [ -n "$PYTHON_ENV" ] && [ -x "$PYTHON_ENV/bin/python" ] && break
done
[ -n "$PYTHON_ENV" ] || fail "no Python environment was found: set PYTHON_ENV, activate one before submitting, or make .venv in $PWD"
[ -x "$PYTHON_ENV/bin/python" ] || fail "PYTHON_ENV=$PYTHON_ENV has no bin/python on $(hostname); all hosts must share its disk"
TEMPLATES=$(trap '' USR1 USR2; exec "$PYTHON_ENV/bin/python" -c 'import mpi4py, mpikv.commands.launch.batch as batch; print(batch.TEMPLATES)') ||
    fail "$PYTHON_ENV/bin/python cannot import mpikv and mpi4py: install them"
. "$TEMPLATES/job.sh" sge-mpirun
