"""How soon training gets to an accuracy where links are slow: local training beside the sum of every step's gradients.

By mpikv, and by PyTorch's own DistributedDataParallel (DDP) over Gloo, with its hook for post-local SGD.

    python scripts/bench_local.py                    # as root: makes the hosts, prints the table, removes the hosts
    python scripts/bench_local.py --program image_classification --epochs 4
    python scripts/bench_local.py --program word_vectors --epochs 3 -- --text FILE

Each host is a network namespace of this machine with a link of `--rate` Mbit/s out and as much in, and runs one worker
of an example, or of _local_ddp.py, which is local_training.py with DDP. The processors are
shared, so a step of computing takes the longer the more hosts there are; the ratio of computing to sending is that of
one machine.

accuracy: on the test images after each epoch; s: of training, without evaluations; MB: that worker 0 has sent by MPI,
which only the example prints. In the last line of each case, and to be compared: what the interface of worker 0's host
has sent from the start of the training to its end, with all headers and the evaluations.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

import _hosts  # lies beside this file

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


class Case(NamedTuple):
    """words: arguments of the example; or ddp_every: steps between the exchanges of DDP, 0 for a sum of gradients."""

    title: str
    words: tuple[str, ...] = ()
    ddp_every: int | None = None


IMAGES = ("--dataset", "fashion-mnist", "--model", "lenet")  # ResNet-18 takes hours on two cores
LOCAL_TRAINING = (
    Case("every step", ("--every", "0")),
    Case("every step, fp16", ("--every", "0", "--compression", "fp16")),
    Case("every 8 steps, mean", ("--every", "8")),
    Case("every 32 steps, mean", ("--every", "32")),
    Case("every 32 steps, nesterov", ("--every", "32", "--outer", "nesterov")),
    Case("every 8 steps, fp16", ("--every", "8", "--compression", "fp16")),
    Case("DDP over Gloo, every step", ddp_every=0),
    Case("DDP over Gloo, post-local SGD, every 8 steps", ddp_every=8),
    Case("DDP over Gloo, post-local SGD, every 32 steps", ddp_every=32),
)
CASES = {
    "local_training": LOCAL_TRAINING,
    "image_classification": (
        Case("every step", IMAGES),
        Case("every step, fp16", (*IMAGES, "--gc-type", "fp16")),
        Case("every 8 steps, mean", (*IMAGES, "--local", "8")),
        Case("every 8 steps, fp16", (*IMAGES, "--local", "8", "--gc-type", "fp16")),
        Case("every 32 steps, mean", (*IMAGES, "--local", "32")),
        Case("every 32 steps, nesterov", (*IMAGES, "--local", "32", "--outer", "nesterov")),
        Case("every 8 steps, nesterov", (*IMAGES, "--local", "8", "--outer", "nesterov")),
    ),
    "word_vectors": (
        Case("every step, by rows"),
        Case("every step, dense", ("--dense",)),
        Case("every 8 steps", ("--local", "8")),
        Case("every 32 steps", ("--local", "32")),
    ),
}


def train(options: argparse.Namespace) -> None:
    """Be a rank: train as the case says, and print what the interface has sent."""
    import torch  # noqa: PLC0415 - ranks alone need it

    torch.set_num_threads(1)
    case, before = CASES[options.program][options.case], _hosts.sent_bytes()
    sys.path.insert(0, str(EXAMPLES))
    if case.ddp_every is None:
        program = EXAMPLES / f"{options.program}.py"
        epochs = "--num-epochs" if options.program == "word_vectors" else "--epochs"
        sys.argv = [str(program), *case.words, epochs, str(options.epochs), *options.words]
        runpy.run_path(str(program), run_name="__main__")
    else:
        import _local_ddp  # noqa: PLC0415

        _local_ddp.main(case.ddp_every, options.epochs)
    sent = _hosts.sent_bytes() - before
    from mpi4py import MPI  # noqa: PLC0415 - initialised by the training

    if MPI.COMM_WORLD.rank == 0:
        print(f"interface of worker 0: {sent / 1e6:.1f} MB sent", flush=True)


def main() -> int:
    """Make the hosts and run one job for each case; or be a rank of such a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts (default 4)")
    parser.add_argument("--epochs", type=int, default=3, help="(default 3)")
    parser.add_argument("--program", choices=CASES, default="local_training", help="(default local_training)")
    parser.add_argument("--cases", help="by number, from 0 (default all)")
    parser.add_argument("words", nargs="*", help="more options of the program, after --")
    parser.add_argument("--case", type=int, default=0, help=argparse.SUPPRESS)
    _hosts.add_options(parser)
    options = parser.parse_args()
    status = 0
    if options.rank:
        train(options)
        return 0
    words, cases = sys.argv[1:], CASES[options.program]
    for number in map(int, options.cases.split(",")) if options.cases else range(len(cases)):
        print(f"\n{cases[number].title}: {options.hosts} hosts, {options.rate:g} Mbit/s each way", flush=True)
        sys.argv[1:] = ["--case", str(number), *words]
        status = max(status, _hosts.run(options, options.hosts, 1, timeout_s=1800))
    return status


if __name__ == "__main__":
    sys.exit(main())
