"""The default store, for calls without a `store`, as all of Horovod's are: a state of the process.

It is a `dist_sync` store over all ranks, made by `init` or by the first call that needs it.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import numpy as np

from mpikv import kv
from mpikv.calls.keyless import CollectiveCalls
from mpikv.kvstore import KVStore


@dataclass
class _Default:
    """The mutable state of this module, set between `init` and `shutdown`."""

    calls: CollectiveCalls | None = None
    local: tuple[int, int] = (0, 1)  # rank and size among the workers of this host
    process_sets: int = 0  # how many have been added


_default = _Default()


def init(store: KVStore | None = None) -> None:
    """Make the default store, or use `store` as such. Collective, blocks. Does nothing if there is one already.

    >>> mt.init(kv.create('local'))  # without an argument: a dist_sync store over all ranks
    >>> mt.rank(), mt.size(), mt.local_rank(), mt.local_size()
    (0, 1, 0, 1)
    >>> mt.shutdown()
    >>> mt.is_initialized()
    False
    """
    if is_initialized() and (store is None or calls_of(None).store is store):
        return
    if is_initialized():
        raise RuntimeError("init: there is a default store already; call shutdown first")
    calls = CollectiveCalls(kv.create("dist_sync") if store is None else store)
    name = np.frombuffer(socket.gethostname().encode().ljust(256)[:256], np.uint8).reshape(1, 256)
    found, rank = calls.whole(lambda: (calls.allgather(name), calls.store.rank))
    hosts = [bytes(row) for row in found]
    _default.local = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    _default.calls, _default.process_sets = calls, 0


def is_initialized() -> bool:
    """Return whether there is a default store. Local. Example: see `init`."""
    return _default.calls is not None


def shutdown() -> None:
    """Close the default store. Collective, blocks. Does nothing if there is none. Example: see `init`."""
    calls, _default.calls = _default.calls, None
    if calls is not None:
        calls.store.close()


def calls_of(store: KVStore | None) -> CollectiveCalls:
    """Return the collective calls of a store; None: of the default one, which is made if necessary."""
    if store is not None:
        return CollectiveCalls(store)
    init()
    assert _default.calls is not None
    return _default.calls


def rank() -> int:
    """Return this worker's number in the default store, which is made if there is none. Example: see `init`."""
    return calls_of(None).store.rank


def size() -> int:
    """Return how many workers the default store has, which is made if there is none. Example: see `init`."""
    return calls_of(None).store.num_workers


def local_rank() -> int:
    """Return this worker's number among those of its host. Makes the default store. Example: see `init`."""
    calls_of(None)
    return _default.local[0]


def local_size() -> int:
    """Return how many workers of the default store are on this host. Makes it. Example: see `init`."""
    calls_of(None)
    return _default.local[1]


def next_process_set() -> int:
    """Return the number of the next process set, the same on all workers, which add them in the same order. Local."""
    _default.process_sets += 1
    return _default.process_sets
