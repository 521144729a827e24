"""The sum of sparse tensors, such as the gradients of `Embedding(sparse=True)`: every rank gets all entries.

Cost: what all ranks bring, to each rank; numbers of entries first. Blocks: the result is as long as these say.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mpikv.errors import UnsupportedError
from mpikv.groups.group import RankGroup
from mpikv.groups.operators import Operator
from mpikv.torch.views import array_of


def allreduce(group: RankGroup, tensor: Any, operator: Operator) -> None:
    """Add a COO tensor of the same shape over all ranks, in place. Raises UnsupportedError for another layout or op."""
    if tensor.layout != torch.sparse_coo or tensor.device.type != "cpu" or operator.name != "sum":
        raise UnsupportedError(
            f"all_reduce ({operator.name}) of a tensor of layout {tensor.layout} on {tensor.device}: of sparse "
            "tensors, the backend mpikv adds those of layout torch.sparse_coo on the CPU"
        )
    mine = tensor.detach().coalesce()
    dims, size = mine.sparse_dim(), group.size
    counts = [np.zeros(1, np.int64) for _ in range(size)]
    group.allgather([(np.array([mine._nnz()], np.int64), counts)]).wait()
    entries = [int(count[0]) for count in counts]
    indices = [torch.empty((dims, n), dtype=torch.int64) for n in entries]
    values = [torch.empty((n, *mine.values().shape[1:]), dtype=mine.dtype) for n in entries]
    brought = (mine.indices().contiguous(), indices), (mine.values().contiguous(), values)
    group.allgather([(array_of(one), [array_of(out) for out in outs]) for one, outs in brought]).wait()
    total = torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), mine.shape, check_invariants=False
    ).coalesce()
    with torch.no_grad():
        tensor.copy_(total)
