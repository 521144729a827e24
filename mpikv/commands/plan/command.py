"""`mpikv plan`: predicts row after row, and prints the table or writes it as JSON.

Columns: workers; servers; mode; what the worker with most sends in one step, in messages and MB of 10^6 bytes; the time
of the exchange; where a step's computing is given, the step's time when the exchange follows it and when both go on
together; what is at work for most of the exchange, with its share of that time (`waiting`: nothing is, since messages
wait for each other).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mpikv.codecs import compression
from mpikv.codecs.compression import KeyCompression
from mpikv.commands.plan import servers
from mpikv.commands.plan.step import StepSettings, of_bytes, of_model
from mpikv.commands.tables import Column, Table
from mpikv.common.files import place_of, replacing
from mpikv.errors import MpikvError
from mpikv.placement.costs import Costs, Link

BAD_INPUT = 2
SYNC_MARK, ASYNC_MARK = "*", "a"

Row = dict[str, Any]


def run(options: argparse.Namespace) -> int:
    """Predict what the options ask for. Returns the status to exit with: 0, or 2 for what cannot be planned."""
    try:
        if options.json and options.json != "-":
            place_of(options.json)
        costs, settings = _costs(options), _settings(options)
        rows = list(predicted(options, costs, settings))
    except (MpikvError, OSError, TypeError, ValueError) as error:
        print(f"mpikv plan: error: {error}", file=sys.stderr)
        return BAD_INPUT
    mark(rows)
    assumed = {
        "workload": options.model if options.bytes is None else f"{options.bytes} bytes",
        "link_bytes_per_s": options.link,
        "latency_s": options.latency,
        "mtu_bytes": options.mtu,
        "per_host": options.per_host,
        "servers_take": options.servers_take,
        "compression": settings.compression.text,
        "codec_costs": {repr(codec): speed._asdict() for codec, speed in settings.speeds.items()},
        "compute_s": settings.compute_s,
        "costs": asdict(costs),
    }
    text = json.dumps({"settings": assumed, "rows": rows}, indent=1)
    print(text if options.json == "-" else "\n".join(lines(assumed, rows)))
    if options.json and options.json != "-":
        with replacing(options.json) as file:
            file.write(f"{text}\n".encode())
    return 0


def _costs(options: argparse.Namespace) -> Costs:
    if not options.calibrate:
        return Costs()
    from mpikv.commands.plan.calibrate import measured  # noqa: PLC0415 - it starts MPI

    return measured()


def _settings(options: argparse.Namespace) -> StepSettings:
    """Return how steps are made, with codecs as fast as here. ValueError or TypeError for what no store takes."""
    travels, speeds = _compression(options), {}
    if not travels.uncompressed:
        from mpikv.commands.plan.calibrate import speed_of  # noqa: PLC0415 - a second for each

        speeds = {codec: speed_of(codec) for codec in dict.fromkeys((travels.push, travels.pull))}
    return StepSettings(travels, speeds, options.compute_ms / 1e3, options.per_host, take=options.servers_take)


def _compression(options: argparse.Namespace) -> KeyCompression:
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


def predicted(options: argparse.Namespace, costs: Costs, settings: StepSettings) -> Iterator[Row]:
    """Yield every row, in the order of the table; times in seconds. Raises ConfigError for what crosses no link."""
    workload = of_model(options.model) if options.bytes is None else of_bytes(options.bytes)
    link = Link(options.link, options.latency, options.mtu)
    for workers in options.workers:
        for number in dict.fromkeys(count(workers) for count in options.servers):
            for mode in options.modes:
                how = settings._replace(servers=number, synchronous=mode == "sync")
                step = servers.predict(workload, workers, link, costs, how)
                what, share = step.binds
                yield {
                    "workers": workers,
                    "servers": number,
                    "mode": step.mode,
                    "messages": step.messages,
                    "sent_bytes": step.sent_bytes,
                    "exchange_s": step.exchange_s,
                    "binds": what,
                    "busy_share": share,
                    "busy_s": dict(step.busy_s),
                    "step_s": settings.compute_s + step.exchange_s,
                    "overlapped_step_s": step.overlapped_s,
                    "mark": "",
                }


def mark(rows: Sequence[Row]) -> None:
    """Mark the fastest synchronous row of each number of workers, and an asynchronous one that is faster."""
    for workers in dict.fromkeys(row["workers"] for row in rows):
        some = [row for row in rows if row["workers"] == workers]
        some.sort(key=lambda row: row["exchange_s"] if row["overlapped_step_s"] is None else row["overlapped_step_s"])
        synchronous = [row for row in some if not row["mode"].endswith(" async")]
        if some[0] not in synchronous:
            some[0]["mark"] = ASYNC_MARK
        if synchronous:
            synchronous[0]["mark"] = SYNC_MARK


def lines(settings: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
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
        Column("mode", max(len(row["mode"]) for row in rows), left=True),
        Column("messages", 8),
        Column("MB", 9),
        Column("exchange ms", 12),
        *((Column("step ms", 10), Column("overlapped", 10)) if compute_ms else ()),
        Column(" binds", 6, left=True),
    )
    found.append(table.head())
    for row in rows:
        cells = [row[name] for name in ("workers", "servers", "mark", "mode", "messages")]
        cells.append(f"{row['sent_bytes'] / 1e6:.2f}")
        names = ("exchange_s", "step_s", "overlapped_step_s") if compute_ms else ("exchange_s",)
        cells += [f"{1e3 * (row[name] or 0.0):.2f}" for name in names]
        found.append(table.line(*cells, f" {row['binds']} {100 * row['busy_share']:.0f} %"))
    return found
