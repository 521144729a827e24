"""Networks of PyTorch that are trained on a GPU, beside the same training on the host without mpikv, on every rank.

    mpirun -n 2 python train_program.py KIND

KIND: fake or cuda. Each way of `WAYS` trains the same network with the same batches, over both types of stores that put
gradients on a GPU; DDP over the backend `mpikv` has no store. All ranks end with the same bits. On the fake GPU PyTorch
computes in host memory (tests/torch_on_gpu.py).
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import gpus
import numpy as np
import torch
from mpi4py import MPI
from torch import nn

import mpikv
import mpikv.torch as mt
from mpikv import kv
from mpikv.config import Config

COMM = MPI.COMM_WORLD
STEPS, EXAMPLES, RATE, MOMENTUM = 5, 8, 0.1, 0.9
STORES, WAYS = ("dist_sync", "dist_sync_device"), ("DistributedModel", "DistributedOptimizer", "Trainer", "own updates")
# Of the way that the weights have gone. A GPU adds in another order: each of some hundred products in a sum is rounded
# by 2**-24 at most. On a CPU first weights that are off by one rounding end 1e-6 off, and weights without the gradient
# of one parameter in one step 3e-3 or more.
TOLERANCE = 1e-4
TIMEOUT_S = 60.0


def network() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh()
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(144, 30), nn.Tanh(), nn.Linear(30, 3))


def loss(model: Any, step: int, device: Any) -> Any:
    random = np.random.default_rng([step, COMM.rank])
    images = torch.from_numpy(random.standard_normal((EXAMPLES, 1, 8, 8)).astype(np.float32))
    labels = torch.from_numpy(random.integers(0, 3, EXAMPLES))
    return nn.functional.cross_entropy(model(images.to(device)), labels.to(device))


def sgd(net: nn.Module) -> Any:
    return torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)


def weights(net: nn.Module) -> Any:
    return np.concatenate([one.detach().cpu().numpy().reshape(-1) for one in net.parameters()])


def reference(first: nn.Module) -> Any:
    """PyTorch on the host, and MPI's sum of each gradient."""
    net = copy.deepcopy(first)
    optimizer = sgd(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(net, step, "cpu").backward()
        for parameter in net.parameters():
            COMM.Allreduce(MPI.IN_PLACE, grad := parameter.grad.numpy())
            grad /= COMM.size
        optimizer.step()
    return weights(net)


@contextlib.contextmanager
def pytorch(gpu: Any) -> Iterator[Any]:
    """Of this kind of GPU: a function that moves a module there and returns it, with its device for other tensors."""
    if gpu.real:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        yield lambda net, number: (net.to(f"cuda:{number}"), torch.device("cuda", number))
        return
    import fake_gpus
    import torch_on_gpu

    with torch_on_gpu.patched() as on_gpu:
        on_gpu.use(fake_gpus.gpu_of(gpu.cupy))
        yield lambda net, _number: (on_gpu.put(net), torch.device("cpu"))


def trained(way: str, store: Any, net: nn.Module, device: Any) -> Any:
    """The weights after all steps. store: None for DDP."""
    model, optimizer = net, sgd(net)
    if way == "DistributedModel":
        model = mt.DistributedModel(net, store)
    elif way == "DistributedOptimizer":
        optimizer = mt.DistributedOptimizer(optimizer, net.named_parameters(), store)
    elif way == "DDP":
        model = nn.parallel.DistributedDataParallel(net)
    else:
        settings = {"learning_rate": RATE, "momentum": MOMENTUM}
        optimizer = mpikv.Trainer(net, "sgd", settings, kvstore=store, update_on_kvstore=way == "Trainer")
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, device).backward()
        optimizer.step()
    return weights(net)


def check(what: str, found: Any, first: Any, expected: Any) -> None:
    away, moved = np.linalg.norm(found - expected), np.linalg.norm(expected - first)
    assert away <= TOLERANCE * moved, f"{what}: off by {away / moved:.1e} of the way"
    digests = COMM.allgather(hashlib.sha256(found.tobytes()).digest())
    assert len(set(digests)) == 1, f"{what}: ranks have different weights"
    if COMM.rank == 0:
        print(f"{what}: as on the host", flush=True)


def main(kind: str) -> None:
    gpu, net = gpus.use(kind), network()
    first, expected = weights(net), reference(net)
    assert np.linalg.norm(expected - first) > 0
    # Of a fake GPU PyTorch knows nothing, so something else must ask for it.
    config = Config(timeout_s=TIMEOUT_S, device_path="auto" if gpu.real else "host")
    with pytorch(gpu) as put:
        for type_ in STORES:
            for way in WAYS:
                with kv.create(type_, config=config) as store:
                    assert store.device is not None, store.session.spaces.missing
                    found = trained(way, store, *put(copy.deepcopy(net), store.device))
                    assert "device" in {info.space for info in store.session.infos.values()}, way
                check(f"{way}, {type_}", found, first, expected)
        number = store.device
        torch.distributed.init_process_group("mpikv")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "mpikv: tensors on cuda go through host memory")
            found = trained("DDP", None, *put(copy.deepcopy(net), number))
        torch.distributed.destroy_process_group()
        check("DDP, mpikv", found, first, expected)


if __name__ == "__main__":
    main(sys.argv[1])
