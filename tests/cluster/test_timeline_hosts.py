"""Timelines of hosts with links: their clocks, which are one here, are found to agree, by what the ranks have asked.

The files are changed to say that each host has a clock of its own, so that `mpikv trace` has to put them together.
"""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest
from namespaces import missing, network

from mpikv.__main__ import main
from mpikv.commands.trace.clocks import clocks_of
from mpikv.commands.trace.files import read_run
from mpikv.commands.trace.rounds import in_common_time, rounds_of, too_early

pytestmark = pytest.mark.skipif(missing() != "", reason=missing())

PROGRAM = str(Path(__file__).parents[1] / "mpirun" / "timeline_program.py")
SERVED = {"MPIKV_NUM_SERVERS": "1", "MPIKV_SERVER_PLACEMENT": "last"}


@pytest.mark.parametrize("settings", [{}, SERVED], ids=["workers", "a server"])
def test_clocks_of_hosts_are_put_together_within_what_is_claimed(
    settings: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mpi = jobs.find_mpi("openmpi")
    if mpi is None:
        pytest.skip("no openmpi in any known environment")
    with network(3, 200) as hosts:
        env = {"MPIKV_TIMELINE": str(tmp_path / "traces"), **settings}
        command = ["python", PROGRAM]
        job = jobs.mpirun(3, command, mpi=hosts.mpi(mpi), options=hosts.options(mpi, 1), env=env, timeout_s=120)
    assert job.status == 0, job.output
    for path in (tmp_path / "traces").glob("*.jsonl"):
        first, *others = path.read_text().splitlines()
        header = json.loads(first)
        path.write_text("\n".join([json.dumps({**header, "machine": header["host"]}), *others]))
    ranks = read_run(tmp_path / "traces")
    clocks = clocks_of(ranks)
    assert len(clocks) == 3
    for clock in clocks.values():
        assert clock.error_ns is not None
        assert abs(clock.common(ranks[0].events[0].begun_ns) - ranks[0].events[0].begun_ns) <= clock.error_ns
    n, _, most_us = too_early(ranks, rounds_of(ranks, in_common_time(ranks, clocks)))
    assert n >= 5
    assert most_us <= 2 * max(clock.error_ns or 0.0 for clock in clocks.values()) / 1e3
    assert main(["trace", "report", str(tmp_path / "traces")]) == 0
    assert "clocks: 3 hosts, put together to" in capsys.readouterr().out
