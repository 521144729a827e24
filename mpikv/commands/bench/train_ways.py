"""Ways of training a network on all ranks: the step alone, raw MPI, the store's, and PyTorch's DDP.

A way has a copy of the network and an optimizer with the same settings as the others', and makes whole steps: forward
and backward pass, exchange, update. To add one: a class here, and its name in `WAYS`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mpikv.commands.bench.job import BenchJob
from mpikv.kvstore import KVStore
from mpikv.torch import DistributedModel, DistributedOptimizer
from mpikv.trainer.trainer import Trainer

# Small, so that the weights hardly move: rounding then does not grow from step to step, and ways can be compared.
LEARNING_RATE, MOMENTUM = 1e-4, 0.9


@dataclass(frozen=True)
class Work:
    """What all ways share. store: for those that use one; several may share it. bucket_bytes: of DistributedModel."""

    job: BenchJob
    store: KVStore
    net: Any  # the first weights, the same on all ranks
    bucket_bytes: int

    @property
    def device(self) -> Any:
        """Where the network is."""
        return next(self.net.parameters()).device


class StepAlone:
    """The step without any exchange: every rank trains for itself. It is also the base of the other ways."""

    title = "alone"

    def __init__(self, work: Work) -> None:
        self.work = work
        self.net = copy.deepcopy(work.net)
        self.model: Any = self.net
        self.optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    @classmethod
    def missing(cls) -> str:
        """Say why this way cannot be measured here; empty where it can."""
        return ""

    def step(self, images: Any, labels: Any) -> None:
        """Make one whole step."""
        torch.nn.functional.cross_entropy(self.model(images), labels).backward()
        self.exchange()
        self.update()

    def exchange(self) -> None:
        """After the backward pass: make every gradient the mean over the ranks."""

    def update(self) -> None:
        """Change the weights and forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """Wait for all that the last step has begun."""
        if self.work.device.type == "cuda":
            torch.cuda.synchronize(self.work.device)

    def close(self) -> None:
        """Give back what the way holds."""


class RawFlat(StepAlone):
    """One MPI_Allreduce in place of a flat buffer in which the gradients lie."""

    title = "raw MPI, flat"

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        parameters = list(self.net.parameters())
        self._flat = torch.zeros(sum(parameter.numel() for parameter in parameters), device=work.device)
        for parameter, grad in zip(parameters, self._flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = grad.view(parameter.shape)

    def exchange(self) -> None:
        sum_in_place(self.work.job, self._flat)
        self._flat /= self.work.job.size

    def update(self) -> None:
        self.optimizer.step()
        self._flat.zero_()


class RawEach(StepAlone):
    """One MPI_Allreduce in place for each gradient."""

    title = "raw MPI, each"

    def exchange(self) -> None:
        for parameter in self.net.parameters():
            sum_in_place(self.work.job, parameter.grad)
            parameter.grad /= self.work.job.size


def sum_in_place(job: BenchJob, tensor: Any) -> None:
    """Sum an array over the ranks by MPI_Allreduce through mpi4py; one on a GPU through host memory."""
    from mpi4py import MPI  # noqa: PLC0415

    on_host = tensor.detach().cpu()  # itself, where it is there
    job.comm.Allreduce(MPI.IN_PLACE, on_host.numpy(), MPI.SUM)
    if on_host.device != tensor.device:
        tensor.detach().copy_(on_host)


class WithModel(StepAlone):
    """mpikv.torch.DistributedModel."""

    title = "DistributedModel"

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.model = DistributedModel(self.net, work.store, bucket_bytes=work.bucket_bytes)


class WithOptimizer(StepAlone):
    """mpikv.torch.DistributedOptimizer."""

    title = "DistributedOptimizer"

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        named = self.net.named_parameters()
        self.optimizer = DistributedOptimizer(self.optimizer, named_parameters=named, store=work.store)


class WithTrainer(StepAlone):
    """mpikv.Trainer, with the optimizer where the owner of a weight is, and gradients that leave during the pass."""

    title = "Trainer"

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        settings = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM}
        self.trainer = Trainer(self.net.named_parameters(), "sgd", settings, kvstore=work.store, overlap=True)

    def update(self) -> None:
        self.trainer.step(self.work.job.size)
        self.net.zero_grad()


class DdpGloo(StepAlone):
    """DistributedDataParallel over the process group that is there: Gloo's."""

    title = "DDP, Gloo"
    backend = "gloo"

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._group = torch.distributed.new_group(backend=self.backend)
        self.model = torch.nn.parallel.DistributedDataParallel(self.net, process_group=self._group)

    def close(self) -> None:
        self.model = None  # before its group
        self.work.job.comm.Barrier()
        torch.distributed.destroy_process_group(self._group)


class DdpMpikv(DdpGloo):
    """The same over the backend "mpikv", which importing mpikv.torch registers."""

    title = "DDP, mpikv"
    backend = "mpikv"

    @classmethod
    def missing(cls) -> str:
        known = cls.backend in torch.distributed.Backend.backend_list
        return "" if known else "torch.distributed has no backend 'mpikv' here"


class DdpNccl(DdpGloo):
    """The same over NCCL, which wants a GPU for each rank."""

    title = "DDP, NCCL"
    backend = "nccl"

    @classmethod
    def missing(cls) -> str:
        if not torch.distributed.is_nccl_available():
            return "this PyTorch has no NCCL"
        return "" if torch.cuda.device_count() >= torch.distributed.get_world_size() else "fewer GPUs than ranks"


WAYS: Mapping[str, type[StepAlone]] = {
    "model": WithModel,
    "optimizer": WithOptimizer,
    "trainer": WithTrainer,
    "ddp": DdpMpikv,
    "gloo": DdpGloo,
    "nccl": DdpNccl,
    "raw": RawFlat,
    "raw-each": RawEach,
}
