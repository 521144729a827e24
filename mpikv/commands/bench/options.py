"""The options of `mpikv bench` and its subcommands."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from mpikv import config
from mpikv.commands import models
from mpikv.commands.numbers import at_least, keys, seconds, size, words

ALGORITHMS = tuple(name for name in config.ALGORITHMS if name not in ("auto", "nccl"))  # of arrays in host memory
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
FLOATS = DTYPES[:4]  # what an optimizer takes
TRAINED = {"resnet18": 224, "lenet": 28, "mlp": 28}  # networks, and a side of their images in pixels
TRAIN_WAYS = ("model", "optimizer", "trainer", "ddp", "gloo", "nccl", "raw", "raw-each")

EXAMPLES = """examples:
  mpikv bench allreduce -n 2                         2 ranks here, 4 bytes to 256 MiB
  mpikv bench allreduce -n 4 -b 64K -e 64M --algorithms all --plot allreduce.png
  mpirun -n 4 mpikv bench allreduce -e 1M --json run.json
  mpikv bench pushpull -n 2 --keys 1000x4K
  mpikv bench model -n 2 --model resnet50
  mpikv bench train -n 2 --model resnet18 --batch 4,32
  mpikv bench ps -n 3 --servers 1 -e 64M
  mpirun --hostfile hosts -n 4 mpikv bench link

