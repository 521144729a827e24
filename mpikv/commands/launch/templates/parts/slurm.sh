
# The job: its slots are the tasks that Slurm gave it.
[ -n "$SLURM_JOB_ID" ] || fail "this is no Slurm job; submit the script with sbatch"
JOB=$SLURM_JOB_ID
STOP_AFTER='' # Slurm itself warns of its limit
cd "$SLURM_SUBMIT_DIR" || fail "the directory of sbatch, $SLURM_SUBMIT_DIR, is not on $(hostname)"
SLOTS=${SLURM_NTASKS:-$SLURM_JOB_NUM_NODES}
HOSTS="$SLURM_JOB_NODELIST, tasks per node $SLURM_TASKS_PER_NODE"
CPUS=${SLURM_CPUS_PER_TASK:-1}
MORE_SLOTS="--ntasks"
requeue() {
    RESULT="$RESULT and goes back into the queue"
    LAST=(scontrol requeue "$JOB") # it ends this shell
}
