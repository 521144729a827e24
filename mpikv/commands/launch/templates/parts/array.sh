# The program of a job array's task: its option, and the task's value.
LAST_TASK=$((${#VALUES[@]} - 1)) TASK=$SLURM_ARRAY_TASK_ID
[ -n "$TASK" ] || fail "this is no job array; submit the script with sbatch --array=0-$LAST_TASK"
[ "$TASK" -le "$LAST_TASK" ] || fail "task $TASK of the array has no value: VALUES has ${#VALUES[@]}, for tasks 0 to $LAST_TASK"
printf 'mpikv: task %s of array %s\n' "$TASK" "$SLURM_ARRAY_JOB_ID"
PROGRAM+=("$OPTION" "${VALUES[TASK]}")
