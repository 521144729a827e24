"""Which owners a key has that does not go round a ring, and in which partitions its values are sent to them.

They are servers, of their own or inside the workers. Where the choice depends on each one's load, worker 0 chooses, and
announces its choice (`Placement.announced`, `as_announced`).
"""

from __future__ import annotations

from collections.abc import Sequence

from mpikv.placement.encoding import Wire, bounds_in_steps
from mpikv.placement.keys import KeyInfo
from mpikv.placement.links import LINK_SEGMENT_BYTES
from mpikv.placement.members import Members
from mpikv.placement.placement import EVENLY, REPLICATED, Placement

# The most partitions of a value, unless they are long. Each costs a server some 0.1 ms for each worker. And a short
# message waits at its receiver until a receive is posted: MPI searches all waiting messages each time, so that
# thousands of them take minutes.
MAX_PARTITIONS = 64
PARTITION_BYTES = 1 << 20  # in memory; the cache holds some
FAST_BYTES_PER_S = 1.25e9
# Workers own a key from so many bytes on together, so that no link carries all of it; shorter ones are dealt out.
CUT_BYTES = 16 << 10
SHORT_PARTITION_BYTES = LINK_SEGMENT_BYTES  # from so many bytes on a partition costs little beside its bytes


def place_at_owners(
    members: Members,
    info: KeyInfo,
    wire: Wire,
    *,
    whole: bool = False,
    updated: bool = False,
    load_bytes: Sequence[int] = (),
    begin: int = 0,
) -> Placement:
    """Place a short key at the owner with the fewest bytes, and cut a longer one evenly over all.

    wire: how its values are sent. whole: one owner has all of it, since its optimizer's formula needs the whole value.
    updated: whether owners update it with an optimizer. load_bytes: what each owner holds already; none: keys are dealt
    out by their numbers. begin: the first element that they own. Where keys have second owners, none is cut.
    """
    n_owners, n_elems = len(members.owners), info.n_elems - begin
    partition_elems = _partition_elems(members, info, n_elems, wire)
    if members.workers_own and n_owners > 1 and not updated and wire.gathers(info.n_bytes, n_owners):
        return _at_several(members, info, wire, [REPLICATED, partition_elems, begin])
    bound = members.config.bigarray_bound_elems
    if members.workers_own:
        bound = CUT_BYTES // info.dtype.itemsize
    if n_owners == 1 or whole or members.has_seconds or n_elems < bound:
        n_first = members.n_first
        at = _least(load_bytes[:n_first]) if load_bytes else info.id % n_first
        return at_one(members, info, at, partition_elems, begin)
    return _at_several(members, info, wire, [EVENLY, partition_elems, begin])


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


def _partition_elems(members: Members, info: KeyInfo, n_elems: int, wire: Wire) -> int:
    """What `partition_bytes` holds, or more where there would be more than MAX_PARTITIONS short ones."""
    item_bytes, step = info.dtype.itemsize, wire.step
    sent = wire.push_bytes / info.n_bytes if wire.push_bytes and info.n_elems else 1.0
    least = min(-(-n_elems // MAX_PARTITIONS), SHORT_PARTITION_BYTES // item_bytes)
    most = max(1, least, partition_bytes(members, sent) // item_bytes)
    return max(1, most // step) * step


def at_one(members: Members, info: KeyInfo, owner: int, partition_elems: int, begin: int = 0) -> Placement:
    second = members.has_seconds and info.n_elems > 0
    owners = members.owners_from(owner) if second else (owner,)
    span = begin, info.n_elems
    return Placement("owners", owners, span, partition_elems, replicated=second, first_answers=second)


def _at_several(members: Members, info: KeyInfo, wire: Wire, announced: Sequence[int]) -> Placement:
    kind, partition_elems, begin = announced
    everybody = tuple(range(len(members.owners)))
    if kind == REPLICATED:
        return Placement("owners", everybody, (begin, info.n_elems), partition_elems, replicated=True)
    return Placement("owners", everybody, bounds_in_steps(info, len(everybody), wire, begin), partition_elems)


def as_announced(members: Members, info: KeyInfo, announced: Sequence[int], wire: Wire) -> Placement:
    return at_one(members, info, *announced) if announced[0] >= 0 else _at_several(members, info, wire, announced)


def _least(load_bytes: Sequence[int]) -> int:
    return min(range(len(load_bytes)), key=lambda owner: (load_bytes[owner], owner))


def add_load(load_bytes: list[int], placement: Placement, itemsize_bytes: int) -> None:
    for owner, begin, end in placement.shards:
        load_bytes[owner] += (end - begin) * itemsize_bytes
