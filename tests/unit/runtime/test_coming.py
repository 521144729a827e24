"""Who does not come, as far as the processes of a host tell it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from mpikv.observe import endpoint
from mpikv.runtime import coming, job_processes
from mpikv.runtime.job_processes import ProcessEntry, below, launcher_of, of_batch_job, ranks_beside

RANK = "OMPI_COMM_WORLD_RANK"
SLURM = {"SLURM_JOB_ID": "77"}


def entry(parent: int, name: str, rank: int | None = None, state: str = "S", **environ: str) -> ProcessEntry:
    ranked = {} if rank is None else {RANK: str(rank), "OMPI_COMM_WORLD_SIZE": "3"}
    return ProcessEntry(parent, 0, state, name, {**ranked, **environ})


# A job of three ranks, one in a shell and one with a data loader's worker, in an allocation, and another job beside it.
TABLE = {
    1: entry(0, "init"),
    10: entry(1, "bash", **SLURM),
    11: entry(10, "mpirun", **SLURM),
    12: entry(11, "python3.11", 0, **SLURM),
    13: entry(11, "sh", 1, **SLURM),
    14: entry(13, "python3.11", 1, **SLURM),
    15: entry(11, "python3.11", 2, "R", **SLURM),
    16: entry(15, "python3.11", 2, **SLURM),
    20: entry(1, "mpirun", PBS_JOBID="123.server"),
    21: entry(20, "python3.11", 0, PBS_JOBID="123.server"),
}


def test_the_processes_of_a_job() -> None:
    assert [launcher_of(TABLE, pid) for pid in (12, 14, 21, 11, 99)] == [11, 11, 20, 0, 0]
    assert below(TABLE, 13) == {13, 14}
    assert below(TABLE, 10) == {10, 11, 12, 13, 14, 15, 16}
    assert ranks_beside(TABLE, 14) == {0: 12, 1: 14, 2: 15}
    assert ranks_beside(TABLE, 14, known=[13]) == {0: 12, 1: 13, 2: 15}
    assert ranks_beside(TABLE, 1) == {}
    assert [of_batch_job(TABLE, job) for job in ("77", "123", "123.server", "7")] == [
        {10, 11, 12, 13, 14, 15, 16},
        {20, 21},
        {20, 21},
        set(),
    ]


def test_this_process_is_in_the_table() -> None:
    found = job_processes.read()[os.getpid()]
    assert (found.parent, found.uid) == (os.getppid(), os.getuid())
    assert found.environ["PATH"] == os.environ["PATH"]


WAITS = {"offers": [{"kind": "create", "doing": "in MPI_Init for 2.0 s"}]}
TRAINS = {"offers": [{"kind": "store", "doing": "in pull of key 'w' for 3.0 s"}]}


@pytest.mark.parametrize(
    ("me", "answers", "size", "said"),
    [
        # One comes late, and one has another store.
        (12, {14: TRAINS}, 3, ["rank 0 on h waits in it for rank 1, 2 on h", "): in pull of key 'w'", "it computes"]),
        (12, {14: WAITS}, 3, ["rank 0, 1 on h wait in it for rank 2 on h", "has not come to it; it computes"]),
        (14, {12: WAITS}, 3, None),  # rank 0 prints it
        (14, {12: None}, 3, ["rank 1 on h waits in it for rank 0, 2 on h", "no answer for 1.0 s; it sleeps"]),
        (12, {14: WAITS, 15: WAITS}, 3, None),  # all are there by now
        (12, {14: WAITS, 15: WAITS}, 5, ["rank 0, 1, 2 on h wait in it for the others", "2 more ranks have no"]),
    ],
)  # fmt: skip
def test_the_table_of_one_rank(
    me: int, answers: Mapping[int, Any], size: int, said: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(pid: int, _uid: int, _question: str, _limit_s: float) -> Any:
        if answers[pid] is None:
            raise TimeoutError
        return answers[pid]

    monkeypatch.setattr(os, "getpid", lambda: me)
    monkeypatch.setattr(coming.socket, "gethostname", lambda: "h")
    monkeypatch.setattr(job_processes, "read", lambda: TABLE)
    monkeypatch.setattr(endpoint, "endpoints", lambda: dict.fromkeys([me, *answers], 0))
    monkeypatch.setattr(endpoint, "ask", ask)
    monkeypatch.setenv(RANK, TABLE[me].environ[RANK])
    printed: list[str] = []
    told = coming.Coming("it", range(size), printed.append)
    told.tell()
    told.end(well=True)
    if said is None:
        assert printed == []
        return
    table, going_on = printed
    assert all(text in table for text in said), table
    assert going_on.startswith("mpikv: going on, after a stall of ")
