"""`mpikv plan` against the measurements in fixtures/plan_measured.md: it still says what stands there, within 15 %."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from jobs import ROOT

from mpikv.commands import models
from mpikv.commands.plan import servers
from mpikv.commands.plan.step import PlannedStep, StepSettings, of_bytes, of_model
from mpikv.placement.costs import Costs, Link

LINK = Link(25e6, 100e-6, 9000)  # of all those measurements
LINE = re.compile(
    r"\| \d \| (?P<what>\w+)(?: MiB)? \| (?P<mode>[\w, ]+) \| (?P<workers>\d)\+(?P<servers>\d)"
    r" \| (?P<measured>\d+) \| (?P<plan>\d+) \| (?P<off>[-+.\d]+) \|"
)


class Row(NamedTuple):
    what: str
    mode: str
    workers: int
    servers: int
    measured_ms: int
    plan_ms: int
    off_percent: float


def rows() -> list[Row]:
    found = []
    for line in (ROOT / "tests" / "fixtures" / "plan_measured.md").read_text().splitlines():
        if match := LINE.fullmatch(line):
            one = match.groupdict()
            numbers = (int(one[name]) for name in ("workers", "servers", "measured", "plan"))
            found.append(Row(one["what"], one["mode"], *numbers, float(one["off"])))
    return found


def predicted(row: Row) -> PlannedStep:
    known = row.what in models.NAMES
    workload = of_model(row.what) if known else of_bytes(int(row.what.rstrip("M")) << 20)
    settings = StepSettings(servers=row.servers, synchronous=row.mode != "servers, async", take=1.0)
    return servers.predict(workload, row.workers, LINK, Costs(), settings)


def test_all_rows_are_found() -> None:
    assert len(rows()) == 37


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.what} {row.mode} {row.workers}+{row.servers}")
def test_the_plan_is_near_what_was_measured(row: Row) -> None:
    plan_ms = 1e3 * predicted(row).exchange_s
    assert abs(plan_ms / row.measured_ms - 1) <= 0.15
    assert plan_ms == pytest.approx(row.plan_ms, abs=0.51)
    assert 100 * (plan_ms / row.measured_ms - 1) == pytest.approx(row.off_percent, abs=0.8)  # of times in whole ms
