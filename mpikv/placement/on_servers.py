"""Which servers own a key, and in which partitions its values are sent to them.

Where the choice depends on each server's load, worker 0 chooses, and announces its choice (`Placement.announced`,
`as_announced`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mpikv.placement.algorithms import LINK_SEGMENT_BYTES
from mpikv.placement.encoding import Wire, bounds_in_steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.placement import EVENLY, Placement

# The most partitions of a value, unless they are long. Each costs a server some 0.1 ms for each worker. And a short
# message waits at its receiver until a receive is posted: MPI searches all waiting messages each time, so that
# thousands of them take minutes.
MAX_PARTITIONS = 64
PARTITION_BYTES = 1 << 20  # in memory; the cache holds some
FAST_BYTES_PER_S = 1.25e9
SHORT_PARTITION_BYTES = LINK_SEGMENT_BYTES  # from so many bytes on a partition costs little beside its bytes


def on_servers(
    members: Members, info: KeyInfo, *, whole: bool, load_bytes: Sequence[int], wire: Wire | None, begin: int = 0
) -> Placement:
    """Place a key below the bound on the server with the fewest bytes, and cut a larger one evenly over all.

    begin: the first element that servers own.
    """
    n_servers, n_elems = len(members.owners), info.n_elems - begin
    partition_elems = _partition_elems(members, info, n_elems, wire)
    if n_servers == 1 or whole or n_elems < members.config.bigarray_bound_elems:
        return on_server(info, least_loaded(load_bytes), partition_elems, begin)
    return _evenly(info, n_servers, partition_elems, wire, begin)


def partition_bytes(members: Members, sent: float = 1.0) -> int:
    """How many bytes of a value a partition has. sent: the part of a pushed byte that is sent.

    Over links a partition is a short message for MPI: a longer one has to be agreed on, and the agreement waits behind
    what goes the same way, so that pushes and answers hardly overlap (docs/adr/0047-the-cut.md). On faster links than
    FAST_BYTES_PER_S the core of a server, which pays for each message, is busy for longer than its link.
    """
    if members.config.partition_bytes:
        return members.config.partition_bytes
    short = members.links and min(members.link_bytes_per_s) <= FAST_BYTES_PER_S
    return min(PARTITION_BYTES, int(LINK_SEGMENT_BYTES / sent)) if short else PARTITION_BYTES


def is_asked_for(n_bytes: int) -> bool:
    """Whether a server asks for a partition of so many bytes, over links: MPI agrees by itself on a longer one."""
    return n_bytes <= LINK_SEGMENT_BYTES


def _partition_elems(members: Members, info: KeyInfo, n_elems: int, wire: Wire | None) -> int:
    """What `partition_bytes` holds, or more where there would be more than MAX_PARTITIONS short ones."""
    item_bytes, step = info.dtype.itemsize, 1 if wire is None else wire.step
    sent = wire.push_bytes / info.n_bytes if wire is not None and wire.push_bytes and info.n_elems else 1.0
    least = min(-(-n_elems // MAX_PARTITIONS), SHORT_PARTITION_BYTES // item_bytes)
    most = max(1, least, partition_bytes(members, sent) // item_bytes)
    return max(1, most // step) * step


def _evenly(info: KeyInfo, n_servers: int, partition_elems: int, wire: Wire | None, begin: int) -> Placement:
    bounds = bounds_in_steps(info, n_servers, wire, begin)
    return Placement("servers", "", tuple(range(n_servers)), bounds, partition_elems)


def on_server(info: KeyInfo, server: int, partition_elems: int, begin: int = 0) -> Placement:
    return Placement("servers", "", (server,), (begin, info.n_elems), partition_elems)


def as_announced(members: Members, info: KeyInfo, announced: Sequence[int], wire: Wire | None = None) -> Placement:
    server, partition_elems, begin = announced
    if server != EVENLY:
        return on_server(info, server, partition_elems, begin)
    return _evenly(info, len(members.owners), partition_elems, wire, begin)


def least_loaded(load_bytes: Sequence[int]) -> int:
    return min(range(len(load_bytes)), key=lambda owner: (load_bytes[owner], owner))


def add_load(load_bytes: list[int], placement: Placement, itemsize_bytes: int) -> None:
    for owner, begin, end in placement.shards:
        load_bytes[owner] += (end - begin) * itemsize_bytes
