"""Jobs that a signal stops: to one rank, to all, to mpirun; all ranks stop after the same step, with status 0.

Real `mpirun`, three ranks, both MPIs where both are installed.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from jobs import Mpi, start

PROGRAM = str(Path(__file__).with_name("stop_program.py"))
LIMIT_S = 40


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
    signals = {"MPIKV_STOP_SIGNALS": "TERM,USR1,USR2", "MPIKV_PROGRESS": progress}
    env = {"MPIKV_TIMEOUT_S": "20", "MPIKV_NUM_SERVERS": str(servers), **signals}
    with start(3, ["python", PROGRAM, case, kind], env=env, timeout_s=LIMIT_S, mpi=mpi) as running:
        running.wait_for("ready 0")
        pids = [int(running.wait_for(rf"pid {rank} (\d+)\n")[1]) for rank in range(3)]
        told = [running._process.pid] if who == "mpirun" else [pids[rank] for rank in who]
        running.kill_all(told, signal.Signals[f"SIG{signum}"])
    job = running.result
    job.check()
    found = re.findall(r"(\d) stopped after (\d+) of (\d+) steps", job.stdout)
    assert sorted(rank for rank, *_ in found) == [str(rank) for rank in range(2 if servers else 3)], job.output
    if kind == "dist_sync":  # all after the same step, which is the furthest worker's
        assert len({number for _, own, most in found for number in (own, most)}) == 1, job.output
        assert int(found[0][1]) < 20_000, job.output
    assert job.stderr.count("all workers stop after their step") == 1, job.output
    assert f"SIG{signum}" in job.stderr
    assert job.stdout.count("1 handler of its own") == (case == "own handler")
