"""The physical limit of an allreduce: what the memory, the adders and the links must do at least. Pure.

p ranks on h hosts sum a value of S bytes, with one copy of the value per rank.

    latency   ceil(log2 p) * l                 l: one way of a ping-pong of 8 bytes. No rank can know of all others
                                               with fewer messages one after another.
    add       S (p-1)/p  / a                   each rank adds p-1 contributions to the S/p bytes that it owns
    memory    S (p-1)/p  / c                   and copies its finished part to p-1 others
    link      2 S (h-1)/h  / B                 what a host sends and receives at least; B: the rate of the slowest
                                               stream over MPI from one host to another

a and c are the rates of an in-place add and of a copy measured with all ranks at work at this very size, so that shared
caches and memory channels are in them. With the values in memory that the ranks of a host share, nothing else has to be
done: for p = 2 that is "add one half in place, copy the other half". Where doing both piece by piece, at the rate t of
bytes added and copied, takes less time than one after the other, that time is their limit: a copy then finds the sum in
the cache. Caches may still serve a call better than they served the probe: a little more than 100 % is no mistake.
Over several hosts the p of add and memory is the number of ranks on one host, and the host's part of the sum is added
once more per other host:

    add and memory of several hosts: p = ranks on the fullest host, and S/p bytes are added (h-1)/h times more.

The limit is the largest of latency, add + memory, and link; what binds is the part that made it.
Source of the lower bounds: Chan, Heimlich, Purkayastha and van de Geijn, Concurrency Computat. 19 (2007), section 4.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Rates(NamedTuple):
    """What was measured. latency_s: one way. together: bytes added plus bytes copied. link: None on one host."""

    latency_s: float
    add_bytes_per_s: float
    copy_bytes_per_s: float
    together_bytes_per_s: float
    link_bytes_per_s: float | None = None


class Limit(NamedTuple):
    """time_s: no allreduce is faster. by: latency, add, memory or link."""

    time_s: float
    by: str


def work_bytes(n_bytes: int, ranks_per_host: int, hosts: int) -> tuple[float, float]:
    """Return the bytes that each rank adds in place, and the bytes that it copies to other ranks of its host."""
    share = n_bytes / ranks_per_host
    return share * (ranks_per_host - 1) + share * (hosts - 1) / hosts, share * (ranks_per_host - 1)


def allreduce_limit(n_bytes: int, ranks: int, ranks_per_host: int, hosts: int, rates: Rates) -> Limit:
    """Return the limit for one value of `n_bytes`, or for several of as many bytes that are exchanged together."""
    if ranks < 2:
        return Limit(0.0, "latency")
    added, copied = work_bytes(n_bytes, ranks_per_host, hosts)
    add_s, copy_s = added / rates.add_bytes_per_s, copied / rates.copy_bytes_per_s
    candidates = [
        Limit(math.ceil(math.log2(ranks)) * rates.latency_s, "latency"),
        Limit(
            min(add_s + copy_s, (added + copied) / rates.together_bytes_per_s), "add" if add_s >= copy_s else "memory"
        ),
    ]
    if hosts > 1 and rates.link_bytes_per_s:
        candidates.append(Limit(ring_bound_s(n_bytes, hosts, rates.link_bytes_per_s), "link"))
    return max(candidates)


def ring_bound_s(n_bytes: int, hosts: int, link_bytes_per_s: float) -> float:
    """Return 2 (h-1)/h * S / B: what must leave, and what must reach, each host."""
    return 2 * (hosts - 1) / hosts * n_bytes / link_bytes_per_s


def server_limit(n_bytes: int, workers: int, servers: int, remote_workers: int, rates: Rates) -> Limit:
    """Return the limit for one value pushed to and pulled from servers, each of which owns an equal part.

    latency: there and back. add: workers - 1 contributions. memory: the first contribution becomes the server's sum by
    a copy, and each worker copies the answer, all at the same time. link: the contributions that come to a server from
    `remote_workers` on other hosts, and as much back, in both directions at once. The optimizer is not in it.
    """
    share = n_bytes / servers
    add_s = (workers - 1) * share / rates.add_bytes_per_s
    copy_s = (share + n_bytes) / rates.copy_bytes_per_s
    candidates = [Limit(2 * rates.latency_s, "latency"), Limit(add_s + copy_s, "add" if add_s >= copy_s else "memory")]
    if remote_workers and rates.link_bytes_per_s:
        candidates.append(Limit(remote_workers * share / rates.link_bytes_per_s, "link"))
    return max(candidates)
