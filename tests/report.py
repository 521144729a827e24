"""One line of JSON for each test, written while the tests run.

`scripts/test` counts from this file. A line is written when a test starts and one when it has ended, so that a run
that dies in the middle (a crash, MPI_Abort, a time limit) still tells which test it died in: it has started and never
ended, which counts as failed.

Active where the variable MPIKV_TEST_REPORT names a file. MPIKV_TEST_STAGE is copied into every line.
"""

from __future__ import annotations

import json
import os
import time

import pytest

FILE_VARIABLE = "MPIKV_TEST_REPORT"
STAGE_VARIABLE = "MPIKV_TEST_STAGE"
WORSE = ("passed", "skipped", "failed")  # of the reports of set-up, call and tear-down the last of these counts


def write(test: str, outcome: str, reason: str = "", seconds: float = 0) -> None:
    """Append one line. One write of a short line to a file opened for appending is whole, whoever else writes."""
    path = os.environ.get(FILE_VARIABLE)
    if path:
        entry = {"stage": os.environ.get(STAGE_VARIABLE, ""), "test": test, "outcome": outcome, "reason": reason}
        line = json.dumps(entry | {"seconds": round(seconds, 3)})
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


class Report:
    """The pytest plugin."""

    def __init__(self) -> None:
        self._outcome, self._reason, self._began = "passed", "", 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome, self._reason, self._began = "passed", "", time.monotonic()
        write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # An expected failure is reported as skipped; it has run and did what was expected.
        outcome = "passed" if hasattr(report, "wasxfail") and report.outcome == "skipped" else report.outcome
        self._outcome = max(self._outcome, outcome, key=WORSE.index)
        if outcome == "skipped":
            self._reason = _reason(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        write(nodeid, self._outcome, self._reason, time.monotonic() - self._began)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            write(report.nodeid or "collection", "failed")
        elif report.skipped:
            write(report.nodeid, "skipped", _reason(report))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why it was skipped: the last of file, line and reason."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
