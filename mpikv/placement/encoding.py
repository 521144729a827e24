"""How many bytes of a key's values are sent where a codec encodes them, and how many where none does."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.placement.keys import KeyInfo, even_bounds
from mpikv.placement.members import Members


class Wire(NamedTuple):
    """How a key's values are sent where they are sent encoded.

    push_bytes, pull_bytes: of all elements, as a worker sends them, and as owners send them back. codec: whether the
    first are encoded by a codec. back: whether the second are. force: whatever it costs. on_device: a GPU can do
    both. step: shards and partitions begin at multiples of so many elements, where the key has that many.
    """

    push_bytes: int
    pull_bytes: int
    codec: bool = False
    back: bool = False
    force: bool = False
    on_device: bool = False
    step: int = 1

    def gathers(self, n_bytes: int, size: int) -> bool:
        """Whether each of `size` workers should send all encoded values to all others, so that no sum has to come back.

        That is where they then send fewer bytes, or as many in half the messages. n_bytes: of the value as owners would
        send it back. The bytes that leave a host are in both cases the same fraction of those that leave its workers.
        """
        return self.codec and not self.back and size * self.push_bytes <= self.push_bytes + n_bytes


def encoded_bytes(members: Members, info: KeyInfo, wire: Wire, *, updated: bool) -> float:
    """The most bytes that a host sends to others in a round of encoded values, cut evenly over workers."""
    size, n_bytes = len(members.workers), info.n_bytes
    gathers = not updated and wire.gathers(n_bytes, size)
    each = wire.push_bytes if gathers else (wire.push_bytes + wire.pull_bytes) / size
    return max(n * (size - n) * each for n in Counter(members.worker_hosts).values())


def uncompressed_bytes(members: Members, info: KeyInfo) -> float:
    """The bytes that each host sends to others in a round without a codec: values out, the result back."""
    n_hosts = len(set(members.worker_hosts))
    return (n_hosts - 1) / n_hosts * info.n_elems * (sum_dtype(info.dtype).itemsize + info.dtype.itemsize)


def bounds_in_steps(info: KeyInfo, n_shards: int, wire: Wire, begin: int = 0) -> tuple[int, ...]:
    """`even_bounds` of the elements from `begin` on, at multiples of `Wire.step` elements after it."""
    step, n_elems = wire.step, info.n_elems
    cuts = even_bounds(-(-(n_elems - begin) // step), n_shards)
    return tuple(min(begin + step * bound, n_elems) for bound in cuts)
