# What this Slurm offers; a library that does not know srun's protocol would start as many jobs of one rank.
OFFERED=" $(srun --mpi=list 2>&1 | tr -s '[:space:],' ' ') "
if [ "$MPI" = "Open MPI" ]; then WANTED=pmix; else WANTED=pmi2; fi
case $OFFERED in *" $WANTED "*) ;; *)
    fail "$MPI needs srun --mpi=$WANTED, and this Slurm offers only:${OFFERED#*:}(srun --mpi=list); use train.sbatch, which starts the ranks with mpirun"
    ;;
esac
LAUNCH=(srun "--mpi=$WANTED" --ntasks="$RANKS" --cpus-per-task="$CPUS" --distribution="$DISTRIBUTION" --kill-on-bad-exit=1)
LAUNCH+=("${LAUNCH_OPTIONS[@]}")
UNFIT="if srun cannot start ranks of $MPI here, use train.sbatch, which starts them with mpirun"
