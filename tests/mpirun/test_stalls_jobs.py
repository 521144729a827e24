"""Workers that stay away are told of by the others' table, with what they do and where in their program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import start

PROGRAM = str(Path(__file__).with_name("stalls_program.py"))
LIMIT_S = 60
HOST = r"on [^\s:;,)]+"


@pytest.mark.parametrize(
    ("case", "call"),
    [
        ("before_init", "MPI_Init"),
        ("before_create", "kv.create('dist_sync')"),
        ("before_create", "kv.create"),  # where ranks may die
    ],
)
@pytest.mark.parametrize("victim", [1, 0])
def test_who_does_not_come_to_the_start_is_told_of(mpi, case: str, call: str, victim: int, tmp_path: Path) -> None:
    env = {"FOLDER": str(tmp_path), "MPIKV_STALL_WARN_S": "1.5", "MPIKV_TIMEOUT_S": "100"}  # told of once, after 4.5 s
    options = []
    if call == "kv.create":
        if mpi.kind != "openmpi":
            pytest.skip("Open MPI alone has fault tolerance")
        env, options = {**env, "MPIKV_ON_FAILURE": "continue"}, ["--with-ft", "ulfm"]
    others = ", ".join(str(rank) for rank in range(3) if rank != victim)
    line = ["python", PROGRAM, case, str(victim)]
    with start(3, line, env=env, timeout_s=LIMIT_S, mpi=mpi, options=options) as running:
        running.wait_for(
            rf"mpikv: stalled for \d+\.\d s: rank {others} {HOST} wait in {re.escape(call)} for rank {victim} {HOST}\n"
            rf"  rank {others} {HOST} \(pid \d+, \d+\): in {re.escape(call)} for \d+\.\d s; at stalls_program\.py:\d+ "
            rf"in <module>\n  rank {victim} {HOST} \(pid \d+\): has not come to it; it (sleeps, or waits|computes)\n",
            LIMIT_S,
        )
        (tmp_path / "go").touch()
    assert (running.result.status, running.result.stdout.count("survived")) == (0, 3), running.result.output
    assert "mpikv: going on, after a stall of" in running.result.output


def test_a_thread_that_makes_the_missing_call_is_waited_for(mpi, tmp_path: Path) -> None:
    """The worker waits in one store, for workers that wait for its other thread in another one."""
    env = {"FOLDER": str(tmp_path), "MPIKV_STALL_WARN_S": "0.5", "MPIKV_TIMEOUT_S": "100"}
    with start(3, ["python", PROGRAM, "helper", "1"], env=env, timeout_s=LIMIT_S, mpi=mpi) as running:
        running.wait_for(rf"mpikv: stalled for .* for worker 1 {HOST}\n", LIMIT_S)
        running.wait_for(rf"mpikv: stalled for .*worker 1 {HOST} waits for worker 0, 2 {HOST}\n", LIMIT_S)
        (tmp_path / "go").touch()
    assert (running.result.status, running.result.stdout.count("survived")) == (0, 3), running.result.output


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_worker_that_waits_for_a_late_one_is_waited_for(mpi, kind: str, tmp_path: Path) -> None:
    """Also when it says for the second time that its limit is over."""
    env = {"FOLDER": str(tmp_path), "MPIKV_TIMEOUT_S": "4"}
    said = r"rank 0 of 2.* waited 4 s in close\..* \(in close of another store"
    line = ["python", str(Path(__file__).with_name("late_program.py")), kind]
    with start(3, line, env=env, timeout_s=LIMIT_S, mpi=mpi) as running:
        running.wait_for(rf"{said}[^\0]*{said}", LIMIT_S)
        (tmp_path / "go").touch()
    assert (running.result.status, running.result.stdout.count("survived")) == (0, 3), running.result.output
