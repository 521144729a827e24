"""Descriptions of collective calls: the text that identifies a call, and what a rank does for it on either path.

All ranks make the same calls in the same order. Arrays are flat, contiguous, and not to be touched meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mpikv.arrays.as_numpy import HostArray, dtype_of
from mpikv.arrays.reductions import OF_GROUPS, Reduction
from mpikv.collectives.shared import Chunk
from mpikv.engine.operation import Steps
from mpikv.groups.messages import MessageCalls
from mpikv.groups.shared import SharedCalls

ALLREDUCE = "all_reduce"  # the text of every allreduce begins so


class Collective(NamedTuple):
    """A call. text: its name, shapes and options; calls whose texts differ are different calls.

    by_messages: returns its steps, which send under a given tag. in_memory: returns its chunks; None: the call is
    always made by messages. of_all: by messages, too, it ends on no rank before all have made it.
    """

    text: str
    by_messages: Callable[[MessageCalls, int], Steps[None]]
    in_memory: Callable[[SharedCalls], Sequence[Chunk]] | None = None
    of_all: bool = False


def allreduce(arrays: Sequence[HostArray], operator: Reduction) -> Collective:
    """Combine each of `arrays` over all ranks, in place. Raises UnsupportedError where the operator is undefined."""
    for array in arrays:
        operator.check(array.dtype)
    return Collective(
        f"{ALLREDUCE} ({operator.name}) of {_shapes(arrays)}",
        lambda calls, tag: calls.allreduce(arrays, operator, tag),
        lambda calls: calls.allreduce(arrays, operator),
        of_all=True,
    )


def reduce(values: HostArray, out: HostArray, operator: Reduction, root: int) -> Collective:
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
        of_all=True,
    )


def reduce_scatter(pairs: Sequence[tuple[Sequence[HostArray], HostArray]], operator: Reduction) -> Collective:
    """Combine every rank's array number `rank` into `out`. pairs: one array for each rank, and `out`."""
    for _, out in pairs:
        operator.check(out.dtype)
    return Collective(
        f"reduce_scatter ({operator.name}) of {'; '.join(_shapes(arrays) for arrays, _ in pairs)}",
        lambda calls, tag: calls.reduce_scatter(pairs, operator, tag),
        lambda calls: calls.reduce_scatter(pairs, operator),
        of_all=True,
    )


def exchange(
    name: str, outgoing: Mapping[int, HostArray], incoming: Mapping[int, HostArray], same: object
) -> Collective:
    """Send `outgoing[rank]` to and receive `incoming[rank]` from each rank in it. same: what is equal on all ranks."""
    return Collective(f"{name} {same}", lambda calls, tag: calls.exchange(outgoing, incoming, tag))


def barrier() -> Collective:
    """A call that is done when every rank has made it."""
    return Collective("barrier", lambda calls, tag: calls.barrier(tag), lambda calls: [], of_all=True)


@lru_cache(maxsize=64)
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the dtype's name. Cached, since NumPy takes 10 us for it."""
    return str(dtype)


def _shapes(arrays: Sequence[HostArray]) -> str:
    """Write dtypes and lengths, a dtype only where it differs from the last one: 'float32 10, 20, int64 1'."""
    texts: list[str] = []
    last = ""
    for array in arrays:
        dtype = name_of(array.dtype)
        texts.append(str(array.size) if dtype == last else f"{dtype} {array.size}")
        last = dtype
    return ", ".join(texts)


def neutral(text: str) -> Collective:
    """Return an allreduce of this text with values that do not change the result, but for the count in a mean."""
    call, _, shapes = text.partition(" of ")
    operator = OF_GROUPS[call.removeprefix(f"{ALLREDUCE} (").rstrip(")")]
    arrays: list[HostArray] = []
    for word in filter(None, shapes.split(", ")):
        *name, size = word.split(" ")
        dtype = dtype_of(name[0]) if name else arrays[-1].dtype
        least, most = (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (-np.inf, np.inf)
        fill = {"prod": 1, "max": least, "min": most}.get(operator.name, 0)
        arrays.append(np.full(int(size), fill, dtype))
    return allreduce(arrays, operator)
