"""The `mpikv` command, also `python -m mpikv`.

Each subcommand is a function that takes the parsed options and returns the status to exit with. It imports what it
needs itself, so that `mpikv --help` is quick and needs no MPI.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from mpikv._version import __version__
from mpikv.commands.bench.options import add_parser as add_bench
from mpikv.commands.bench.start import RankedParser
from mpikv.commands.launch.options import add_launch, add_submit
from mpikv.commands.plan.options import add_parser as add_plan
from mpikv.commands.top import add_parser as add_top
from mpikv.commands.trace.command import add_parser as add_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand. arguments: default the command line's. Returns its status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(words)
    options.words = words  # for a command that starts itself again
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        print("mpikv: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


def _parser() -> argparse.ArgumentParser:
    parser = RankedParser(
        prog="mpikv", description="A key-value store for data-parallel training on MPI.", epilog="mpikv COMMAND --help"
    )
    parser.gone = {"records": "use MXNet's im2rec, or data.RecordWriter as docs/data.md shows it"}
    parser.add_argument("--version", action="version", version=f"mpikv {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    info = commands.add_parser(
        "info",
        help="the MPI library, hosts and ranks, array libraries and settings; alone or under mpirun",
        description="Print the MPI library and what it can do, hosts and ranks, the array libraries found and every "
        "MPIKV_* variable in force. Under `mpirun -n N mpikv info` rank 0 prints for all.",
    )
    info.gone = dict.fromkeys(("--model", "--all", "--placement"), "mpikv plan says what workers and servers exchange")
    info.set_defaults(run=_info)
    add_launch(commands)
    add_submit(commands)
    add_bench(commands)
    add_plan(commands)
    add_trace(commands)
    add_top(commands)
    return parser


def _info(_options: argparse.Namespace) -> int:
    from mpikv.commands.info import show  # noqa: PLC0415

    return show()


if __name__ == "__main__":
    sys.exit(main())
