"""The options of `mpikv plan`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from mpikv.commands import models
from mpikv.commands.numbers import at_least, size, words
from mpikv.commands.plan import units

T = TypeVar("T")

MODES = ("sync", "async")
ALGORITHMS = ("auto", "naive", "ring", "halving_doubling", "hierarchical")

EXAMPLES = """examples:
  mpikv plan --model resnet50 --workers 8..1024 --servers 0,W/2,W --link 10gbit --latency 20us
  mpikv plan --model resnet50 --workers 16 --servers 0,4,8 --link 25gbit --compute-ms 120
  mpikv plan --bytes 16M --workers 2,3,4 --link 200mbit --latency 100us --mtu 9000
  mpikv plan --model resnet18 --workers 4..32 --link 1gbit --compression 2bit --pull fp16
  mpikv plan --model resnet18 --workers 64 --per-host 8 --link 10gbit --json plan.json

W is the number of workers; 8..1024 doubles from 8 to 1024. * marks the fastest synchronous mode of a number of workers,
a an asynchronous one that is faster still. Needs neither MPI nor hosts: the messages of an allreduce are counted, those
to servers and back go over simulated links. See docs/scaling.md."""


def add_parser(commands: Any) -> None:
    """Add `plan` to the commands of `mpikv`."""
    parser = commands.add_parser(
        "plan",
        help="predict the step time on more hosts than are at hand",
        description="Predict the time of a training step for numbers of workers and servers, from the messages that "
        "the store would send.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", choices=models.NAMES, default="resnet50", help="whose gradients (default resnet50)")
    what.add_argument("--bytes", type=size, metavar="SIZE", help="one float32 array instead, e.g. 16M")
    parser.add_argument(
        "--workers", type=_read(units.counts), default="8..1024", metavar="N", help="e.g. 8..1024 (default), or 8,12"
    )
    parser.add_argument(
        "--servers",
        type=_read(units.server_counts),
        default="0,W/2,W",
        metavar="S",
        help="0: allreduce (asynchronous: a server in every worker); default 0,W/2,W",
    )
    parser.add_argument("--modes", type=words(MODES), default=MODES, metavar="M", help="sync, async or both (default)")
    parser.add_argument(
        "--link", type=_read(units.rate), default="10gbit", metavar="RATE", help="of each host, each way (10gbit)"
    )
    parser.add_argument(
        "--latency", type=_read(units.duration), default="20us", metavar="TIME", help="from host to host (20us)"
    )
    parser.add_argument(
        "--mtu", type=at_least(100, 65535), default=1500, metavar="BYTES", help="longest packet (default 1500)"
    )
    parser.add_argument("--per-host", type=at_least(1), default=1, metavar="N", help="workers on each host (default 1)")
    parser.add_argument(
        "--server-hosts",
        choices=("own", "workers"),
        default="own",
        help="servers on hosts of their own (default), or on the workers' hosts in turn, whose links they share",
    )
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="auto", help="of the allreduce (default auto)")
    parser.add_argument(
        "--compression",
        metavar="TYPE",
        help='of what is pushed: fp16, 2bit, int8, topk, ..., or JSON, \'{"type": "topk", "ratio": 0.05}\'; how '
        "fast it is is measured here (default: nothing is compressed)",
    )
    parser.add_argument("--pull", metavar="TYPE", help="of what comes back, such as fp16 (default: as it is)")
    parser.add_argument(
        "--buckets",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keys of an allreduce travel several together, as a Trainer lets them (default), or each by itself",
    )
    parser.add_argument(
        "--optimizer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="owners of an allreduce update what they have added, as with a Trainer (default), or workers get the sum",
    )
    parser.add_argument(
        "--compute-ms",
        type=_milliseconds,
        default=0.0,
        metavar="MS",
        help="a step's computing: adds the step's time, without and with overlap (`Trainer.push_grad`)",
    )
    parser.add_argument(
        "--message-cost",
        type=_read(units.duration),
        metavar="TIME",
        help="a core's work to send or to receive one message (default: measured once, or --calibrate)",
    )
    parser.add_argument("--calibrate", action="store_true", help="measure this machine's cores first, with MPI")
    parser.add_argument("--json", metavar="FILE", help="write settings and all rows; - for standard output")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from mpikv.commands.plan.command import run  # noqa: PLC0415 - it imports the servers

    return run(options)


def _read(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Read a number with units; a mistake is argparse's own error."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _milliseconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of milliseconds from 0 on")
    return number
