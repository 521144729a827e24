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

from mpikv.plan.costs import Costs
from mpikv.plan.outcome import Outcome

SYNC_MARK, ASYNC_MARK = "*", "a"


@dataclass
class Row:
    """One line. mark: `*` the fastest synchronous mode of its number of workers, `a` an asynchronous faster one."""

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
        """What modes are compared by."""
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


def document(options: argparse.Namespace, costs: Costs, rows: Sequence[Row]) -> dict[str, Any]:
    """All of it as plain values; times in seconds."""
    settings = {
        "workload": options.model if options.bytes is None else f"{options.bytes} bytes",
        "link_bytes_per_s": options.link,
        "latency_s": options.latency,
        "mtu_bytes": options.mtu,
        "per_host": options.per_host,
        "server_hosts": options.server_hosts,
        "algorithm": options.algorithm,
        "compute_s": options.compute_ms / 1e3,
        "costs": asdict(costs),
    }
    return {"settings": settings, "rows": [_as_dict(row, settings["compute_s"]) for row in rows]}


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


def lines(settings: Mapping[str, Any], rows: Sequence[Row], *, steps: bool) -> list[str]:
    """What is printed. steps: with the columns of the step."""
    costs = settings["costs"]
    compute_ms = 1e3 * settings["compute_s"]
    found = [
        f"# {settings['workload']}; links of {settings['link_bytes_per_s'] * 8 / 1e6:g} Mbit/s each way, "
        f"{settings['latency_s'] * 1e6:g} us, packets of {settings['mtu_bytes']} bytes; workers "
        f"on each host: {settings['per_host']}",
        f"# a core: {costs['message_s'] * 1e6:.3g} us for a message sent or received, {costs['byte_s'] * 1e9:.2g} ns a "
        f"byte; {costs['add_byte_s'] * 1e9:.2g} ns to add one, {costs['copy_byte_s'] * 1e9:.2g} ns to copy one",
    ]
    if steps:
        found.append(f"# a step computes for {compute_ms:g} ms")
    width = max(len("mode"), *(len(row.outcome.mode) for row in rows))
    head = f"{'workers':>7} {'servers':>7}   {'mode':<{width}} {'messages':>8} {'MB':>9} {'exchange ms':>12}"
    if steps:
        head += f" {'step ms':>10} {'overlapped':>10}"
    found.append(f"{head}  binds")
    for row in rows:
        one = row.outcome
        what, share = one.binds
        line = f"{row.workers:>7} {row.servers:>7} {row.mark or ' '} {one.mode:<{width}} {one.messages:>8}"
        line += f" {one.sent_bytes / 1e6:9.2f} {1e3 * one.exchange_s:12.2f}"
        if steps:
            line += f" {compute_ms + 1e3 * one.exchange_s:10.2f} {1e3 * (one.overlapped_s or 0.0):10.2f}"
        found.append(f"{line}  {what} {100 * share:.0f} %")
    if any("all alike" in row.outcome.simulated for row in rows):
        found.append("# allreduce: where all ranks do the same at the same time, those of one host were simulated")
    if any("stand for" in row.outcome.simulated for row in rows):
        found.append("# servers: all were simulated; of many workers some, each counted as often as there are more")
    return found
