"""mpikv: an MPI-native key-value store for data-parallel training.

`store = mpikv.kv.create('dist_sync')`, then `init`, `push`, `pull`, `pushpull`; started with `mpirun -n N python
train.py`. Importing this package initialises nothing and reads no environment.
"""

from __future__ import annotations

from mpikv import data, errors, kv, optimizers
from mpikv._version import __version__
from mpikv.config import Config
from mpikv.data.split import SplitSampler, split_and_load, split_data
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
from mpikv.kvstore import Request
from mpikv.parameter import Parameter
from mpikv.trainer import Trainer

__all__ = [
    "Config",
    "ConfigError",
    "KVStore",
    "KeyExists",
    "KeyNotInitialized",
    "MpikvError",
    "Parameter",
    "PeerError",
    "Request",
    "ShapeMismatch",
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
    "split_and_load",
    "split_data",
]
