"""Where a key is cut between the workers and the servers, in a synchronous store that has both.

The elements before the cut go by the workers' own algorithm, as in a store without servers, the others go to the
servers, both at the same time. Of S bytes let the servers take the share s. Each of h hosts of workers sends, and
receives, 2(h-1)/h (1-s) S among the workers, and s S to and from the servers, whatever the number of its workers, who
add in memory first. A host with m of k servers receives, and sends, h m/k s S. (Where workers of a host do not add,
h is there the number of workers, and each of them sends s S.) The best s is the one where the slowest link ends first.
With equal links that is where workers and servers end together:

    2(h-1)/h (1-s) + s = h s/k

So a key takes, in units of S over a link's rate, with h=4: 1.5 among the workers alone, and with k = 1, 2, 4 servers
1.33, 1.2, 1.0. Source: Jiang et al., OSDI 2020 (BytePS), section 3, which does it with machines of several GPUs. A
server's link is taken to be busy for `SERVER_LINK` times as long as its bytes take.

A key that is so short that messages cost more than bytes goes to one side whole, where it ends first; so does one for
which the cut saves too little, or of which servers would take less than `LEAST_BYTES`. Row-sparse keys, and those in
device memory, go to the servers; so do keys whose optimizer needs the whole value at one owner.

The share is a multiple of 1/64, so that links that were measured a little differently give the same cut.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from mpikv.placement.algorithms import LINK_SEGMENT_BYTES, choose
from mpikv.placement.costs import Costs, Link, allreduce_s, exchange_s
from mpikv.placement.encoding import Wire
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members

SHARES = 64
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


def cut_of(members: Members, info: KeyInfo, wire: Wire, *, whole: bool) -> int:
    """How many elements, from the first on, go by the workers; the rest goes to servers.

    whole: one owner has all of it, since its optimizer's formula needs the whole value.
    """
    if not members.divides or info.sparse or info.space == "device":
        return 0
    share = servers_share(members, info.n_bytes, added=members.is_added_on_hosts(info))
    if whole and share > 0:
        return 0
    steps = round((1 - share) * info.n_elems / wire.step)
    return min(steps * wire.step, info.n_elems)


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
        algorithm = choose(n_bytes - of_servers, workers, members.config.host_algorithm, hosts)
        algorithm = "ring" if algorithm == "native" else algorithm
        n_hosts = len(set(hosts))
        of_ring = n_bytes - of_servers
        segment_bytes = LINK_SEGMENT_BYTES
        ring_s = allreduce_s(algorithm, of_ring, workers, link, Costs(), hosts=n_hosts, segment_bytes=segment_bytes)
        found = max(found, ring_s)
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
