"""The table of `mpikv plan`, and the same for JSON.

Columns: workers; servers; mode; what the worker with most sends in one step, in messages and MB of 10^6 bytes; the time
of the exchange; where a step's computing is given, the step's time when the exchange follows it and when both go on
together; what is at work for most of the exchange, with its share of that time (`waiting`: nothing is, since messages
wait for each other or ranks nap).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpikv.commands import tables
from mpikv.commands.plan.allreduce import Step
from mpikv.commands.plan.costs import Costs
from mpikv.commands.plan.outcome import Outcome
from mpikv.commands.tables import Column

SYNC_MARK, ASYNC_MARK = "*", "a"


@dataclass
class Row:
    """One line of the table.

    mark: `*` for the fastest synchronous mode of its number of workers, `a` for an asynchronous one that is faster.
    """

    workers: int
    servers: int
    outcome: Outcome
    mark: str = ""

    @property
    def is_async(self) -> bool:
        """Whether its workers do not wait for each other."""
        return self.outcome.mode.endswith(" async")

    @property
    def best_s(self) -> float:
        """The time by which modes are compared."""
        return self.outcome.exchange_s if self.outcome.overlapped_s is None else self.outcome.overlapped_s


def marked(rows: Sequence[Row]) -> None:
    """Set the marks."""
    for workers in dict.fromkeys(row.workers for row in rows):
        some = [row for row in rows if row.workers == workers]
        best_s = float("inf")
        synchronous = [row for row in some if not row.is_async]
        if synchronous:
            best = min(synchronous, key=lambda row: row.best_s)
            best.mark, best_s = SYNC_MARK, best.best_s
        faster = [row for row in some if row.is_async and row.best_s < best_s]
        if faster:
            min(faster, key=lambda row: row.best_s).mark = ASYNC_MARK


def settings_of(options: argparse.Namespace, costs: Costs, step: Step) -> dict[str, Any]:
    """Return what is assumed, as plain values; times in seconds."""
    return {
        "workload": options.model if options.bytes is None else f"{options.bytes} bytes",
        "link_bytes_per_s": options.link,
        "latency_s": options.latency,
        "mtu_bytes": options.mtu,
        "per_host": options.per_host,
        "server_hosts": options.server_hosts,
        "algorithm": options.algorithm,
        "compression": step.compression.text,
        "buckets": step.bucketed,
        "optimizer": step.updated,
        "codec_costs": {repr(codec): speed._asdict() for codec, speed in step.speeds.items()},
        "compute_s": options.compute_ms / 1e3,
        "costs": asdict(costs),
    }


def document(settings: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the whole plan as plain values; times in seconds."""
    return {"settings": dict(settings), "rows": [_as_dict(row, settings["compute_s"]) for row in rows]}


def _as_dict(row: Row, compute_s: float) -> dict[str, Any]:
    found = row.outcome
    what, share = found.binds
    return {
        "workers": row.workers,
        "servers": row.servers,
        "mode": found.mode,
        "messages": found.messages,
        "sent_bytes": found.sent_bytes,
        "exchange_s": found.exchange_s,
        "binds": what,
        "busy_share": share,
        "busy_s": dict(found.busy_s),
        "step_s": compute_s + found.exchange_s,
        "overlapped_step_s": found.overlapped_s,
        "simulated": found.simulated,
        "mark": row.mark,
    }


class Table:
    """What is printed, piece by piece.

    settings: of `document`. mode_width: of the longest mode. steps: whether there is a column for a step.
    """

    def __init__(self, settings: Mapping[str, Any], mode_width: int, *, steps: bool) -> None:
        self._settings = settings
        self._steps = steps
        of_step = (Column("step ms", 10), Column("overlapped", 10)) if steps else ()
        self._table = tables.Table(
            Column("workers", 7),
            Column("servers", 7),
            Column("", 1),
            Column("mode", mode_width, left=True),
            Column("messages", 8),
            Column("MB", 9),
            Column("exchange ms", 12),
            *of_step,
            Column(" binds", 6, left=True),
        )

    def head(self) -> list[str]:
        """Return what was assumed, and the titles of the columns."""
        settings, costs = self._settings, self._settings["costs"]
        found = [
            f"# {settings['workload']}; links of {settings['link_bytes_per_s'] * 8 / 1e6:g} Mbit/s each way, "
            f"{settings['latency_s'] * 1e6:g} us, packets of {settings['mtu_bytes']} bytes; workers "
            f"on each host: {settings['per_host']}",
            f"# a core: {costs['message_s'] * 1e6:.3g} us for a message sent or received, {costs['byte_s'] * 1e9:.2g} "
            f"ns a byte; {costs['add_byte_s'] * 1e9:.2g} ns to add one, {costs['copy_byte_s'] * 1e9:.2g} ns to copy "
            "one",
        ]
        if settings["codec_costs"]:
            found.append(f"# compression: {settings['compression']}")
        for codec, one in settings["codec_costs"].items():
            speeds = (f"{what} {1e9 * one[f'{what}_s']:.2g}" for what in ("encode", "decode", "add"))
            found.append(f"#   a core, ns for an element by {codec}: {', '.join(speeds)}")
        if self._steps:
            found.append(f"# a step computes for {1e3 * settings['compute_s']:g} ms")
        return [*found, self._table.head()]

    def line(self, row: Row) -> str:
        """Return one row."""
        one, compute_ms = row.outcome, 1e3 * self._settings["compute_s"]
        what, share = one.binds
        times_ms = [1e3 * one.exchange_s]
        if self._steps:
            times_ms += [compute_ms + 1e3 * one.exchange_s, 1e3 * (one.overlapped_s or 0.0)]
        return self._table.line(
            row.workers,
            row.servers,
            row.mark,
            one.mode,
            one.messages,
            f"{one.sent_bytes / 1e6:.2f}",
            *(f"{time_ms:.2f}" for time_ms in times_ms),
            f" {what} {100 * share:.0f} %",
        )

    @staticmethod
    def foot(rows: Sequence[Row]) -> list[str]:
        """Say what was not simulated rank by rank."""
        if any(row.outcome.simulated for row in rows):
            return ["# servers: all were simulated; of many workers some, each counted as often as there are more"]
        return []
