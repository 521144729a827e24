"""`mpikv plan`: simulates each row, shows on a terminal how far it is, prints the table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mpikv.config import Config
from mpikv.errors import MpikvError
from mpikv.plan import allreduce, servers
from mpikv.plan.costs import Costs, Link
from mpikv.plan.outcome import Outcome
from mpikv.plan.report import Row, document, lines, marked
from mpikv.plan.workload import Workload, of_bytes, of_model

BAD_INPUT = 2
SHOWN_S = 0.2  # between two updates of the line that says how far it is


class Case(NamedTuple):
    """A row to be simulated."""

    workers: int
    servers: int
    mode: str


class Machine(NamedTuple):
    """What all rows have in common."""

    workload: Workload
    link: Link
    costs: Costs


def run(options: argparse.Namespace) -> int:
    """The status to exit with: 0, or 2 for what cannot be planned."""
    try:
        if options.json and options.json != "-" and not Path(options.json).absolute().parent.is_dir():
            raise ValueError(f"--json {options.json}: there is no such folder")
        costs = _costs(options)
        rows = _simulated(options, costs)
    except (MpikvError, ValueError) as error:
        print(f"mpikv plan: error: {error}", file=sys.stderr)
        return BAD_INPUT
    marked(rows)
    found = document(options, costs, rows)
    if options.json == "-":
        print(json.dumps(found, indent=1))
        return 0
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines(found["settings"], rows, steps=bool(options.compute_ms))))
    return 0


def _costs(options: argparse.Namespace) -> Costs:
    costs = Costs()
    if options.calibrate:
        from mpikv.plan.calibrate import measured  # noqa: PLC0415 - it starts MPI

        costs = measured()
    return costs if options.message_cost is None else replace(costs, message_s=options.message_cost)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Every row, in the order of the table."""
    for workers in options.workers:
        for number in dict.fromkeys(count(workers) for count in options.servers):
            for mode in options.modes:
                yield Case(workers, number, mode)


def workload_of(options: argparse.Namespace) -> Workload:
    """What is exchanged."""
    return of_model(options.model) if options.bytes is None else of_bytes(options.bytes)


def _simulated(options: argparse.Namespace, costs: Costs) -> list[Row]:
    workload, link = workload_of(options), Link(options.link, options.latency, options.mtu)
    todo, rows = list(cases(options)), []
    progress = _Progress(len(todo))
    for case in todo:
        progress.begin(f"{case.workers} workers, {case.servers} servers, {case.mode}")
        rows.append(
            Row(case.workers, case.servers, simulate(options, case, Machine(workload, link, costs), progress.alive))
        )
    progress.end()
    return rows


def simulate(
    options: argparse.Namespace, case: Case, machine: Machine, alive: Callable[[], None] = lambda: None
) -> Outcome:
    """One row. Raises ConfigError for what cannot be simulated."""
    compute_s = options.compute_ms / 1e3
    if case.mode == "sync" and not case.servers:
        return allreduce.simulate(
            machine.workload,
            case.workers,
            machine.link,
            machine.costs,
            per_host=options.per_host,
            algorithm=options.algorithm,
            compute_s=compute_s,
            alive=alive,
        )
    return servers.simulate(
        machine.workload,
        case.workers,
        case.servers,
        machine.link,
        machine.costs,
        synchronous=case.mode == "sync",
        per_host=options.per_host,
        shared=options.server_hosts == "workers",
        config=Config(),
        compute_s=compute_s,
        alive=alive,
    )


class _Progress:
    """One line on a terminal, nothing elsewhere."""

    def __init__(self, total: int) -> None:
        self._shown = sys.stderr.isatty()
        self._total, self._done, self._what = total, 0, ""
        self._begun_s = self._last_s = time.monotonic()

    def begin(self, what: str) -> None:
        """The next row."""
        self._what = what
        self._done += 1
        self._show()

    def alive(self) -> None:
        """Called by the simulation now and then."""
        if time.monotonic() - self._last_s > SHOWN_S:
            self._show()

    def _show(self) -> None:
        self._last_s = time.monotonic()
        if self._shown:
            text = f"{self._done} of {self._total}: {self._what} ({self._last_s - self._begun_s:.0f} s)"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Remove it."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
