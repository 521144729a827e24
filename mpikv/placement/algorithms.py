"""Which algorithm adds a key's values over the workers, and which shard each worker owns with it.

A table of measured results decides, unless the user names an algorithm. Source: docs/adr/0003-allreduce-table.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from mpikv.placement.keys import even_bounds
from mpikv.placement.topology import topology


class AlgorithmRow(NamedTuple):
    """Use `algorithm` for up to `max_ranks` ranks and up to `max_bytes` bytes on the wire. None: no limit."""

    max_ranks: int | None
    max_bytes: int | None
    algorithm: str


# The first row that matches is used. For few ranks the direct algorithm has the fewest steps, is as fast as the others
# up to some megabytes, and adds in the order of the ranks, so that the bits are those of a server; for more bytes it
# would need too much scratch memory, a whole buffer. For many ranks the number of steps decides the time of short
# messages, and the number of bytes that of long ones. Measured with `mpikv bench allreduce --algorithms all`; see
# docs/adr/0003-allreduce-table.md.
TABLE = (
    AlgorithmRow(4, 4 << 20, "naive"),
    AlgorithmRow(None, 64 << 10, "halving_doubling"),
    AlgorithmRow(None, None, "ring"),
)

# The same for one rank on each of several hosts. The ring keeps both directions of a link busy all the time. The others
# send long messages, for which Open MPI over TCP first waits until the receiver has agreed, and that answer waits in a
# full socket. Measured with scripts/bench_links.py.
ACROSS = (
    AlgorithmRow(4, 32 << 10, "naive"),
    AlgorithmRow(None, 32 << 10, "halving_doubling"),
    AlgorithmRow(None, None, "ring"),
)


# Across a link a segment must be a short message for MPI (Open MPI's TCP: up to 64 KiB with its header). A longer one
# is announced first and sent when the receiver has agreed, and the agreement waits in the socket behind everything that
# the receiver is sending itself: with 2 segments of 256 KiB under way in both directions half of the link stayed idle.
LINK_SEGMENT_BYTES = 60 << 10


def choose(n_bytes: int, size: int, forced: str = "auto", hosts: Sequence[str] = ()) -> str:
    """The algorithm for `n_bytes` over `size` ranks. hosts: of each rank; empty: not known."""
    if forced != "auto":
        return forced
    n_hosts = len(set(hosts))
    if n_hosts > 1 and n_hosts < size:
        return "hierarchical"
    for row in ACROSS if n_hosts > 1 else TABLE:
        if (row.max_ranks is None or size <= row.max_ranks) and (row.max_bytes is None or n_bytes <= row.max_bytes):
            return row.algorithm
    raise AssertionError("the last row of the table fits everything")


def most_owners(algorithm: str, size: int) -> int:
    """How many ranks, from 0 on, may own a shard: halving and doubling needs a power of two."""
    return 1 << (size.bit_length() - 1) if algorithm == "halving_doubling" else size


def bounds_of(algorithm: str, n_elems: int, hosts: Sequence[str]) -> tuple[int, ...]:
    """The bounds of the ranks' shards: rank i owns `[bounds[i], bounds[i+1])`. hosts: of each rank.

    The hierarchical algorithm cuts a key evenly over the hosts, and then over the ranks of each host, so that all links
    carry equally many bytes; the others cut it evenly over the ranks.
    """
    size = len(hosts)
    if algorithm != "hierarchical":
        core = even_bounds(n_elems, most_owners(algorithm, size))
        return core + (n_elems,) * (size + 1 - len(core))
    members, lengths = topology(hosts).hosts, [0] * size
    of_hosts = even_bounds(n_elems, len(members))
    for i, ranks in enumerate(members):
        cuts = even_bounds(of_hosts[i + 1] - of_hosts[i], len(ranks))
        for local_rank, rank in enumerate(ranks):
            lengths[rank] = cuts[local_rank + 1] - cuts[local_rank]
    return tuple(accumulate(lengths, initial=0))
