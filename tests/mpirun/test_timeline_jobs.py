"""A job that writes timelines, in which a rank is killed: `mpikv trace` reads what was written before.

A job that comes to its end is in docs/observing.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import Mpi, mpirun

from mpikv.__main__ import main

PROGRAM = str(Path(__file__).with_name("timeline_program.py"))


@pytest.mark.parametrize("servers", [0, 1])
def test_what_was_written_before_a_rank_was_killed_can_be_read(
    mpi: Mpi, servers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"MPIKV_TIMELINE": str(tmp_path / "traces"), "MPIKV_NUM_SERVERS": str(servers)}
    mpirun(3 + servers, ["python", PROGRAM], env=settings, mpi=mpi).check(None)
    assert main(["trace", "report", str(tmp_path / "traces")]) == 0
    assert re.search(r"; [34] rounds", capsys.readouterr().out)  # others may have pushed once more
