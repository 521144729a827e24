"""`mpikv plan`: predicts row after row, and prints the table or writes it as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpikv.codecs import compression
from mpikv.codecs.compression import Compression
from mpikv.commands.plan import allreduce, servers
from mpikv.commands.plan.allreduce import StepSettings
from mpikv.commands.plan.costs import Costs, Link
from mpikv.commands.plan.report import PlanRow, document, lines, mark
from mpikv.commands.plan.workload import of_bytes, of_model
from mpikv.errors import MpikvError

BAD_INPUT = 2


def run(options: argparse.Namespace) -> int:
    """Predict what the options ask for. Returns the status to exit with: 0, or 2 for what cannot be planned."""
    try:
        if options.json and options.json != "-" and not Path(options.json).absolute().parent.is_dir():
            raise ValueError(f"--json {options.json}: there is no such folder")
        costs, travels = _costs(options), _travels(options)
        rows = list(predicted(options, costs, travels))
    except (MpikvError, TypeError, ValueError) as error:
        print(f"mpikv plan: error: {error}", file=sys.stderr)
        return BAD_INPUT
    mark(rows)
    settings = {
        "workload": options.model if options.bytes is None else f"{options.bytes} bytes",
        "link_bytes_per_s": options.link,
        "latency_s": options.latency,
        "mtu_bytes": options.mtu,
        "per_host": options.per_host,
        "server_hosts": options.server_hosts,
        "algorithm": options.algorithm,
        "compression": travels.compression.text,
        "buckets": travels.bucketed,
        "optimizer": travels.updated,
        "codec_costs": {repr(codec): speed._asdict() for codec, speed in travels.speeds.items()},
        "compute_s": options.compute_ms / 1e3,
        "costs": asdict(costs),
    }
    text = json.dumps(document(settings, rows), indent=1)
    if options.json != "-":
        print("\n".join(lines(settings, rows)))
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(f"{text}\n")
    return 0


def _costs(options: argparse.Namespace) -> Costs:
    if not options.calibrate:
        return Costs()
    from mpikv.commands.plan.calibrate import measured  # noqa: PLC0415 - it starts MPI

    return measured()


def _travels(options: argparse.Namespace) -> StepSettings:
    """Return how keys travel, with codecs as fast as they are here. ValueError or TypeError for what no store takes."""
    found, speeds = _compression(options), {}
    if not found.plain:
        from mpikv.commands.plan.calibrate import speed_of  # noqa: PLC0415 - a second for each

        speeds = {codec: speed_of(codec) for codec in dict.fromkeys((found.push, found.pull))}
    return StepSettings(found, options.buckets, options.optimizer, speeds)


def _compression(options: argparse.Namespace) -> Compression:
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


def predicted(options: argparse.Namespace, costs: Costs, travels: StepSettings) -> Iterator[PlanRow]:
    """Yield every row, in the order of the table. Raises ConfigError for what crosses no link."""
    workload = of_model(options.model) if options.bytes is None else of_bytes(options.bytes)
    link, compute_s = Link(options.link, options.latency, options.mtu), options.compute_ms / 1e3
    for workers in options.workers:
        for number in dict.fromkeys(count(workers) for count in options.servers):
            for mode in options.modes:
                if mode == "sync" and not number:
                    step = allreduce.predict(
                        workload,
                        workers,
                        link,
                        costs,
                        per_host=options.per_host,
                        algorithm=options.algorithm,
                        compute_s=compute_s,
                        travels=travels,
                    )
                else:
                    step = servers.predict(
                        workload,
                        workers,
                        number,
                        link,
                        costs,
                        synchronous=mode == "sync",
                        per_host=options.per_host,
                        shared=options.server_hosts == "workers",
                        compute_s=compute_s,
                        compression=travels.compression,
                        speeds=travels.speeds,
                    )
                yield PlanRow(workers, number, step)
