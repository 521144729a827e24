"""mpikv: an MPI-native key-value store for data-parallel training.

A program makes a store by `store = mpikv.kv.create('dist_sync')`, then calls `init`, `push`, `pull` and `pushpull`; it
is started with `mpirun -n N python train.py`. Importing this package initialises nothing and reads no environment.

The examples in docstrings run after these lines:

    import numpy as np
    import mpikv
    from mpikv import data, kv, optimizers
"""

from __future__ import annotations

from mpikv import data, errors, kv, optimizers
from mpikv._version import __version__
from mpikv.arrays.row_sparse import RowSparse
from mpikv.config import Config
from mpikv.data.split import SplitSampler
from mpikv.errors import (
    ConfigError,
    KeyExists,
    KeyNotInitialized,
    MpikvError,
    PeerError,
    ShapeMismatch,
    StallError,
    StatesFileError,
    UnsupportedError,
)
from mpikv.kv import KVStore, create
from mpikv.trainer.local_updates import LocalUpdates
from mpikv.trainer.parameter import Parameter
from mpikv.trainer.snapshots import Snapshots
from mpikv.trainer.trainer import Trainer

__all__ = [
    "Config",
    "ConfigError",
    "KVStore",
    "KeyExists",
    "KeyNotInitialized",
    "LocalUpdates",
    "MpikvError",
    "Parameter",
    "PeerError",
    "RowSparse",
    "ShapeMismatch",
    "Snapshots",
    "SplitSampler",
    "StallError",
    "StatesFileError",
    "Trainer",
    "UnsupportedError",
    "__version__",
    "create",
    "data",
    "errors",
    "kv",
    "optimizers",
]
