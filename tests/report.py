"""One line of JSON for each test, written while the tests run.

`scripts/test` counts from this file. A line is written when a test starts and one when it has ended, so that a run
that dies in the middle (a crash, MPI_Abort, a time limit) still tells which test it died in: it has started and never
ended, which counts as failed. Before all these, one line tells how many tests were collected.

A line of a test that has the mark `whole_job` or `gpu` says so, and one of a test that has failed has the text of its
failure.

Active where the variable MPIKV_TEST_REPORT names a file. MPIKV_TEST_STAGE is copied into every line.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

FILE_VARIABLE = "MPIKV_TEST_REPORT"
STAGE_VARIABLE = "MPIKV_TEST_STAGE"
WHOLE_JOB = "whole_job"  # the mark of a test that starts a real job
GPU = "gpu"  # the mark of a test that needs a GPU
WORSE = ("passed", "skipped", "failed")  # of the reports of set-up, call and tear-down the last of these counts


def write(test: str, outcome: str, seconds: float = 0, **more: Any) -> None:
    """Append one line about a test. more: what else it says, such as `reason`."""
    _append({"stage": os.environ.get(STAGE_VARIABLE, ""), "test": test, "outcome": outcome, "seconds": seconds, **more})


def _append(entry: dict[str, Any]) -> None:
    """One write to a file opened for appending is whole, whoever else writes."""
    path = os.environ.get(FILE_VARIABLE)
    if path:
        with open(path, "ab", buffering=0) as file:
            file.write(json.dumps(entry).encode() + b"\n")


class Report:
    """The pytest plugin."""

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[float, list[pytest.TestReport]]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        _append({"collected": len(session.items)})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._under_way[nodeid] = time.monotonic(), []
        write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._under_way[report.nodeid][1].append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        began, reports = self._under_way.pop(nodeid)
        worst = max(reports, key=lambda one: WORSE.index(_outcome(one)))
        outcome, more = _outcome(worst), dict[str, Any]()
        if outcome == "skipped":
            more["reason"] = _reason(worst)
        if outcome == "failed":
            more["text"] = "\n".join(
                part
                for one in reports
                if one.failed
                for part in (one.longreprtext, *(f"{title}:\n{content}" for title, content in one.sections))
            )
        more |= {mark: True for mark in (WHOLE_JOB, GPU) if any(mark in one.keywords for one in reports)}
        write(nodeid, outcome, round(time.monotonic() - began, 3), **more)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            write(report.nodeid or "collection", "failed")
        elif report.skipped:
            write(report.nodeid, "skipped", reason=_reason(report))


def _outcome(report: pytest.TestReport) -> str:
    """An expected failure is reported as skipped; it has run and did what was expected."""
    return "passed" if hasattr(report, "wasxfail") and report.outcome == "skipped" else report.outcome


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why it was skipped: the last of file, line and reason."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
