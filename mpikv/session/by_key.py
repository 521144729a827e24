"""What `store.stats(by_key=True)` says: the bytes of a ledger by the names of keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mpikv.placement.keys import Key, KeyInfo


def by_key(
    counted: Mapping[int | None, int], infos: Sequence[KeyInfo], buckets: Iterable[Sequence[KeyInfo]]
) -> dict[Key | None, int]:
    """Return the bytes of each key, in the order of `infos`, and under None what belongs to none of them.

    counted: by the numbers of keys. buckets: keys that travel as one; they share its bytes by their lengths.
    """
    found: dict[Key | None, int] = {info.key: counted.get(info.id, 0) for info in infos}
    found[None] = sum(counted.values()) - sum(found.values())
    for bucket in buckets:
        together = [info for info in bucket if info.key in found]
        n_bytes, n_elems, end = sum(found[info.key] for info in together), sum(info.n_elems for info in together), 0
        for info in together:
            begin, end = end, end + info.n_elems
            found[info.key] = n_bytes * end // n_elems - n_bytes * begin // n_elems
    return {key: n_bytes for key, n_bytes in found.items() if n_bytes}
