"""Which ranks share a host: from the name of each rank's host alone, so every rank gets the same result.

Hosts are numbered in the order of their first ranks, a host's ranks in the order of their numbers; they need not be
consecutive. `pretended` lets one machine stand for several hosts, in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from mpikv.errors import ConfigError


class Topology(NamedTuple):
    """hosts: the ranks of each. host_of: the number of each rank's host. local_rank: its index among that host's."""

    hosts: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...]
    local_rank: tuple[int, ...]

    @property
    def n_leaders(self) -> int:
        """How many ranks of every host can have a partner on every other one: the size of the smallest host."""
        return min(len(ranks) for ranks in self.hosts)


def topology(hosts: Sequence[str]) -> Topology:
    return _topology(tuple(hosts))


@lru_cache(maxsize=64)  # every key asks for the topology of the same few groups
def _topology(hosts: tuple[str, ...]) -> Topology:
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    numbers = {host: number for number, host in enumerate(members)}
    return Topology(
        tuple(tuple(ranks) for ranks in members.values()),
        tuple(numbers[host] for host in hosts),
        tuple(members[host].index(rank) for rank, host in enumerate(hosts)),
    )


def labels(hosts: Sequence[str]) -> list[str]:
    return [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]


def pretended(hosts: Sequence[str], n_hosts: int) -> tuple[str, ...]:
    """Names as if the ranks ran on `n_hosts` hosts, in blocks of neighbours; 0: the names as they are.

    The real name stays in front, so that messages still say where a rank runs. ConfigError for more hosts than ranks.
    """
    if n_hosts == 0:
        return tuple(hosts)
    size = len(hosts)
    if n_hosts > size:
        raise ConfigError(f"MPIKV_TEST_HOSTS={n_hosts}, but there are only {size} ranks: use at most {size}")
    return tuple(f"{hosts[rank]}/{rank * n_hosts // size}" for rank in range(size))
