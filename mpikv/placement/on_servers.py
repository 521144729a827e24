"""Which servers own a key, and in which partitions its values are sent to them.

Where the choice depends on each server's load, worker 0 chooses, and announces its choice (`Placement.announced`,
`as_announced`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mpikv.placement.encoding import Wire, bounds_in_steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.placement import EVENLY, Placement

# The most partitions of a value, unless they are long. Each costs a server some 0.1 ms for each worker. And a short
# message waits at its receiver until a receive is posted: MPI searches all waiting messages each time, so that
# thousands of them take minutes.
MAX_PARTITIONS = 64
SHORT_PARTITION_BYTES = 1 << 16  # from so many bytes on a partition costs little beside its bytes


def on_servers(
    members: Members, info: KeyInfo, *, whole: bool, load_bytes: Sequence[int], wire: Wire | None
) -> Placement:
    """Place a key below the bound on the server with the fewest bytes, and cut a larger one evenly over all servers."""
    n_servers = len(members.owners)
    partition_elems = _partition_elems(members, info, 1 if wire is None else wire.step)
    if n_servers == 1 or whole or info.n_elems < members.config.bigarray_bound_elems:
        return on_server(info, least_loaded(load_bytes), partition_elems)
    return _evenly(info, n_servers, partition_elems, wire)


def _partition_elems(members: Members, info: KeyInfo, step: int) -> int:
    """Return as many as the settings ask for, or more where there would be more than MAX_PARTITIONS short ones.

    A multiple of `step`.
    """
    item_bytes = info.dtype.itemsize
    least = min(-(-info.n_elems // MAX_PARTITIONS), SHORT_PARTITION_BYTES // item_bytes)
    most = max(1, least, members.config.partition_bytes // item_bytes)
    return max(1, most // step) * step


def _evenly(info: KeyInfo, n_servers: int, partition_elems: int, wire: Wire | None) -> Placement:
    bounds = bounds_in_steps(info, n_servers, wire)
    return Placement("servers", "", tuple(range(n_servers)), bounds, partition_elems)


def on_server(info: KeyInfo, server: int, partition_elems: int) -> Placement:
    """Place a key on one server alone."""
    return Placement("servers", "", (server,), (0, info.n_elems), partition_elems)


def as_announced(members: Members, info: KeyInfo, announced: Sequence[int], wire: Wire | None = None) -> Placement:
    """Return the placement that worker 0 has announced (`Placement.announced`). wire: see `place`."""
    server, partition_elems = announced
    if server != EVENLY:
        return on_server(info, server, partition_elems)
    return _evenly(info, len(members.owners), partition_elems, wire)


def least_loaded(load_bytes: Sequence[int]) -> int:
    """Return the owner that holds the fewest bytes; the first of several."""
    return min(range(len(load_bytes)), key=lambda owner: (load_bytes[owner], owner))


def add_load(load_bytes: list[int], placement: Placement, itemsize_bytes: int) -> None:
    """Add a key's bytes to its owners' loads, in place."""
    for owner, begin, end in placement.shards:
        load_bytes[owner] += (end - begin) * itemsize_bytes
