# The child: it checks everything, shows where the ranks are, and becomes the launcher of the program.
trap '' USR1 USR2
: >"$WORK/ignores"
. "$PARTS/mpi.sh"
. "$PARTS/$KIND.sh"
LAUNCH+=("${LAUNCH_OPTIONS[@]}")
cat >"$WORK/rank" <<'END'
# One rank: sh rank NAME COMMAND... It ignores the signals until the program sets handlers. The launcher may signal its
# whole process group: this shell does not die of that.
trap '' USR1 USR2
trap : TERM
mark=${0%/*}/$1 rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$SLURM_PROCID}}
shift
: >"$mark-begun-$rank"
"$@"
status=$?
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
say "$(quoted "${LAUNCH[@]}" "${PROGRAM[@]}")"
saved >"$WORK/saved"
exec "${LAUNCH[@]}" sh "$WORK/rank" train "${PROGRAM[@]}"
