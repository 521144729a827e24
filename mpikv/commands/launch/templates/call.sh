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
