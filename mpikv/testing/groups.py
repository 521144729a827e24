"""Process groups over thread ranks: the same calls as under mpirun, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mpikv.config import Config
from mpikv.groups.group import RankGroup
from mpikv.groups.world import World
from mpikv.testing.ranks import memories_of, spawn
from mpikv.testing.stores import for_tests
from mpikv.transports.base import Transport
from mpikv.transports.threads import Fabric

T = TypeVar("T")


def spawn_groups(
    size: int,
    body: Callable[[World, RankGroup], T],
    *,
    hosts: Sequence[str] | None = None,
    config: Config | None = None,
    fabric: Fabric | None = None,
) -> list[T]:
    """Run `body(world, group of all ranks)` on thread ranks, and return its results in rank order. Blocks.

    hosts: of each rank; those of one host share memory, unless config says `shared_memory="off"`. fabric: what they
    talk over, such as one with a clock of its own, in place of a new one on these hosts. Raises RankError.

    >>> from mpikv.testing.groups import spawn_groups
    >>> spawn_groups(2, lambda world, group: (group.rank, group.size))
    [(0, 2), (1, 2)]
    """
    config = for_tests(config)
    places = hosts or ["localhost"] * size
    memories = memories_of(places) if config.shared_memory == "auto" else [None] * size

    def rank_body(transport: Transport) -> T:
        fatal: list[BaseException] = []
        memory = memories[transport.rank]
        world = World(transport, config, threaded=True, memory=memory, on_fatal=fatal.append)
        try:
            result = body(world, world.group(range(size), 1, config.timeout_s))
            world.close()
        finally:
            world.engine.stop()
        if fatal:
            raise fatal[0]
        return result

    return spawn(size, rank_body, hosts=hosts, fabric=fabric, timeout_s=3 * config.timeout_s + 10)
