"""A key's placement: the value that `place` returns."""

from __future__ import annotations

from typing import NamedTuple

from mpikv.placement.keys import Shard, ShardPlan, plan_of_bounds
from mpikv.placement.members import Path

EVENLY, REPLICATED = -1, -2  # announced in place of a key's only owner: cut evenly over all owners; all have all of it


class Placement(NamedTuple):
    """The placement of one key: `owners[i]` owns the shard `[bounds[i], bounds[i+1])`, which may be empty.

    owners: numbers among the servers, or among the workers where they own the keys. partition_elems: the most elements
    of a message to or from an owner. host: the path on the host, where the path is `host`. replicated: each owner gets
    all elements: of keys that nothing updates, so that nobody has to send it the sum; and of those that have a second
    owner (`Members.has_seconds`), where the first one answers.
    """

    path: Path
    owners: tuple[int, ...]
    bounds: tuple[int, ...]
    partition_elems: int = 0
    host: Path | None = None
    replicated: bool = False
    first_answers: bool = False

    @property
    def shards(self) -> ShardPlan:
        if self.replicated:
            return tuple(Shard(owner, self.bounds[0], self.bounds[-1]) for owner in self.owners)
        return tuple(shard._replace(owner=self.owners[shard.owner]) for shard in plan_of_bounds(self.bounds))

    def announced(self) -> list[int]:
        """What worker 0 announces of a key with owners: its first one, EVENLY or REPLICATED; partition_elems; begin."""
        several = REPLICATED if self.replicated else EVENLY
        one = len(self.owners) == 1 or self.first_answers
        return [self.owners[0] if one else several, self.partition_elems, self.bounds[0]]
