"""The stores that scripts/bench_links.py compares, with and without servers, and what links allow them.

Of n hosts with workers, whatever their number on each, and k with a server, where servers take the share t of S bytes
of keys and the rest goes by the ring of the workers, the link of workers carries 2(n-1)/n (1-t) + t of S each way, and
a server's n t/k.
"""

from __future__ import annotations

import argparse
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mpikv import Config
    from mpikv.kvstore import KVStore


class Links(NamedTuple):
    """What links allow of n hosts with workers and k with servers; one worker's is `slow` times as slow as all others.

    take: the share of the keys' bytes that goes to servers. Times are in units of S/B.
    """

    n: int
    k: int
    slow: float

    def sent(self, take: float) -> float:
        """What a worker's host sends, relative to the keys' bytes."""
        return 2 * (self.n - 1) / self.n * (1 - take) + take

    def bound(self, take: float) -> float:
        """The least time."""
        return max(self.slow * self.sent(take), self.n * take / self.k if self.k else 0.0)

    def best(self) -> float:
        """The share with the least bound: workers' and servers' links take equally long, if servers can be so slow."""
        ring = self.slow * self.sent(0)
        return min(1.0, ring / (self.n / self.k + ring - self.slow)) if self.k else 0.0

    def share(self, take: str) -> float:
        """The share that a setting asks for; of `auto`, the best one."""
        return {"all": 1.0, "auto": self.best()}[take] if take in {"all", "auto"} else float(take)


def takes(options: argparse.Namespace) -> dict[str, str]:
    """The contenders with servers, and the setting of what these take."""
    given = options.take.split(",") if options.take else []
    return {"servers alone": "all", "hybrid": "auto", **{f"hybrid, {take}": take for take in given}}


def with_servers(k: int, take: str) -> Config:
    """The settings of a store whose servers are its last k ranks."""
    from mpikv import Config  # noqa: PLC0415

    return Config.from_environ().with_(num_servers=k, server_placement="last", servers_take=take)


def open_stores(options: argparse.Namespace) -> tuple[Any, dict[str, KVStore]]:
    """The communicator of the workers, and each contender's store. A server rank serves one of them, and ends here."""
    from mpi4py import MPI  # noqa: PLC0415

    from mpikv import Config, kv  # noqa: PLC0415

    world, n, k = MPI.COMM_WORLD, int(options.hosts), int(options.servers)
    if not k:
        configs = {name: Config.from_environ().with_(algorithm=name) for name in options.algorithms.split(",")}
        return world, {name: kv.create("dist_sync", config=config) for name, config in configs.items()}
    configs = {"ring alone": Config.from_environ().with_(num_servers=0)}
    configs |= {name: with_servers(k, take) for name, take in takes(options).items()}
    # All workers, and in each group but the first one a server of each host, the i-th one there in the i-th of these.
    names, rank = world.allgather(socket.gethostname()), world.Get_rank()
    is_worker = names[rank] in list(dict.fromkeys(names))[:n]
    group = -1 if is_worker else 1 + names[:rank].count(names[rank])
    groups = [world.Split(0 if is_worker or group == i else MPI.UNDEFINED, rank) for i in range(len(configs))]
    stores = {
        name: kv.create("dist_sync", comm=comm, config=config)
        for comm, (name, config) in zip(groups, configs.items(), strict=True)
        if comm != MPI.COMM_NULL
    }
    return groups[0], stores
