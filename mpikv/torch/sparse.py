"""The sum of sparse tensors, such as the gradients of `Embedding(sparse=True)`: every rank gets all entries.

Cost: the entries of all ranks are sent to each rank, after their numbers. Blocks, since the length of the result
depends on these numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpikv.arrays.reductions import Reduction
from mpikv.errors import ShapeMismatch, UnsupportedError
from mpikv.groups import collective
from mpikv.groups.group import RankGroup
from mpikv.torch.arrays import flat_array_of


def allreduce(group: RankGroup, tensor: Any, operator: Reduction) -> None:
    """Add a COO tensor of the same shape over all ranks, in place. UnsupportedError, or ShapeMismatch on all ranks."""
    if tensor.layout != torch.sparse_coo or tensor.device.type != "cpu" or operator.name != "sum":
        raise UnsupportedError(
            f"all_reduce ({operator.name}) of a tensor of layout {tensor.layout} on {tensor.device}: of sparse "
            "tensors, the backend mpikv adds those of layout torch.sparse_coo on the CPU"
        )
    mine = tensor.detach().coalesce()
    dims, size = mine.sparse_dim(), group.size
    # The number of entries, the number of sparse dimensions, and the shape, which the group itself does not compare.
    own = np.array([mine._nnz(), dims, *mine.shape], np.int64)
    of_ranks = [np.zeros_like(own) for _ in range(size)]
    group.start(collective.allgather([(own, of_ranks)])).wait()
    for rank, other in enumerate(of_ranks):
        if not np.array_equal(other[1:], own[1:]):
            theirs, sparse = tuple(other[2:].tolist()), int(other[1])
            raise ShapeMismatch(
                f"all_reduce of a sparse tensor: rank {group.rank} has one of shape {tuple(mine.shape)} with {dims} "
                f"sparse dimensions, rank {rank} one of {theirs} with {sparse}"
            )
    entries = [int(other[0]) for other in of_ranks]
    indices = [torch.empty((dims, n), dtype=torch.int64) for n in entries]
    values = [torch.empty((n, *mine.values().shape[1:]), dtype=mine.dtype) for n in entries]
    pairs = (mine.indices().contiguous(), indices), (mine.values().contiguous(), values)
    flat = [(flat_array_of(one), [flat_array_of(out) for out in outs]) for one, outs in pairs]
    group.start(collective.allgather(flat)).wait()
    total = torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), mine.shape, check_invariants=False
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
