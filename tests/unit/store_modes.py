"""The modes that the tests of the store run through, on thread ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mpikv.config import Config
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores

DTYPES = tuple(
    np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64)
)
BOUND = 8  # elements from which on a key is cut over all servers


class Mode(NamedTuple):
    """A store: its name, its workers and servers, and the algorithm without servers."""

    name: str
    workers: int
    servers: int = 0
    algorithm: str = "auto"

    @property
    def synchronous(self) -> bool:
        return "async" not in self.name

    def config(self, **changes: Any) -> Config:
        fields = {"algorithm": self.algorithm, "bigarray_bound_elems": BOUND, "timeout_s": TEST_TIMEOUT_S, **changes}
        return Config(**fields)

    def run(self, body: Callable[[Any], Any], **changes: Any) -> list[Any]:
        """`body(store)` on every worker; the results in worker order."""
        if not self.name.startswith("dist"):
            from mpikv import kv

            with kv.create(self.name) as store:
                return [body(store)]
        return spawn_stores(self.name, self.workers, body, num_servers=self.servers, config=self.config(**changes))


def mode_id(mode: Mode) -> str:
    return f"{mode.name}-{mode.workers}w{mode.servers}s-{mode.algorithm}"


LOCAL = (Mode("local", 1), Mode("device", 1))
ALLREDUCE = tuple(Mode("dist_sync", w, 0, a) for w in (1, 2, 3, 4, 5) for a in ("naive", "ring", "halving_doubling"))
SERVERS = tuple(Mode("dist_sync", w, s) for w, s in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 3), (5, 2)))
ASYNC = tuple(Mode("dist_async", w, s) for w, s in ((1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (3, 1), (2, 2), (3, 3)))
SYNC = LOCAL + ALLREDUCE + SERVERS
# One of each kind, for tests of what all modes share.
FEW_DIST_SYNC = (Mode("dist_sync", 3, 0, "ring"), Mode("dist_sync", 3, 0, "naive"), Mode("dist_sync", 3, 2))
FEW_ASYNC = (Mode("dist_async", 2, 0), Mode("dist_async", 3, 2))
FEW = (Mode("local", 1), *FEW_DIST_SYNC, *FEW_ASYNC)
