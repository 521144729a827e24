"""Stores on thread ranks of one host, with and without shared memory: however a call looks, the bits are equal."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
from on_workers import taken_of

from mpikv.config import Config
from mpikv.testing.stores import spawn_stores

F32 = np.float32
DTYPES = tuple(
    np.dtype(d) for d in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64)
)
TIMEOUT_S = 20.0
LARGE = 200_000  # float32: several chunks


def run(workers, body, **changes):
    return spawn_stores("dist_sync", workers, body, config=Config(**{"timeout_s": TIMEOUT_S, **changes}))


def bits(value):
    """A result in a form that compares bit by bit."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, (list, tuple)):
        return [bits(one) for one in value]
    return value


def both_ways(workers, body, *, direct=True, **changes):
    """What `body(store)` yields with shared memory must be what it yields with messages, added in rank order.

    direct: whether calls must have gone the direct way, on every worker; None: it does not matter.
    """

    def counted(store):
        return [bits(one) for one in body(store) or ()], store.stats().get("direct_calls", 0)

    messages = [result for result, _ in run(workers, counted, algorithm="naive", **changes)]
    shared = run(workers, counted, **changes)
    assert [result for result, _ in shared] == messages
    if direct is not None:
        assert [calls > 0 for _, calls in shared] == [direct] * workers, [calls for _, calls in shared]


def alike(workers, *, direct=True, **changes):
    """Make a test of what one worker does and yields: `both_ways` with it."""
    return lambda body: taken_of(body, lambda worker, given: both_ways(workers, worker, direct=direct, **changes))


def numbers(store, n, seed=0, dtype=F32):
    """Values whose sum shows the order of adding."""
    return values_of(store.rank, n, seed, np.dtype(dtype)).copy()


@functools.lru_cache(maxsize=700)  # both ways take the same ones, and making them takes longer than adding them
def values_of(rank, n, seed, dtype):
    random = np.random.default_rng([rank, n, seed])
    powers = np.array([0.01, 0.1, 1, 10, 100])[random.integers(0, 5, n)]
    return (random.standard_normal(n) * powers).astype(dtype)


def refused(call, *arguments, **named):
    """The kind of error of a call, and its text."""
    try:
        call(*arguments, **named)
    except Exception as error:
        return type(error), str(error)
    return None, ""


CALLS = ("list", "singles", "turned", "push and pull", "async", "new arrays", "lists inside", "tuples", "out", "outs")


def exchange(store, form, keys, values, outs):
    """One step of all keys in one of many ways; afterwards the results are in `values`."""
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
        requests = [store.pushpull_async(key, value) for key, value in zip(keys, values, strict=True)]
        for request in requests:
            request.wait()
    elif form == "new arrays":
        copies = [value.copy() for value in values]
        store.pushpull(list(keys), copies)
        for value, copy in zip(values, copies, strict=True):
            value[...] = copy
    elif form == "lists inside":
        store.pushpull(keys, [[value] for value in values])
    elif form == "out":
        store.pushpull(keys, values, outs)
        for value, out in zip(values, outs, strict=True):
            value[...] = out
    else:
        others = [np.empty_like(out) for out in outs]
        store.pushpull(keys, values, [[out, other] for out, other in zip(outs, others, strict=True)])
        for value, out, other in zip(values, outs, others, strict=True):
            assert out.tobytes() == other.tobytes()
            value[...] = out
