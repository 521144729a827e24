"""`mpikv bench wire` across shaped links: bytes and time of one step, compressed and not.

    python scripts/bench_wire.py --hosts 2,4 --rates 100,1000                            # as root
    python scripts/bench_wire.py --hosts 2 --mtu 9000 -- --model resnet50 --codecs 2bit,topk

Each host is a network namespace of this machine with a link of so many Mbit/s out and as much in, and has one rank. For
every number of hosts and every rate one job runs. What stands behind `--` goes to `mpikv bench wire`, whose `--help`
says what the columns mean.
"""

from __future__ import annotations

import argparse
import sys

import _hosts  # lies beside this file


def main() -> int:
    """Make the hosts and run one job for each case; or be a rank of such a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,4", help="numbers of hosts (default %(default)s)")
    parser.add_argument("--rates", default="100,1000", help="Mbit/s of each link, instead of --rate (default 100,1000)")
    parser.add_argument("words", nargs="*", help="options of `mpikv bench wire`, after --")
    _hosts.add_options(parser)
    options = parser.parse_args()
    if options.rank:
        from mpikv.__main__ import main as mpikv  # noqa: PLC0415 - it is for ranks

        return mpikv(["bench", "wire", *options.words])
    statuses = []
    for n_hosts in map(int, options.hosts.split(",")):
        for rate in map(float, options.rates.split(",")):
            options.rate = rate
            print(f"\n{n_hosts} hosts, {options.rate:g} Mbit/s each way, MTU {options.mtu}, {options.mpi}", flush=True)
            statuses.append(_hosts.run(options, n_hosts, 1))
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
