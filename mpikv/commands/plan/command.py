"""`mpikv plan`: predicts row after row, and prints the table or writes it as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mpikv.codecs import compression
from mpikv.codecs.compression import KeyCompression
from mpikv.commands.plan import allreduce, hybrid, servers
from mpikv.commands.plan.report import PlanRow, document, lines, mark
from mpikv.commands.plan.workload import StepSettings, of_bytes, of_model
from mpikv.common.files import place_of, replacing
from mpikv.errors import MpikvError
from mpikv.placement.costs import Costs, Link

BAD_INPUT = 2


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
        "server_hosts": options.server_hosts,
        "servers_take": options.servers_take,
        "algorithm": options.algorithm,
        "compression": settings.compression.text,
        "buckets": settings.bucketed,
        "optimizer": settings.updated,
        "codec_costs": {repr(codec): speed._asdict() for codec, speed in settings.speeds.items()},
        "compute_s": settings.compute_s,
        "costs": asdict(costs),
    }
    text = json.dumps(document(assumed, rows), indent=1)
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
    return StepSettings(
        travels,
        speeds,
        options.compute_ms / 1e3,
        options.per_host,
        bucketed=options.buckets,
        updated=options.optimizer,
        algorithm=options.algorithm,
        shared=options.server_hosts == "workers",
        take=options.servers_take,
    )


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


def predicted(options: argparse.Namespace, costs: Costs, settings: StepSettings) -> Iterator[PlanRow]:
    """Yield every row, in the order of the table. Raises ConfigError for what crosses no link."""
    workload = of_model(options.model) if options.bytes is None else of_bytes(options.bytes)
    link = Link(options.link, options.latency, options.mtu)
    for workers in options.workers:
        for number in dict.fromkeys(count(workers) for count in options.servers):
            for mode in options.modes:
                how = settings._replace(servers=number, synchronous=mode == "sync")
                predict = servers.predict if mode == "async" else hybrid.predict if number else allreduce.predict
                yield PlanRow(workers, number, predict(workload, workers, link, costs, how))
