"""Who is a server: a pure function of the ranks' hosts and of what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpikv.errors import ConfigError


class Roles(NamedTuple):
    """Ranks of the workers and of the servers, each in ascending order."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]


def assign(hosts: Sequence[str], num_servers: int, placement: str = "spread") -> Roles:
    """Choose `num_servers` of the ranks as servers. hosts: the host of each rank.

    `spread`: each host in turn gives its last rank that is still a worker, so that every host gets its share and rank 0
    stays a worker as long as possible; `last`: the last ranks. ConfigError when no worker would be left.
    """
    size = len(hosts)
    if num_servers >= size:
        raise ConfigError(
            f"{num_servers} servers among {size} ranks leave no worker: "
            f"start more ranks (mpirun -n {num_servers + 1} or more) or ask for fewer servers (MPIKV_NUM_SERVERS)"
        )
    if placement == "last":
        servers = set(range(size - num_servers, size))
    else:
        servers = set()
        # Hosts with more ranks give first, the last host before the first, so that rank 0's host is taxed last.
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        while len(servers) < num_servers:
            for ranks in sorted(by_host.values(), key=lambda ranks: (-len(ranks), -ranks[-1])):
                if len(servers) < num_servers and len(ranks) > (ranks[0] == 0):
                    servers.add(ranks.pop())
            by_host = {host: ranks for host, ranks in by_host.items() if ranks}
    return Roles(tuple(rank for rank in range(size) if rank not in servers), tuple(sorted(servers)))
