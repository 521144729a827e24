"""Which servers own a key, and in what pieces its values travel to them.

Where each server's load decides, worker 0 chooses, and announces its choice (`Placement.announced`, `as_announced`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mpikv.placement.encoding import Wire, bounds_in_steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.members import Members
from mpikv.placement.placement import EVENLY, Placement

# Pieces of a value, unless they are long. Each costs a server some 0.1 ms for each worker. And a short message waits
# where it is sent to until it is asked for: MPI looks through all that wait, each time, so that thousands take minutes.
MOST_PARTS = 64
SHORT_PART_BYTES = 1 << 16  # from here on what a piece costs is little beside its bytes


def on_servers(
    members: Members, info: KeyInfo, *, whole: bool, load_bytes: Sequence[int], wire: Wire | None
) -> Placement:
    """A key below the bound goes whole to the server with the fewest bytes, a larger one is cut evenly over all."""
    n_servers = len(members.owners)
    part_elems = _part_elems(members, info, 1 if wire is None else wire.step)
    if n_servers == 1 or whole or info.n_elems < members.config.bigarray_bound_elems:
        return on_server(info, least_loaded(load_bytes), part_elems)
    return _evenly(info, n_servers, part_elems, wire)


def _part_elems(members: Members, info: KeyInfo, step: int) -> int:
    """As many as are asked for, or more where the value would travel in more than MOST_PARTS short pieces; in steps."""
    item_bytes = info.dtype.itemsize
    least = min(-(-info.n_elems // MOST_PARTS), SHORT_PART_BYTES // item_bytes)
    most = max(1, least, members.config.partition_bytes // item_bytes)
    return max(1, most // step) * step


def _evenly(info: KeyInfo, n_servers: int, part_elems: int, wire: Wire | None) -> Placement:
    bounds = bounds_in_steps(info, n_servers, wire)
    return Placement("servers", "", tuple(range(n_servers)), bounds, part_elems)


def on_server(info: KeyInfo, server: int, part_elems: int) -> Placement:
    """A key that lives with one server alone."""
    return Placement("servers", "", (server,), (0, info.n_elems), part_elems)


def as_announced(members: Members, info: KeyInfo, announced: Sequence[int], wire: Wire | None = None) -> Placement:
    """The placement that worker 0 has announced (`Placement.announced`). wire: see `place`."""
    server, part_elems = announced
    if server != EVENLY:
        return on_server(info, server, part_elems)
    return _evenly(info, len(members.owners), part_elems, wire)


def least_loaded(load_bytes: Sequence[int]) -> int:
    """The owner that holds the fewest bytes; the first of several."""
    return min(range(len(load_bytes)), key=lambda owner: (load_bytes[owner], owner))


def add_load(load_bytes: list[int], placement: Placement, itemsize_bytes: int) -> None:
    """Count what a key adds to its owners, in place."""
    for owner, begin, end in placement.shards:
        load_bytes[owner] += (end - begin) * itemsize_bytes
