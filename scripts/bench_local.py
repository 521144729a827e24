"""How soon training gets to an accuracy where links are slow: local training beside the sum of every step's gradients.

    python scripts/bench_local.py                    # as root: makes the hosts, prints the table, removes the hosts

Each host is a network namespace of this machine with a link of `--rate` Mbit/s out and as much in, and runs one worker
of examples/local_training.py: Fashion-MNIST, batches of 64 for each worker. The processors are shared, so a step of
computing takes the longer the more hosts there are; the ratio of computing to sending is that of one machine.

accuracy: on the test images after each epoch; s: of training, without evaluations; MB: that worker 0 has sent by MPI.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import _hosts  # lies beside this file

PROGRAM = Path(__file__).resolve().parents[1] / "examples" / "local_training.py"
CASES = (
    ("every step", ["--every", "0"]),
    ("every step, fp16", ["--every", "0", "--compression", "fp16"]),
    ("every 8 steps, mean", ["--every", "8"]),
    ("every 32 steps, mean", ["--every", "32"]),
    ("every 32 steps, nesterov", ["--every", "32", "--outer", "nesterov"]),
    ("every 8 steps, fp16", ["--every", "8", "--compression", "fp16"]),
)


def main() -> int:
    """Make the hosts and run one job for each case; or be a rank of such a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4, help="number of hosts (default 4)")
    parser.add_argument("--epochs", type=int, default=3, help="(default 3)")
    parser.add_argument("--data-dir", default="", help="directory with the four IDX files")
    parser.add_argument("--cases", default=",".join(map(str, range(len(CASES)))), help="which of them, by number")
    parser.add_argument("--case", type=int, default=0, help=argparse.SUPPRESS)
    _hosts.add_options(parser)
    options = parser.parse_args()
    status = 0
    if options.rank:
        import torch  # noqa: PLC0415 - ranks alone need it

        torch.set_num_threads(1)
        case = CASES[options.case][1]
        data = ["--data-dir", options.data_dir] if options.data_dir else []
        sys.argv = [str(PROGRAM), *case, *data, "--epochs", str(options.epochs)]
        sys.path.insert(0, str(PROGRAM.parent))
        runpy.run_path(str(PROGRAM), run_name="__main__")
        return 0
    words = sys.argv[1:]
    for number in map(int, options.cases.split(",")):
        print(f"\n{CASES[number][0]}: {options.hosts} hosts, {options.rate:g} Mbit/s each way", flush=True)
        sys.argv[1:] = [*words, "--case", str(number)]
        status = max(status, _hosts.run(options, options.hosts, 1, timeout_s=1800))
    return status


if __name__ == "__main__":
    sys.exit(main())
