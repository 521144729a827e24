"""Grid Engine: its option lines, and qsub, qstat, qacct and qdel.

qstat knows a job only until it ends. How it ended stands in the last line of its output, since the accounting (qacct)
is written with a delay and on many sites not readable everywhere.
"""

from __future__ import annotations

import getpass
import re
import shlex
import xml.etree.ElementTree as ET

from mpikv.commands.launch.batch import Job, render, time_text
from mpikv.commands.launch.scheduler import Scheduler, SchedulerError, State, run, said
from mpikv.errors import ConfigError

PASSED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX")


def script(job: Job) -> str:
    """The batch script."""
    job.check()
    lines = [f"-N {job.name}", f"-pe {job.parallel_environment or 'mpi'} {job.ranks}"]
    if job.time_s:
        # Not s_rt: of a job on several hosts the master host's daemon takes it for a limit like h_rt (8.1.9).
        lines.append(f"-l h_rt={time_text(job.time_s)}")
    # Told with USR1 before it is suspended, and with USR2 some time before it is ended, by qdel or at h_rt.
    lines.append("-notify")
    if job.queue:
        lines.append(f"-q {shlex.quote(job.queue)}")
    output = str(job.output("$JOB_ID"))
    lines.append(f'-o "{output}"' if re.search(r"\s", output) else f"-o {output}")
    lines.append("-S /bin/bash -cwd -j y")
    # Not -V: Grid Engine shows a job's environment to every user, in files of its own and by `qstat -j`.
    lines.append(f"-v {','.join(job.passed or PASSED)}")
    lines += job.options
    return render("train-servers.sh" if job.servers else "train.sh", job, [f"#$ {line}" for line in lines])


def state(job_id: str) -> State:
    """Where the job is. Raises SchedulerError where Grid Engine does not answer."""
    done = run(["qstat", "-u", getpass.getuser(), "-g", "t", "-xml"], "Grid Engine")
    if done.returncode != 0:
        raise SchedulerError(said(done))
    found = read_state(done.stdout, job_id)
    if found is None:
        return State("finished", _accounted(job_id), lost=True)
    if found.text == "pending":
        reason = pending_reason(run(["qstat", "-j", job_id], "Grid Engine").stdout)
        return State(f"pending ({reason})" if reason else "pending")
    return found


def read_state(xml: str, job_id: str) -> State | None:
    """The state from what `qstat -g t -xml` says, None for a job that it does not know."""
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
        return State(f"in error state {letters}, `qstat -j {job_id}` says why")
    if "d" in letters:
        return State("being deleted")
    if hosts:
        return State(f"{'suspended' if set(letters) & set('sST') else 'running'} on {', '.join(sorted(hosts))}")
    return State("held" if "h" in letters else "pending")


def pending_reason(text: str) -> str:
    """Why a job waits: the last of the scheduler's remarks in `qstat -j`, which site may switch off."""
    match = re.search(r"^scheduling info:(.*(?:\n +.*)*)", text, re.MULTILINE)
    remarks = [line.strip() for line in match[1].splitlines() if line.strip()] if match else []
    return remarks[-1] if remarks else ""


def _accounted(job_id: str) -> int | None:
    """The status from the accounting, None where there is none (yet)."""
    try:
        done = run(["qacct", "-j", job_id], "Grid Engine")
    except ConfigError:
        return None
    return read_accounting(done.stdout) if done.returncode == 0 else None


def read_accounting(text: str) -> int | None:
    """The status of a job from what qacct says, None if that is nothing.

    A job that was requeued has several records, of which the last counts; and each process that it started on another
    host may have one of its own, with that process's status.
    """
    records = [
        dict(re.findall(r"^(\w+) +(.*?) *$", part, re.MULTILINE)) for part in re.split(r"^=+$", text, flags=re.M)
    ]
    own = [record for record in records if record.get("pe_taskid", "NONE") in ("NONE", "UNDEFINED")]
    codes = [record for record in own if record.get("exit_status", "").isdigit()]
    if not codes:
        return None
    failed = codes[-1].get("failed", "0").partition(" ")[0]
    return int(codes[-1]["exit_status"]) or (0 if failed == "0" else 1)


SGE = Scheduler("Grid Engine", script, state, ("qsub", "-terse"), "qdel", '--option "-l h_vmem=4G"')
