"""The collective algorithms that run on a group, by name; which one a key uses is part of its placement.

Each is a module with two generators, which yield each request they must wait for. Both are collective:

- `reduce_scatter(group, buf, chunks, tag, combine=np.add)` adds `buf` over all ranks, or combines it; then each rank's
  own chunk of its `buf` holds the result, and its other chunks may hold partial sums.
- `allgather(group, buf, chunks, tag)` gives every rank every chunk, of which each has its own at the start.

buf: (n,), contiguous, same n and dtype on every rank. Rank i owns the chunk `[chunks[i], chunks[i+1])`.
"""

from __future__ import annotations

from types import ModuleType

from mpikv.collectives import halving_doubling, hierarchical, naive, ring

# `native` is not among them: it runs on communicators of its own, not on a group.
ALGORITHMS: dict[str, ModuleType] = {
    "naive": naive,
    "ring": ring,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
}
