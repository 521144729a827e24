"""Stores with arrays on a GPU beside stores of NumPy arrays, on every rank.

    mpirun -n 3 python store_program.py KIND WORK PATH

KIND: fake or cuda. PATH: of MPIKV_DEVICE_PATH. WORK: a function below. Gradients are small whole numbers, whose sums
are exact in any order: without an optimizer values are equal. With one each operation may differ by 4 units in the last
place (docs/gpu.md). On the GPU all workers have the same bits, and a second run has them, too.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import gpus
import numpy as np
from mpi4py import MPI

from mpikv import kv, optimizers
from mpikv.arrays.as_numpy import BFLOAT16
from mpikv.config import Config

SHAPES = [(1,), (13, 7), (5003,), (0,), (70_001,)]
F32, F16 = np.dtype("float32"), np.dtype("float16")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "": {},
    "sgd": {"momentum": 0.9, "wd": 0.01, "multi_precision": True},
    "adam": {"clip_gradient": 0.5},
    "lamb": {},  # of no elementwise formula
}
ALL = [(dtype, "") for dtype in (F32, F16, BFLOAT16, np.dtype("float64"), np.dtype("int32"))]
ALL += [(dtype, optimizer) for dtype in (F32, F16, BFLOAT16) for optimizer in OPTIMIZERS if optimizer]
FEW = [(F32, ""), (F16, "sgd"), (BFLOAT16, ""), (F32, "lamb")]
EXACT = ("none", "fp16", "bf16", "1bit", "2bit", "topk")
NEAR = {"int8": 1 / 100, "powersgd": 1 / 1000}  # by this part of the largest value
ROUNDS, CALLS, OPERATIONS, UNITS = 3, 4, 20, 4  # calls of a round; operations of an update
TIMEOUT_S = 60.0


def make(
    gpu: Any, path: str, optimizer: str = "", codec: str = "", type_: str = "dist_sync_device", **more: Any
) -> Any:
    """A store whose keys are on its GPU, which is the user's, too; gpu: None: in host memory."""
    type_ = type_.removesuffix("_device") if gpu is None else type_
    path = "auto" if gpu is None else path
    store = kv.create(type_, config=Config(timeout_s=TIMEOUT_S, device_path=path, **more))
    if gpu is not None:
        gpu.cupy.cuda.runtime.setDevice(store.device)
    if codec:
        store.set_gradient_compression({"type": codec, "force": True})
    if optimizer:
        store.set_optimizer(optimizers.create(optimizer, learning_rate=0.1, **OPTIMIZERS[optimizer]))
    return store


def train(store: Any, gpu: Any, dtype: Any, *, whole: bool = True) -> list[Any]:
    """All that comes back: of calls in place, into other arrays, in lists, and of the store's own arrays; NumPy's."""

    def array(values: Any) -> Any:
        return values.copy() if gpu is None else gpu.cupy.asarray(values)

    def host(arrays: Any) -> list[Any]:
        return [one.copy() if isinstance(one, np.ndarray) else one.get() for one in arrays]

    found, keys, generator = [], list(range(len(SHAPES))), np.random.default_rng([store.rank, dtype.num])
    store.init(keys, [array(np.ones(shape, dtype)) for shape in SHAPES])
    given = store.zeros(SHAPES, dtype, **({} if gpu is None else {"device": store.device}))
    for _ in range(ROUNDS):
        drawn = [generator.standard_normal(shape) * 8 for shape in SHAPES]
        grads = [(np.rint(one) if whole else one).astype(dtype) for one in drawn]
        store.pushpull(keys, arrays := [array(grad) for grad in grads])
        outs = [array(np.zeros_like(grad)) for grad in grads]
        for key, grad, out in zip(keys, grads, outs, strict=True):
            store.push(key, array(grad))
            store.pull(key, out)
        for own, grad in zip(given, grads, strict=True):
            own[...] = array(grad)
        found += host(arrays) + host(outs)
        store.pushpull_async(keys, given).wait()
        store.push(keys, [[array(grad), array(grad)] for grad in grads])  # of two devices of this worker
        store.pull(keys, outs)
        found += host(given) + host(outs)
    return found


def near(found: Any, expected: Any, optimizer: str, codec: str) -> bool:
    if not optimizer and codec in ("", *EXACT):
        return found.tobytes() == expected.tobytes()
    away, expected = np.abs(found.astype(float) - expected.astype(float)), expected.astype(float)
    rounded = {F16: 2.0**-10, BFLOAT16: 2.0**-7}.get(found.dtype, 0.0)
    each = UNITS * OPERATIONS * 2.0**-23 + rounded if optimizer else 0.0
    return bool((away <= (ROUNDS * CALLS * each + NEAR.get(codec, 0)) * np.abs(expected).max(initial=0)).all())


def compare(gpu: Any, path: str, dtype: Any, optimizer: str, codec: str = "", **more: Any) -> None:
    """Train on the host and on the GPU, and there once more with any numbers, twice."""
    results = []
    for on, whole in ((None, not codec), (gpu, not codec), (gpu, False), (gpu, False)):
        try:
            store = make(on, path, optimizer, codec, **more)
        except SystemExit:  # this rank has been the server of that store, and is that of the next one
            continue
        with store:
            results.append(train(store, on, dtype, whole=whole))
            assert on is None or store.stats()["device_path"] == path
            rank = store.rank
    digests = [hashlib.sha256(b"".join(one.tobytes() for one in result)).digest() for result in results[2:]]
    everybody = [one for one in MPI.COMM_WORLD.allgather(digests) if one]
    if not results:
        return
    case = (optimizer, codec, dtype, path)
    assert all(near(*pair, optimizer, codec) for pair in zip(results[1], results[0], strict=True)), case
    assert len({digest for one in everybody for digest in one}) == 1, case
    if rank == 0:
        print(f"{case}: near enough, and the same", flush=True)


def modes(gpu: Any, path: str) -> None:
    for dtype, optimizer in ALL if gpu.real else FEW:
        compare(gpu, path, dtype, optimizer)


def codecs(gpu: Any, path: str) -> None:
    for codec in (*EXACT[1:], *NEAR) if gpu.real else ("1bit", "topk", "int8"):
        compare(gpu, path, F32, "", codec)


def servers(gpu: Any, path: str) -> None:
    """A server of this host, which holds its keys in host memory."""
    for dtype, optimizer in FEW:
        compare(gpu, path, dtype, optimizer, num_servers=1)
    compare(gpu, path, F32, "", "2bit", num_servers=1)


def endless(gpu: Any, path: str) -> None:
    """Rounds without an end, of some memory, for a test that kills a rank."""
    store = make(gpu, path)
    store.init(["w", "given"], [np.zeros(1 << 22, np.float32)] * 2)
    arrays = [gpu.cupy.zeros(1 << 22, np.float32), store.zeros(1 << 22, device=store.device)]
    for turn in range(1 << 30):
        store.pushpull(["w", "given"], arrays)
        gpu.finish()
        if turn == 2:
            print(f"rank {store.rank} is process {os.getpid()}", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[2]](gpus.use(sys.argv[1]), sys.argv[3])
