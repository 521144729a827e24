"""How soon training gets to an accuracy where links are slow: local training beside the sum of every step's gradients.

By mpikv, and by PyTorch's own DistributedDataParallel (DDP) over Gloo, with its hook for post-local SGD.

    python scripts/bench_local.py                    # as root: makes the hosts, prints the table, removes the hosts

Each host is a network namespace of this machine with a link of `--rate` Mbit/s out and as much in, and runs one worker
of examples/local_training.py, or of _local_ddp.py: Fashion-MNIST, batches of 64 for each worker. The processors are
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

PROGRAM = Path(__file__).resolve().parents[1] / "examples" / "local_training.py"


class Case(NamedTuple):
    """words: arguments of the example; or ddp_every: steps between the exchanges of DDP, 0 for a sum of gradients."""

    title: str
    words: tuple[str, ...] = ()
    ddp_every: int | None = None


CASES = (
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


def train(options: argparse.Namespace) -> None:
    """Be a rank: train as the case says, and print what the interface has sent."""
    import torch  # noqa: PLC0415 - ranks alone need it

    torch.set_num_threads(1)
    case, before = CASES[options.case], _hosts.sent_bytes()
    sys.path.insert(0, str(PROGRAM.parent))
    if case.ddp_every is None:
        data = ["--data-dir", options.data_dir] if options.data_dir else []
        sys.argv = [str(PROGRAM), *case.words, *data, "--epochs", str(options.epochs)]
        runpy.run_path(str(PROGRAM), run_name="__main__")
    else:
        import _local_ddp  # noqa: PLC0415

        _local_ddp.main(case.ddp_every, options.epochs, options.data_dir or None)
    sent = _hosts.sent_bytes() - before
    from mpi4py import MPI  # noqa: PLC0415 - initialised by the training

    if MPI.COMM_WORLD.rank == 0:
        print(f"interface of worker 0: {sent / 1e6:.1f} MB sent", flush=True)


def main() -> int:
    """Make the hosts and run one job for each case; or be a rank of such a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts (default 4)")
    parser.add_argument("--epochs", type=int, default=3, help="(default 3)")
    parser.add_argument("--data-dir", default="", help="directory with the four IDX files")
    listed = "; ".join(f"{number}: {case.title}" for number, case in enumerate(CASES))
    parser.add_argument("--cases", default=",".join(map(str, range(len(CASES)))), help=f"by number ({listed})")
    parser.add_argument("--case", type=int, default=0, help=argparse.SUPPRESS)
    _hosts.add_options(parser)
    options = parser.parse_args()
    status = 0
    if options.rank:
        train(options)
        return 0
    words = sys.argv[1:]
    for number in map(int, options.cases.split(",")):
        print(f"\n{CASES[number].title}: {options.hosts} hosts, {options.rate:g} Mbit/s each way", flush=True)
        sys.argv[1:] = [*words, "--case", str(number)]
        status = max(status, _hosts.run(options, options.hosts, 1, timeout_s=1800))
    return status


if __name__ == "__main__":
    sys.exit(main())
