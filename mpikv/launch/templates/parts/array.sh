
[ -n "$SLURM_ARRAY_TASK_ID" ] || fail "this is no job array; submit the script with sbatch --array=0-$((${#VALUES[@]} - 1))"
[ "$SLURM_ARRAY_TASK_ID" -lt ${#VALUES[@]} ] ||
    fail "task $SLURM_ARRAY_TASK_ID of the array has no value: VALUES has ${#VALUES[@]}, for tasks 0 to $((${#VALUES[@]} - 1))"
PROGRAM+=("$OPTION" "${VALUES[$SLURM_ARRAY_TASK_ID]}")
say "task $SLURM_ARRAY_TASK_ID of array $SLURM_ARRAY_JOB_ID"
