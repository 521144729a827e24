"""`mpikv bench`, on the kind of GPU that the first argument names.

KIND:BYTES: copies that it is compared with are as long as its values, and of BYTES at least.
"""

import sys
from typing import Any

import gpus

from mpikv.__main__ import main
from mpikv.commands.bench import device

kind, _, least = sys.argv[1].partition(":")
if least or kind == "fake":
    device.LEAST_BYTES = int(least or 1 << 12)  # of a fake one nobody judges figures
user = gpus.use(kind)
if kind == "fake" and not least and sys.argv[2] == "train":  # PyTorch takes host memory for the GPU's
    import fake_gpus
    import torch
    import torch_on_gpu

    from mpikv.commands.bench import train

    def store_and_device(job: Any, *, on_gpu: bool) -> Any:
        store = device.device_store(job)
        device.open_space(job, store)
        return store, torch.device("cpu")

    train._store_and_device = store_and_device
    with torch_on_gpu.patched() as on_gpu:
        on_gpu.use(fake_gpus.gpu_of(user.cupy))
        sys.exit(main(["bench", *sys.argv[2:]]))
sys.exit(main(["bench", *sys.argv[2:]]))
