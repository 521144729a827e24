"""`mpikv plan`: predicts row after row, says how far it is, prints each number of workers as soon as it is known."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mpikv.codecs import compression
from mpikv.codecs.compression import Compression
from mpikv.commands.plan import allreduce, servers
from mpikv.commands.plan.allreduce import Step
from mpikv.commands.plan.costs import Costs, Link
from mpikv.commands.plan.outcome import Outcome
from mpikv.commands.plan.report import Row, Table, document, marked, settings_of
from mpikv.commands.plan.workload import Workload, of_bytes, of_model
from mpikv.common.progress import Progress
from mpikv.config import Config
from mpikv.errors import MpikvError

BAD_INPUT = 2


class Case(NamedTuple):
    """A row to be predicted."""

    workers: int
    servers: int
    mode: str


class Machine(NamedTuple):
    """What all rows have in common."""

    workload: Workload
    link: Link
    costs: Costs
    step: Step


def run(options: argparse.Namespace) -> int:
    """Predict what the options ask for. Returns the status to exit with: 0, or 2 for what cannot be planned."""
    try:
        if options.json and options.json != "-" and not Path(options.json).absolute().parent.is_dir():
            raise ValueError(f"--json {options.json}: there is no such folder")
        step = step_of(options, compression_of(options))
        costs = _costs(options)
        settings = settings_of(options, costs, step)
        rows = _predicted(options, costs, step, None if options.json == "-" else _table(options, settings, step))
    except (MpikvError, TypeError, ValueError) as error:
        print(f"mpikv plan: error: {error}", file=sys.stderr)
        return BAD_INPUT
    if options.json:
        text = json.dumps(document(settings, rows), indent=1)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(f"{text}\n")
    return 0


def compression_of(options: argparse.Namespace) -> Compression:
    """Return how values travel. Raises ValueError or TypeError for what no store would take."""
    params = {"type": "none"} if options.compression is None else _params("--compression", options.compression)
    return compression.make(params if options.pull is None else params | {"pull": _params("--pull", options.pull)})


def _params(option: str, text: str) -> dict[str, Any]:
    """Read a codec: its name, or JSON."""
    if not text.startswith("{"):
        return {"type": text}
    try:
        params: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from None
    return params


def step_of(options: argparse.Namespace, travels: Compression) -> Step:
    """Return how keys travel, with codecs as fast as they are on this machine."""
    speeds = {}
    if not travels.plain:
        from mpikv.commands.plan.calibrate import speed_of  # noqa: PLC0415 - a second for each

        speeds = {codec: speed_of(codec) for codec in dict.fromkeys((travels.push, travels.pull))}
    return Step(travels, options.buckets, options.optimizer, speeds)


def _table(options: argparse.Namespace, settings: Mapping[str, Any], step: Step) -> Table:
    """Return the table of these cases. Raises ConfigError where they cannot be predicted."""
    workload = workload_of(options)
    width = max(len(mode_of(options, case, workload, step)) for case in cases(options))
    return Table(settings, width, steps=bool(options.compute_ms))


def _costs(options: argparse.Namespace) -> Costs:
    costs = Costs()
    if options.calibrate:
        from mpikv.commands.plan.calibrate import measured  # noqa: PLC0415 - it starts MPI

        costs = measured()
    return costs if options.message_cost is None else replace(costs, message_s=options.message_cost)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield every row, in the order of the table."""
    for workers in options.workers:
        for number in dict.fromkeys(count(workers) for count in options.servers):
            for mode in options.modes:
                yield Case(workers, number, mode)


def workload_of(options: argparse.Namespace) -> Workload:
    """Return what is exchanged."""
    return of_model(options.model) if options.bytes is None else of_bytes(options.bytes)


def _predicted(options: argparse.Namespace, costs: Costs, step: Step, table: Table | None) -> list[Row]:
    """Predict all rows, and print the table as far as it is known.

    It is known for one number of workers at a time, since the marks compare the rows of one number.
    """
    workload, link = workload_of(options), Link(options.link, options.latency, options.mtu)
    todo, rows = list(cases(options)), []
    with Progress("mpikv plan", len(todo), "rows") as progress:
        if table is not None:
            progress.say(*table.head())
        for _, group in itertools.groupby(todo, key=lambda case: case.workers):
            some: list[Row] = []
            for case in group:
                progress.update(what=f"{case.workers} workers, {case.servers} servers, {case.mode}")
                outcome = predict(options, case, Machine(workload, link, costs, step), progress.update)
                some.append(Row(case.workers, case.servers, outcome))
                progress.update(1)
            marked(some)
            rows += some
            if table is not None:
                progress.say(*map(table.line, some))
        if table is not None:
            progress.say(*table.foot(rows))
    return rows


def mode_of(options: argparse.Namespace, case: Case, workload: Workload, step: Step) -> str:
    """Return the mode of its row, before it is predicted."""
    if case.mode == "sync" and not case.servers:
        return allreduce.mode_of(
            workload, case.workers, per_host=options.per_host, algorithm=options.algorithm, step=step
        )
    return servers.mode_of(case.servers, synchronous=case.mode == "sync")


def predict(
    options: argparse.Namespace, case: Case, machine: Machine, alive: Callable[[], None] = lambda: None
) -> Outcome:
    """Predict one row: an allreduce from its counts, servers by simulation. ConfigError for what crosses no link."""
    compute_s = options.compute_ms / 1e3
    if case.mode == "sync" and not case.servers:
        return allreduce.predict(
            machine.workload,
            case.workers,
            machine.link,
            machine.costs,
            per_host=options.per_host,
            algorithm=options.algorithm,
            compute_s=compute_s,
            step=machine.step,
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
        compression=machine.step.compression,
        speeds=machine.step.speeds,
        alive=alive,
    )
