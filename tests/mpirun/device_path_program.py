"""A worker whose arrays are on a GPU of its process, made of host memory. Prints what became of its keys.

Arguments: the store's type, and whether it closes the store. MPIKV_TEST_OWN_GPUS: the workers' GPUs are different ones.
"""

import os
import sys
from unittest import mock

import numpy as np

from mpikv import kv, worker_device
from mpikv.runtime import cuda_driver
from mpikv.testing.fake_gpu import FakeGpu


def main(name: str, closes: bool) -> None:
    gpu, n = FakeGpu(), 3000
    if os.environ.get("MPIKV_TEST_OWN_GPUS"):
        gpu.uuid = f"GPU of process {os.getpid()}"
    found = cuda_driver.Devices(("a GPU",), "a version")
    with (
        mock.patch.dict(worker_device.find.__kwdefaults__, {"ask": lambda: found}),
        mock.patch.object(worker_device, "_cupy_driver", return_value=gpu),
        mock.patch.object(cuda_driver, "has_cupy", return_value=True),
    ):
        store = kv.create(name)
    store.init("w", gpu.array(np.zeros(n, np.float32)))
    out = gpu.array(np.zeros(n, np.float32))
    for step in range(3):
        store.push("w", gpu.array(np.full(n, store.rank + step, np.float32)))
        store.pull("w", out)
    store.barrier()
    if store.rank == 0:
        stats = store.stats()
        why = dict(stats["device_path_reasons"])
        down, up = stats["copies_down"], stats["copies_up"]
        print(
            f"sum {np.unique(out.get()).tolist()} path {stats['device_path']} down {down} up {up} why {why}", flush=True
        )
    store.barrier()
    if closes:
        store.close()
        store.close()
        assert gpu.counts["frees"] == gpu.counts["allocations"]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "closes")
