"""Where a key is cut: its elements before the cut go round the ring of the workers, the others to owners.

In a synchronous store without servers the owners are services in the workers, and a key goes one of the two ways
(`goes_to_owners`). With servers both ways are under way at the same time.

Of S bytes let the servers take the share s. Each of h hosts of workers sends, and receives, 2(h-1)/h (1-s) S among the
workers, and s S to and from the servers, whatever the number of its workers, who add in memory first. A host with m of
k servers receives, and sends, h m/k s S. (Where workers of a host do not add, h is there the number of workers, and
each of them sends s S.) The best s is the one where the slowest link ends first; docs/gradient.md ("Where a key is
cut") has the times. Source: Jiang et al., OSDI 2020 (BytePS), section 3, which does it with machines of several GPUs.

A key that is so short that messages cost more than bytes goes to one side whole, where it ends first; so does one for
which the cut saves too little, or of which servers would take less than `LEAST_BYTES`. Row-sparse keys, and those in
device memory, go to the servers; so do keys whose optimizer needs the whole value at one owner.

The share is a multiple of 1/64, so that links that were measured a little differently give the same cut.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.placement.costs import Costs, Link, exchange_s, ring_s
from mpikv.placement.encoding import Wire, encoded_bytes, uncompressed_bytes
from mpikv.placement.keys import KeyInfo
from mpikv.placement.links import LINK_SEGMENT_BYTES
from mpikv.placement.members import Members

SHARES = 64
# Shorter keys of workers alone go to owners, by the path that longer ones take (docs/adr/0051-owners.md). Where the
# workers of a host add in memory first, all but one of them would send for nothing.
SHORT_BYTES = {"ring": 256 << 10, "hosted": 64 << 10}
# For how much longer a server's link is busy than its bytes take, since answers begin when all have pushed
# (docs/performance.md, "Workers and servers at once").
SERVER_LINK = 1.04
# A cut has to save 8 % of what the workers alone would take, or 15 % of what servers alone would: it costs messages of
# both kinds, and links reach less of their rate when both parts use them. With 4 workers and 4 servers, where a cut
# would save 7 % of the latter, a round took 1.7 times as long as on servers alone; with 2 servers and one worker's link
# at half its rate, where it would save 9 %, 1.1 times (docs/performance.md, "Workers and servers at once").
GAIN = {0.0: 0.92, 1.0: 0.85}
# Less of a key goes to a server in one message with that of other keys, and is answered when all of these are there:
# ResNet-18 on 3 workers and a server took 1.6 times its bytes over the rate with such cuts, and 1.3 without.
LEAST_BYTES = 256 << 10


def cut_of(members: Members, info: KeyInfo, wire: Wire, *, whole: bool = False, updated: bool = False) -> int:
    """How many elements, from the first on, go round the ring of the workers; the rest goes to owners.

    whole: one owner has all of it, since its optimizer's formula needs the whole value. updated: whether owners update
    it with an optimizer.
    """
    if members.workers_own:
        return 0 if goes_to_owners(members, info, wire, updated=updated) else info.n_elems
    # Servers decode what a codec encodes, and take halves as they are: a ring would send them as float32.
    encoded = wire.codec or wire.back or sum_dtype(info.dtype) != info.dtype
    if not members.divides or info.sparse or info.space == "device" or encoded:
        return 0
    share = servers_share(members, info.n_bytes, added=members.is_added_on_hosts(info))
    if whole and share > 0:
        return 0
    steps = round((1 - share) * info.n_elems / wire.step)
    return min(steps * wire.step, info.n_elems)


def goes_to_owners(members: Members, info: KeyInfo, wire: Wire, *, updated: bool = False) -> bool:
    """Whether the owners of a key in a synchronous store without servers are services in the workers.

    So are those of rows; of values that a codec encodes, if these are fewer bytes between hosts; of halves, which a
    ring would send as float32; and of short values, of which a call sends all with one message to each owner, while a
    ring takes 2(n-1) steps, one after another.
    """
    if info.sparse:
        return True
    if wire.codec or wire.back:
        return wire.force or encoded_bytes(members, info, wire, updated=updated) < uncompressed_bytes(members, info)
    if len(members.workers) == 1 or members.path in ("direct", "native"):
        return False
    if members.device_path_of(info) in ("nccl", "mpi"):
        return False
    if members.config.host_algorithm != "auto":
        return members.config.host_algorithm == "owners"
    if sum_dtype(info.dtype) != info.dtype and members.path == "ring":
        return True
    return info.n_bytes < SHORT_BYTES[members.path]


def servers_share(members: Members, n_bytes: int, *, added: bool = False) -> float:
    """The servers' share of a key of so many bytes: MPIKV_SERVERS_TAKE, or by cost.

    added: whether the workers of a host add before one of them asks the servers.
    """
    share = members.config.servers_take
    if not isinstance(share, str):
        return share
    return _by_cost(members, n_bytes, added=added) if len(set(members.worker_hosts)) > 1 else 1.0


@lru_cache(maxsize=1024)  # many keys have the same length
def _by_cost(members: Members, n_bytes: int, *, added: bool = False) -> float:
    cut = min(range(SHARES + 1), key=lambda part: link_s(members, part / SHARES, added=added)) / SHARES
    if cut * n_bytes < LEAST_BYTES:
        cut = 0.0
    of_ends = {share: seconds(members, n_bytes, share, added=added) for share in (0.0, 1.0)}
    best = min(of_ends, key=lambda share: of_ends[share])
    return cut if seconds(members, n_bytes, cut, added=added) < GAIN[best] * of_ends[best] else best


def seconds(members: Members, n_bytes: int, share: float, *, added: bool = False) -> float:
    """How long a round of a key takes where the servers take this share of it. added: see `servers_share`."""
    hosts, workers = members.worker_hosts, len(members.workers)
    link = Link(min(members.link_bytes_per_s), members.link.latency_s)
    found = n_bytes * link_s(members, share, added=added)
    of_servers = int(share * n_bytes)
    if of_servers < n_bytes and len(set(hosts)) > 1:
        n_hosts, of_ring = len(set(hosts)), n_bytes - of_servers
        found = max(found, ring_s(of_ring, workers, link, Costs(), hosts=n_hosts, segment_bytes=LINK_SEGMENT_BYTES))
    if of_servers:
        found = max(
            found, exchange_s(of_servers, len(set(hosts)) if added else workers, len(members.servers), link, Costs())
        )
    return found


def link_s(members: Members, share: float, *, added: bool = False) -> float:
    """For how long a byte of a key keeps the busiest link busy, in its busier direction."""
    workers, servers = Counter(members.worker_hosts), Counter(members.hosts[rank] for rank in members.servers)
    if added:
        workers = Counter(dict.fromkeys(workers, 1))
    rates, n_servers = dict(zip(members.hosts, members.link_bytes_per_s, strict=True)), len(members.servers)
    among_workers = 2 * (len(workers) - 1) / len(workers) * (1 - share)
    loads = []
    for host in workers | servers:
        others = workers.total() - workers[host]
        to_servers = workers[host] * (n_servers - servers[host]) / n_servers  # what stays on a host crosses no link
        of_workers = among_workers if workers[host] else 0.0
        of_servers = SERVER_LINK * others * servers[host] / n_servers
        loads.append((of_workers + share * (to_servers + of_servers)) / rates[host])
    return max(loads)
