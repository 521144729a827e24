"""PyTorch on a store: models and optimizers with the gradients of all workers, and Horovod's calls.

Importing this package registers the backend "mpikv" of `torch.distributed`, and initialises no MPI. The examples run
after `import torch` and `import mpikv.torch as mt`, and those of `mpikv`.
"""

from typing import Any

try:
    from mpikv.torch import backend, calls
except ModuleNotFoundError as error:
    error.msg += "; mpikv.torch needs PyTorch: pip install torch"
    raise
from mpikv.common.checks import meant
from mpikv.errors import MpikvError as HorovodInternalError
from mpikv.torch.calls import *  # noqa: F403 - what its `__all__` lists
from mpikv.torch.compression import Compression
from mpikv.torch.default import init, is_initialized, local_rank, local_size, rank, shutdown, size
from mpikv.torch.local_updates import ModelUpdates as LocalUpdates
from mpikv.torch.model import DistributedModel
from mpikv.torch.optimizer import DistributedOptimizer
from mpikv.torch.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from mpikv.torch.states import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from mpikv.torch.uneven import join

__all__ = ["Compression", "DistributedModel", "DistributedOptimizer", "HorovodInternalError", "LocalUpdates", "join"]
__all__ += ["init", "is_initialized", "local_rank", "local_size", "rank", "shutdown", "size"]
__all__ += ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
__all__ += ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
__all__ += calls.__all__

# What else `horovod.torch` has: what programs ask, and what to use instead of the rest.
_MPI = ("mpi_built", "mpi_enabled", "mpi_threads_supported")
_OTHERS = ("ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "nccl_built", "rocm_built")
_INSTEAD = {
    "cross_rank": "rank() // local_size() is it where all hosts have equally many workers",
    "cross_size": "size() // local_size() is it where all hosts have equally many workers",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm does this, for tensors on GPUs",
    "elastic": "mpikv launch --on-failure continue, or --restarts N, with mpikv.Snapshots (docs/failures.md)",
    "start_timeline": "set MPIKV_TIMELINE to a folder, or call store.timeline(folder)",
    "stop_timeline": "what store.timeline returns has end()",
}


def __getattr__(name: str) -> Any:
    if name in _MPI or name in _OTHERS:
        return lambda: name in _MPI
    instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else f".{meant(name, __all__)}"
    raise AttributeError(f"mpikv.torch has no {name!r}{instead}")


backend.register()
