
# The job: its slots and hosts are those that the parallel environment gave it.
[ -n "$JOB_ID" ] || fail "this is no Grid Engine job; submit the script with qsub"
JOB=$JOB_ID
[ -r "$PE_HOSTFILE" ] || fail "the job has no parallel environment; submit the script with qsub -pe NAME SLOTS (qconf -spl lists the names)"
SLOTS=$NSLOTS
HOSTS=$(trap '' USR1 USR2; awk '{ if (!($1 in n)) order[++hosts] = $1; n[$1] += $2 }
    END { for (i = 1; i <= hosts; i++) printf "%s%s:%d", (i > 1 ? "," : ""), order[i], n[order[i]] }' "$PE_HOSTFILE")
CPUS=1
# Not in the job's own directory ($TMPDIR): Grid Engine empties that of a host whenever a task that it started there ends.
SCRATCH=$(trap '' USR1 USR2; mktemp -d /tmp/mpikv.XXXXXX) || fail "no directory for temporary files"
MORE_SLOTS="-pe $PE"
# A copy of the job, which gets its file. Status 99, by which Grid Engine would put this job itself into the queue again,
# is for want of anything better: a job on several hosts then waits for them for ever (8.1.9).
requeue() {
    local copied copy
    copied=$(qresub -h u "$JOB" 2>&1)
    copy=$(printf '%s\n' "$copied" | sed -n 's/^Your job \([0-9]*\) .*/\1/p')
    if [ -z "$copy" ]; then
        say "qresub: $copied"
        RESULT="$RESULT and goes back into the queue"
        STATUS=99
        return
    fi
    # Named by the job's number, it has to be named by the copy's; folders may have the same number in their names.
    case $STOP_FILE in *-"$JOB".state) [ ! -e "$STOP_FILE" ] || mv "$STOP_FILE" "${STOP_FILE%-"$JOB".state}-$copy.state" ;; esac
    qrls "$copy" >/dev/null
    RESULT="$RESULT and goes on as job $copy"
}
