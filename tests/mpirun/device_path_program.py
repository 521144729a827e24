"""A worker whose arrays are on a GPU of its process, made of host memory. Prints what became of its keys.

Argument: whether it closes the store, twice.
"""

import sys
from pathlib import Path
from unittest import mock

import numpy as np

from mpikv import kv
from mpikv.create import worker_device
from mpikv.runtime import cuda_driver
from mpikv.spaces.gpu import Gpu

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_cupy import Machine


def main(closes: bool) -> None:
    machine, n = Machine(), 3000
    cupy = machine.process()
    gpu = Gpu(0, cupy, has_context=lambda number: number in cupy.contexts)
    found = cuda_driver.Devices(("a GPU",), "a version")
    with mock.patch.dict(worker_device.find.__kwdefaults__, {"ask": lambda: found, "open_gpu": lambda _: gpu}):
        store = kv.create("dist_sync_device")
    store.init("w", cupy.asarray(np.zeros(n, np.float32)))
    out = cupy.asarray(np.zeros(n, np.float32))
    for step in range(3):
        store.push("w", cupy.asarray(np.full(n, store.rank + step, np.float32)))
        store.pull("w", out)
    store.barrier()
    if store.rank == 0:
        stats = store.stats()
        why = dict(stats["device_path_reasons"])
        print(f"sum {np.unique(out.get()).tolist()} path {stats['device_path']} why {why}", flush=True)
    store.barrier()
    for _ in range(2 * closes):
        store.close()


if __name__ == "__main__":
    main(sys.argv[1] == "closes")
