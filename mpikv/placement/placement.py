"""A key's placement: the value that `place` makes, and all else asks."""

from __future__ import annotations

from typing import NamedTuple

from mpikv.placement.keys import ShardPlan, plan_of_bounds
from mpikv.placement.members import Path

EVENLY = -1  # announced in place of a key's only owner: the key is cut evenly over all servers


class Placement(NamedTuple):
    """One key's. Part i of its flat value, `[bounds[i], bounds[i+1])`, belongs to `owners[i]`; it may be empty.

    owners: numbers among the servers, or among the workers where they own the keys. algorithm: how workers add, "" for
    servers. part_elems: the most elements that travel to or from a server in one piece; 0 for workers. plain: of an
    `encoded` one the path and the algorithm of rounds whose values travel as they are; None: its own. host: of a
    `staged` one, and of one whose rounds as they are go so, the path on the host.
    """

    path: Path
    algorithm: str
    owners: tuple[int, ...]
    bounds: tuple[int, ...]
    part_elems: int = 0
    host: Path | None = None
    plain: tuple[Path, str] | None = None

    @property
    def as_it_is(self) -> Placement | None:
        """That of rounds whose values travel as they are, with the same owners and bounds; None: this one."""
        return None if self.plain is None else self._replace(path=self.plain[0], algorithm=self.plain[1], plain=None)

    @property
    def shards(self) -> ShardPlan:
        """The parts that are not empty."""
        return tuple(shard._replace(owner=self.owners[shard.owner]) for shard in plan_of_bounds(self.bounds))

    def announced(self) -> list[int]:
        """What worker 0 announces of a key on servers, whatever their number: its only owner, and part_elems."""
        return [self.owners[0] if len(self.owners) == 1 else EVENLY, self.part_elems]
