"""Jobs that go wrong: each ends by itself, with a status, leaves no process, and says what happened where.

Faults of one worker, without servers or files, are in test_fault_matrix.py. Real `mpirun`, three ranks, both MPIs where
both are installed. MPIKV_TIMEOUT_S is 4 where it is to run out, 20 where it is not, so a job that still runs after
`LIMIT_S` would have hung.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from jobs import Job, mpirun, start

PROGRAM = str(Path(__file__).with_name("program.py"))
STALL_S, PATIENT_S = 4, 20
LIMIT_S = 60  # starting a job, the time limit, the report and its end, on a busy machine; the default limit is 300

HOST = r"on [^\s:;,)]+"

# case -> what the output must say
EVERYWHERE = {
    "returns early": [
        rf"PeerError: worker [02] {HOST}.* pull of key 'w', round 3: worker 1 {HOST} closed its store after 2 pushes"
    ],
    "leaves by os._exit": [],
    "Ctrl-C at exit": [rf"\[rank 1 of 3 {HOST}\] KeyboardInterrupt"],
    "other call": [rf"different calls.* worker 0 {HOST}: barrier\(\); worker 1 {HOST}: init\('x'\)"],
    "other type": [rf"ConfigError: .* rank 0 {HOST}, rank 2 {HOST}: dist_sync; rank 1 {HOST}: dist_async"],
    "variable is no number": [rf"\[rank 1 of 3 {HOST}\] .*ConfigError: MPIKV_TIMEOUT_S='ten' is not a number"],
    "other number of servers": [
        rf"ConfigError: .*number of servers.* rank 0 {HOST}, rank 2 {HOST}: 0; rank 1 {HOST}: 2"
    ],
    "optimizer raises": [r"ZeroDivisionError: in the user's optimizer", r"in the update of key 'w'"],
    "damaged states": [r"StatesFileError: .*states", r"the next step was 1\.75\n"],
}
WITH_SERVERS = {
    "optimizer exits": [rf"\[rank 2 of 3 {HOST}\] .*MpikvError: an optimizer has called sys\.exit\(3\) at this server"],
    "Ctrl-C at exit": [rf"\[rank 1 of 3 {HOST}\] KeyboardInterrupt"],
    "second store": [r"ConfigError: .* another store is open and has its servers at rank 2; make one store for all"],
    "store after store": [
        r"StallError: rank [01] of 3 waited 4 s in kv\.create\('dist_sync'\) for the other ranks .*: every one of them "
        r"must call it; an earlier store had its servers at rank 2, where the process ended with it: make one store"
    ],
    "returns early": [r"PeerError: worker 0 .* pull of key 'w', round 3: worker 1 .* closed its store after 2 pushes"],
    "never pushes": [r"StallError: worker 0 .* pull of key 'w', round 3\. Not arrived: worker 1"],
    "optimizer raises": [rf"\[rank 2 of 3 {HOST}\] .*ZeroDivisionError", r"in the update of key 'w'"],
    "damaged states": [r"StatesFileError: .*states", r"the next step was 1\.75\n"],
}
ASYNCHRONOUS = {
    "raises": [rf"\[rank 1 of 3 {HOST}\] RuntimeError: boom on one worker"],
    "optimizer raises": [rf"\[rank \d of 3 {HOST}\] .*ZeroDivisionError", r"in the update of key 'w'"],
    "other call": [r"different calls|closed the store already"],
}
GRID = [
    *[("dist_sync", 0, case) for case in EVERYWHERE],
    *[("dist_sync", 1, case) for case in WITH_SERVERS],
    *[("dist_async", 0, case) for case in ASYNCHRONOUS],
]
# In these the launcher has a part, or the start and the end of MPI; --full makes them with both. The other cases are
# the store's alone, and MPICH starts a job in a third of the time.
UNDER_BOTH = {
    "raises",
    "returns early",
    "never pushes",
    "leaves by os._exit",
    "Ctrl-C at exit",
    "variable is no number",
    "optimizer exits",
    "store after store",
}
PHRASES = {("dist_sync", 0): EVERYWHERE, ("dist_sync", 1): WITH_SERVERS, ("dist_async", 0): ASYNCHRONOUS}


def environment(folder: Path, servers: int = 0, timeout_s: int = PATIENT_S) -> dict[str, str]:
    return {"FOLDER": str(folder), "MPIKV_TIMEOUT_S": str(timeout_s), "MPIKV_NUM_SERVERS": str(servers)}


def check_end(job: Job) -> None:
    assert not job.timed_out, f"still running after {LIMIT_S} s:\n{job.output}"
    assert job.status != 0, job.output
    assert job.ranks_left == [], job.output
    assert "survived" not in job.stdout, job.output


@pytest.mark.parametrize(
    ("mpi", "kind", "servers", "case"),
    [pytest.param("mpich", *row, marks=[pytest.mark.full] * (row[2] in UNDER_BOTH)) for row in GRID]
    + [("openmpi", *row) for row in GRID if row[2] in UNDER_BOTH],
    indirect=["mpi"],
)
def test_ends_and_says_why(mpi, kind: str, servers: int, case: str, tmp_path: Path) -> None:
    phrases = PHRASES[kind, servers][case]
    stalls = any(phrase.startswith("StallError") for phrase in phrases)
    env = environment(tmp_path, servers, STALL_S if stalls else PATIENT_S)
    job = mpirun(3, ["python", PROGRAM, case, kind], env=env, timeout_s=LIMIT_S, mpi=mpi)
    check_end(job)
    for phrase in phrases:
        assert re.search(phrase, job.output), f"no {phrase!r} in:\n{job.output}"
    if case == "Ctrl-C at exit":
        assert job.status == 130
    if case == "leaves by os._exit" and mpi.kind == "openmpi":
        assert job.status == 5


@pytest.mark.parametrize(
    ("kind", "servers", "victim"), [("dist_sync", 0, 1), ("dist_sync", 1, 2), ("dist_async", 0, 0)]
)
def test_killed(mpi, kind: str, servers: int, victim: int, tmp_path: Path) -> None:
    """kill -9 of a worker, of a server: the others are gone at once; mpirun names the rank, they say what they lack."""
    env = environment(tmp_path, servers)
    with start(3, ["python", PROGRAM, "killed", kind], env=env, timeout_s=LIMIT_S, mpi=mpi) as running:
        running.wait_for("ready 0")
        ranks = {int(rank): pid for pid in running.processes() if (rank := rank_of(pid)) is not None}
        if kind == "dist_sync":  # the others say what they lack if they already wait for it when they are ended
            running.kill(ranks[victim], signal.SIGSTOP)
            (tmp_path / "stopped").touch()
            running.wait_for("waits")
        running.kill(ranks[victim])
    job = running.result
    check_end(job)
    if mpi.kind == "openmpi":
        # Open MPI lets the other ranks end by SIGTERM; MPICH kills them, and prints the exit code alone.
        assert re.search(rf"rank {victim} with PID \d+ on node \S+ exited on\s+signal 9", job.output), job.output
        if kind == "dist_sync":
            assert re.search(r"told to end \(SIGTERM\) while in pull of key 'w', round \d+", job.output), job.output
    else:
        assert re.search(r"RANK \d|EXIT CODE: 9", job.output), job.output


def rank_of(pid: int, program: str = PROGRAM) -> int | None:
    """The rank of a process that runs the program; None for mpirun and its helpers."""
    environ = dict(
        entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry
    )
    if (
        program not in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        or "mpirun" in Path(f"/proc/{pid}/comm").read_text()
    ):
        return None
    rank = environ.get("OMPI_COMM_WORLD_RANK", environ.get("PMI_RANK"))
    return None if rank is None else int(rank)


def test_too_many_servers(mpi, tmp_path: Path) -> None:
    job = mpirun(3, ["python", PROGRAM, "none", "dist_sync"], env=environment(tmp_path, 3), timeout_s=LIMIT_S, mpi=mpi)
    check_end(job)
    assert re.search(
        r"ConfigError: 3 servers among 3 ranks leave no worker: start more ranks \(mpirun -n 4", job.output
    )


def test_without_a_fault_the_program_survives(mpi, tmp_path: Path) -> None:
    """Else the tests above could not fail."""
    for kind, servers in (("dist_sync", 0), ("dist_sync", 1), ("dist_async", 0)):
        env = environment(tmp_path, servers)
        job = mpirun(3, ["python", PROGRAM, "none", kind], env=env, timeout_s=LIMIT_S, mpi=mpi)
        assert job.status == 0, job.output
        assert job.stdout.count("survived") == 3 - servers
        assert job.ranks_left == []
