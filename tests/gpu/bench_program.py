"""`mpikv bench`, on the kind of GPU that the first argument names."""

import sys

import gpus

from mpikv.__main__ import main

kind = sys.argv[1]
user = gpus.use(kind)
if kind == "fake" and sys.argv[2] == "train":  # PyTorch takes host memory for the GPU's
    import fake_gpus
    import torch
    import torch_on_gpu

    from mpikv import kv
    from mpikv.commands.bench import train

    train.store_and_device = lambda job: (kv.create("dist_sync_device", comm=job.comm), torch.device("cpu"))
    with torch_on_gpu.patched() as on_gpu:
        on_gpu.use(fake_gpus.gpu_of(user.cupy))
        sys.exit(main(["bench", *sys.argv[2:]]))
sys.exit(main(["bench", *sys.argv[2:]]))
