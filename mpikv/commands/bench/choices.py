"""What the options of `mpikv bench` may name, for the parser and for the benchmarks."""

from __future__ import annotations

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
FLOATS = DTYPES[:4]  # what an optimizer takes
DEVICE_PATHS = ("ipc", "mpi", "staged", "nccl")  # what --device compares by default, where it works
TRAINED = {"resnet18": 224, "lenet": 28, "mlp": 28}  # networks, and a side of their images in pixels
TRAIN_WAYS = ("model", "optimizer", "trainer", "ddp")
TRAIN_VERSUS = ("gloo", "nccl", "raw", "raw-each")
