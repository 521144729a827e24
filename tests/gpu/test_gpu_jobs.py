"""Jobs whose ranks share a GPU: values and bits by every way, a rank that is killed, memory that is not there."""

from __future__ import annotations

import re
import time

import gpus
import pytest
from jobs import ROOT, Job, have_ended, mpirun, start
from report import GPU, WHOLE_JOB

pytestmark = getattr(pytest.mark, WHOLE_JOB)
PROGRAM = str(ROOT / "tests/gpu/store_program.py")
SETTLE_S = 20.0  # until a driver has taken back what a killed process had
SMALL_BYTES = 16 << 20  # by which what is taken of a GPU may differ: the driver's own
CUDA = getattr(pytest.mark, GPU)


def store_job(kind: str, n: int, work: str, path: str) -> Job:
    job = mpirun(n, ["python", PROGRAM, kind, work, path], timeout_s=230)
    job.check()
    return job


def same(job: Job) -> int:
    return job.stdout.count(": near enough, and the same\n")


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_dtypes_and_optimizers(kind: str, n: int) -> None:
    assert same(store_job(kind, n, "modes", "host")) == (4 if kind == "fake" else 14)


@CUDA
@pytest.mark.parametrize("path", ["mpi", "nccl"], ids="path {}".format)  # a test named mpi is one for pytest-mpi
def test_ways_that_not_every_machine_has(path: str) -> None:
    job = mpirun(2, ["python", PROGRAM, "cuda", "modes", path], timeout_s=230)
    why = re.search(rf"MPIKV_DEVICE_PATH={path}: (.*)", job.output)
    if job.status and why:
        pytest.skip(why[1])
    assert (job.status, same(job)) == (0, 14), job.output


@pytest.mark.thorough
def test_codecs(kind: str) -> None:
    assert same(store_job(kind, 3, "codecs", "host")) == (3 if kind == "fake" else 8)


@pytest.mark.thorough
def test_servers(kind: str) -> None:
    assert same(store_job(kind, 3, "servers", "host")) == 5


@CUDA
def test_a_killed_rank_leaves_no_memory() -> None:
    gpu = gpus.use("cuda", lambda *_: None)
    before = gpu.used_bytes()
    with start(2, ["python", PROGRAM, "cuda", "endless", "host"], timeout_s=100) as running:
        pids = [int(running.wait_for(rf"rank {rank} is process (\d+)", 90)[1]) for rank in range(2)]
        assert gpu.used_bytes() > before + SMALL_BYTES
        running.kill(pids[1])
    running.result.check(None)
    assert have_ended(pids)  # with their memory, also where nobody has asked for their status yet
    until = time.monotonic() + SETTLE_S
    while gpu.used_bytes() > before + SMALL_BYTES and time.monotonic() < until:
        time.sleep(0.05)
    assert gpu.used_bytes() <= before + SMALL_BYTES
