"""Ways of training a network on all ranks: the step alone, raw MPI, the store's, and PyTorch's DDP.

Each trains a copy of the network by an optimizer with the same settings as the others', and makes whole steps: forward
and backward pass, exchange, update. To add one: a function here that changes a copy, and its name in `WAYS`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from mpikv.commands.bench.job import BenchJob
from mpikv.kvstore import KVStore
from mpikv.torch import DistributedModel, DistributedOptimizer
from mpikv.trainer.trainer import Trainer

# Small, so that the weights hardly move: rounding then does not grow from step to step, and ways can be compared.
LEARNING_RATE, MOMENTUM = 1e-4, 0.9


class Work(NamedTuple):
    """What all ways share. store: for those that use one; several may share it."""

    job: BenchJob
    store: KVStore
    net: Any  # the first weights, the same on all ranks


class TrainedCopy:
    """A copy of the network. As it is, it makes the step without any exchange: every rank trains for itself.

    A way changes `model`, which the forward pass calls, or `optimizer`; or `exchange`, which follows the backward pass
    and makes every gradient the mean over the ranks, or `update`; `close` gives back what it holds.
    """

    def __init__(self, work: Work, prepare: Callable[[TrainedCopy], None] = lambda _copy: None) -> None:
        self.work = work
        self.net = copy.deepcopy(work.net)
        self.model: Any = self.net
        self.optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self.exchange: Callable[[], None] = lambda: None
        self.update: Callable[[], None] = self._update
        self.close: Callable[[], None] = lambda: None
        prepare(self)

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, images: Any, labels: Any) -> None:
        torch.nn.functional.cross_entropy(self.model(images), labels).backward()
        self.exchange()
        self.update()

    def finish(self) -> None:
        device = next(self.net.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def with_model(trained: TrainedCopy) -> None:
    """Let gradients leave during the backward pass, in buckets."""
    trained.model = DistributedModel(trained.net, trained.work.store)


def with_optimizer(trained: TrainedCopy) -> None:
    """Let gradients leave during the backward pass, and the optimizer wait for them."""
    trained.optimizer = DistributedOptimizer(
        trained.optimizer, named_parameters=trained.net.named_parameters(), store=trained.work.store
    )


def with_trainer(trained: TrainedCopy) -> None:
    """Have the optimizer where the owner of a weight is, and let gradients leave during the backward pass."""
    settings = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM}
    trainer = Trainer(trained.net.named_parameters(), "sgd", settings, kvstore=trained.work.store, overlap=True)

    def update() -> None:
        trainer.step(trained.work.job.size)
        trained.net.zero_grad()

    trained.update = update


def raw_flat(trained: TrainedCopy) -> None:
    """Call MPI_Allreduce once, in place, of a flat buffer in which the gradients lie."""
    parameters = list(trained.net.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), device=parameters[0].device)
    for parameter, grad in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = grad.view(parameter.shape)

    def update() -> None:
        trained.optimizer.step()
        flat.zero_()

    trained.exchange, trained.update = lambda: _mean_in_place(trained.work.job, flat), update


def raw_each(trained: TrainedCopy) -> None:
    def exchange() -> None:
        for parameter in trained.net.parameters():
            _mean_in_place(trained.work.job, parameter.grad)

    trained.exchange = exchange


def _mean_in_place(job: BenchJob, tensor: Any) -> None:
    """Make an array the mean over the ranks by MPI_Allreduce through mpi4py; one on a GPU through host memory."""
    from mpi4py import MPI  # noqa: PLC0415

    on_host = tensor.detach().cpu()  # itself, where it is there
    job.comm.Allreduce(MPI.IN_PLACE, on_host.numpy(), MPI.SUM)
    if on_host.device != tensor.device:
        tensor.detach().copy_(on_host)
    tensor /= job.size


def ddp(backend: str) -> Callable[[TrainedCopy], None]:
    """Make a way by DistributedDataParallel over a backend of torch.distributed."""

    def prepare(trained: TrainedCopy) -> None:
        group = torch.distributed.new_group(backend=backend)
        trained.model = torch.nn.parallel.DistributedDataParallel(trained.net, process_group=group)

        def close() -> None:
            trained.model = None  # before its group
            trained.work.job.comm.Barrier()
            torch.distributed.destroy_process_group(group)

        trained.close = close

    return prepare


def _without_nccl() -> str:
    if not torch.distributed.is_nccl_available():
        return "this PyTorch has no NCCL"
    return "" if torch.cuda.device_count() >= torch.distributed.get_world_size() else "fewer GPUs than ranks"


def _without_mpikv() -> str:
    known = "mpikv" in torch.distributed.Backend.backend_list  # which importing mpikv.torch registers
    return "" if known else "torch.distributed has no backend 'mpikv' here"


class TrainWay(NamedTuple):
    """missing: says why it cannot be measured here; empty where it can."""

    title: str
    prepare: Callable[[TrainedCopy], None] = lambda _copy: None
    missing: Callable[[], str] = lambda: ""


ALONE = TrainWay("alone")
WAYS: Mapping[str, TrainWay] = {
    "model": TrainWay("DistributedModel", with_model),
    "optimizer": TrainWay("DistributedOptimizer", with_optimizer),
    "trainer": TrainWay("Trainer", with_trainer),
    "ddp": TrainWay("DDP, mpikv", ddp("mpikv"), _without_mpikv),
    "gloo": TrainWay("DDP, Gloo", ddp("gloo")),
    "nccl": TrainWay("DDP, NCCL", ddp("nccl"), _without_nccl),
    "raw": TrainWay("raw MPI, flat", raw_flat),
    "raw-each": TrainWay("raw MPI, each", raw_each),
}
