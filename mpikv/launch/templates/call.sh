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
