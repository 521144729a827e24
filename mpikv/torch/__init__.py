"""PyTorch on a store: models and optimizers with the gradients of all workers, and Horovod's calls.

Importing this package registers the backend "mpikv" of `torch.distributed`, and initialises no MPI. The examples run
after `import torch` and `import mpikv.torch as mt`, and those of `mpikv`.
"""

try:
    from mpikv.torch import backend
except ModuleNotFoundError as error:
    error.msg += "; mpikv.torch needs PyTorch: pip install torch"
    raise
from mpikv.torch.calls import (
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allreduce,
    grouped_allreduce_,
    poll,
    synchronize,
)
from mpikv.torch.default import (
    barrier,
    default_store,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from mpikv.torch.local_updates import ModelUpdates as LocalUpdates
from mpikv.torch.model import DistributedModel
from mpikv.torch.optimizer import DistributedOptimizer
from mpikv.torch.states import broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "Average",
    "Compression",
    "DistributedModel",
    "DistributedOptimizer",
    "LocalUpdates",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "default_store",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

backend.register()
