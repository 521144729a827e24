"""A key's placement: the value that `place` returns."""

from __future__ import annotations

from typing import NamedTuple

from mpikv.placement.keys import ShardPlan, plan_of_bounds
from mpikv.placement.members import Path

EVENLY = -1  # announced in place of a key's only owner: the key is cut evenly over all servers


class Placement(NamedTuple):
    """The placement of one key: `owners[i]` owns the shard `[bounds[i], bounds[i+1])`, which may be empty.

    owners: numbers among the servers, or among the workers where they own the keys. algorithm: how workers add.
    partition_elems: the most elements of a message to or from a server. uncompressed_path: for `encoded`: the path and
    the algorithm of rounds without a codec; None: the same. host: the path on the host, where one of them is `host`.
    """

    path: Path
    algorithm: str
    owners: tuple[int, ...]
    bounds: tuple[int, ...]
    partition_elems: int = 0
    host: Path | None = None
    uncompressed_path: tuple[Path, str] | None = None

    @property
    def uncompressed(self) -> Placement | None:
        """The placement of rounds without a codec, with the same owners and bounds; None: this one."""
        if self.uncompressed_path is None:
            return None
        path, algorithm = self.uncompressed_path
        return self._replace(path=path, algorithm=algorithm, uncompressed_path=None)

    @property
    def shards(self) -> ShardPlan:
        return tuple(shard._replace(owner=self.owners[shard.owner]) for shard in plan_of_bounds(self.bounds))

    def announced(self) -> list[int]:
        """What worker 0 announces of a key on servers: its only owner, or EVENLY, partition_elems, its begin."""
        return [self.owners[0] if len(self.owners) == 1 else EVENLY, self.partition_elems, self.bounds[0]]
