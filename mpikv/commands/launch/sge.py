"""Grid Engine: its option lines, and qsub, qstat and qdel.

qstat knows a job only until it ends. How it ended is in the last line of its output: the accounting (qacct) is written
with a delay and on many sites not readable everywhere.
"""

from __future__ import annotations

import getpass
import re
import shlex
import xml.etree.ElementTree as ET

from mpikv.commands.launch.scheduler import BatchJob, BatchState, BatchSystem, SchedulerError, run, time_text, words_of

PASSED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX")


def lines(job: BatchJob) -> tuple[str, list[str]]:
    words = [f"-N {job.name}", f"-pe {job.parallel_environment or 'mpi'} {job.ranks}"]
    if job.time_s:
        # Not s_rt: of a job on several hosts the master host's daemon takes it for a limit like h_rt (8.1.9).
        words.append(f"-l h_rt={time_text(job.time_s)}")
    # It gets USR1 before it is suspended, and USR2 some time before it is ended, by qdel or at h_rt.
    words.append("-notify")
    words += [f"-q {shlex.quote(job.queue)}"] if job.queue else []
    output = str(job.output("$JOB_ID"))
    words.append(f'-o "{output}"' if re.search(r"\s", output) else f"-o {output}")
    words.append("-S /bin/bash -cwd -j y")
    # Not -V: Grid Engine shows a job's environment to every user, in files of its own and by `qstat -j`.
    words.append(f"-v {','.join(job.passed or PASSED)}")
    return "train-servers.sh" if job.servers else "train.sh", [f"#$ {word}" for word in (*words, *job.options)]


def state(job_id: str) -> BatchState:
    done = run(["qstat", "-u", getpass.getuser(), "-g", "t", "-xml"], "Grid Engine")
    if done.returncode != 0:
        raise SchedulerError(words_of(done))
    found = read_state(done.stdout, job_id)
    if found is None:
        return BatchState("finished", lost=True)
    if found.text == "pending":
        reason = pending_reason(run(["qstat", "-j", job_id], "Grid Engine").stdout)
        return BatchState(f"pending ({reason})" if reason else "pending")
    return found


def read_state(xml: str, job_id: str) -> BatchState | None:
    """The state from what `qstat -g t -xml` prints, None for a job that it does not know."""
    try:
        tree = ET.fromstring(xml)
    except ET.ParseError as error:
        raise SchedulerError(f"qstat's XML cannot be read: {error}") from None
    letters, hosts = "", []
    for item in tree.iter("job_list"):
        if item.findtext("JB_job_number") == job_id:
            letters = item.findtext("state") or "?"
            host = (item.findtext("queue_name") or "").partition("@")[2]
            if host and host not in hosts:
                hosts.append(host)
    if not letters:
        return None
    if "E" in letters:
        return BatchState(f"in error state {letters}, `qstat -j {job_id}` says why")
    if "d" in letters:
        return BatchState("being deleted")
    if hosts:
        return BatchState(f"{'suspended' if set(letters) & set('sST') else 'running'} on {', '.join(sorted(hosts))}")
    return BatchState("held" if "h" in letters else "pending")


def pending_reason(text: str) -> str:
    """Why a job waits: the last of the scheduler's remarks in `qstat -j`, which site may switch off."""
    match = re.search(r"^scheduling info:(.*(?:\n +.*)*)", text, re.MULTILINE)
    remarks = [line.strip() for line in match[1].splitlines() if line.strip()] if match else []
    return remarks[-1] if remarks else ""


SGE = BatchSystem("Grid Engine", lines, state, ("qsub", "-terse"), "qdel")
