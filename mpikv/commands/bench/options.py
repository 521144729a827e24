"""The options of `mpikv bench` and its subcommands."""

from __future__ import annotations

import argparse
from typing import Any

from mpikv import config
from mpikv.commands.bench.progress import FILE_OPTION
from mpikv.commands.numbers import at_least, seconds, size, words
from mpikv.common.progress import MODES

ALGORITHMS = tuple(name for name in config.ALGORITHMS if name not in ("auto", "nccl"))  # of arrays in host memory
DEVICE_PATHS = ("ipc", "mpi", "staged", "nccl")  # what is compared by default, where it works
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
FLOATS = DTYPES[:4]  # what an optimizer takes
MODELS = ("lenet", "resnet18", "resnet50", "transformer12")
PS_VARIANTS = ("sync", "sync-sgd", "async-sgd")
TRAINED = {"resnet18": 224, "lenet": 28, "mlp": 28}  # and a side of their images, in pixels
TRAIN_WAYS = ("model", "optimizer", "trainer", "ddp")
TRAIN_VERSUS = ("gloo", "nccl", "raw", "raw-each")

EXAMPLES = """examples:
  mpikv bench allreduce -n 2                         2 ranks here, 4 bytes to 256 MiB
  mpikv bench allreduce -n 4 -b 64K -e 64M --algorithms all --plot allreduce.png
  mpirun -n 4 mpikv bench allreduce -e 1M --json run.json
  mpikv bench pushpull -n 2 --keys 1000 --key-bytes 1K
  mpikv bench model -n 2 --model resnet50
  mpikv bench train -n 2 --model resnet18 --batch 4,32
  mpikv bench ps -n 3 --servers 1 -e 64M
  mpikv bench allreduce -n 2 --device                arrays on the GPU, by each way that works here
  mpikv bench codec --codecs 2bit,int8               compression on one core
  mpirun --hostfile hosts -n 4 mpikv bench link --interface-counters
  mpirun --hostfile hosts -n 4 mpikv bench wire --model resnet18 --codecs 2bit,topk

Without mpirun, -n starts one. Times are of the slowest rank; every result is checked."""


