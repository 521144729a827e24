case $MPI in
"Open MPI")
    # Slurm gives the job its CPUs; bound to one of them, a rank's threads would share it.
    LAUNCH=("$MPIRUN" --bind-to none -n "$RANKS")
    [ "$DISTRIBUTION" = block ] || LAUNCH+=(--map-by node)
    ;;
*)
    LAUNCH=("$MPIRUN" -n "$RANKS")
    [ "$DISTRIBUTION" = block ] || LAUNCH+=(-ppn 1)
    ;;
esac