Without mpirun, -n starts one. Times are of the slowest rank; every result is checked, and a wrong one ends the command
with status 1. docs/performance.md says how to read the tables."""


def _option(meaning: str, read: Any = None, default: Any = None, metavar: str | None = None, **more: Any) -> Any:
    return {"help": meaning, "type": read, "default": default, "metavar": metavar, **more}


def _counts(text: str) -> tuple[int, ...]:
    """Read whole numbers, as in 4,32."""
    return tuple(map(at_least(1), text.split(",")))


OPTIONS = {
    "-n": _option("start mpirun with this many ranks", at_least(1), None, "RANKS"),
    "--json": _option("write machine, versions, settings and all rows", None, None, "FILE"),
    "--iterations": _option("default: as many as fit into --seconds", at_least(1), None, "N"),
    "--seconds": _option("for what takes turns, checks included (default %(default)s)", seconds, 0.5),
    "-b,--min-bytes": _option(
        "smallest size (default %(default)s), of which each next one has four times; K, M, G: 1024, ...",
        size,
        "4",
        "SIZE",
    ),
    "-e,--max-bytes": _option("largest size (default %(default)s)", size, "64M", "SIZE"),
    "--plot": _option(
        "draw bandwidth over size, by default into mpikv-bench-WHAT.png here; needs matplotlib",
        None,
        None,
        "FILE",
        nargs="?",
        const="",
    ),
    "--dtype": _option("of all values (default %(default)s)", None, "float32", choices=DTYPES),
    "--vs": _option("compare with PyTorch's Gloo", words(("gloo",)), (), "gloo"),
    "--algorithms": _option(f"{', '.join(ALGORITHMS)} or all", words(ALGORITHMS), (), "A,B"),
    "--keys": _option("N keys of SIZE (default 1K) in one call instead of sizes", keys, None, "NxSIZE"),
    "--model": _option("the network (default %(default)s)", None, "resnet18", choices=models.NAMES),
    "--servers": _option("of the ranks (default %(default)s)", at_least(1), 1, "S"),
    "--batch": _option("examples of one rank in a step (default 4,32; on GPUs 128)", _counts, None, "A,B"),
    "--image-size": _option("a side of an image (default resnet18 224, else 28)", at_least(8), None, "PIXELS"),
    "--save": _option("write what stores need to know of each host's link, for MPIKV_LINK", None, None, "FILE"),
}
TIMED = ("--iterations", "--seconds")
SIZES = ("-b,--min-bytes", "-e,--max-bytes", "--plot")
GPU_ROW = "Where every worker has a GPU, arrays on it are one more contender."


class Kind(NamedTuple):
    """A benchmark. options: the names of those that it takes. other: what differs from `OPTIONS`, by name."""

    title: str
    description: str
    options: tuple[str, ...]
    other: dict[str, dict[str, Any]] = {}  # noqa: RUF012 - nobody changes it


KINDS = {
    "allreduce": Kind(
        "one key, pushpull without an optimizer, against MPI_Allreduce in place",
        "Sum one array over the ranks, in place: store.pushpull with ordinary and with shared arrays, by each "
        f"algorithm that --algorithms names, and MPI_Allreduce. {GPU_ROW}",
        (*TIMED, *SIZES, "--algorithms", "--dtype", "--vs"),
        {"-e,--max-bytes": {"default": "256M"}},
    ),
    "pushpull": Kind(
        "in place, out of place, with an optimizer; or many keys in one call",
        "The same exchange in its variants: in place, with out=, with SGD where the owner is. With --keys: many keys "
        f"in one call, ordinary and shared arrays, against one MPI_Allreduce per key. {GPU_ROW}",
        (*TIMED, *SIZES, "--keys", "--dtype", "--vs"),
    ),
    "model": Kind(
        "the gradients of a network, in one pushpull",
        "Exchange the gradients of a network in one pushpull of all its arrays, the last layer's first, against raw "
        f"MPI with one call per array and with all arrays packed into one buffer. {GPU_ROW}",
        (*TIMED, "--model", "--dtype", "--vs"),
    ),
    "train": Kind(
        "training steps of a PyTorch network, each way of exchanging gradients against the step alone",
        "Train a network with PyTorch, on GPUs where every rank has one, else on the CPU: DistributedModel, "
        "DistributedOptimizer, Trainer, and DDP over the backend 'mpikv', beside DDP over Gloo and raw MPI after the "
        "backward pass, all against the step without any exchange. --iterations are rounds, in which each way makes "
        "two steps; --seconds is time for each --batch.",
        (*TIMED, "--model", "--batch", "--image-size", "--vs"),
        {
            "--seconds": {"default": 60.0},
            "--model": {"choices": tuple(TRAINED)},
            "--vs": {
                "type": words(TRAIN_WAYS),
                "metavar": "A,B",
                "help": f"which ways: {','.join(TRAIN_WAYS)} (default all that work here, nccl on GPUs alone)",
            },
        },
    ),
    "ps": Kind(
        "pushpull through parameter servers",
        "One key pushed to and pulled from server ranks: without an optimizer, with SGD on the servers, and "
        f"asynchronous with SGD; beside MPI_Allreduce over the workers alone. {GPU_ROW}",
        (*TIMED, *SIZES, "--servers", "--dtype"),
    ),
    "link": Kind(
        "latency and bandwidth between two ranks of a host, and from each host to the next",
        "Measure the links by MPI between two ranks of one host and from each host to the next: half a round trip of 8 "
        "bytes, and a stream of long messages in one direction. With --save, MPIKV_LINK=FILE spares stores a "
        "measurement of their own, and lets them divide keys between workers and servers alike in every run.",
        ("--save",),
    ),
}
GONE = {
    "codec": "docs/compression.md has the sizes of encoded values, store.stats()['compressed_keys'] the times of keys",
    "wire": "use link or allreduce; docs/compression.md has the sizes of encoded values",
}
GONE_OPTIONS = {
    "-f": "sizes grow by 4",
    "--factor": "sizes grow by 4",
    "--device": "where every worker has a GPU, arrays on it are in the same table, and train uses it",
    "--device-paths": "set MPIKV_DEVICE_PATH",
    "--key-bytes": "write --keys 1000x4K",
    "--steps": "a turn has two steps",
    "--bucket-bytes": "give bucket_bytes to DistributedModel in a program of your own",
    "--threads": "set OMP_NUM_THREADS",
    "--ways": "--vs names all ways",
}


def add_parser(commands: Any) -> None:
    how: dict[str, Any] = {"epilog": EXAMPLES, "formatter_class": argparse.RawDescriptionHelpFormatter}
    bench = commands.add_parser(
        "bench",
        help="the store beside raw MPI and Gloo; under mpirun, or with -n",
        description="Time the store, interleaved with raw MPI (and Gloo), and check every result.",
        **how,
    )
    kinds = bench.add_subparsers(metavar="WHAT", required=True, dest="kind")
    for name, kind in KINDS.items():
        parser = kinds.add_parser(name, help=kind.title, description=kind.description, **how)
        for flags in ("-n", "--json", *kind.options):
            parser.add_argument(*flags.split(","), **{**OPTIONS[flags], **kind.other.get(flags, {})})
        parser.gone = GONE_OPTIONS
    bench.gone = GONE
    bench.set_defaults(run=_run, dtype="float32", plot=None, keys=None, vs=(), algorithms=())


def _run(options: argparse.Namespace) -> int:
    from mpikv.commands.bench.command import run  # noqa: PLC0415 - it imports the store

    return run(options)
