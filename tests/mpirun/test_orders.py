"""Workers that wait for each other in different stores, which no time limit of one store alone could tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import mpirun, start

PROGRAM = str(Path(__file__).with_name("orders_program.py"))
LIMIT_S = 60
KINDS = pytest.mark.parametrize(
    ("mpi", "kind"),
    [("mpich", "dist_sync"), ("mpich", "dist_async"), ("openmpi", "dist_sync")],
    indirect=["mpi"],
)


@KINDS
def test_a_worker_that_waits_for_a_late_one_is_waited_for(mpi, kind: str, tmp_path: Path) -> None:
    """Also when it says for the second time that its limit is over."""
    env = {"MPIKV_TIMEOUT_S": "4", "SIGN": str(tmp_path / "sign")}
    said = r"rank 0 of 2.* waited 4 s in close\..* \(in close of another store"
    with start(3, ["python", PROGRAM, "late", kind], env=env, timeout_s=LIMIT_S, mpi=mpi) as running:
        running.wait_for(rf"{said}[^\0]*{said}", LIMIT_S)
        (tmp_path / "sign").touch()
    assert (running.result.status, running.result.stdout.count("survived")) == (0, 3), running.result.output


def test_pushpulls_in_different_orders(mpi) -> None:
    env = {"MPIKV_TIMEOUT_S": "60", "MPIKV_STALL_WARN_S": "2"}
    elsewhere = (
        r"in pushpull of key 'w'(, round 1)? of another store for|its pushpull of key 'w'.* of another store failed"
    )
    job = mpirun(3, ["python", PROGRAM, "two pushpulls", "dist_sync"], env=env, timeout_s=LIMIT_S, mpi=mpi)
    assert not job.timed_out, job.output
    assert job.status != 0, job.output
    assert re.search(f"Not arrived: .*; ({elsewhere})", job.output), job.output
    assert "They wait in different stores" in job.output
