# The child: it checks everything, shows where the ranks are, and becomes the launcher of the program.
trap '' USR1 USR2
: >"$WORK/ignores"
. "$PARTS/mpi.sh"
REACH=() # options of `mpikv launch`, where it needs some to reach the other hosts
. "$PARTS/$KIND.sh"
LAUNCH+=("${LAUNCH_OPTIONS[@]}")
[ "$KIND" = slurm-srun ] && FORWARDS=yes || FORWARDS=
echo "forwards=$FORWARDS" >"$WORK/rank"
cat >>"$WORK/rank" <<'END'
# One rank: sh rank NAME COMMAND... It ignores the signals until the program sets handlers. `mpirun` signals its whole
# process group: this shell does not die of that. Slurm signals what it has started itself, which is this shell alone
# (proctrack/cgroup): it passes the signal on.
trap '' USR1 USR2
trap : TERM
mark=${0%/*}/$1 rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$SLURM_PROCID}}
shift
: >"$mark-begun-$rank"
if [ -n "$forwards" ]; then
    "$@" &
    pid=$!
    for signal in USR1 USR2 TERM; do trap "kill -$signal $pid 2>/dev/null" $signal; done
    while wait $pid; status=$?; kill -0 $pid 2>/dev/null; do :; done # a signal ends a wait
    wait $pid 2>/dev/null # the program's end may have come with the signal: then that wait had the signal's status
    again=$?
    [ $again = 127 ] || status=$again # 127: it had the program's, which is told once
else
    "$@"
    status=$?
fi
[ $status != 0 ] || : >"$mark-ended-$rank"
[ $status -le 128 ] || kill -$((status - 128)) $$
exit $status
END
quoted() { # the words as one could type them
    local text
    text=$(printf '%q ' "$@")
    printf '%s' "${text% }"
}

# Where it runs; the ranks of `mpikv info` also show whether they can be started here at all.
say "job $JOB on $HOSTS"
say "$RANKS ranks, $((RANKS - SERVERS)) workers and $SERVERS servers, of $SLOTS slots"
say "$(python --version) in $PYTHON_ENV; $MPI, $MPIRUN"
"${LAUNCH[@]}" sh "$WORK/rank" info python -m mpikv info || fail "the ranks could not be started, or \`mpikv info\` \
found an error (see above)${UNFIT:+; $UNFIT}. It was run by: $(quoted "${LAUNCH[@]}") python -m mpikv info"
# `mpikv launch` starts ranks that die again. It names servers by itself, and gives each host in turn a rank.
if [ "$RESTARTS" != 0 ]; then
    LAUNCH=(python -m mpikv launch --restarts "$RESTARTS" -n "$((RANKS - SERVERS))" -s "$SERVERS" "${REACH[@]}")
    [ ${#LAUNCH_OPTIONS[@]} = 0 ] || LAUNCH+=(--mpirun-options "$(quoted "${LAUNCH_OPTIONS[@]}")")
fi
say "$(quoted "${LAUNCH[@]}" "${PROGRAM[@]}")"
saved >"$WORK/saved"
exec "${LAUNCH[@]}" sh "$WORK/rank" train "${PROGRAM[@]}"
