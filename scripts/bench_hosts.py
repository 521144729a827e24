"""`mpikv bench` across shaped links: what a step or a sum costs between hosts, without having any.

    python scripts/bench_hosts.py --rates 200 --hosts 2,3 -- train --batch 4 --image-size 64 --vs model,gloo
    python scripts/bench_hosts.py --rates 100,1000 --hosts 2,4 -- model --model resnet50

As root: makes the hosts, network namespaces of this machine with links of so many Mbit/s each way, runs one job for
each number of them and each rate, and removes them. What stands behind `--` goes to `mpikv bench`, whose ranks have one
thread each. The pretended network runs on the same processors as the ranks, which compute meanwhile: with fewer cores
than hosts a step alone is slower, too, and the ratio to it is what counts.
"""

from __future__ import annotations

import argparse
import os
import sys

import _hosts  # lies beside this file


def main() -> int:
    """Make the hosts and run one job for each case; or be a rank of such a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,3", help="numbers of hosts (default %(default)s)")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("words", nargs="+", help="what is measured and its options, as of `mpikv bench`, after --")
    parser.add_argument("--rates", default="200", help="Mbit/s of each link, instead of --rate (default %(default)s)")
    _hosts.add_options(parser)
    options = parser.parse_args()
    if options.rank:
        from mpikv.__main__ import main as mpikv  # noqa: PLC0415 - ranks alone need it

        os.environ["OMP_NUM_THREADS"] = "1"  # the hosts have the same cores
        return mpikv(["bench", *options.words])
    status = 0
    for n_hosts in map(int, options.hosts.split(",")):
        for rate in map(float, options.rates.split(",")):
            options.rate = rate
            print(f"\n{n_hosts} hosts of {options.ranks_per_host} ranks, {rate:g} Mbit/s each way, {options.mpi}")
            status = max(status, _hosts.run(options, n_hosts, options.ranks_per_host, timeout_s=3600))
    return status


if __name__ == "__main__":
    sys.exit(main())
