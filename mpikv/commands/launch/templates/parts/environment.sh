
# Variables of --env, in a file that its user alone can read.
if [ -n "$ENV_FILE" ]; then
    case $ENV_FILE in */*) ;; *) ENV_FILE=./$ENV_FILE ;; esac # a name alone would be looked for on PATH
    [ ! -e "$ENV_FILE" ] || [ -O "$ENV_FILE" ] ||
        fail "ENV_FILE=$ENV_FILE, whose lines this job would run, is another user's file: name a copy of your own"
    # shellcheck disable=SC1090 # lines `export NAME=VALUE`
    . "$ENV_FILE" || fail "ENV_FILE=$ENV_FILE, with the variables for the ranks, cannot be read"
fi
export PATH=$PYTHON_ENV/bin:$PATH VIRTUAL_ENV=$PYTHON_ENV
# NumPy would otherwise start a thread for each core of the host in every rank.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$CPUS} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-$CPUS}

# The ranks. A launcher may start more of them than there are slots without a word; then they share cores.
RANKS=${RANKS:-$SLOTS}
is_number "$RANKS" && [ "$RANKS" -gt 0 ] || fail "RANKS=$RANKS is not a number of ranks"
[ -z "$STOP_AFTER" ] || is_number "$STOP_AFTER" || fail "STOP_AFTER=$STOP_AFTER is not a number of seconds"
RESTARTS=${RESTARTS:-0} # which older scripts, and those with srun, do not set
is_number "$RESTARTS" || fail "RESTARTS=$RESTARTS is not a number of restarts"
is_number "$SERVERS" || fail "SERVERS=$SERVERS is not a number of servers"
[ "$RANKS" -le "$SLOTS" ] || fail "$RANKS ranks do not fit into the $SLOTS slots of this job; ask for more slots ($MORE_SLOTS)"
[ "$SERVERS" -lt "$RANKS" ] ||
    fail "$SERVERS servers among $RANKS ranks leave no worker; lower SERVERS or ask for more slots ($MORE_SLOTS)"
case $DISTRIBUTION in block | cyclic) ;; *) fail "DISTRIBUTION=$DISTRIBUTION is neither block nor cyclic" ;; esac
[ "$RESTARTS" = 0 ] || [ "$DISTRIBUTION $PLACEMENT" = "block spread" ] ||
    fail "RESTARTS=$RESTARTS goes with DISTRIBUTION=block and PLACEMENT=spread alone: mpikv launch places the ranks then"
export MPIKV_NUM_SERVERS=$SERVERS MPIKV_SERVER_PLACEMENT=$PLACEMENT
# Signals that the ranks take as a request to stop after the step they are in.
export MPIKV_STOP_FILE=$STOP_FILE
export MPIKV_STOP_SIGNALS=${MPIKV_STOP_SIGNALS:-TERM,USR1,USR2}
