"""Which host runs how many servers and workers: MXNet's rule, made to respect slots.

Servers first, then workers, one process to each host in turn: process i of both goes to host i mod H. A host whose
slots are full is passed over; when all are full, the counting begins anew, which is only allowed where some host has no
slots of its own or where it was asked for. So with hosts that have no slots, or all the same, this is MXNet's placement
(dmlc_tracker/ssh.py).

Ranks are then numbered host by host, the workers of a host before its servers, and rank 0 is a worker: neighbours in
rank sit on one host, which is what ring and hierarchical allreduce want, and any `mpirun` does it when it fills hosts
in turn. MXNet numbers its processes by when they arrive, so no number is lost by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpikv.commands.launch.hosts import Host
from mpikv.errors import ConfigError


class RankBlock(NamedTuple):
    """Ranks of one role that follow each other on one host: one program of the `mpirun` line. host: "" for any."""

    role: str
    ranks: int
    first_number: int
    first_rank: int
    host: str


def place(hosts: Sequence[Host], workers: int, servers: int, *, oversubscribe: bool = False) -> list[RankBlock]:
    """The blocks, in the order of their ranks. No hosts: all where `mpirun` puts them.

    Raises ConfigError where slots do not suffice.
    """
    if not hosts:
        blocks = [RankBlock("worker", workers, 0, 0, "")]
        return blocks + ([RankBlock("server", servers, 0, workers, "")] if servers else [])
    slots = sum(host.slots or 0 for host in hosts)
    if not oversubscribe and all(host.slots is not None for host in hosts) and workers + servers > slots:
        raise ConfigError(
            f"{workers + servers} processes (workers and servers), but {len(hosts)} hosts with {slots} slots in all: "
            "give more hosts or slots, fewer processes (-s 0 starts no servers), or --oversubscribe"
        )
    on = [{"server": 0, "worker": 0} for _ in hosts]
    free = [host.slots or 1 for host in hosts]
    at = 0
    for role in ["server"] * servers + ["worker"] * workers:
        if not any(free):
            free = [host.slots or 1 for host in hosts]
        while not free[at % len(hosts)]:
            at += 1
        on[at % len(hosts)][role] += 1
        free[at % len(hosts)] -= 1
        at += 1
    first = next(i for i, counts in enumerate(on) if counts["worker"])
    blocks, next_number, rank = [], {"worker": 0, "server": 0}, 0
    for i in [first, *(i for i in range(len(hosts)) if i != first)]:
        for role in ("worker", "server"):
            if on[i][role]:
                blocks.append(RankBlock(role, on[i][role], next_number[role], rank, hosts[i].name))
                next_number[role] += on[i][role]
                rank += on[i][role]
    return blocks


def per_host(blocks: Sequence[RankBlock]) -> list[tuple[str, int]]:
    """How many ranks each host gets, in the order in which they are filled."""
    counts: dict[str, int] = {}
    for block in blocks:
        if block.host:
            counts[block.host] = counts.get(block.host, 0) + block.ranks
    return list(counts.items())
