"""What `store.stats(by_key=True)` says: the bytes of a ledger by the names of keys and hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpikv.placement.keys import Key, KeyInfo
from mpikv.transports.ledger import MEMORY, Ends, Use

ByKey = dict[Key | None, dict[str, dict[str, int]]]  # bytes by key, leg and link


def by_key(
    entries: Iterable[tuple[Ends, Use, int]],
    infos: Sequence[KeyInfo],
    buckets: Mapping[int, Sequence[KeyInfo]],
    hosts: Sequence[str],
) -> ByKey:
    """Return the bytes of each key, in the order of `infos`, and under None what belongs to none of them.

    buckets: the keys of each bucket, by the number under which they travel. hosts: of each rank.
    """
    found: ByKey = {info.key: {} for info in infos} | {None: {}}
    names: dict[int | None, Key] = {info.id: info.key for info in infos}
    for ends, (key_id, leg), n_bytes in entries:
        together = buckets.get(key_id, ()) if key_id is not None and leg != "init" else ()
        shares = _shares(together, n_bytes) if together else [(names.get(key_id), n_bytes)]
        for key, share in shares:
            if share:
                links, link = found.setdefault(key, {}).setdefault(leg, {}), _link(ends, hosts)
                links[link] = links.get(link, 0) + share
    return {key: legs for key, legs in found.items() if legs}


def _shares(infos: Sequence[KeyInfo], n_bytes: int) -> Iterator[tuple[Key, int]]:
    """Divide the bytes of a bucket among its keys by their lengths, to the byte."""
    n_elems, end, given = sum(info.n_elems for info in infos), 0, 0
    for info in infos:
        end += info.n_elems
        upto = n_bytes * end // n_elems
        yield info.key, upto - given
        given = upto


def _link(ends: Ends, hosts: Sequence[str]) -> str:
    if ends == MEMORY:
        return "memory"
    source, dest = (hosts[rank] for rank in ends)
    return f"within {source}" if source == dest else f"{source} -> {dest}"
