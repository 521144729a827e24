
# A folder that all hosts share: in it the ranks say that they have begun and that they ended, and this shell
# that they were asked to stop.
MARKED=$RANKS # of the ranks, those that make marks there
[ "$RESTARTS" = 0 ] || MARKED=$((RANKS - SERVERS))
WORK=$(trap '' USR1 USR2; mktemp -d "$PWD/.mpikv-job.XXXXXX") || fail "$PWD cannot be written to"
export MPIKV_STOP_ASKED=$WORK/asked
marks() { # of this kind, from the program's ranks; a new file makes a network file system look anew
    : >"$WORK/look-$SECONDS"
    MARKS=("$WORK/train-$1"-*)
}
saved() { # what changes when the stop file is written; opened, so that a network file system looks anew
    { : <"$STOP_FILE"; } 2>/dev/null && stat -c '%i %z' -- "$STOP_FILE"
}

exec {NEVER}<> <(:) # a pipe through which nothing comes: reading it is a pause without a process
# The child ignores the signals from its first command on. Grid Engine sends them to all processes of a job: one that comes
# before that ends the child, and another one takes its place.
for _ in 1 2 3; do
    . "$PARTS/launch.sh" &
    PID=$!
    until [ -e "$WORK/ignores" ] || ! kill -0 "$PID" 2>/dev/null; do read -rt 0.05 -u "$NEVER"; done
    [ ! -e "$WORK/ignores" ] || break
done
STOPPED='' SENT=''
while kill -0 "$PID" 2>/dev/null; do
    # Grid Engine does not warn of a time limit.
    [ -z "$STOP_AFTER" ] || [ "$SECONDS" -lt "$STOP_AFTER" ] || ASKED=${ASKED:-USR1}
    if [ -n "$ASKED" ]; then
        [ "$STOPPED" = "$ASKED" ] || say "signal $ASKED: the ranks are asked to stop after this step"
        STOPPED=$ASKED
        # Passed on when all ranks have begun, for they would die of it before. As USR1: of TERM the launcher would end
        # them at once. Ranks that do not listen yet ignore it: their worker 0 looks for the file when it does.
        marks begun
        if [ -z "$SENT" ] && [ ${#MARKS[@]} -ge "$MARKED" ]; then
            : >"$MPIKV_STOP_ASKED"
            kill -USR1 "$PID" 2>/dev/null
            SENT=yes
        fi
    fi
    read -rt 0.2 -u "$NEVER"
done
trap '' USR1 USR2 # there is nobody left to tell; and what follows is not to die of them
wait "$PID"
STATUS=$?

# Open MPI's mpirun may end with status 0 after it has lost a host. So the ranks that ended with 0 are counted, but where
# `mpikv launch` has done so, which may have gone on with fewer.
[ "$RESTARTS" = 0 ] || MARKED=0
for _ in 1 2 3 4 5 6 7 8 9 10; do
    marks ended
    [ "$STATUS" = 0 ] && [ ${#MARKS[@]} -lt "$MARKED" ] || break
    sleep 1
done
if [ "$STATUS" = 0 ] && [ ${#MARKS[@]} -lt "$MARKED" ]; then
    STATUS=1
    say "error: $((RANKS - ${#MARKS[@]})) of $RANKS ranks never ended, though the launcher says status 0: a host was lost"
fi
RESULT="status $STATUS"
if [ "$ASKED" = USR1 ] && [ "$STATUS" = 0 ] && [ "$REQUEUE" = yes ]; then
    case $(saved) in
    "" | "$(<"$WORK/saved")") say "not put into the queue again: this run has not written $STOP_FILE" ;;
    *) requeue ;;
    esac
fi
exit "$STATUS"
