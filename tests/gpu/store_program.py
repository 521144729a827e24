"""Stores with arrays on a GPU, compared with stores of NumPy arrays, bit by bit, on every rank.

    mpirun -n 3 python store_program.py KIND WORK PATH

KIND: fake or cuda. PATH: of MPIKV_DEVICE_PATH. WORK: a function below. A fake GPU takes some of the cases.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import gpus
import numpy as np

from mpikv import kv, optimizers
from mpikv.arrays import BFLOAT16
from mpikv.config import Config

SHAPES = [(1,), (13, 7), (5003,), (0,), (70_001,)]
DTYPES = [np.dtype(name) for name in ("float32", "float16", "float64", "int32")] + [BFLOAT16]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "": {},
    "sgd": {"momentum": 0.9, "wd": 0.01, "multi_precision": True},
    "adam": {"clip_gradient": 0.5},
    "lamb": {},  # of no elementwise formula
}
FEW = [(np.dtype("float32"), ""), (np.dtype("float16"), "sgd"), (BFLOAT16, ""), (np.dtype("float32"), "lamb")]
BEGINS = [("dist_sync", False), ("dist_sync_device", True), ("dist_sync", True)]
"""Types of stores, and whether first values are in host memory: keys of the last are there, and pushed from the GPU."""
ROUNDS = 3
TIMEOUT_S = 60.0


class Side:
    """A store, and its arrays: on the host or on the GPU."""

    def __init__(
        self, type_: str, optimizer: str, path: str, gpu: Any = None, *, servers: int = 0, codec: str = ""
    ) -> None:
        self.gpu, self.on_host = gpu, gpu is None
        path = "host" if self.on_host else "auto" if servers else path
        config = Config(timeout_s=TIMEOUT_S, device_path=path, num_servers=servers, cuda_aware="1")
        self.store = kv.create(type_, config=config)
        if codec:
            self.store.set_gradient_compression({"type": codec, "force": True})
        if optimizer:
            self.store.set_optimizer(optimizers.create(optimizer, learning_rate=0.1, **OPTIMIZERS[optimizer]))

    def array(self, values: Any) -> Any:
        return values.copy() if self.on_host else self.gpu.array(values)

    def values(self, array: Any) -> bytes:
        """Also of a key in host memory, whose values come as NumPy's."""
        return (array if isinstance(array, np.ndarray) else array.get()).tobytes()

    def zeros(self, shapes: Any, dtype: Any) -> Any:
        where = {} if self.on_host or self.store.device is None else {"device": self.store.device}
        return self.store.zeros(shapes, dtype, **where)


def gradients(rank: int, dtype: np.dtype[Any]) -> Any:
    """Of each round and key; any bits that a gradient may have, of about the same size."""
    generator = np.random.default_rng([rank, dtype.num])
    for _ in range(ROUNDS):
        yield [(generator.standard_normal(shape) * 8).astype(dtype) for shape in SHAPES]


def train(side: Side, dtype: np.dtype[Any], *, host_first: bool) -> list[bytes]:
    """All that comes back: of calls in place, into other arrays, one by one and in lists, and of the store's arrays."""
    store, found = side.store, []
    keys = list(range(len(SHAPES)))
    first = [(np.arange(np.prod(shape)) % 100).reshape(shape).astype(dtype) for shape in SHAPES]
    store.init(keys, first if host_first else [side.array(one) for one in first])
    given = side.zeros(SHAPES, dtype)
    for grads in gradients(store.rank, dtype):
        arrays = [side.array(grad) for grad in grads]
        store.pushpull(keys, arrays)
        found += [side.values(array) for array in arrays]
        outs = [side.array(np.zeros_like(grad)) for grad in grads]
        for key, grad, out in zip(keys, grads, outs, strict=True):
            store.push(key, side.array(grad))
            store.pull(key, out)
        found += [side.values(out) for out in outs]
        for array, grad in zip(given, grads, strict=True):
            array[...] = side.array(grad)
        request = store.pushpull_async(keys, given)
        request.wait()
        found += [side.values(array) for array in given]
        pair = [[side.array(grad), side.array(grad)] for grad in grads]  # of two devices of this worker
        store.push(keys, pair)
        store.pull(keys, outs)
        found += [side.values(out) for out in outs]
    return found


def modes(gpu: Any, path: str) -> None:
    """Synchronous stores whose keys are where their first values are, and stores whose keys are on the GPU."""
    cases = [(dtype, optimizer) for dtype in DTYPES for optimizer in OPTIMIZERS if dtype.kind != "i" or not optimizer]
    for i, (dtype, optimizer) in enumerate(cases if gpu.real else FEW):
        if gpu.holds(dtype):
            for begin in BEGINS if gpu.real else BEGINS[i % 3 : i % 3 + 1]:
                compare(gpu, path, begin, dtype, optimizer)


