"""Which algorithm adds a key's values over the workers, and what each of them owns then.

A table that was measured decides, unless the user names an algorithm. Source: docs/adr/0003-allreduce-table.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from mpikv.placement.keys import even_bounds
from mpikv.placement.topology import topology


class AlgorithmRow(NamedTuple):
    """Up to `max_ranks` ranks and up to `max_bytes` bytes on the wire: `algorithm`. None: no limit."""

    max_ranks: int | None
    max_bytes: int | None
    algorithm: str


# The first row that fits. Few ranks: the direct algorithm has the fewest steps, is as fast as the others up to some
# megabytes, and adds in the order of the ranks, so that the bits are those of a server; beyond, its scratch memory of a
# whole buffer counts. Many ranks: short messages cost their steps, long ones their bytes. Measured with
# `mpikv bench allreduce --algorithms all`; see docs/adr/0003-allreduce-table.md.
TABLE = (
    AlgorithmRow(4, 4 << 20, "naive"),
    AlgorithmRow(None, 64 << 10, "halving_doubling"),
    AlgorithmRow(None, None, "ring"),
)

# One rank on each of several hosts. The ring keeps both directions of a link busy all the time; the others have long
# messages, which Open MPI sends over TCP only once the receiver's consent has come back through a full socket. Measured
# with scripts/bench_links.py.
ACROSS = (
    AlgorithmRow(4, 32 << 10, "naive"),
    AlgorithmRow(None, 32 << 10, "halving_doubling"),
    AlgorithmRow(None, None, "ring"),
)


def choose(n_bytes: int, size: int, forced: str = "auto", hosts: Sequence[str] = ()) -> str:
    """The name of the algorithm for `n_bytes` bytes over `size` ranks. hosts: of each rank, where it is known."""
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
    """How many ranks, from 0 on, may own a part.

    Halving and doubling runs between as many ranks as the largest power of two has; the others own nothing.
    """
    return 1 << (size.bit_length() - 1) if algorithm == "halving_doubling" else size


def bounds_of(algorithm: str, n_elems: int, hosts: Sequence[str]) -> tuple[int, ...]:
    """What each rank owns: rank i owns `[bounds[i], bounds[i+1])`. hosts: of each rank.

    The hierarchical algorithm gives every host the same share and cuts it evenly over the host's ranks, so that all
    links carry the same; the others give every rank the same.
    """
    size = len(hosts)
    if algorithm != "hierarchical":
        core = even_bounds(n_elems, most_owners(algorithm, size))
        return core + (n_elems,) * (size + 1 - len(core))
    members, lengths = topology(hosts).hosts, [0] * size
    shares = even_bounds(n_elems, len(members))
    for i, ranks in enumerate(members):
        cuts = even_bounds(shares[i + 1] - shares[i], len(ranks))
        for place, rank in enumerate(ranks):
            lengths[rank] = cuts[place + 1] - cuts[place]
    return tuple(accumulate(lengths, initial=0))
