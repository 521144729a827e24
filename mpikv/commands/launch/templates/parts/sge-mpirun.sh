
# The ranks are started through Grid Engine (qrsh -inherit), so that it counts, limits and ends them. Grid Engine sends
# the job's signals to all its processes: those that start ranks would die of USR1 and USR2, and ignore them therefore.
cat >"$SCRATCH/agent" <<'END'
#!/bin/sh
trap '' USR1 USR2
while :; do case $1 in -*) shift ;; *) break ;; esac; done
host=$1
shift
exec qrsh -inherit -nostdin -v PATH,LD_LIBRARY_PATH "$host" "trap '' USR1 USR2; $*"
END
chmod +x "$SCRATCH/agent"
# What ranks on other hosts get of this shell's variables goes through mpirun: what qrsh is given can be read there by
# every user. Not what belongs to a host, a login or a shell.
PASSED=()
for NAME in $(compgen -e); do
    case $NAME in
    HOME | HOST | HOSTNAME | LOGNAME | MAIL | OLDPWD | PWD | SHELL | SHLVL | TERM | TMP | TMPDIR | USER | _) ;;
    ARC | ENVIRONMENT | JOB_* | NHOSTS | NQUEUES | NSLOTS | PE | PE_HOSTFILE | QUEUE | REQNAME | REQUEST | RESTARTED | SGE_*) ;;
    *) PASSED+=("$NAME") ;;
    esac
done
REACH=(--ssh "$SCRATCH/agent")
for NAME in "${PASSED[@]}"; do REACH+=(--env "$NAME"); done
case $MPI in
"Open MPI")
    printf '%s\n' "$HOSTS" | tr , '\n' | sed 's/:/ slots=/' >"$SCRATCH/hosts"
    case $MPI_VERSION in
    *") "[1-4].*) LAUNCH=("$MPIRUN" --mca plm_rsh_agent "$SCRATCH/agent" --mca orte_tmpdir_base /tmp) ;;
    *) LAUNCH=("$MPIRUN" --prtemca plm_ssh_agent "$SCRATCH/agent" --prtemca prte_tmpdir_base /tmp) ;;
    esac
    # Grid Engine gives the job its CPUs; every host would bind its first rank to the same one.
    LAUNCH+=(--hostfile "$SCRATCH/hosts" --bind-to none -n "$RANKS")
    for NAME in "${PASSED[@]}"; do LAUNCH+=(-x "$NAME"); done
    [ "$DISTRIBUTION" = block ] || LAUNCH+=(--map-by node)
    ;;
*)
    printf '%s\n' "$HOSTS" | tr , '\n' >"$SCRATCH/hosts"
    LAUNCH=("$MPIRUN" -launcher ssh -launcher-exec "$SCRATCH/agent" -f "$SCRATCH/hosts" -n "$RANKS")
    [ "$DISTRIBUTION" = block ] || LAUNCH+=(-ppn 1)
    ;;
esac
