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
PYTHON_ENV=  # the Python environment's folder; empty: the active one, else .venv here
PROGRAM=(python examples/train_mnist.py)  # what every rank runs
RANKS=  # how many; empty: one in each slot of the job
SERVERS=0  # how many of them are parameter servers; 0: none, the workers own the weights
PLACEMENT=spread  # of the servers: spread over the hosts, hosts of their own, or last
DISTRIBUTION=block  # block: ranks fill host after host; cyclic: each host in turn gets one
REQUEUE=no  # yes: stopped before its limit, with status 0, it goes on later
STOP_AFTER=1740  # seconds until the ranks are asked to stop: below h_rt; empty: never
STOP_FILE=${MPIKV_STOP_FILE:-train-$JOB_ID.state}  # where a Trainer saves everything then
ENV_FILE=  # a file with lines export NAME=VALUE: more variables for all ranks
LAUNCH_OPTIONS=()  # more words for mpirun
# ---- The rest works as it is: `mpikv batch` checks the job, starts the ranks and passes the scheduler's signals on ----
fail() { printf 'mpikv: error: %s\nmpikv: job %s ends with status 2\n' "$1" "${SLURM_JOB_ID:-$JOB_ID}"; exit 2; }
[ $# = 0 ] || PROGRAM=("$@")
[ -n "$PYTHON_ENV" ] || for PYTHON_ENV in "$VIRTUAL_ENV" "$CONDA_PREFIX" "$PWD/.venv" ''; do
    [ -n "$PYTHON_ENV" ] && [ -x "$PYTHON_ENV/bin/python" ] && break
done
[ -n "$PYTHON_ENV" ] || fail "no Python environment was found: set PYTHON_ENV, activate one before submitting, or make .venv in $PWD"
[ -x "$PYTHON_ENV/bin/python" ] || fail "PYTHON_ENV=$PYTHON_ENV has no bin/python on $(hostname); all hosts must share its disk"
"$PYTHON_ENV/bin/python" -c 'import mpikv, mpi4py' || fail "$PYTHON_ENV/bin/python cannot import mpikv and mpi4py: install them"
export PYTHON_ENV RANKS SERVERS PLACEMENT DISTRIBUTION REQUEUE STOP_AFTER STOP_FILE ENV_FILE
exec "$PYTHON_ENV/bin/python" -m mpikv batch "${LAUNCH_OPTIONS[@]/#/--launch-option=}" sge-mpirun -- "${PROGRAM[@]}"
