"""`mpikv bench train` across shaped links: what a training step costs there, in each way, beside the step alone.

    python scripts/bench_train.py --rate 200 --hosts 2,3 --batch 4 --image-size 64 --ways model --vs gloo

As root: makes the hosts, network namespaces of this machine with links of `--rate` Mbit/s each way, runs one job for
each number of them, and removes them. All other options are those of `mpikv bench train`, with one thread per rank. The
pretended network runs on the same processors as the ranks, which compute meanwhile: with fewer cores than hosts the
step alone is slower, too, and the ratio to it is what counts.
"""

from __future__ import annotations

import argparse
import sys

import _hosts  # lies beside this file


def main() -> int:
    """Make the hosts and run one job for each number of them; or be a rank of such a job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hosts", default="2,3", help="numbers of hosts (default 2,3)")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    _hosts.add_options(parser)
    options, words = parser.parse_known_args()
    if options.rank:
        from mpikv.__main__ import main as mpikv  # noqa: PLC0415 - ranks alone need it

        return mpikv(["bench", "train", "--threads", "1", *words])
    for n_hosts in map(int, options.hosts.split(",")):
        print(f"\n{n_hosts} hosts of {options.ranks_per_host} ranks, {options.rate:g} Mbit/s each way, {options.mpi}")
        status = _hosts.run(options, n_hosts, options.ranks_per_host, timeout_s=3600)
        if status != 0:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
