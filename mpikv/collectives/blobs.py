"""Gather, scatter and swap of byte strings of any length: for saving and loading states.

The length of each byte string is sent before it. Cost: two messages per rank, of gather and scatter all at the root.
Restrictions: none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.engine.operation import Steps
from mpikv.transports.base import Group


def _send(group: Group, data: bytes, dest: int, tag: int) -> Steps[None]:
    yield group.isend(np.array([len(data)], np.int64), dest, tag)
    if data:
        yield group.isend(np.frombuffer(data, np.uint8), dest, tag)


def _receive(group: Group, source: int, tag: int) -> Steps[bytes]:
    length = np.empty(1, np.int64)
    yield group.irecv(length, source, tag)
    data: HostArray = np.empty(int(length[0]), np.uint8)
    if data.size:
        yield group.irecv(data, source, tag)
    return data.tobytes()


def gather(group: Group, data: bytes, root: int, tag: int) -> Steps[list[bytes]]:
    """Return every rank's bytes, in rank order, at the root; an empty list elsewhere. Collective."""
    if group.rank != root:
        yield from _send(group, data, root, tag)
        return []
    blobs = []
    for source in range(group.size):
        blobs.append(data if source == root else (yield from _receive(group, source, tag)))
    return blobs


def scatter(group: Group, blobs: Sequence[bytes] | None, root: int, tag: int) -> Steps[bytes]:
    """Return `blobs[r]` of the root at rank r. blobs: None at all other ranks. Collective."""
    if group.rank != root:
        return (yield from _receive(group, root, tag))
    assert blobs is not None
    for dest in range(group.size):
        if dest != root:
            yield from _send(group, blobs[dest], dest, tag)
    return blobs[root]


def swap(group: Group, data: bytes, dests: Sequence[int], tag: int) -> Steps[dict[int, bytes]]:
    """Send bytes to `dests[group.rank]`; return those that came here, by rank. dests: of all ranks. Collective.

    A rank that is its own destination sends nothing.
    """
    dest, found = dests[group.rank], dict[int, bytes]()
    sending = []
    if dest != group.rank:
        length = np.array([len(data)], np.int64)
        sending = [group.isend(length, dest, tag), group.isend(np.frombuffer(data, np.uint8), dest, tag)]
    for source in range(group.size):
        if source != group.rank and dests[source] == group.rank:
            found[source] = yield from _receive(group, source, tag)
    yield from sending
    return found
