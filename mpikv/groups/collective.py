"""Collective calls before they are made: what each is called, and what a rank does for it on either path.

All ranks of a group make the same calls in the same order. Arrays are flat, contiguous, and not to be touched until the
call is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray
from mpikv.collectives.shared import Chunk
from mpikv.engine.operation import Steps
from mpikv.groups.messages import MessageCalls
from mpikv.groups.operators import Operator
from mpikv.groups.shared import SharedCalls


class Collective(NamedTuple):
    """A call. text: what it is called, with its shapes and options; calls whose texts differ are different calls.

    by_messages: the steps of it under a tag. in_memory: the chunks of it; None: it always goes by messages.
    """

    text: str
    by_messages: Callable[[MessageCalls, int], Steps[None]]
    in_memory: Callable[[SharedCalls], Sequence[Chunk]] | None = None


def allreduce(arrays: Sequence[HostArray], operator: Operator) -> Collective:
    """Combine each of `arrays` over all ranks, in place. Raises UnsupportedError where that means nothing."""
    for array in arrays:
        operator.check(array.dtype)
    return Collective(
        f"all_reduce ({operator.name}) of {_shapes(arrays)}",
        lambda calls, tag: calls.allreduce(arrays, operator, tag),
        lambda calls: calls.allreduce(arrays, operator),
    )


def reduce(values: HostArray, out: HostArray, operator: Operator, root: int) -> Collective:
    """Combine `values` over all ranks into the root's `out`, which may be `values`."""
    operator.check(values.dtype)
    return Collective(
        f"reduce ({operator.name}) to {root} of {_shapes([values])}",
        lambda calls, tag: calls.reduce(values, out, operator, root, tag),
        lambda calls: calls.reduce(values, out, operator, root),
    )


def broadcast(arrays: Sequence[HostArray], root: int) -> Collective:
    """Copy the root's arrays to all ranks."""
    return Collective(
        f"broadcast from {root} of {_shapes(arrays)}",
        lambda calls, tag: calls.broadcast(arrays, root, tag),
        lambda calls: calls.broadcast(arrays, root),
    )


def allgather(pairs: Sequence[tuple[HostArray, Sequence[HostArray]]]) -> Collective:
    """Copy every rank's values to every rank. pairs: values, and one array for each rank."""
    return Collective(
        f"all_gather of {'; '.join(_shapes(outs) for _, outs in pairs)}",
        lambda calls, tag: calls.allgather(pairs, tag),
        lambda calls: calls.allgather(pairs),
    )


def reduce_scatter(pairs: Sequence[tuple[Sequence[HostArray], HostArray]], operator: Operator) -> Collective:
    """Combine part number `rank` of every rank into `out`. pairs: one array for each rank, and `out`."""
    for _, out in pairs:
        operator.check(out.dtype)
    return Collective(
        f"reduce_scatter ({operator.name}) of {'; '.join(_shapes(parts) for parts, _ in pairs)}",
        lambda calls, tag: calls.reduce_scatter(pairs, operator, tag),
        lambda calls: calls.reduce_scatter(pairs, operator),
    )


def exchange(
    name: str, outgoing: Mapping[int, HostArray], incoming: Mapping[int, HostArray], same: object
) -> Collective:
    """Send `outgoing[rank]` to the ranks in it, and receive `incoming[rank]` from those in it.

    It makes gather, scatter and all-to-all. same: what all ranks bring alike, to tell different calls apart.
    """
    return Collective(f"{name} {same}", lambda calls, tag: calls.exchange(outgoing, incoming, tag))


def barrier() -> Collective:
    """A call that is done when every rank has made it."""
    return Collective("barrier", lambda calls, tag: calls.barrier(tag), lambda calls: [])


@lru_cache(maxsize=64)
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the dtype's name, which takes NumPy 10 us."""
    return str(dtype)


def _shapes(arrays: Sequence[HostArray]) -> str:
    """Write dtypes and lengths, each dtype once in a row: 'float32 10, 20, int64 1'."""
    parts: list[str] = []
    last = ""
    for array in arrays:
        dtype = name_of(array.dtype)
        parts.append(str(array.size) if dtype == last else f"{dtype} {array.size}")
        last = dtype
    return ", ".join(parts)
