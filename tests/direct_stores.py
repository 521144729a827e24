"""Stores on thread ranks with and without shared memory: however a call looks, the bits are those of messages."""

from __future__ import annotations

import functools

import numpy as np
from on_workers import taken_of

from mpikv.config import Config
from mpikv.testing.stores import spawn_stores


def bits(value):
    """A result in a form that compares bit by bit."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return [bits(one) for one in value] if isinstance(value, (list, tuple)) else value


def both_ways(workers, body, *, direct=True, hosts=None, **changes):
    """What `body(store)` yields with shared memory must be what it yields with messages, on every worker.

    direct: whether calls must have gone the direct way, on every worker; None: it does not matter.
    """
    config = Config(**{"timeout_s": 20.0, **changes})

    def counted(store):
        return [bits(one) for one in body(store) or ()], store.stats().get("direct_calls", 0)

    off = config.with_(shared_memory="off") if hosts else config.with_(algorithm="owners")  # they add in the same order
    messages = [result for result, _ in spawn_stores("dist_sync", workers, counted, config=off, hosts=hosts)]
    shared = spawn_stores("dist_sync", workers, counted, config=config, hosts=hosts)
    assert [result for result, _ in shared] == messages
    if direct is not None:
        assert [calls > 0 for _, calls in shared] == [direct] * workers, [calls for _, calls in shared]


def alike(workers, *, direct=True, **changes):
    """Make a test of what one worker does and yields: `both_ways` with it."""
    return lambda body: taken_of(body, lambda worker, given: both_ways(workers, worker, direct=direct, **changes))


def numbers(store, n, seed=0, dtype=np.float32):
    """Values whose sum shows the order of adding."""
    return values_of(store.rank, n, seed, np.dtype(dtype)).copy()


@functools.lru_cache(maxsize=700)  # both ways take the same ones, and making them takes longer than adding them
def values_of(rank, n, seed, dtype):
    random = np.random.default_rng([rank, n, seed])
    powers = np.array([0.01, 0.1, 1, 10, 100])[random.integers(0, 5, n)]
    return (random.standard_normal(n) * powers).astype(dtype)


CALLS = ("list", "singles", "turned", "push and pull", "async", "new arrays", "lists inside", "tuples", "out", "outs")


def exchange(store, form, keys, values, outs):
    """One step of all keys in one of many forms; afterwards the results are in `values`."""
    copies = [value.copy() for value in values]
    if form == "list":
        store.pushpull(keys, values)
    elif form == "tuples":
        store.pushpull(tuple(keys), tuple(values))
    elif form == "singles":
        for key, value in zip(keys, values, strict=True):
            store.pushpull(key, value)
    elif form == "turned":
        store.pushpull(keys[::-1], values[::-1])
    elif form == "push and pull":
        store.push(keys, values)
        store.pull(keys, values)
    elif form == "async":
        for request in [store.pushpull_async(key, value) for key, value in zip(keys, values, strict=True)]:
            request.wait()
    elif form == "lists inside":
        store.pushpull(keys, [[value] for value in values])
    else:
        if form == "new arrays":
            store.pushpull(list(keys), outs := copies)
        elif form == "out":
            store.pushpull(keys, values, outs)
        else:
            store.pushpull(keys, values, [[out, copy] for out, copy in zip(outs, copies, strict=True)])
            assert [out.tobytes() for out in outs] == [copy.tobytes() for copy in copies]
        for value, out in zip(values, outs, strict=True):
            value[...] = out
