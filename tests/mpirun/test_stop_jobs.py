"""Jobs that a signal stops: to one rank, to all, to mpirun; all ranks stop after the same step, with status 0.

Real `mpirun`, three ranks, both MPIs where both are installed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import Job, Mpi, Running, start

PROGRAM = str(Path(__file__).with_name("stop_program.py"))
LIMIT_S = 40
HEARD = "all workers stop after their step"


def environment(servers: int = 0, **more: str) -> dict[str, str]:
    return {"MPIKV_TIMEOUT_S": "20", "MPIKV_STOP_SIGNALS": "TERM,USR1,USR2", "MPIKV_NUM_SERVERS": str(servers), **more}


def ranks(running: Running) -> list[int]:
    running.wait_for("ready 0")
    return [int(running.wait_for(rf"pid {rank} (\d+)\n")[1]) for rank in range(3)]


def check_stopped(job: Job, workers: Sequence[int], *, common: bool = True) -> None:
    job.check()
    found = {int(rank): (int(own), int(most)) for rank, own, most in
             re.findall(r"(\d) stopped after (\d+) of (\d+) steps", job.stdout)}  # fmt: skip
    assert sorted(found) == sorted(workers), job.output
    if common:
        assert len(set(found.values())) == 1, job.output
        assert all(own == most < 20_000 for own, most in found.values()), job.output
    assert len(re.findall(HEARD, job.stderr)) == 1, job.output


@pytest.mark.parametrize(
    ("mpi", "progress", "case", "kind", "servers", "who", "signum"),
    [
        ("mpich", "thread", "plain", "dist_sync", 0, [1], "TERM"),
        ("openmpi", "thread", "own handler", "dist_sync", 0, [1], "USR1"),  # which is called as well
        ("mpich", "thread", "plain", "dist_sync", 0, [0, 1, 2], "TERM"),
        ("openmpi", "calls", "stays open", "dist_sync", 0, [0, 1, 2], "USR1"),  # the exit closes the store
        # With servers rank 2 is one: what it is told, it tells the workers.
        ("mpich", "calls", "plain", "dist_sync", 1, [2], "USR1"),
        ("mpich", "thread", "plain", "dist_async", 0, [1], "USR1"),
        ("mpich", "calls", "plain", "dist_async", 1, [2], "USR1"),
        # Both MPIs pass SIGUSR1 on to every rank, as batch scripts count on; MPICH's mpirun ends by SIGUSR2.
        ("openmpi", "thread", "plain", "dist_sync", 1, "mpirun", "USR1"),
        ("openmpi", "thread", "plain", "dist_sync", 1, "mpirun", "USR2"),
        ("mpich", "thread", "plain", "dist_sync", 1, "mpirun", "USR1"),
    ],
    indirect=["mpi"],
)
def test_all_stop(
    mpi: Mpi, *, progress: str, case: str, kind: str, servers: int, who: str | list[int], signum: str
) -> None:
    env = environment(servers, MPIKV_PROGRESS=progress)
    with start(3, ["python", PROGRAM, case, kind], env=env, timeout_s=LIMIT_S, mpi=mpi) as running:
        pids = ranks(running)
        told = [running._process.pid] if who == "mpirun" else [pids[rank] for rank in who]
        running.kill_all(told, signal.Signals[f"SIG{signum}"])
    job = running.result
    check_stopped(job, [0, 1] if servers else [0, 1, 2], common=kind == "dist_sync")
    assert f"SIG{signum}" in job.stderr
    assert job.stdout.count("1 handler of its own") == (case == "own handler")
