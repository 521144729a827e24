"""The table of `mpikv plan`, and the same for JSON.

Columns: workers; servers; mode; what the worker with most sends in one step, in messages and MB of 10^6 bytes; the time
of the exchange; where a step's computing is given, the step's time when the exchange follows it and when both go on
together; what is at work for most of the exchange, with its share of that time (`waiting`: nothing is, since messages
wait for each other).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpikv.commands.plan.outcome import PlannedStep
from mpikv.commands.tables import Column, Table

SYNC_MARK, ASYNC_MARK = "*", "a"


@dataclass
class PlanRow:
    """One line of the table.

    mark: `*` for the fastest synchronous mode of its number of workers, `a` for an asynchronous one that is faster.
    """

    workers: int
    servers: int
    step: PlannedStep
    mark: str = ""

    @property
    def best_s(self) -> float:
        """The time by which modes are compared."""
        return self.step.exchange_s if self.step.overlapped_s is None else self.step.overlapped_s


def mark(rows: Sequence[PlanRow]) -> None:
    """Set the marks."""
    for workers in dict.fromkeys(row.workers for row in rows):
        some = sorted((row for row in rows if row.workers == workers), key=lambda row: row.best_s)
        synchronous = [row for row in some if not row.step.mode.endswith(" async")]
        if some[0] not in synchronous:
            some[0].mark = ASYNC_MARK
        if synchronous:
            synchronous[0].mark = SYNC_MARK


def document(settings: Mapping[str, Any], rows: Sequence[PlanRow]) -> dict[str, Any]:
    """Return the whole plan as plain values; times in seconds."""
    return {"settings": dict(settings), "rows": [_as_dict(row, settings["compute_s"]) for row in rows]}


def _as_dict(row: PlanRow, compute_s: float) -> dict[str, Any]:
    step = row.step
    what, share = step.binds
    return {
        "workers": row.workers,
        "servers": row.servers,
        "mode": step.mode,
        "messages": step.messages,
        "sent_bytes": step.sent_bytes,
        "exchange_s": step.exchange_s,
        "binds": what,
        "busy_share": share,
        "busy_s": dict(step.busy_s),
        "step_s": compute_s + step.exchange_s,
        "overlapped_step_s": step.overlapped_s,
        "mark": row.mark,
    }


def lines(settings: Mapping[str, Any], rows: Sequence[PlanRow]) -> list[str]:
    """Return what was assumed, and the table. settings: of `document`."""
    costs, compute_ms = settings["costs"], 1e3 * settings["compute_s"]
    found = [
        f"# {settings['workload']}; links of {settings['link_bytes_per_s'] * 8 / 1e6:g} Mbit/s each way, "
        f"{settings['latency_s'] * 1e6:g} us, packets of {settings['mtu_bytes']} bytes; workers on each host: "
        f"{settings['per_host']}",
        f"# a core: {costs['message_s'] * 1e6:.3g} us for a message sent or received, {costs['byte_s'] * 1e9:.2g} ns a "
        f"byte; {costs['add_byte_s'] * 1e9:.2g} ns to add one, {costs['copy_byte_s'] * 1e9:.2g} ns to copy one",
    ]
    if settings["codec_costs"]:
        found.append(f"# compression: {settings['compression']}")
    for codec, one in settings["codec_costs"].items():
        speeds = (f"{what} {1e9 * one[f'{what}_s']:.2g}" for what in ("encode", "decode", "add"))
        found.append(f"#   a core, ns for an element by {codec}: {', '.join(speeds)}")
    if compute_ms:
        found.append(f"# a step computes for {compute_ms:g} ms")
    table = Table(
        Column("workers", 7),
        Column("servers", 7),
        Column("", 1),
        Column("mode", max(len(row.step.mode) for row in rows), left=True),
        Column("messages", 8),
        Column("MB", 9),
        Column("exchange ms", 12),
        *((Column("step ms", 10), Column("overlapped", 10)) if compute_ms else ()),
        Column(" binds", 6, left=True),
    )
    found.append(table.head())
    for row in rows:
        step = row.step
        what, share = step.binds
        times_ms = [1e3 * step.exchange_s]
        if compute_ms:
            times_ms += [compute_ms + 1e3 * step.exchange_s, 1e3 * (step.overlapped_s or 0.0)]
        cells = (row.workers, row.servers, row.mark, step.mode, step.messages, f"{step.sent_bytes / 1e6:.2f}")
        found.append(table.line(*cells, *(f"{ms:.2f}" for ms in times_ms), f" {what} {100 * share:.0f} %"))
    return found
