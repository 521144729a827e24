"""How many bytes a key's values are where they travel encoded, and how many as they are."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from mpikv.arrays.as_numpy import sum_dtype
from mpikv.placement.keys import KeyInfo, even_bounds
from mpikv.placement.members import Members


class Wire(NamedTuple):
    """How a key's values travel where they travel encoded.

    push_bytes, pull_bytes: of all elements, as a worker sends them, and as owners send them back. codec: whether the
    first are encoded by a codec. back: whether the second are. force: the user wants it at all costs. on_device:
    whether a GPU can encode and decode both. step: parts of owners, and what travels in one piece, begin at multiples
    of so many elements, where there are that many.
    """

    push_bytes: int
    pull_bytes: int
    codec: bool = False
    back: bool = False
    force: bool = False
    on_device: bool = False
    step: int = 1

    def gathers(self, n_bytes: int, size: int) -> bool:
        """Whether `size` workers send fewer bytes, or as many in half the messages, where each sends all to all others.

        n_bytes: of the value as owners would send it back. For what leaves a worker both ways differ by one factor,
        the share that its host's workers have in all, so that this holds for each link, too.
        """
        return not self.back and size * self.push_bytes <= self.push_bytes + n_bytes


def encoded_bytes(members: Members, info: KeyInfo, wire: Wire, *, updated: bool) -> float:
    """What the busiest host sends to other hosts in a round whose values go encoded, cut evenly over the workers."""
    size, n_bytes = len(members.workers), info.n_bytes
    gathers = not updated and wire.gathers(n_bytes, size)
    each = wire.push_bytes if gathers else (wire.push_bytes + wire.pull_bytes) / size
    return max(n * (size - n) * each for n in Counter(members.worker_hosts).values())


def plain_bytes(members: Members, info: KeyInfo) -> float:
    """What each host sends to other hosts in a round whose values go as they are: sums that way, the result back."""
    n_hosts = len(set(members.worker_hosts))
    return (n_hosts - 1) / n_hosts * info.n_elems * (sum_dtype(info.dtype).itemsize + info.dtype.itemsize)


def bounds_in_steps(info: KeyInfo, parts: int, wire: Wire | None) -> tuple[int, ...]:
    """`even_bounds`, at multiples of the step in which values travel."""
    step = 1 if wire is None else wire.step
    return tuple(min(step * bound, info.n_elems) for bound in even_bounds(-(-info.n_elems // step), parts))
