
# Open MPI's mpirun may end with status 0 after it has lost a host. So every rank that ends with 0 leaves a file in a
# directory of the file system that all hosts share, and these are counted in the end. srun does not lose them.
MARKED=()
if [ "$MPI" = "Open MPI" ] && [ "$KIND" != slurm-srun ]; then
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
