"""The sum of sparse tensors, such as the gradients of `Embedding(sparse=True)`: every rank gets all entries.

Cost: what all ranks bring, to each rank; numbers of entries first. Blocks: the result is as long as these say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpikv.errors import ShapeMismatch, UnsupportedError
from mpikv.groups.group import RankGroup
from mpikv.groups.operators import Operator
from mpikv.torch.arrays import flat_array_of


def allreduce(group: RankGroup, tensor: Any, operator: Operator) -> None:
    """Add a COO tensor of the same shape over all ranks, in place.

    Raises UnsupportedError for another layout or op, ShapeMismatch on all ranks where their shapes differ.
    """
    if tensor.layout != torch.sparse_coo or tensor.device.type != "cpu" or operator.name != "sum":
        raise UnsupportedError(
            f"all_reduce ({operator.name}) of a tensor of layout {tensor.layout} on {tensor.device}: of sparse "
            "tensors, the backend mpikv adds those of layout torch.sparse_coo on the CPU"
        )
    mine = tensor.detach().coalesce()
    dims, size = mine.sparse_dim(), group.size
    # How many entries each rank has, how many of its dimensions are sparse, and its shape: a call's own text has none.
    own = np.array([mine._nnz(), dims, *mine.shape], np.int64)
    brought_by = [np.zeros_like(own) for _ in range(size)]
    group.allgather([(own, brought_by)]).wait()
    for rank, other in enumerate(brought_by):
        if not np.array_equal(other[1:], own[1:]):
            theirs, sparse = tuple(other[2:].tolist()), int(other[1])
            raise ShapeMismatch(
                f"all_reduce of a sparse tensor: rank {group.rank} has one of shape {tuple(mine.shape)} with {dims} "
                f"sparse dimensions, rank {rank} one of {theirs} with {sparse}"
            )
    entries = [int(other[0]) for other in brought_by]
    indices = [torch.empty((dims, n), dtype=torch.int64) for n in entries]
    values = [torch.empty((n, *mine.values().shape[1:]), dtype=mine.dtype) for n in entries]
    brought = (mine.indices().contiguous(), indices), (mine.values().contiguous(), values)
    group.allgather([(flat_array_of(one), [flat_array_of(out) for out in outs]) for one, outs in brought]).wait()
    total = torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), mine.shape, check_invariants=False
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
