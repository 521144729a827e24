"""Jobs that write timelines: `mpikv trace` puts together what their ranks have written, also where one was killed."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jobs import Mpi, mpirun

from mpikv.__main__ import main

PROGRAM = str(Path(__file__).with_name("timeline_program.py"))
LIMIT_S = 60


def job(mpi: Mpi, traces: Path, *words: str, **env: str) -> Any:
    settings = {"MPIKV_TIMELINE": str(traces), **env}
    return mpirun(4, ["python", PROGRAM, *words], env=settings, timeout_s=LIMIT_S, mpi=mpi)


@pytest.mark.parametrize(
    "env",
    [{}, {"MPIKV_NUM_SERVERS": "1"}, {"MPIKV_TEST_HOSTS": "4", "MPIKV_SHARED_MEMORY": "off"}],
    ids=["memory", "server", "messages"],
)
def test_a_job_writes_what_a_trace_and_a_report_are_made_of(mpi, env: dict[str, str], tmp_path: Path, capsys) -> None:
    done = job(mpi, tmp_path / "traces", **env)
    assert done.status == 0, done.output
    assert main(["trace", str(tmp_path / "traces"), "-o", str(tmp_path / "x.json.gz")]) == 0
    assert re.search(r"clocks: all \d+ results come after what they were made of", capsys.readouterr().out)
    events = json.loads(gzip.decompress((tmp_path / "x.json.gz").read_bytes()))["traceEvents"]
    names = {event["args"]["name"].split(" on ")[0] for event in events if event["name"] == "process_name"}
    servers = int(env.get("MPIKV_NUM_SERVERS", "0"))
    assert names == {*(f"worker {i}" for i in range(4 - servers)), *(f"server {i}" for i in range(servers))}
    assert sum(event["name"] == "forward" for event in events) == 5 * (4 - servers)
    assert any(event["ph"] == "f" for event in events)
    assert main(["trace", "report", str(tmp_path / "traces")]) == 0
    assert re.search(r"advice: worker 1 on \S+ computes \d+\.\d times as long as the others", capsys.readouterr().out)


def test_what_was_written_before_a_rank_was_killed_can_be_read(mpi, tmp_path: Path, capsys) -> None:
    done = job(mpi, tmp_path / "traces", "killed")
    assert done.status != 0, done.output
    assert main(["trace", "report", str(tmp_path / "traces")]) == 0
    assert re.search(r"; [34] rounds", capsys.readouterr().out)  # others may have pushed once more
