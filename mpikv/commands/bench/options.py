"""The options of `mpikv bench` and its subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

from mpikv import config
from mpikv.commands import models
from mpikv.commands.bench.choices import DEVICE_PATHS, DTYPES, TRAIN_VERSUS, TRAIN_WAYS, TRAINED
from mpikv.commands.numbers import at_least, seconds, size, words

ALGORITHMS = tuple(name for name in config.ALGORITHMS if name not in ("auto", "nccl"))  # of arrays in host memory

EXAMPLES = """examples:
  mpikv bench allreduce -n 2                         2 ranks here, 4 bytes to 256 MiB
  mpikv bench allreduce -n 4 -b 64K -e 64M --algorithms all --plot allreduce.png
  mpirun -n 4 mpikv bench allreduce -e 1M --json run.json
  mpikv bench pushpull -n 2 --keys 1000 --key-bytes 1K
  mpikv bench model -n 2 --model resnet50
  mpikv bench train -n 2 --model resnet18 --batch 4,32
  mpikv bench ps -n 3 --servers 1 -e 64M
  mpikv bench allreduce -n 2 --device                arrays on the GPU, by each path that works here
  mpirun --hostfile hosts -n 4 mpikv bench link

Without mpirun, -n starts one. Times are of the slowest rank; every result is checked, and a wrong one ends the command
with status 1. docs/performance.md says how to read the tables."""


def _counts(text: str) -> tuple[int, ...]:
    """Read whole numbers, as in 4,32."""
    return tuple(map(at_least(1), text.split(",")))


def _option(
    meaning: str, default: Any = None, read: Any = None, metavar: str | None = None, **more: Any
) -> dict[str, Any]:
    return {"help": meaning, "default": default, "type": read, "metavar": metavar, **more}


def _network(names: tuple[str, ...]) -> dict[str, Any]:
    return _option("the network (default resnet18)", "resnet18", choices=names)


COMMON = {
    "-n": _option("start mpirun with this many ranks", None, at_least(1), "RANKS"),
    "--json": _option("write machine, versions, settings and all rows", metavar="FILE"),
}
TIMED = {
    "--iterations": _option("default: as many as fit into --seconds", None, at_least(1), "N"),
    "--seconds": _option("for what takes turns, checks included (default %(default)s)", 0.5, seconds),
}
SIZES = {
    "-b,--min-bytes": _option("smallest size (default %(default)s); K, M, G: 1024, 1024^2, 1024^3", "4", size, "SIZE"),
    "-e,--max-bytes": _option("largest size (default %(default)s)", "64M", size, "SIZE"),
    "-f,--factor": _option("from size to size (default %(default)s)", 4, at_least(2)),
    "--plot": _option(
        "draw bandwidth over size, by default into %(const)s here; needs matplotlib",
        metavar="FILE",
        nargs="?",
        const="mpikv-bench-{kind}.png",
    ),
}
DTYPE = {"--dtype": _option("of all values (default %(default)s)", "float32", choices=DTYPES)}
VERSUS = {"--vs": _option("compare with PyTorch's Gloo", (), words(("gloo",)), "gloo")}
DEVICE = {
    "--device": {
        "action": "store_true",
        "help": "arrays on the GPU of each worker, by each path that works here, beside what the GPU's memory and "
        "page-locked copies allow",
    },
}
PATHS = {
    "--device-paths": _option(
        f"of MPIKV_DEVICE_PATH, with --device (default {','.join(DEVICE_PATHS)})",
        (),
        words((*DEVICE_PATHS, "host")),
        "A,B",
    )
}
TRAINING = {
    "--model": _network(tuple(TRAINED)),
    "--batch": _option("examples of one rank in a step (default 4,32; on GPUs 128)", None, _counts, "A,B"),
    "--image-size": _option("a side of an image (default resnet18 224, else 28)", None, at_least(8), "PIXELS"),
    "--device": {"action": "store_true", "help": "train on the GPU of each worker"},
    "--steps": _option("steps of a way in a turn (default %(default)s)", 2, at_least(1), "N"),
    "--bucket-bytes": _option("of DistributedModel (default: its own)", None, size, "SIZE"),
    "--threads": _option("of PyTorch in each rank (default: cores / ranks of the host)", None, at_least(1), "N"),
    "--ways": _option(f"default {','.join(TRAIN_WAYS)}", TRAIN_WAYS, words(TRAIN_WAYS), "A,B"),
    "--vs": _option("default gloo,raw,raw-each, on GPUs nccl, too", (), words(TRAIN_VERSUS), "A,B"),
}


class Kind(NamedTuple):
    """A benchmark. options: by their names, with the arguments that argparse gets. defaults: other ones than theirs."""

    title: str
    description: str
    options: Mapping[str, Mapping[str, Any]]
    defaults: Mapping[str, Any] = {}


KINDS = {
    "allreduce": Kind(
        "one key, pushpull without an optimizer, against MPI_Allreduce in place",
        "Sum one array over the ranks, in place: store.pushpull with ordinary and with shared arrays, by each "
        "algorithm that --algorithms names, and MPI_Allreduce.",
        {
            **TIMED,
            **SIZES,
            "--algorithms": _option(f"{', '.join(ALGORITHMS)} or all", (), words(ALGORITHMS), "A,B"),
            **DTYPE,
            **VERSUS,
            **DEVICE,
            **PATHS,
        },
        {"max_bytes": "256M"},
    ),
    "pushpull": Kind(
        "in place, out of place, with an optimizer; or many keys in one call",
        "The same exchange in its variants: in place, with out=, with SGD where the owner is. With --keys: many keys "
        "in one call, ordinary and shared arrays, against one MPI_Allreduce per key.",
        {
            **TIMED,
            **SIZES,
            "--keys": _option("N keys in one call instead of sizes", None, at_least(1), "N"),
            "--key-bytes": _option("of each key (default %(default)s)", "1K", size, "SIZE"),
            **DTYPE,
            **VERSUS,
            **DEVICE,
            **PATHS,
        },
    ),
    "model": Kind(
        "the gradients of a network, in one pushpull",
        "Exchange the gradients of a network in one pushpull of all its arrays, the last layer's first, against raw "
        "MPI with one call per array and with all arrays packed into one buffer.",
        {**TIMED, "--model": _network(models.NAMES), **DTYPE, **VERSUS, **DEVICE, **PATHS},
    ),
    "train": Kind(
        "training steps of a PyTorch network, each way of exchanging gradients against the step alone",
        "Train a network with PyTorch, on the CPU or with --device on GPUs: DistributedModel, DistributedOptimizer, "
        "Trainer, and DDP over the backend 'mpikv', beside DDP over Gloo and raw MPI after the backward pass, all "
        "against the step without any exchange. --iterations are rounds, in which each way makes --steps steps; "
        "--seconds is time for each --batch.",
        {**TIMED, **TRAINING},
        {"seconds": 60.0},
    ),
    "ps": Kind(
        "pushpull through parameter servers",
        "One key pushed to and pulled from server ranks: without an optimizer, with SGD on the servers, and "
        "asynchronous with SGD; beside MPI_Allreduce over the workers alone.",
        {
            **TIMED,
            **SIZES,
            "--servers": _option("of the ranks (default %(default)s)", 1, at_least(1), "S"),
            **DTYPE,
            **DEVICE,
        },
    ),
    "link": Kind(
        "latency and bandwidth between two ranks of a host, and from each host to the next",
        "Measure the links by MPI between two ranks of one host and from each host to the next: half a round trip of 8 "
        "bytes, and a stream of long messages in one direction. The bound of an allreduce across hosts, in the other "
        "tables, follows from the slowest of these streams. With --save, MPIKV_LINK=FILE spares stores a measurement "
        "of their own, and lets them divide keys between workers and servers alike in every run.",
        {"--save": _option("write what stores need to know of each host's link, for MPIKV_LINK", None, None, "FILE")},
    ),
}
GONE = {
    "codec": "docs/compression.md has the sizes of encoded values, store.stats()['compressed_keys'] the times of keys",
    "wire": "use link or allreduce; docs/compression.md has the sizes of encoded values",
}


def add_parser(commands: Any) -> None:
    """Add `bench` to the commands of `mpikv`."""
    how: dict[str, Any] = {"epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter}
    bench = commands.add_parser(
        "bench",
        help="the store beside raw MPI, Gloo and the machine's limit; under mpirun, or with -n",
        description="Time the store, interleaved with raw MPI (and Gloo), and print how near both are to what the "
        "memory, the adders and the links of this machine allow.",
        **how,
    )
    kinds = bench.add_subparsers(metavar="WHAT", required=True, dest="kind")
    for name, kind in KINDS.items():
        parser = kinds.add_parser(name, help=kind.title, description=kind.description, **how)
        for flags, what in {**COMMON, **kind.options}.items():
            constant = {"const": what["const"].format(kind=name)} if "const" in what else {}
            parser.add_argument(*flags.split(","), **{**what, **constant})
        parser.set_defaults(**kind.defaults)
    bench.gone = GONE
    bench.set_defaults(run=_run, dtype="float32", plot=None, device=False)


def _run(options: argparse.Namespace) -> int:
    from mpikv.commands.bench.command import run  # noqa: PLC0415 - it imports the store

    return run(options)
