"""A rank of jobs that use the backend mpikv of torch.distributed: `process_group_program.py CASE`."""

from __future__ import annotations

import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpikv.torch as mt  # registers the backend
from mpikv import kv

STEPS = 6
CPU = torch.device("cpu")


def net() -> nn.Module:
    """With a buffer, and parameters of several sizes; the same everywhere."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Linear(33, 7), nn.Linear(7, 1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 6, generator=generator)
    return x, x.sum(1, keepdim=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters after some steps on this rank's batches."""
    for step in range(STEPS):
        x, y = batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(mine: list[torch.Tensor], other: list[torch.Tensor], precision: float = 1e-5) -> None:
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=precision, atol=precision)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trains() -> None:
    """DDP over mpikv and over Gloo, ZeRO and mpikv.torch give the same; a store in this program, too."""
    gloo = dist.new_group(backend="gloo")
    model = DistributedDataParallel(net())
    result = train(model, sgd(model))
    model = DistributedDataParallel(net(), process_group=gloo)
    same(result, train(model, sgd(model)))
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    model.register_comm_hook(dist.new_group(), allreduce_then_divide)
    same(result, train(model, sgd(model)))
    for kind, precision in ((dist.BuiltinCommHookType.ALLREDUCE, 1e-5), (dist.BuiltinCommHookType.FP16_COMPRESS, 1e-2)):
        model = DistributedDataParallel(net())
        model._register_builtin_comm_hook(kind)
        same(result, train(model, sgd(model)), precision)

    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    same(result, train(model, zero))

    store = kv.create("dist_sync")
    own = net()
    same(result, train(mt.DistributedModel(own, store, bucket_bytes=500), sgd(own)))
    own = net()
    optimizer = mt.DistributedOptimizer(sgd(own), own.named_parameters(), store=store, bucket_bytes=500)
    same(result, train(own, optimizer))
    store.init("w", np.zeros(5, np.float32))
    store.pushpull("w", value := np.ones(5, np.float32))
    assert value.tolist() == [dist.get_world_size()] * 5
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [dist.get_world_size()] * 3


def allreduce_then_divide(group, bucket):  # PyTorch looks at annotations, which must not be strings
    """A communication hook: what it chains to the future makes a call of another group, and waits for it."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)

    def divide(future: torch.futures.Future) -> torch.Tensor:
        number = torch.ones(1)
        dist.all_reduce(number, group=group, async_op=True).get_future().wait()
        return future.value()[0] / number

    return work.get_future().then(divide)


def sharded() -> None:
    """FSDP 1 and 2, and a compiled DDP: as DDP, without the batch norm, whose statistics DDP takes from rank 0."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        return  # fully_shard came with 2.6, where it needs a GPU
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def plain() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 33), nn.ReLU(), nn.Linear(33, 1))

    model = DistributedDataParallel(plain())
    expected = train(model, sgd(model))
    model = plain()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    train(model, sgd(model))
    same([parameter.full_tensor().detach() for parameter in model.parameters()], expected)

    model = FullyShardedDataParallel(plain(), device_id=CPU)  # frees the memory of parameters in between
    train(model, sgd(model))
    with FullyShardedDataParallel.summon_full_params(model):
        same(
            [torch.cat([one.flatten() for one in model.parameters()])], [torch.cat([one.flatten() for one in expected])]
        )

    model = torch.compile(DistributedDataParallel(plain()), backend="eager")  # the second step calls from compiled code
    same(train(model, sgd(model)), expected)


def leaves() -> None:
    """Rank 1 exits with a status while the other one waits for it."""
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.all_reduce(torch.ones(1))


def main(case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mpikv", timeout=timedelta(seconds=60))
    cases = {one.__name__: one for one in (trains, sharded, leaves)}
    cases[case]()
    print(f"trained {dist.get_rank()}")
    # No destroy_process_group: a program may just end.


main(sys.argv[1])
