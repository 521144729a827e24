"""`mpikv trace DIR` writes a file for Perfetto, `mpikv trace report DIR` prints where the time went."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpikv.commands.trace.analysis import analysed
from mpikv.commands.trace.clocks import ClockOffset, clocks_of
from mpikv.commands.trace.events import events_of
from mpikv.commands.trace.files import Rank, UnreadableError, read_run
from mpikv.commands.trace.report import report
from mpikv.commands.trace.rounds import Name, Timed, TimedRound, in_common_time, rounds_of, too_early
from mpikv.common.files import replacing

BAD_INPUT = 2
EXAMPLES = """examples:
  MPIKV_TIMELINE=traces mpirun -n 4 python train.py          each rank writes what it does to a file in traces
  mpikv trace traces -o trace.json.gz                        for https://ui.perfetto.dev, or chrome://tracing
  mpikv trace report traces                                  where the time went, and what to do

exit status: 0; 2 where there is nothing to read."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "trace",
        help="put the timelines of all ranks together: a file for Perfetto, or a report of where the time went",
        description="Read what the ranks of a job have written with MPIKV_TIMELINE or store.timeline(), of the newest "
        "run in the folder. Clocks of different hosts are put together.",
        usage="mpikv trace [-h] [-o FILE] [report] DIR",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="+", metavar="[report] DIR", help="the folder; after `report`: print the report")
    parser.add_argument(
        "-o", "--output", metavar="FILE", default="trace.json.gz", help="the file to write [trace.json.gz]"
    )
    parser.set_defaults(run=_run, parser=parser)


def _run(options: argparse.Namespace) -> int:
    *action, directory = options.what
    if action not in ([], ["report"]):
        options.parser.error(f"one folder is read, not {', '.join(options.what)}")
    try:
        ranks = read_run(Path(directory))
    except (UnreadableError, OSError) as error:
        print(f"mpikv trace: {error}", file=sys.stderr)
        return BAD_INPUT
    clocks = clocks_of(ranks)
    timed = in_common_time(ranks, clocks)
    rounds = rounds_of(ranks, timed)
    print(*_about(ranks, clocks, rounds), sep="\n")
    if action:
        print(*report(ranks, analysed(ranks, timed, rounds)), sep="\n")
        return 0
    return _write(options.output, ranks, timed, rounds)


def _write(path: str, ranks: Sequence[Rank], timed: Sequence[Timed], rounds: dict[Name, TimedRound]) -> int:
    n = 0
    try:
        with replacing(path) as file:
            packed = gzip.GzipFile(fileobj=file, mode="wb") if path.endswith(".gz") else contextlib.nullcontext(file)
            with packed as out:
                out.write(b'{"displayTimeUnit":"ms","traceEvents":[')
                for n, event in enumerate(events_of(ranks, timed, rounds), 1):
                    out.write(f"{',' if n > 1 else ''}\n{json.dumps(event, separators=(',', ':'))}".encode())
                out.write(b"\n]}\n")
    except OSError as error:
        print(f"mpikv trace: {path}: {error.strerror or error}", file=sys.stderr)
        return BAD_INPUT
    print(f"{path}: {n} events; open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


def _about(ranks: Sequence[Rank], clocks: dict[str, ClockOffset], rounds: dict[Name, TimedRound]) -> Iterable[str]:
    n_records = sum(len(rank.events) for rank in ranks)
    names = ", ".join(rank.name for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    yield f"{names}: {n_records} records"
    damaged = sum(rank.damaged for rank in ranks)
    if damaged:
        yield f"{damaged} lines could not be read and were left out: a rank was killed in them, or its disk was full"
    errors = [clock.error_ns for clock in clocks.values()]
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        yield f"clocks: {len(errors) - len(known)} hosts have not been compared with the first: their times may be off"
    elif len(known) > 1:
        yield f"clocks: {len(known)} hosts, put together to {max(known) / 1e3:.0f} us"
    n, wrong, most_us = too_early(ranks, rounds)
    if wrong:
        yield f"clocks: {wrong} of {n} results seem to come before what they were made of, by up to {most_us:.0f} us"
    elif n:
        yield f"clocks: all {n} results come after what they were made of"