def codecs(gpu: Any, path: str) -> None:
    """Pushes that are encoded on the GPU: by all workers to all, by owners, to a server."""
    several = ("2bit", "", 0), ("fp16", "sgd", 0), ("int8", "adam", 0), ("int8", "sgd", 1), ("topk", "", 0)
    for codec, optimizer, servers in several:
        dtype = np.dtype(np.float32)
        compare(gpu, path, BEGINS[1], dtype, optimizer, servers=servers, codec=codec)


def servers(gpu: Any, path: str) -> None:
    """The same with a server of this host, which holds its keys in host memory."""
    for dtype, optimizer in FEW:
        if gpu.holds(dtype):
            compare(gpu, path, BEGINS[1], dtype, optimizer, servers=1)


def compare(gpu: Any, path: str, begin: tuple[str, bool], dtype: Any, optimizer: str, **more: Any) -> None:
    """Train on the host and on the GPU, with the same bits. more: see `Side`."""
    results, (type_, host_first) = [], begin
    for on in (None, gpu):
        try:
            side = Side(type_, optimizer, path, on, **more)
        except SystemExit:  # this rank has been the server of that store, and is that of the next one
            continue
        with side.store:
            results.append(train(side, dtype, host_first=host_first))
            if on is not None:
                assert side.store.stats()["device_path"] == ("staged" if more.get("servers") else path)
                assert side.store.device == 0
    if not results:
        return
    assert results[0] == results[1], (type_, optimizer, dtype, path)
    if side.store.rank == 0:
        print(f"{type_}, {optimizer or 'no optimizer'}, {dtype}, {path}: the same", flush=True)


def streams(gpu: Any, path: str) -> None:
    """Gradients that a stream is still computing, and results that another one reads; nobody waits in between."""
    config = Config(timeout_s=TIMEOUT_S, device_path=path)
    n, outs = 100_003, []
    with kv.create("dist_sync_device", config=config) as store:
        keys = list(range(4))
        store.init(keys, [np.zeros(n, np.float32)] * len(keys))
        for turn in range(ROUNDS):
            for key in keys:
                with gpu.stream():
                    array = gpu.array(np.full(n, key, np.float32))
                    gpu.slow()
                    array += turn + store.rank
                    store.push(key, array)
                    array[...] = -1  # the push has been of what was there
                with gpu.stream():
                    store.pull(key, out := gpu.array(np.zeros(n, np.float32)))
                    out += 1
                    outs.append((out, store.num_workers * (key + turn) + sum(range(store.num_workers)) + 1))
        gpu.finish()
        for out, expected in outs:
            assert (out.get() == expected).all(), (out.get(), expected)


def asynchronous(gpu: Any, _path: str) -> None:
    """Pushes in any order: whole numbers, whose sum is known."""
    config = Config(timeout_s=TIMEOUT_S, num_servers=1)
    with kv.create("dist_async_device", config=config) as store:
        store.set_optimizer(optimizers.create("sgd", learning_rate=1.0))
        store.init("w", np.zeros(1000, np.float32))
        for _ in range(ROUNDS):
            store.push("w", gpu.array(np.full(1000, store.rank + 1, np.float32)))
        store.barrier()
        store.pull("w", out := gpu.array(np.zeros(1000, np.float32)))
        expected = -ROUNDS * sum(rank + 1 for rank in range(store.num_workers))
        assert (out.get() == expected).all(), out.get()
        store.barrier()


def endless(gpu: Any, path: str) -> None:
    """Rounds without an end, of some memory, for a test that kills a rank."""
    store = kv.create("dist_sync_device", config=Config(timeout_s=TIMEOUT_S, device_path=path))
    store.init("w", np.zeros(1 << 22, np.float32))
    array = gpu.array(np.ones(1 << 22, np.float32))
    given = store.zeros(1 << 20, device=store.device)
    store.init("given", np.zeros(1 << 20, np.float32))
    for turn in range(1 << 30):
        store.pushpull(["w", "given"], [array, given])
        gpu.finish()
        if turn == 2:
            print(f"rank {store.rank} is process {os.getpid()}", flush=True)


def too_much(gpu: Any, path: str) -> None:
    """More memory than the GPU has: an error on every rank that asked, and the store goes on."""
    with kv.create("dist_sync_device", config=Config(timeout_s=TIMEOUT_S, device_path=path)) as store:
        store.init("w", np.zeros(1000, np.float32))
        try:
            store.zeros(1 << 46, "uint8", device="gpu")
        except MemoryError as error:
            print(f"rank {store.rank}: {error}", flush=True)
        store.pushpull("w", array := gpu.array(np.ones(1000, np.float32)))
        assert (array.get() == store.num_workers).all()


def main(kind: str, work: str, path: str) -> None:
    works = {one.__name__: one for one in (modes, codecs, servers, streams, asynchronous, endless, too_much)}
    works[work](gpus.use(kind), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
