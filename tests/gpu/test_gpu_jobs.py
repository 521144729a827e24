"""Jobs whose ranks share a GPU: the bits of every way and mode, a rank that is killed, and memory that is not there."""

from __future__ import annotations

import os
import time

import gpus
import pytest
from jobs import ROOT, Job, mpirun, start
from kinds import FULL
from report import WHOLE_JOB

pytestmark = getattr(pytest.mark, WHOLE_JOB)
PROGRAM = str(ROOT / "tests/gpu/store_program.py")
SETTLE_S = 20.0  # until a driver has taken back what a killed process had
SMALL_BYTES = 16 << 20  # by which what is taken of a GPU may differ: the driver's own


def store_job(kind: str, n: int, work: str, path: str = "host") -> Job:
    job = mpirun(n, ["python", PROGRAM, kind, work, path], timeout_s=230)
    assert job.status == 0, job.output
    assert job.ranks_left == []
    return job


def same(job: Job) -> int:
    return job.stdout.count(": the same\n")


def test_three_ranks_by_ipc(kind: str) -> None:
    assert same(store_job(kind, 3, "modes", "ipc")) >= 4


def test_two_ranks_staged(kind: str) -> None:
    assert same(store_job(kind, 2, "modes", "staged")) >= 4


def test_codecs(kind: str) -> None:
    assert same(store_job(kind, 3, "codecs", "ipc")) == 5


@FULL
@pytest.mark.parametrize(("n", "path"), [(2, "ipc"), (4, "ipc"), (3, "staged"), (4, "staged")])
def test_other_numbers_of_ranks(kind: str, n: int, path: str) -> None:
    assert same(store_job(kind, n, "modes", path)) >= 4


@pytest.mark.full
def test_device_pointers_in_messages() -> None:
    """On a fake GPU any MPI takes them, since they are host memory."""
    assert same(store_job("fake", 3, "modes", "mpi")) >= 4


@pytest.mark.parametrize("path", [pytest.param("ipc"), pytest.param("staged", marks=pytest.mark.full)])
def test_streams_under_load(kind: str, path: str) -> None:
    store_job(kind, 2, "streams", path)


@FULL
def test_servers(kind: str) -> None:
    assert same(store_job(kind, 3, "servers")) == 4


@FULL
def test_asynchronous(kind: str) -> None:
    store_job(kind, 3, "asynchronous")


def test_more_memory_than_there_is(kind: str) -> None:
    job = store_job(kind, 2, "too_much", "ipc")
    for rank in range(2):
        assert f"rank {rank}: " in job.stdout


@pytest.mark.parametrize("path", [pytest.param("ipc"), pytest.param("staged", marks=pytest.mark.full)])
def test_a_killed_rank_leaves_no_memory(kind: str, path: str) -> None:
    gpu = gpus.use(kind, lambda *_: None)
    before = gpu.used_bytes()
    with start(2, ["python", PROGRAM, kind, "endless", path], timeout_s=100) as running:
        pids = [int(running.wait_for(rf"rank {rank} is process (\d+)", 90)[1]) for rank in range(2)]
        if gpu.real:
            assert gpu.used_bytes() > before + SMALL_BYTES
        running.kill(pids[1])
    assert running.result.status != 0
    assert running.result.ranks_left == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # whose memory ends with them
    until = time.monotonic() + SETTLE_S
    while gpu.used_bytes() > before + SMALL_BYTES and time.monotonic() < until:
        time.sleep(0.05)
    assert gpu.used_bytes() <= before + SMALL_BYTES