def add_parser(commands: Any) -> None:
    """Add `bench` to the commands of `mpikv`."""
    bench = commands.add_parser(
        "bench",
        help="the store beside raw MPI, Gloo and the machine's limit; under mpirun, or with -n",
        description="Time the store, interleaved with raw MPI (and Gloo), and print how near both are to what the "
        "memory, the adders and the links of this machine allow.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = bench.add_subparsers(metavar="WHAT", required=True, dest="kind")
    _allreduce(kinds)
    _pushpull(kinds)
    _model(kinds)
    _train(kinds)
    _ps(kinds)
    _codec(kinds)
    _link(kinds)
    _wire(kinds)
    bench.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from mpikv.commands.bench.command import run  # noqa: PLC0415 - it imports the store

    return run(options)


def _kind(kinds: Any, name: str, title: str, description: str) -> argparse.ArgumentParser:
    """Add a subcommand with the options that all have."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        name, help=title, description=description, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=at_least(1), metavar="RANKS", help="start mpirun with this many ranks")
    parser.add_argument("--iterations", type=at_least(1), metavar="N", help="default: as many as fit into --seconds")
    parser.add_argument(
        "--seconds", type=seconds, default=0.5, help="time for each size, checks too (default %(default)s)"
    )
    parser.add_argument(
        "--warmup", type=at_least(1), default=3, metavar="N", help="untimed iterations (default %(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default float32")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="check every result (default)"
    )
    parser.add_argument(
        "--progress",
        choices=MODES,
        default="bar",
        help="bar: on a terminal, else a line now and then (default); lines: in any case; both on standard error",
    )
    parser.add_argument(FILE_OPTION, help=argparse.SUPPRESS)  # for rank 0, where the process that started mpirun draws
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, settings and all rows")
    parser.add_argument(
        "--plot",
        nargs="?",
        const=f"mpikv-bench-{name}.png",
        metavar="FILE",
        help="draw bandwidth over size, by default into %(const)s here; needs matplotlib",
    )
    return parser


def _sizes(parser: argparse.ArgumentParser, max_bytes: str = "256M") -> None:
    parser.add_argument("-b", "--min-bytes", type=size, default="4", metavar="SIZE", help="default 4")
    parser.add_argument(
        "-e", "--max-bytes", type=size, default=max_bytes, metavar="SIZE", help=f"default {max_bytes}; K, M, G: 1024^k"
    )
    parser.add_argument("-f", "--factor", type=at_least(2), default=4, help="from size to size (default 4)")


def _device(parser: argparse.ArgumentParser, *, paths: bool = True) -> None:
    parser.add_argument(
        "--device",
        action="store_true",
        help="arrays on the GPU of each worker, by each way that works here, beside what the GPU's memory and "
        "page-locked copies allow",
    )
    if paths:
        parser.add_argument(
            "--device-paths",
            type=words((*DEVICE_PATHS, "host")),
            default=(),
            metavar="A,B",
            help=f"of MPIKV_DEVICE_PATH, with --device (default {','.join(DEVICE_PATHS)})",
        )


def _versus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vs", type=words(("gloo",)), default=(), metavar="gloo", help="compare with torch and Gloo")


def _allreduce(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "allreduce",
        "one key, pushpull without an optimizer, against MPI_Allreduce in place",
        "Sum one array over the ranks, in place: store.pushpull with ordinary and with shared arrays, by each "
        "algorithm that --algorithms names, and MPI_Allreduce.",
    )
    _sizes(parser)
    parser.add_argument(
        "--algorithms", type=words(ALGORITHMS), default=(), metavar="A,B", help=f"{', '.join(ALGORITHMS)} or all"
    )
    _versus(parser)
    _device(parser)


def _pushpull(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "pushpull",
        "in place, out of place, with an optimizer; or many keys in one call",
        "The same exchange in its variants: in place, with out=, with SGD where the owner is. With --keys: many keys "
        "in one call, ordinary and shared arrays, against one MPI_Allreduce per key.",
    )
    _sizes(parser, "64M")
    parser.add_argument("--keys", type=at_least(1), metavar="N", help="N keys in one call instead of sizes")
    parser.add_argument("--key-bytes", type=size, default="1K", metavar="SIZE", help="of each key (default 1K)")
    _versus(parser)
    _device(parser)


def _model(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "model",
        "the gradients of a network, in one pushpull",
        "Exchange the gradients of a network in one pushpull of all its arrays, the last layer's first, against raw "
        "MPI with one call per array and with all arrays packed into one buffer.",
    )
    parser.add_argument("--model", choices=MODELS, default="resnet18", help="default resnet18")
    _versus(parser)
    _device(parser)


def _train(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "train",
        "training steps of a PyTorch network, each way of exchanging gradients against the step alone",
        "Train a network with PyTorch, on the CPU or with --device on GPUs: DistributedModel, DistributedOptimizer, "
        "Trainer, and DDP over the backend 'mpikv', beside DDP over Gloo and raw MPI after the backward pass, all "
        "against the step without any exchange. --iterations are rounds, in which each way makes --steps steps; "
        "--seconds is time for each --batch.",
    )
    parser.set_defaults(seconds=60.0, warmup=1)
    parser.add_argument("--model", choices=tuple(TRAINED), default="resnet18", help="default resnet18")
    parser.add_argument("--batch", type=_counts, metavar="A,B", help="examples of one rank in a step (default 4,32)")
    parser.add_argument(
        "--image-size", type=at_least(8), metavar="PIXELS", help="a side (default resnet18 224, else 28)"
    )
    parser.add_argument("--device", action="store_true", help="train on the GPU of each worker (default --batch 128)")
    parser.add_argument(
        "--steps", type=at_least(1), default=2, metavar="N", help="steps of a way in a turn (default 2)"
    )
    parser.add_argument(
        "--bucket-bytes", type=size, default="4M", metavar="SIZE", help="of DistributedModel (default 4M)"
    )
    parser.add_argument(
        "--threads", type=at_least(1), metavar="N", help="of PyTorch in each rank (default: cores / ranks of the host)"
    )
    parser.add_argument(
        "--ways", type=words(TRAIN_WAYS), default=TRAIN_WAYS, metavar="A,B", help=f"default {','.join(TRAIN_WAYS)}"
    )
    parser.add_argument(
        "--vs", type=words(TRAIN_VERSUS), default=(), metavar="A,B", help="default gloo,raw,raw-each, on GPUs nccl, too"
    )


def _counts(text: str) -> tuple[int, ...]:
    """Read whole numbers, as in 4,32."""
    return tuple(map(at_least(1), text.split(",")))


def _ps(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "ps",
        "pushpull through parameter servers",
        "One key pushed to and pulled from server ranks: without an optimizer, with SGD on the servers, and "
        "asynchronous with SGD; beside MPI_Allreduce over the workers alone.",
    )
    _sizes(parser, "64M")
    parser.add_argument("--servers", type=at_least(1), default=1, metavar="S", help="of the ranks (default 1)")
    parser.add_argument(
        "--variants", type=words(PS_VARIANTS), default=PS_VARIANTS, metavar="A,B", help=", ".join(PS_VARIANTS)
    )
    _device(parser, paths=False)


def _codec(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "codec",
        "each codec's encoding, decoding and adding on one core, beside memcpy",
        "Encode, decode and add one array with each codec that pushes can be compressed by, beside memcpy and a sum.",
    )
    parser.add_argument("--bytes", type=size, default="64M", metavar="SIZE", help="of the values (default 64M)")
    parser.add_argument(
        "--codecs", type=lambda text: tuple(text.split(",")), default=(), metavar="A,B", help="default all"
    )


def _link(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "link",
        "ping-pong, one-way bandwidth, raw TCP, and how near allreduce comes to the ring bound",
        "What the links between ranks of one host and of different hosts do, and how near an allreduce comes to the "
        "bound 2(h-1)/h * S/B that B, the TCP goodput between two hosts, sets to it.",
    )
    _sizes(parser, "16M")
    parser.set_defaults(min_bytes=1 << 20)
    parser.add_argument(
        "--interface-counters", action="store_true", help="say how many bytes crossed each host's interfaces"
    )


def _wire(kinds: Any) -> None:
    parser = _kind(
        kinds,
        "wire",
        "bytes and time of one step: uncompressed, in 16 bits, each codec, sparse, raw MPI, Gloo",
        "Exchange the gradients of a network, float32, in one pushpull: uncompressed, without bundles of short "
        "messages, as float16 and bfloat16 keys, with each codec (always encoded, as with force), as some rows of a "
        "sparse table of the same size; and by raw MPI and, where PyTorch is installed, Gloo. Prints bytes and "
        "messages that the rank with most of them sends in a step, bytes in percent of those of the uncompressed "
        "store, the median and 95th percentile of the slowest rank's time in milliseconds, and the median divided by "
        "the uncompressed store's. Between hosts only is anything sent: MPIKV_FAKE_HOSTS=2 lets ranks of one host "
        "count as two.",
    )
    parser.set_defaults(seconds=20.0)
    parser.add_argument("--model", choices=MODELS, default="resnet18", help="default resnet18")
    parser.add_argument(
        "--codecs", type=lambda text: tuple(text.split(",")), default=(), metavar="A,B", help="default all"
    )
    parser.add_argument(
        "--density", type=_share, default=0.01, metavar="SHARE", help="of the table's rows in a step (default 0.01)"
    )
    parser.add_argument("--rows", type=at_least(1), metavar="N", help="of the table (default: of 64 values each)")


def _share(text: str) -> float:
    """Read a number above 0 and up to 1."""
    found = float(text)
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"{text}: a share is above 0 and at most 1")
    return found
