"""What one call sends and copies, counted; and the memory that the store holds: from `store.stats()`.

Collectives of the MPI library (`MPIKV_ALGORITHM=native`) hide their messages: messages and bytes are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI


class Counts(NamedTuple):
    """What one call costs, on the rank with most of each; None: not known.

    Control messages are among the messages, too. held_bytes: memory of the store beyond the user's arrays.
    shared_bytes: what it has in memory that the ranks of a host share.
    """

    messages: int | None = None
    bytes_sent: int | None = None
    control_messages: int | None = None
    bytes_copied: int | None = None
    held_bytes: int | None = None
    shared_bytes: int | None = None


def counts_of(before: Mapping[str, int], after: Mapping[str, int], *, hidden: bool = False) -> Counts:
    """Return what a call did. before, after: `store.stats()`. hidden: the MPI library sends, not the store."""

    def grown(name: str) -> int | None:
        return after[name] - before[name] if name in after else None

    return Counts(
        messages=None if hidden else grown("messages_sent"),
        bytes_sent=None if hidden else grown("bytes_sent"),
        control_messages=grown("control_messages_sent"),
        bytes_copied=grown("bytes_copied"),
        held_bytes=after.get("held_bytes"),
        shared_bytes=after.get("shared_bytes"),
    )


def most(comm: MPI.Intracomm, mine: Counts) -> Counts:
    """Return for each count the largest over the ranks; None where a rank does not know it. Collective."""
    return merge(comm.allgather(mine))


def merge(counts: Sequence[Counts]) -> Counts:
    """Return for each count the largest of these; None where one of them does not know it."""
    return Counts(*(None if None in column else max(column) for column in zip(*counts, strict=True)))
