"""Batch jobs that are asked to stop: the scripts of `mpikv submit` as they are, with real ranks.

The scheduler's own programs are stand-ins, which write down that they were called.
"""

from __future__ import annotations

import signal
import socket
import tempfile
from pathlib import Path

import pytest
from jobs import Job, Mpi, Running, environment

from mpikv.commands.launch import batch

PROGRAM = str(Path(__file__).with_name("batch_program.py"))
LIMIT_S = 90
# The job's one host is this one, whatever the variables of a scheduler say.
HERE = {"PRTE_MCA_ras": "^slurm", "PRTE_MCA_plm": "^slurm", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def run(path: str, mpi: Mpi, folder: Path, case: str, when: str, *, program: str = PROGRAM) -> Job:
    """Run a job of two ranks, and signal its script when it says `when`."""
    for name, says in (("scontrol", ""), ("qresub", 'Your job 43 ("train") has been submitted'), ("qrls", "")):
        file = folder / name
        file.write_text(f"#!/bin/sh\necho \"{name} $*\" >>'{folder}/called'\necho '{says}'\n")
        file.chmod(0o755)
    (folder / "hosts").write_text(f"{socket.gethostname()} 2 all.q UNDEFINED\n")
    slurm = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "2", "SLURM_SUBMIT_DIR": str(folder)}
    sge = {"JOB_ID": "17", "NSLOTS": "2", "PE": "mpi", "PE_HOSTFILE": str(folder / "hosts")}
    text = batch.repository_scripts()[path].replace("\nREQUEUE=no ", "\nREQUEUE=yes ")
    scratch = Path(tempfile.mkdtemp(prefix="mpikv-job-"))
    env = environment(mpi, {**HERE, **(slurm if "slurm" in path else sge), "VIRTUAL_ENV": str(mpi.prefix)}, scratch)
    env |= {"PATH": f"{folder}:{env['PATH']}", "MPIKV_TIMEOUT_S": "30", "GO": str(folder / "go")}
    script = folder / "script"
    script.write_text(text.replace("\nRANKS=", f"\ncd '{folder}' || exit\nRANKS=", 1))
    running = Running(["bash", str(script), "python", program, case], env, scratch, LIMIT_S)
    try:
        running.wait_for(when)
        running.kill(running._process.pid, signal.SIGUSR1)
        running.wait_for("mpikv: signal USR1: ")
        (folder / "go").touch()
    except BaseException:
        running.end()
        raise
    job = running.finish()
    job.check()
    return job


WINDOWS = {
    "while the job is checked": ("trains", "mpikv: job 17 on"),
    "before the store is made": ("imports", "imports 0"),
    "in training": ("trains", "step 3"),
    "after training": ("evaluates", "evaluates 0"),  # it is over, and not queued again
}


@pytest.mark.parametrize(
    ("mpi", "path"),
    # not MPICH and Slurm, which its mpirun asks for the hosts
    [("openmpi", "slurm/train.sbatch"), ("openmpi", "sge/train.sh"), ("mpich", "sge/train.sh")],
    indirect=["mpi"],
)
@pytest.mark.parametrize("window", WINDOWS)
def test_saves_and_is_queued_again(mpi: Mpi, tmp_path: Path, path: str, window: str) -> None:
    called, over = tmp_path / "called", window == "after training"
    if over:
        (tmp_path / "train-17.state").write_text("of an earlier run")
    job = run(path, mpi, tmp_path, *WINDOWS[window])
    if over:
        assert "mpikv: job 17 ends with status 0\n" in job.stdout, job.output
        assert not called.exists()
        return
    assert "mpikv: SIGUSR1 at worker" in job.stderr, job.output
    assert "mpikv: job 17 ends with status 0 and goes " in job.stdout, job.output
    assert list(tmp_path.glob("train-*.state")), job.output
    assert len(called.read_text().splitlines()) == (1 if "slurm" in path else 2)
