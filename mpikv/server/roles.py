"""Which ranks are servers: a pure function of the ranks' hosts and of the settings.

There are three placements. `spread`: the servers are spread evenly over all hosts, and so are the bytes on the hosts'
links. `hosts`: all ranks of some hosts, so that processors and links of these serve no worker. `last`: the last
ranks, wherever they run. Rank 0 stays a worker as long as there is another rank to take. How the launcher numbers the
ranks does not matter to the first two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpikv.config import PLACEMENTS
from mpikv.errors import ConfigError
from mpikv.placement.topology import topology

MANY = 8  # of more numbers than this an error names only the first ones and the last


class Roles(NamedTuple):
    """Ranks of the workers and of the servers, each in ascending order."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]


def assign(hosts: Sequence[str], num_servers: int, placement: str = "spread") -> Roles:
    """Choose `num_servers` of the ranks as servers. hosts: the host of each rank; placement: one of `PLACEMENTS`.

    Raises ConfigError when no worker would be left, or when no set of whole hosts has exactly so many ranks; the text
    says which numbers work.
    """
    size = len(hosts)
    if placement not in PLACEMENTS:
        raise ConfigError(
            f"servers are placed by {', '.join(PLACEMENTS)}, not by {placement!r} (MPIKV_SERVER_PLACEMENT)"
        )
    if num_servers < 0:
        raise ConfigError(f"{num_servers} servers are asked for; the least is 0 (MPIKV_NUM_SERVERS)")
    if num_servers >= size:
        raise ConfigError(
            f"{num_servers} servers among {size} ranks leave no worker: "
            f"start more ranks (mpirun -n {num_servers + 1} or more) or ask for fewer servers (MPIKV_NUM_SERVERS)"
        )
    if placement == "last":
        servers = set(range(size - num_servers, size))
    elif placement == "hosts":
        servers = _whole_hosts(hosts, num_servers)
    else:
        servers = _spread(hosts, num_servers)
    return Roles(tuple(rank for rank in range(size) if rank not in servers), tuple(sorted(servers)))


def _spread(hosts: Sequence[str], num_servers: int) -> set[int]:
    servers: set[int] = set()
    # Hosts with more ranks come first, and the last host before the first, so that rank 0's host comes last.
    left = [list(ranks) for ranks in topology(hosts).hosts]
    while len(servers) < num_servers:
        for ranks in sorted(left, key=lambda ranks: (-len(ranks), -ranks[-1])):
            if len(servers) < num_servers and len(ranks) > (ranks[0] == 0):
                servers.add(ranks.pop())
        left = [ranks for ranks in left if ranks]
    return servers


def _whole_hosts(hosts: Sequence[str], num_servers: int) -> set[int]:
    """All ranks of some hosts except the first one; the last hosts where there are several choices."""
    members = topology(hosts).hosts
    # possible[i]: the numbers of ranks of all sets of the hosts 1..i
    possible = [{0}]
    for ranks in members[1:]:
        possible.append(possible[-1] | {number + len(ranks) for number in possible[-1]})
    if num_servers not in possible[-1]:
        works = sorted(possible[-1])
        sizes = ", ".join(f"{hosts[ranks[0]]} {len(ranks)}" for ranks in members[:MANY])
        raise ConfigError(
            f"MPIKV_SERVER_PLACEMENT=hosts makes whole hosts servers, and no hosts have just {num_servers} ranks "
            f"beside that of rank 0, which stays with the workers: numbers that work are {_listed(works)} (ranks per "
            f"host: {sizes}{', ...' * (len(members) > MANY)}). Ask for one of these (MPIKV_NUM_SERVERS), start other "
            "numbers of ranks on the hosts, or choose spread or last"
        )
    servers: set[int] = set()
    missing = num_servers
    for i in range(len(members) - 1, 0, -1):
        ranks = members[i]
        if missing >= len(ranks) and missing - len(ranks) in possible[i - 1]:
            servers.update(ranks)
            missing -= len(ranks)
    return servers


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) <= MANY:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[: MANY - 1]))}, ..., {numbers[-1]}"
