
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
