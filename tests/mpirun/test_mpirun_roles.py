"""Who becomes a server, with a real `mpirun`: by program; and how a server rank ends."""

from __future__ import annotations

from pathlib import Path

from jobs import Mpi, mpirun

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


def test_servers_by_program(mpi: Mpi, tmp_path: Path) -> None:
    """What follows `create` runs on workers only."""
    (path := tmp_path / "worker.py").write_text(WORKER)
    job = mpirun([(1, ["python", "-m", "mpikv.server"]), (2, ["python", str(path)])], mpi=mpi)
    assert (job.status, job.ranks_left) == (0, []), job.output
    found = sorted(line for line in job.stdout.splitlines() if line)
    assert found == [f"rank {r + 1} is worker {r} of 2 and got 3" for r in range(2)]
