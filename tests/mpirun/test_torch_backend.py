"""Jobs whose ranks use the backend mpikv of torch.distributed, under `mpirun` and with nothing else set; and a program
for Horovod with the import changed: process sets, join, compression objects, sparse gradients.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import frameworks
import pytest
from jobs import Job, mpirun

frameworks.need("torch")

HERE = Path(__file__).parent
PROGRAM = str(HERE / "process_group_program.py")
SUITE = str(HERE.parents[1] / "scripts" / "pytorch_tests.py")
LIMIT_S = 200  # PyTorch takes long to import on a busy machine
HOST = r"on [^\s:;,)]+"


def run(n: int, *argv: str, **env: str) -> Job:
    return mpirun(n, [sys.executable, *argv], env={"OMP_NUM_THREADS": "1", **env}, timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("case", "n", "hosts"),
    [
        ("trains", 2, 0),
        pytest.param("trains", 3, 2, marks=pytest.mark.thorough),
        pytest.param("sharded", 2, 0, marks=pytest.mark.thorough),
    ],
)
def test_training_is_the_same_as_over_gloo(case: str, n: int, hosts: int) -> None:
    job = run(n, PROGRAM, case, MPIKV_TEST_HOSTS=str(hosts))
    job.check()
    assert sorted(re.findall(r"trained (\d)", job.stdout)) == [str(rank) for rank in range(n)], job.output


@pytest.mark.thorough
def test_a_rank_that_leaves_ends_the_job_and_says_why() -> None:
    """Though torch.distributed puts a hook of its own in front of ours."""
    job = run(2, PROGRAM, "leaves", MPIKV_STALL_WARN_S="off")
    job.check(None)
    assert re.search(rf"\[rank 1 of 2 {HOST}\] sys.exit\(3\) while there was a process group", job.stderr), job.output


@pytest.mark.thorough
def test_pytorchs_own_tests() -> None:
    frameworks.need("expecttest")
    names = HERE / "pytorch_tests.txt"
    job = run(3, SUITE, "--list", str(names))
    job.check()
    assert sorted(re.findall(r"passed (test_\w+)", job.stdout)) == sorted(names.read_text().split()), job.output


@pytest.mark.thorough  # on thread ranks every run makes these calls
@pytest.mark.parametrize(
    ("ranks", "environment"),
    [
        (3, {}),
        (4, {"MPIKV_NUM_SERVERS": "1"}),
        pytest.param(3, {"MPIKV_SHARED_MEMORY": "off"}, marks=pytest.mark.full),
    ],
    ids=["workers", "server", "messages"],
)
def test_a_program_for_horovod(ranks: int, environment: dict[str, str]) -> None:
    job = run(ranks, str(HERE / "horovod_program.py"), **environment)
    job.check()
    assert job.stdout.count("all as Horovod has it") == 3, job.output
