"""Who becomes a server, with a real `mpirun`: by number, by program, by host; and how a server rank ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import mpirun

WORKER = """
import sys
import numpy as np
from mpi4py import MPI
from mpikv import kv
store = kv.create("dist_sync")
store.init("w", np.zeros(3))
store.pushpull("w", value := np.full(3, store.rank + 1.0))
# One write: print's own newline is a second one, between which other ranks may come.
sys.stdout.write(f"rank {MPI.COMM_WORLD.rank} is worker {store.rank} of {store.num_workers} and got {value[0]:g}\\n")
sys.stdout.flush()
store.close()
"""


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return ["python", str(path)]


def lines(job) -> list[str]:
    assert job.status == 0, job.output
    assert job.ranks_left == []
    return sorted(line for line in job.stdout.splitlines() if line)


def test_servers_by_number(mpi, worker) -> None:
    """On one host the last ranks; what follows `create` runs on workers only."""
    found = lines(mpirun(5, worker, env={"MPIKV_NUM_SERVERS": "2"}, mpi=mpi))
    assert found == [f"rank {r} is worker {r} of 3 and got 6" for r in range(3)]


def test_servers_by_program(mpi, worker) -> None:
    found = lines(mpirun([(1, ["python", "-m", "mpikv.server"]), (2, worker)], mpi=mpi))
    assert found == [f"rank {r + 1} is worker {r} of 2 and got 3" for r in range(2)]
