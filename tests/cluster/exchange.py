"""The ranks of `test_links.py`: exchange a key over the links, check every sum, print what each host's link carried.

    exchange.py N_ELEMS ROUNDS

Rank 0 prints `found` and JSON: `sent`, bytes out of each host per round as its interface counted them, less the headers
of its packets (how many acknowledgements are among them depends on how busy the host is).
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpikv import kv

HEADERS_BYTES = 66  # of a packet: Ethernet 14, IPv4 20, TCP with timestamps 32


def sent_bytes() -> int:
    """What this host's interface has sent, without the headers of its packets."""
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    counters = [int(word) for word in line.split(":")[1].split()]  # received, then sent: bytes, packets, ...
    return counters[8] - HEADERS_BYTES * counters[9]


def main() -> None:
    n, rounds = map(int, sys.argv[1:])
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    hosts = comm.allgather(socket.gethostname())
    with kv.create("dist_sync") as store:
        value = np.zeros(n, np.float32)
        store.init("w", value)
        store.pushpull("w", value)  # connections are made now
        comm.Barrier()
        time.sleep(0.2)  # nothing of it is on its way any more
        before_bytes = sent_bytes()
        for round_ in range(rounds):
            value[:] = np.arange(n) % 7 + rank + round_
            store.pushpull("w", value)
            expected = (np.arange(n) % 7) * size + sum(range(size)) + size * round_
            np.testing.assert_array_equal(value, expected)
        comm.Barrier()
        time.sleep(0.2)
        sent = comm.gather((sent_bytes() - before_bytes) / rounds)
    if rank == 0:
        found = {"sent": dict(zip(hosts, sent, strict=True))}
        print("found " + json.dumps(found), flush=True)


main()
