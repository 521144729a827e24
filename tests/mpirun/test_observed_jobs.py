"""Stores of some of the ranks, which have a worker 0 each: their ranks' files of metrics have names of their own."""

from __future__ import annotations

from pathlib import Path

from jobs import Mpi, mpirun

GROUPS = """
import numpy as np
from mpi4py import MPI
from mpikv import kv
world = MPI.COMM_WORLD
with kv.create("dist_sync", comm=world.Split(world.rank // 2)) as store:
    store.init("w", np.zeros(3, np.float32))
    store.pushpull("w", np.ones(3, np.float32))
"""


def test_stores_of_some_of_the_ranks(mpi: Mpi, tmp_path: Path) -> None:
    mpirun(4, ["python", "-c", GROUPS], env={"MPIKV_METRICS": str(tmp_path)}, mpi=mpi).check()
    files = {path.name: path.read_text() for path in sorted(tmp_path.iterdir())}
    assert list(files) == [f"mpikv-rank-{rank}.prom" for rank in range(4)]
    for rank, text in enumerate(files.values()):
        assert f'mpikv_rounds_total{{worker="{rank % 2}",store="0"}} 1\n' in text
