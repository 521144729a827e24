"""Stores on the ranks of a test: workers run a body, server ranks serve meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from direct_stores import values_of
from on_workers import full, uniform

from mpikv import Config, kv

__all__ = ["full", "modes", "numbers", "on_workers", "uniform"]
TIMEOUT_S = 30.0


def on_workers(comm: Any, name: str, body: Callable[[Any], Any], *, num_servers: int = 0, **config: Any) -> list[Any]:
    """Run `body(store)` on the workers of a store over `comm`; every rank gets the results in worker order."""
    settings = Config(**{"timeout_s": TIMEOUT_S, **config})
    mine: tuple[int, Any] | None = None
    status: object = None
    try:
        store = kv.create(name, comm=comm, num_servers=num_servers, config=settings)
    except SystemExit as end:
        status = end.code
    else:
        with store:
            assert store.num_workers == comm.Get_size() - num_servers
            mine = (store.rank, body(store))
    assert not status
    told = sorted((entry for entry in comm.allgather(mine) if entry is not None), key=lambda entry: entry[0])
    assert [rank for rank, _ in told] == list(range(comm.Get_size() - num_servers))
    return [result for _, result in told]


def modes(comm: Any, algorithm: str = "auto") -> list[tuple[str, int]]:
    """(name, number of servers) of every kind of distributed store that fits the ranks, and has this algorithm."""
    if algorithm != "auto":
        return [("dist_sync", 0)]
    servers = sorted({0, 1, comm.Get_size() // 2, comm.Get_size() - 1} & set(range(comm.Get_size())))
    return [(name, n) for name in ("dist_sync", "dist_async") for n in servers]


def numbers(rank: int, n: int, seed: int) -> Any:
    """Values whose sum shows the order of adding."""
    return values_of(rank, n, seed, np.dtype(np.float32)).copy()
