"""The options of `mpikv plan`."""

from __future__ import annotations

import argparse
from typing import Any

from mpikv.commands import models
from mpikv.commands.numbers import at_least, size, words
from mpikv.commands.plan import units

MODES = ("sync", "async")
ALGORITHMS = ("auto", "naive", "ring", "halving_doubling", "hierarchical")

EXAMPLES = """examples:
  mpikv plan --model resnet50 --workers 8..1024 --servers 0,W/2,W --link 10gbit --latency 20us
  mpikv plan --model resnet50 --workers 16 --servers 0,4,8 --link 25gbit --compute-ms 120
  mpikv plan --bytes 16M --workers 2,3,4 --link 200mbit --latency 100us --mtu 9000
  mpikv plan --model resnet18 --workers 4..32 --link 1gbit --compression 2bit --pull fp16
  mpikv plan --model resnet18 --workers 64 --per-host 8 --link 10gbit --json plan.json

W is the number of workers; 8..1024 doubles from 8 to 1024. * marks the fastest synchronous mode of a number of workers,
a an asynchronous one that is faster still. Needs neither MPI nor hosts. docs/scaling.md says how to read the table and
how near it comes to measured times."""


def add_parser(commands: Any) -> None:
    """Add `plan` to the commands of `mpikv`."""
    parser = commands.add_parser(
        "plan",
        help="predict the step time on more hosts than are at hand",
        description="Predict the time of a training step for several numbers of workers and servers. The messages that "
        "the store would send are counted; their time follows from the links that you describe and from what a message "
        "and a byte cost a core.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _exchanged(parser.add_argument_group("what is exchanged"))
    _ranks(parser.add_argument_group("workers and servers"))
    _machine(parser.add_argument_group("links and cores"))
    parser.add_argument("--json", metavar="FILE", help="write settings and all rows; - for standard output")
    parser.set_defaults(run=_run)


def _exchanged(group: Any) -> None:
    what = group.add_mutually_exclusive_group()
    what.add_argument("--model", choices=models.NAMES, default="resnet50", help="whose gradients (default resnet50)")
    what.add_argument("--bytes", type=size, metavar="SIZE", help="one float32 array instead, e.g. 16M")
    group.add_argument(
        "--compression",
        metavar="TYPE",
        help='of what is pushed: fp16, 2bit, int8, topk, ..., or JSON, \'{"type": "topk", "ratio": 0.05}\'. The speed '
        "of the codec is measured on this machine (default: nothing is compressed)",
    )
    group.add_argument("--pull", metavar="TYPE", help="of what comes back, such as fp16 (default: as it is)")
    group.add_argument(
        "--buckets",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keys of an allreduce travel several together, as a Trainer lets them (default), or each by itself",
    )
    group.add_argument(
        "--optimizer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="owners of an allreduce update what they have added, as with a Trainer (default), or workers get the sum",
    )


def _ranks(group: Any) -> None:
    group.add_argument("--workers", type=units.counts, default="8..1024", metavar="N", help="default 8..1024")
    group.add_argument(
        "--servers",
        type=units.server_counts,
        default="0,W/2,W",
        metavar="S",
        help="default 0,W/2,W. 0: allreduce (sync), or a server in every worker (async)",
    )
    group.add_argument(
        "--servers-take",
        type=units.share,
        default="auto",
        metavar="SHARE",
        help="of each key, in synchronous stores, as MPIKV_SERVERS_TAKE: auto (default), all, or 0.0 to 1.0",
    )
    group.add_argument("--modes", type=words(MODES), default=MODES, metavar="M", help="sync, async or both (default)")
    group.add_argument("--algorithm", choices=ALGORITHMS, default="auto", help="of the allreduce (default auto)")
    group.add_argument("--per-host", type=at_least(1), default=1, metavar="N", help="workers on each host (default 1)")
    group.add_argument(
        "--server-hosts",
        choices=("own", "workers"),
        default="own",
        help="servers are on hosts of their own (default), or on the workers' hosts, whose links they share",
    )


def _machine(group: Any) -> None:
    group.add_argument(
        "--link", type=units.rate, default="10gbit", metavar="RATE", help="of each host, each way (default 10gbit)"
    )
    group.add_argument(
        "--latency", type=units.duration, default="20us", metavar="TIME", help="from host to host (default 20us)"
    )
    group.add_argument(
        "--mtu", type=at_least(100, 65535), default=1500, metavar="BYTES", help="longest packet (default 1500)"
    )
    group.add_argument("--calibrate", action="store_true", help="measure this machine's cores first; needs MPI")
    group.add_argument(
        "--compute-ms",
        type=units.milliseconds,
        default=0.0,
        metavar="MS",
        help="for how long a step computes: adds the time of a whole step, without and with overlap",
    )


def _run(options: argparse.Namespace) -> int:
    from mpikv.commands.plan.command import run  # noqa: PLC0415 - it imports the servers

    return run(options)
