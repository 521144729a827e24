"""Slurm: its option lines, and sbatch, scontrol, sacct and scancel.

A job's state and exit status come from `scontrol show job`, which knows a finished job for some minutes (MinJobAge);
then from the accounting, where there is one.
"""

from __future__ import annotations

import re
import shlex

from mpikv.commands.launch.batch import Job, render, time_text
from mpikv.commands.launch.scheduler import Scheduler, SchedulerError, State, run, said
from mpikv.errors import ConfigError

FINAL = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}
UNKNOWN_JOB = "Invalid job id"
FIELD = re.compile(r"(?:^|\s)(JobState|Reason|NodeList|ExitCode)=(\S*)")


def script(job: Job, array: str | None = None) -> str:
    """The batch script. array: indices of a job array."""
    job.check()
    template = "array.sbatch" if array else "train-srun.sbatch" if job.with_srun else "train.sbatch"
    pattern = "%A_%a" if array else "%j"
    words = [f"--job-name={job.name}", f"--ntasks={job.ranks}"]
    if job.nodes:
        words.append(f"--nodes={job.nodes}")
    if job.tasks_per_node:
        words.append(f"--ntasks-per-node={job.tasks_per_node}")
    words.append(f"--cpus-per-task={job.cpus_per_task}")
    if job.time_s:
        words.append(f"--time={time_text(job.time_s)}")
    # B: to the batch shell alone, which passes it on; the ranks would else get it beside their launcher.
    words.append(f"--signal=B:USR1@{job.notice_s}")
    if array:
        words.append(f"--array={array}")
    if job.queue:
        words.append(f"--partition={job.queue}")
    # A job that comes again from the queue goes on in the same file.
    words += [f"--output={job.output(pattern)}", "--open-mode=append"]
    if job.requeue:
        words.append("--requeue")
    words += job.options
    return render(template, job, [f"#SBATCH {shlex.quote(word)}" for word in words])


def state(job_id: str) -> State:
    """Where the job is. Raises SchedulerError where Slurm does not answer."""
    done = run(["scontrol", "--oneliner", "show", "job", job_id], "Slurm")
    if done.returncode == 0:
        return read_state(done.stdout)
    if UNKNOWN_JOB not in done.stderr:
        raise SchedulerError(said(done))
    # Finished longer ago than Slurm remembers.
    try:
        done = run(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State,ExitCode"], "Slurm")
    except ConfigError:
        return State("finished", lost=True)
    name, _, code = done.stdout.strip().partition("|")
    if done.returncode != 0 or not name:
        return State("finished", lost=True)
    return _final(name.split()[0], code)


def read_state(line: str) -> State:
    """The state from what `scontrol --oneliner show job` says."""
    fields = dict(reversed(FIELD.findall(line)))  # the first of each counts
    name = fields.get("JobState", "")
    if name in FINAL:
        return _final(name, fields.get("ExitCode", ""))
    nodes, reason = fields.get("NodeList", ""), fields.get("Reason", "None")
    if name in ("RUNNING", "SUSPENDED", "COMPLETING") and nodes not in ("", "(null)"):
        return State(f"{name.lower()} on {nodes}")
    return State(name.lower() + (f" ({reason})" if reason not in ("None", "") else ""))


def _final(name: str, code: str) -> State:
    """ExitCode is STATUS:SIGNAL. A job that was ended by Slurm is no success, even where its script left with 0."""
    status, _, signal = (int(part) if part.isdigit() else part for part in code.partition(":"))
    if isinstance(signal, int) and signal:
        status = 128 + signal
    if not isinstance(status, int) or (status == 0 and name != "COMPLETED"):
        status = 1
    return State(name.lower().replace("_", " "), status)


SLURM = Scheduler("Slurm", script, state, ("sbatch", "--parsable"), "scancel", '--option "--mem=4G"')
