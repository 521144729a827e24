"""Slurm: its option lines, and sbatch, scontrol, sacct and scancel.

A job's state and exit status come from `scontrol show job`, which knows a finished job for some minutes (MinJobAge);
then from the accounting, where there is one.
"""

from __future__ import annotations

import re
import shlex

from mpikv.commands.launch.scheduler import (
    NOTICE_S,
    BatchJob,
    BatchState,
    BatchSystem,
    SchedulerError,
    run,
    time_text,
    words_of,
)
from mpikv.errors import ConfigError

# States of ended jobs
FINAL = re.compile("BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|TIMEOUT")
UNKNOWN_JOB = "Invalid job id"
FIELD = re.compile(r"(?:^|\s)(JobState|Reason|NodeList|ExitCode)=(\S*)")


def lines(job: BatchJob) -> tuple[str, list[str]]:
    template = "array.sbatch" if job.array else "train-srun.sbatch" if job.with_srun else "train.sbatch"
    words = [f"--job-name={job.name}", f"--ntasks={job.ranks}"]
    words.append(f"--cpus-per-task={job.cpus_per_task}")
    words += [f"--time={time_text(job.time_s)}"] if job.time_s else []
    # B: to the batch shell alone, which passes it on; the ranks would else get it beside their launcher.
    words.append(f"--signal=B:USR1@{NOTICE_S}")
    words += [f"--array={job.array}"] if job.array else []
    words += [f"--partition={job.queue}"] if job.queue else []
    # A job that comes again from the queue goes on in the same file.
    words += [f"--output={job.output('%A_%a' if job.array else '%j')}", "--open-mode=append"]
    words += ["--requeue"] if job.requeue else []
    words += ["--no-kill"] if job.restarts else []  # else Slurm ends the job with its first lost host
    return template, [f"#SBATCH {shlex.quote(word)}" for word in (*words, *job.options)]


def state(job_id: str) -> BatchState:
    done = run(["scontrol", "--oneliner", "show", "job", job_id], "Slurm")
    if done.returncode == 0:
        return read_state(done.stdout)
    if UNKNOWN_JOB not in done.stderr:
        raise SchedulerError(words_of(done))
    # Finished longer ago than Slurm remembers.
    try:
        done = run(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State,ExitCode"], "Slurm")
    except ConfigError:
        return BatchState("finished", lost=True)
    name, _, code = done.stdout.strip().partition("|")
    if done.returncode != 0 or not name:
        return BatchState("finished", lost=True)
    return _final(name.split()[0], code)


def read_state(line: str) -> BatchState:
    """The state from what `scontrol --oneliner show job` prints."""
    fields = dict(reversed(FIELD.findall(line)))  # the first of each counts
    name = fields.get("JobState", "")
    if FINAL.fullmatch(name):
        return _final(name, fields.get("ExitCode", ""))
    nodes, reason = fields.get("NodeList", ""), fields.get("Reason", "None")
    if name in ("RUNNING", "SUSPENDED", "COMPLETING") and nodes not in ("", "(null)"):
        return BatchState(f"{name.lower()} on {nodes}")
    return BatchState(name.lower() + (f" ({reason})" if reason not in ("None", "") else ""))


def _final(name: str, code: str) -> BatchState:
    """ExitCode is STATUS:SIGNAL. A job that was ended by Slurm is no success, even where its script left with 0."""
    status, _, signal = (int(text) if text.isdigit() else text for text in code.partition(":"))
    if isinstance(signal, int) and signal:
        status = 128 + signal
    if not isinstance(status, int) or (status == 0 and name != "COMPLETED"):
        status = 1
    return BatchState(name.lower().replace("_", " "), status)


SLURM = BatchSystem("Slurm", lines, state, ("sbatch", "--parsable"), "scancel")
