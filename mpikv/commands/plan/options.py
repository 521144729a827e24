"""The options of `mpikv plan`, and readers of its numbers, whose ArgumentTypeError says what to write instead."""

from __future__ import annotations

import argparse
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

from mpikv.commands import models
from mpikv.commands.numbers import at_least, size, words
from mpikv.common import units
from mpikv.config import Config
from mpikv.errors import ConfigError

MODES = ("sync", "async")
MOST = 16384  # workers
_SHARE = re.compile(r"(\d*)\s*w(?:\s*/\s*(\d+))?", re.IGNORECASE)

EXAMPLES = """examples:
  mpikv plan --model resnet50 --workers 8..1024 --servers 0,W/2,W --link 10gbit --latency 20us
  mpikv plan --model resnet50 --workers 16 --servers 0,4,8 --link 25gbit --compute-ms 120
  mpikv plan --bytes 16M --workers 2,3,4 --link 200mbit --latency 100us --mtu 9000
  mpikv plan --model resnet18 --workers 4..32 --link 1gbit --compression 2bit --pull fp16
  mpikv plan --model resnet18 --workers 64 --per-host 8 --link 10gbit --json plan.json

W is the number of workers; 8..1024 doubles from 8 to 1024. * marks the fastest synchronous mode of a number of workers,
a an asynchronous one that is faster still. Needs neither MPI nor hosts. docs/scaling.md says how to read the table and
how near it comes to measured times."""

AS_A_TRAINER = "the plan is of a Trainer's step, by the algorithm that the store chooses"
GONE = {
    **dict.fromkeys(("--buckets", "--no-buckets", "--optimizer", "--no-optimizer", "--algorithm"), AS_A_TRAINER),
    "--server-hosts": "the plan's servers are on hosts of their own",
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict the step time on more hosts than are at hand",
        description="Predict the time of a training step for several numbers of workers and servers. The messages that "
        "the store would send are counted; their time follows from the links that you describe and from what a message "
        "and a byte cost a core.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.gone = GONE

    def takes(flag: str, metavar: str, read: Any, default: Any, meaning: str) -> None:
        parser.add_argument(flag, metavar=metavar, type=read, default=default, help=meaning)

    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", choices=models.NAMES, default="resnet50", help="whose gradients (default resnet50)")
    what.add_argument("--bytes", type=size, metavar="SIZE", help="one float32 array instead, e.g. 16M")
    takes(
        "--compression",
        "TYPE",
        str,
        None,
        'of what is pushed: fp16, 2bit, int8, topk, ..., or JSON, \'{"type": "topk", "ratio": 0.05}\'. The speed '
        "of the codec is measured on this machine (default: nothing is compressed)",
    )
    takes("--pull", "TYPE", str, None, "of what comes back, such as fp16 (default: as it is)")
    takes("--workers", "N", counts, "8..1024", "default 8..1024")
    takes(
        "--servers",
        "S",
        server_counts,
        "0,W/2,W",
        "default 0,W/2,W. 0: allreduce (sync), or a server in every worker (async)",
    )
    takes(
        "--servers-take",
        "SHARE",
        share,
        "auto",
        "of each key, in synchronous stores, as MPIKV_SERVERS_TAKE: auto (default), all, or 0.0 to 1.0",
    )
    takes("--modes", "M", words(MODES), MODES, "sync, async or both (default)")
    takes("--per-host", "N", at_least(1), 1, "workers on each host (default 1)")
    takes("--link", "RATE", _reads(units.rate), "10gbit", "of each host, each way (default 10gbit)")
    takes("--latency", "TIME", _reads(units.duration), "20us", "from host to host (default 20us)")
    takes("--mtu", "BYTES", at_least(100, 65535), 1500, "longest packet (default 1500)")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine's cores first; needs MPI")
    takes(
        "--compute-ms",
        "MS",
        milliseconds,
        0.0,
        "for how long a step computes: adds the time of a whole step, without and with overlap",
    )
    takes("--json", "FILE", str, None, "write settings and all rows; - for standard output")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from mpikv.commands.plan.command import run  # noqa: PLC0415 - it imports the servers

    return run(options)


# --- readers


def _reads(reader: Callable[[str], float]) -> Callable[[str], float]:
    """Make a reader for argparse of one whose ValueError has the end of a sentence."""

    def parse(text: str) -> float:
        try:
            return reader(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} {error}") from None

    return parse


def share(text: str) -> float | str:
    try:
        found: float | str = Config(servers_take=text).servers_take
    except ConfigError as error:
        raise ArgumentTypeError(str(error).partition(": ")[2]) from None
    return found


def milliseconds(text: str) -> float:
    """Read a number of milliseconds, from 0 on."""
    try:
        return 1e3 * units.duration(f"{text}ms")
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number of milliseconds from 0 on") from None


def counts(text: str) -> list[int]:
    """Read `8..1024` as 8, 16, 32, ... up to 1024, and `8,12,16` as these; both forms may be mixed."""
    found: list[int] = []
    for word in text.split(","):
        first, dots, last = word.strip().partition("..")
        if not first.isdigit() or (dots and not last.isdigit()) or int(first) < 1:
            raise ArgumentTypeError(f"{word!r} is none of the form 8, 8,16 or 8..1024 (doubling)")
        number, end = int(first), int(last or first)
        if end < number:
            raise ArgumentTypeError(f"{word!r} goes downwards")
        if end > MOST:
            raise ArgumentTypeError(f"{word!r} is more than {MOST}, which is the most that can be predicted in minutes")
        while number <= end:
            found.append(number)
            number *= 2
    return list(dict.fromkeys(found))


def server_counts(text: str) -> list[Callable[[int], int]]:
    """Read `0,W/2,W,2W,4`: for each word a function from the number of workers to that of servers, at least one."""
    return [_server_count(word.strip()) for word in text.split(",")]


def _server_count(word: str) -> Callable[[int], int]:
    if word.isdigit():
        number = int(word)
        return lambda workers: number
    found = _SHARE.fullmatch(word)
    if found is None or found[2] == "0" or found[1] == "0":
        raise ArgumentTypeError(f"{word!r} is no number of servers: write 0, 4, W, W/2 or 2W")
    times, divisor = int(found[1] or 1), int(found[2] or 1)
    return lambda workers: max(1, workers * times // divisor)
