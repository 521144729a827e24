# srun starts Open MPI, through PMIx. Not MPICH: Slurm's pmi2 (22.05) reads a request that comes in two pieces as two, and
# ends some jobs at their start on a busy machine ("value not properly terminated in client request").
[ "$MPI" = "Open MPI" ] ||
    fail "srun starts Open MPI alone, not $MPI: Slurm's pmi2 fails now and then; use train.sbatch, which starts the ranks with $MPI's own mpirun"
[ "$RESTARTS" = 0 ] ||
    fail "ranks that srun has started are not started again (RESTARTS=$RESTARTS); use train.sbatch, which starts them with mpirun"
# What this Slurm offers; with another protocol as many jobs of one rank would start.
OFFERED=" $(srun --mpi=list 2>&1 | tr -s '[:space:],' ' ') "
case $OFFERED in *" pmix "*) ;; *)
    fail "$MPI needs srun --mpi=pmix, and this Slurm offers only:${OFFERED#*:}(srun --mpi=list); use train.sbatch, which starts the ranks with mpirun"
    ;;
esac
LAUNCH=(srun --mpi=pmix --ntasks="$RANKS" --cpus-per-task="$CPUS" --distribution="$DISTRIBUTION" --kill-on-bad-exit=1)
UNFIT="if srun cannot start ranks of $MPI here, use train.sbatch, which starts them with mpirun"
