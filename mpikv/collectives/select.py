"""The collective algorithms that run on a group, by name; which one a key uses is part of its placement."""

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
