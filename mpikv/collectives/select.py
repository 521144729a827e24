"""Which algorithm runs: tables of sizes and rank counts, or the one that `MPIKV_ALGORITHM` forces.

The choice depends only on what all ranks agreed on at `init`, so that every rank makes the same one without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from mpikv.collectives import halving_doubling, hierarchical, naive, ring
from mpikv.keys import even_bounds

# `native` is not among them: it runs on communicators of its own, not on a group.
ALGORITHMS: dict[str, ModuleType] = {
    "naive": naive,
    "ring": ring,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
}


class Row(NamedTuple):
    """Up to `max_ranks` ranks and up to `max_bytes` bytes on the wire: `algorithm`. None: no limit."""

    max_ranks: int | None
    max_bytes: int | None
    algorithm: str


# The first row that fits. Few ranks: the direct algorithm has the fewest steps, is as fast as the others up to some
# megabytes, and adds in the order of the ranks, so that the bits are those of a server; beyond, its scratch memory of a
# whole buffer counts. Many ranks: short messages cost their steps, long ones their bytes. Measured with
# scripts/compare_algorithms.py; see docs/adr/0003-allreduce-table.md.
TABLE = (
    Row(4, 4 << 20, "naive"),
    Row(None, 64 << 10, "halving_doubling"),
    Row(None, None, "ring"),
)


# One rank on each of several hosts. The ring keeps both directions of a link busy all the time; the others have long
# messages, which Open MPI sends over TCP only once the receiver's consent has come back through a full socket. Measured
# with scripts/bench_links.py.
ACROSS = (
    Row(4, 32 << 10, "naive"),
    Row(None, 32 << 10, "halving_doubling"),
    Row(None, None, "ring"),
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


def chunk_bounds(algorithm: str, n_elems: int, hosts: Sequence[str]) -> tuple[int, ...]:
    """Chunk i, owned by rank i, is `[bounds[i], bounds[i+1])`. hosts: of each rank."""
    if algorithm == "native":
        return even_bounds(n_elems, len(hosts))
    if algorithm == "hierarchical":
        return hierarchical.bounds(n_elems, len(hosts), hosts)
    found: tuple[int, ...] = ALGORITHMS[algorithm].bounds(n_elems, len(hosts))
    return found
