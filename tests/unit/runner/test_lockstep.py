"""`tests/lockstep.py`: generated tests, run by real jobs, that fail in every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import ROOT, Job, find_mpi, mpirun

MPI = find_mpi("mpich") or find_mpi()  # the one that starts faster
pytestmark = [pytest.mark.thorough, pytest.mark.skipif(MPI is None, reason="no mpirun in this environment")]

CONFTEST = """
from lockstep import comm
import lockstep, report

def pytest_configure(config):
    config.pluginmanager.register(report.Report(), "mpikv-report")
    lockstep.pytest_configure(config)
"""


class Run:
    """A run of generated tests: the job, and the last outcome of each test in the report."""

    def __init__(self, job: Job, report: Path) -> None:
        self.job = job
        lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
        self.outcomes = {line["test"].rpartition("::")[2]: line["outcome"] for line in lines}

    def said(self, text: str) -> int:
        return self.job.output.count(text)


@pytest.fixture
def run(tmp_path: Path):
    def run(n: int, tests: str, *options: str, grace_s: float = 10) -> Run:
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "test_it.py").write_text(f"import os, time, pytest\n{tests}")
        (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\n")
        line = ["python", "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "--with-mpi", *options, str(tmp_path)]
        env = {
            "MPIKV_TEST_LIMIT_S": "30",
            "MPIKV_TEST_GRACE_S": str(grace_s),
            "MPIKV_TEST_REPORT": str(tmp_path / "report"),
        }
        return Run(mpirun(n, line, env=env, timeout_s=60, mpi=MPI), tmp_path / "report")

    return run


MANY = """
def test_sum(comm): assert comm.allreduce(1) == 3
def test_one_fails(comm):
    print('seen by', comm.rank)
    assert comm.rank != 1, 'only the middle one'
def test_after(comm): assert comm.allreduce(1) == 3
@pytest.fixture(params=["setup", "teardown"])
def thing(comm, request):
    assert comm.rank != 1 or request.param == "teardown", "in setup"
    yield
    assert comm.rank != 1 or request.param == "setup", "in teardown"
def test_fixture(thing): pass
def test_some(comm): comm.rank or pytest.skip("not here")
def test_none(comm): pytest.skip("nowhere")
@pytest.mark.xfail(strict=True)
def test_x_on_one(comm): assert comm.rank != 1
@pytest.mark.xfail(strict=True)
def test_x(comm): assert comm.rank > 7
def test_sends(comm):
    if comm.rank == 0: comm.send("stale", dest=1)
    else: assert False
def test_next(comm):  # messages of a failed test do not reach the next
    if comm.rank == 0: comm.send("fresh", dest=1)
    elif comm.rank == 1: assert comm.recv(source=0) == "fresh"
"""


def test_a_test_has_one_outcome_on_all_ranks(run) -> None:
    done = run(3, MANY)
    assert done.job.status == 1, done.job.output
    failed = {"test_one_fails", "test_fixture[setup]", "test_fixture[teardown]", "test_x_on_one", "test_sends"}
    passed = {"test_sum", "test_after", "test_some", "test_x", "test_next"}
    outcomes = {**dict.fromkeys(failed, "failed"), **dict.fromkeys(passed, "passed"), "test_none": "skipped"}
    assert done.outcomes == outcomes, done.job.output
    # Rank 0 alone says so, and which rank brought it.
    assert done.said("test session starts") == 1
    assert done.said("5 failed, 4 passed, 1 skipped, 1 xfailed") == 1
    assert done.said("failed on rank 1 of 3:") >= 1
    assert done.said("seen by 1") == done.said("AssertionError: only the middle one") == 1
    assert done.said("seen by 0") == done.said("seen by 2") == 0
    for part in ("setup", "teardown"):
        assert done.said(f"AssertionError: in {part}") == 1


def test_a_deadlock_ends_with_all_stacks(run) -> None:
    done = run(
        3,
        "def test_before(): pass\n"
        "@pytest.mark.timeout(3)\n"
        "def test_stuck(comm):\n"
        "    wait_here(comm) if comm.rank == 1 else comm.recv(source=1)\n"
        "def wait_here(comm):\n    comm.recv(source=0)\n"
        "def test_never(): pass\n",
    )
    assert not done.job.timed_out
    assert done.job.status not in (0, 1)
    assert done.job.ranks_left == []
    for rank in range(3):
        assert done.said(f"--- stacks of rank {rank} of 3") == 1
    assert done.said("in wait_here") == 1  # rank 1's own place
    assert done.said("in test_stuck") == 3
    assert done.outcomes == {"test_before": "passed", "test_stuck": "failed"}


def test_a_failure_that_leaves_the_others_waiting(run) -> None:
    done = run(
        2,
        "def test_left(comm):\n    assert comm.rank == 0, 'I fail first'\n    comm.barrier()\n",
        grace_s=2,
    )
    assert not done.job.timed_out
    assert done.job.status not in (0, 1)
    assert done.said("AssertionError: I fail first") == 1
    assert done.said("failure on rank 1 of 2") == 1
    assert done.said("--- stacks of rank 0 of 2") == 1
    assert done.outcomes == {"test_left": "failed"}


def test_a_crash_counts_as_failed(run) -> None:
    done = run(
        2, "def test_crash(comm):\n    comm.barrier()\n    os.kill(os.getpid(), 11) if comm.rank else comm.barrier()"
    )
    assert done.job.status not in (0, 1)
    assert done.outcomes == {"test_crash": "started"}  # and never ended


@pytest.mark.parametrize(
    ("tests", "text"),
    [
        ("if MPI.COMM_WORLD.rank:\n    def test_more(): pass\n", "did not collect the same tests"),
        ("assert MPI.COMM_WORLD.rank == 0, 'cannot even import'\n", "AssertionError: cannot even import"),
    ],
)
def test_different_tests_on_different_ranks(run, tests: str, text: str) -> None:
    done = run(2, f"from mpi4py import MPI\n{tests}def test_both(): pass\n")
    assert done.job.status == 3, done.job.output
    assert done.said(text) >= 1
    assert done.outcomes == {"collection": "failed"}


@pytest.mark.parametrize(
    ("options", "outcomes"), [((), {"test_three": "skipped"}), (("-k", "nothing"), {})], ids=["skipped", "deselected"]
)
def test_a_run_without_an_executed_test_fails(run, options: tuple[str, ...], outcomes: dict[str, str]) -> None:
    done = run(2, "@pytest.mark.mpi(min_size=3)\ndef test_three(comm): pass\n", *options)
    assert done.job.status == 5, done.job.output
    assert done.outcomes == outcomes
    assert done.said("no test was executed on 2 ranks") == bool(outcomes)
