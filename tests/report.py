"""One line of JSON for each outcome of a test, written while the tests run; `scripts/test` counts from this file.

A line when a test starts, and one for each outcome: so a run that dies in the middle (a crash, MPI_Abort, a time limit)
shows the test in which it died, which has started and has no outcome. Active where the variable MPIKV_TEST_REPORT names
a file. Under pytest-xdist the process that divides the tests writes, under mpirun each rank: the same (tests/mpi).
"""

from __future__ import annotations

import json
import os

import pytest

FILE_VARIABLE = "MPIKV_TEST_REPORT"
WHOLE_JOB = "whole_job"  # the mark of a test that starts a real job
GPU = "gpu"  # the mark of a test that needs a GPU


def write(test: str, outcome: str, reason: str = "", *, whole_job: bool = False) -> None:
    """Append a line. One write to a file opened for appending is whole, whoever else writes."""
    if path := os.environ.get(FILE_VARIABLE):
        entry = {"test": test, "outcome": outcome, "reason": reason, "whole_job": whole_job}
        with open(path, "ab", buffering=0) as file:
            file.write(json.dumps(entry).encode() + b"\n")


def write_report(report: pytest.TestReport | pytest.CollectReport) -> None:
    """An expected failure, which pytest reports as skipped, has passed. Of a skipped test: also why it was skipped."""
    outcome = "passed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""  # the last of file, line and reason
    marks = getattr(report, "keywords", ())
    write(report.nodeid or "collection", outcome, reason.removeprefix("Skipped: "), whole_job=WHOLE_JOB in marks)


class Report:
    """The pytest plugin."""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            write_report(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            write_report(report)
