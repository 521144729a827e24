"""`tests/lockstep.py` and `tests/report.py`: generated tests, run by real jobs, that fail in every way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import ROOT, Job, find_mpi, mpirun

MPI = find_mpi()
pytestmark = pytest.mark.skipif(MPI is None, reason="no mpirun in this environment")

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
        self.outcomes = {line["test"].rpartition("::")[2]: line["outcome"] for line in lines if "test" in line}

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
        return Run(mpirun(n, line, env=env, timeout_s=60), tmp_path / "report")

    return run


def test_all_well_is_said_once(run) -> None:
    done = run(3, "def test_sum(comm): assert comm.allreduce(1) == 3")
    assert done.job.status == 0, done.job.output
    assert done.said("1 passed") == done.said("test session starts") == 1
    assert done.outcomes == {"test_sum": "passed"}


def test_a_failure_on_one_rank_fails_everywhere_and_is_said_once(run) -> None:
    done = run(
        3,
        "def test_two(comm):\n"
        "    print('seen by', comm.rank)\n"
        "    assert comm.rank != 1, 'only the middle one'\n"
        "def test_after(comm): assert comm.allreduce(1) == 3\n",
    )
    assert done.job.status == 1, done.job.output
    assert done.said("failed on rank 1 of 3:") >= 1
    assert done.said("AssertionError: only the middle one") == 1
    assert done.said("seen by 1") == 1
    assert done.said("seen by 0") == done.said("seen by 2") == 0
    assert done.said("1 failed, 1 passed") == 1
    assert done.outcomes == {"test_two": "failed", "test_after": "passed"}


@pytest.mark.parametrize("part", ["setup", "teardown"])
def test_a_failure_in_a_fixture_of_one_rank(run, part: str) -> None:
    done = run(
        2,
        "@pytest.fixture\n"
        "def thing(comm):\n"
        f"    assert comm.rank == 0 or {part == 'teardown'}, 'in setup'\n"
        "    yield\n"
        "    assert comm.rank == 0, 'in teardown'\n"
        "def test_it(thing): pass\n",
    )
    assert done.job.status == 1
    assert done.said(f"AssertionError: in {part}") == 1
    assert done.said("1 failed") == 1
    assert done.outcomes == {"test_it": "failed"}


def test_skipped_on_one_rank_counts_as_executed(run) -> None:
    done = run(
        2,
        "def test_some(comm):\n    if comm.rank == 0: pytest.skip('not here')\n"
        "def test_none(comm): pytest.skip('nowhere')\n",
    )
    assert done.job.status == 0, done.job.output
    assert done.said("1 passed, 1 skipped") == 1
    assert done.outcomes == {"test_some": "passed", "test_none": "skipped"}


def test_an_expected_failure_is_one_on_every_rank(run) -> None:
    done = run(2, "@pytest.mark.xfail(strict=True)\ndef test_x(comm): assert comm.rank != 1\n")
    # Rank 0 did not fail as expected, and says so.
    assert done.job.status == 1
    assert done.outcomes == {"test_x": "failed"}
    assert run(2, "@pytest.mark.xfail(strict=True)\ndef test_x(comm): assert comm.rank > 7\n").job.status == 0


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


def test_different_tests_on_different_ranks(run) -> None:
    done = run(
        2,
        "from mpi4py import MPI\ndef test_both(): pass\nif MPI.COMM_WORLD.rank:\n    def test_more(): pass\n",
    )
    assert done.job.status == 3, done.job.output
    assert done.said("did not collect the same tests") >= 1
    assert done.outcomes == {"collection": "failed"}


def test_an_error_of_collection_on_one_rank(run) -> None:
    done = run(2, "from mpi4py import MPI\nassert MPI.COMM_WORLD.rank == 0, 'cannot even import'\ndef test_a(): pass\n")
    assert done.job.status == 3, done.job.output
    assert done.said("AssertionError: cannot even import") == 1
    assert done.outcomes == {"collection": "failed"}


def test_a_run_without_an_executed_test_fails(run) -> None:
    done = run(2, "@pytest.mark.mpi(min_size=3)\ndef test_three(comm): pass\n")
    assert done.job.status == 5, done.job.output
    assert done.said("no test was executed on 2 ranks") == 1
    assert done.outcomes == {"test_three": "skipped"}
    assert run(2, "", "-k", "nothing").job.status == 5


def test_messages_of_a_failed_test_do_not_reach_the_next(run) -> None:
    done = run(
        2,
        "def test_sends(comm):\n"
        "    if comm.rank == 0: comm.send('stale', dest=1)\n"
        "    else: assert False\n"
        "def test_next(comm):\n"
        "    if comm.rank == 0: comm.send('fresh', dest=1)\n"
        "    else: assert comm.recv(source=0) == 'fresh'\n",
    )
    assert done.outcomes == {"test_sends": "failed", "test_next": "passed"}
