"""The ranks of a store and its settings: what the placement of every key of the store depends on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.config import Config
from mpikv.placement.keys import KeyInfo
from mpikv.placement.links import ASSUMED, LinkRates

Path = Literal["direct", "hosted", "divided", "ring", "native", "owners", "nccl", "mpi", "host"]
# Shorter keys of a call are sent to a server in one message by each worker; added on hosts each would need its own.
ADDED_BYTES = 64 << 10
DevicePath = Literal["nccl", "mpi", "host", "none"]  # "none": no key is in device memory


@dataclass(frozen=True)
class Members:
    """The ranks of a store and its settings, the same on every rank.

    hosts: of each rank of the transport. workers, servers: ranks of the transport, not always all of them. memory:
    whether the ranks of each host can share memory, as far as known. device_path: of keys in device memory.
    device_reasons: why it is none of the better paths: pairs of a path and a sentence.
    """

    hosts: tuple[str, ...]
    workers: tuple[int, ...]
    servers: tuple[int, ...] = ()
    synchronous: bool = True
    config: Config = Config()  # noqa: RUF009 - immutable
    memory: bool = True
    device_path: DevicePath = "none"
    device_reasons: tuple[tuple[str, str], ...] = ()
    link: LinkRates = ASSUMED

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks that own the keys; a placement counts them from 0. The first `n_first` of them are asked.

        Where keys have second owners, those of an only server are at a worker.
        """
        if len(self.servers) == 1 and self.keeps:
            return *self.servers, self.workers[0]
        return self.servers or self.workers

    @property
    def n_first(self) -> int:
        return len(self.servers or self.workers)

    @property
    def keeps(self) -> bool:
        """Whether the store is asynchronous, so that values are at their owners alone, and goes on when one dies."""
        return not self.synchronous and self.config.on_failure == "continue"

    @cached_property
    def link_bytes_per_s(self) -> tuple[float, ...]:
        return tuple(map(self.link.of, self.hosts))

    @cached_property
    def worker_hosts(self) -> tuple[str, ...]:
        return tuple(self.hosts[rank] for rank in self.workers)

    @property
    def workers_own(self) -> bool:
        """Whether it is a synchronous store without servers: workers are the owners of all keys, in a ring or not."""
        return self.synchronous and not self.servers

    @cached_property
    def has_seconds(self) -> bool:
        """Whether each key is at two owners that both get all pushes, so that one of them may die."""
        return self.keeps and len(self.owners) > 1

    def owners_from(self, first: int) -> tuple[int, ...]:
        """Of a key that is whole at this owner, all of them."""
        return (first, (first + 1) % len(self.owners)) if self.has_seconds else (first,)

    @cached_property
    def owner_labels(self) -> list[str]:
        """How errors name the owners: workers, or servers of their own or inside of workers."""
        if self.workers_own:
            return [f"worker {i} on {host}" for i, host in enumerate(self.worker_hosts)]
        return [f"server {i} (rank {rank} on {self.hosts[rank]})" for i, rank in enumerate(self.owners)]

    @cached_property
    def servers_apart(self) -> bool:
        return {self.hosts[rank] for rank in self.servers}.isdisjoint(self.worker_hosts)

    @cached_property
    def divides(self) -> bool:
        """Whether keys are divided between the workers and the servers (cut.py)."""
        if not self.servers or not self.synchronous:
            return False
        share = self.config.servers_take
        several = self.servers_apart and len(set(self.worker_hosts)) > 1
        return self.adds_on_hosts or (several if share == "auto" else share != 1.0)

    @cached_property
    def adds_on_hosts(self) -> bool:
        """Whether the workers of a host add in memory what servers get of a key, and one of them asks the servers."""
        if not self.servers or not self.synchronous or max(Counter(self.worker_hosts).values()) == 1:
            return False
        return self.servers_apart and self.ring.shares_memory

    @cached_property
    def speakers(self) -> tuple[int, ...]:
        """The first worker of each host, who asks the servers for all of them where they add in memory."""
        return tuple(self.worker_hosts.index(host) for host in dict.fromkeys(self.worker_hosts))

    def is_added_on_hosts(self, info: KeyInfo) -> bool:
        """Whether the workers of a host add what servers get of this key: plain values in the dtype of the sums."""
        plain = info.space == "host" and info.codec == "none" and sum_dtype(info.dtype) == info.dtype
        return self.adds_on_hosts and plain and not info.sparse and info.n_bytes >= ADDED_BYTES

    @cached_property
    def ring(self) -> Members:
        """The workers alone, as in a store without servers: they own what servers do not take of divided keys.

        They share memory only where no server is on their hosts: there workers and servers share it.
        """
        return replace(self, servers=(), memory=self.memory and self.servers_apart)

    @cached_property
    def links(self) -> bool:
        return len({self.hosts[rank] for rank in (*self.workers, *self.servers)}) > 1

    @cached_property
    def shares_memory(self) -> bool:
        """Whether ranks of one host use memory that they share, where a host has several ranks."""
        if self.ring_has_memory:
            return True
        wanted = self.config.shared_memory == "auto" and (not self.workers_own or self.config.host_algorithm == "auto")
        hosts = [self.hosts[rank] for rank in (*self.workers, *self.servers)]
        return wanted and self.memory and len(set(hosts)) < len(hosts)

    @cached_property
    def ring_has_memory(self) -> bool:
        return self.divides and self.ring.shares_memory

    @cached_property
    def path(self) -> Path:
        """The path of every key, as long as the memory has space for it."""
        if not self.workers_own:
            return "owners"
        if not self.shares_memory:
            return "native" if self.config.algorithm == "native" else "ring"
        return "direct" if len(set(self.worker_hosts)) == 1 else "hosted"

    def device_path_of(self, info: KeyInfo) -> DevicePath:
        return self.device_path if info.space == "device" else "none"
