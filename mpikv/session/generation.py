"""The ranks of a store from one death to the next, and how those that are left find each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from mpikv.placement.spares import Seat
from mpikv.session.workers import Workers


class Generation(NamedTuple):
    """The ranks from one death to the next: what a store of theirs has. number: how often survivors have come together.

    strategy: a `Strategy`. calls: a `WorkersGroup`. seats: of all ranks, and mine: of this one. alone: the store is of
    this rank alone, a spare.
    """

    number: int
    session: Workers
    strategy: Any
    calls: Any
    seats: Sequence[Seat]
    mine: Seat
    alone: bool = False


class Survivors(Protocol):
    """How the ranks that are left find each other: those of MPI (create/survivors.py), or threads in tests."""

    def is_death(self, error: BaseException) -> bool:
        """Whether an error comes from the end of a rank of the present generation. Local."""

    def regroup(self) -> Generation:
        """Begin the next generation, with the ranks that are left. Collective over them, blocks.

        Raises AllClosedError, and what `is_death` knows where another rank dies meanwhile.
        """

    def is_ready(self, *, admits: bool) -> None:
        """Say so when ranks come together next: this spare is ready, or, with `admits`, this worker lets spares in.
        Local.
        """

    def has_news(self) -> bool:
        """Whether a spare that was coming is ready, or dead. Local."""

    def closed(self) -> None:
        """Tell the others that this worker has seen all agree to close the store. Local."""


class AllClosedError(Exception):
    """Another worker has seen all agree to close the store: so they have, and this one has only not learned of it."""
