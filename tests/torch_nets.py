"""For the tests of mpikv.torch: networks, and the same training on one process with a replica per worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from store_modes import Mode
from torch_on_gpu import BesideGpus, OnGpus

import mpikv.torch as mt

HERE, LINKS, SERVERS = Mode("dist_sync", 2), Mode("dist_sync", 2, memory="off"), Mode("dist_sync", 2, 2)
# Of a type that puts keys into GPUs' memory. The model is there, or in the host's memory.
ON_GPUS = OnGpus("dist_sync_device", 2, device="nccl")
DEVICE_MODES = (
    OnGpus("dist_sync_device", 3, device="nccl"),
    BesideGpus("dist_sync_device", 3, 1, device="host"),
    pytest.param(OnGpus("dist_sync_device", 3, 1, device="host"), marks=pytest.mark.thorough),
    pytest.param(BesideGpus("dist_sync_device", 3, device="nccl"), marks=pytest.mark.thorough),
)
MODES = (HERE, Mode("dist_sync", 3), Mode("dist_sync", 3, memory="off"), SERVERS, *DEVICE_MODES)
TWO = (HERE, LINKS, SERVERS, ON_GPUS)  # of two workers
LONG = (HERE, LINKS, *(pytest.param(mode, marks=pytest.mark.thorough) for mode in TWO[2:]))  # for tests that take long
_seeding = threading.Lock()  # the generator is the process's


def seeded(make: Callable[[], torch.nn.Module], seed: int = 0) -> torch.nn.Module:
    """A module with the weights that this seed gives, also on thread ranks."""
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


class Net(torch.nn.Module):
    """A convolution, a batch normalisation, a layer used twice, one that is frozen, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.twice = torch.nn.Linear(16, 16)
        self.frozen = torch.nn.Linear(16, 16).requires_grad_(False)
        self.unused = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(16, 3)
        self.odd = torch.nn.Linear(16, 3)  # for odd workers
        self.register_buffer("mask", torch.arange(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor, odd: bool = False) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        x = torch.tanh(self.frozen(self.twice(torch.tanh(self.twice(x)))))
        return self.head(x) + self.odd(x) if odd else self.head(x)


class Of(torch.nn.Module):
    """A module of these parts, whose forward pass is `run(module, ...)`."""

    def __init__(self, run: Callable[..., torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> torch.Tensor:
        return self.run(self, *args)


class Parts(torch.nn.Module):
    """Parameters of ones whose gradients are what a pass is given: by name, or the same for all that it uses."""

    def __init__(self, sizes: dict[str, int] | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, n in (sizes or {"a": 2, "b": 3, "c": 4}).items():
            self.register_parameter(name, torch.nn.Parameter(torch.ones(n, dtype=dtype)))

    def forward(self, x: float | None = None, use: str = "abc", **grads: Any) -> Any:
        given = grads if x is None else dict.fromkeys(use, x)
        return sum((getattr(self, name) * torch.as_tensor(grad)).sum() for name, grad in given.items())


def grads_of(model: torch.nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


def batch(step: int, rank: int, n: int = 4) -> torch.Tensor:
    """The images of one worker in one step."""
    return torch.randn(n, 1, 4, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


def mean_gradients(replicas: Iterable[torch.nn.Module], weights: list[float] | None = None) -> None:
    """What DistributedModel promises, over replicas in one process: unused ones count 0, unused by all stay None."""
    models = list(replicas)
    factors = weights or [1 / len(models)] * len(models)
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        grads = [p.grad for p in parameters]
        if all(grad is None for grad in grads):
            continue
        mean = sum(
            f * (torch.zeros_like(p) if g is None else g) for f, p, g in zip(factors, parameters, grads, strict=True)
        )
        for parameter in parameters:
            parameter.grad = mean.clone()


def assert_same_grads(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    for (name, parameter), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (parameter.grad is None) == (wanted.grad is None), name
        if wanted.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted.grad)
            assert parameter.grad.stride() == wanted.grad.stride()


def equal_buffers(replicas: Iterable[torch.nn.Module]) -> None:
    """Worker 0's for all."""
    first, *others = [list(model.buffers()) for model in replicas]
    for buffers in others:
        for buffer, source in zip(buffers, first, strict=True):
            buffer.copy_(source)


def assert_same_state(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    found, wanted = model.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # names the one that differs


def same_on_all(results: list[dict[str, Any]]) -> None:
    """Bitwise."""
    for other in results[1:]:
        assert list(other) == list(results[0])
        for name, value in results[0].items():
            assert torch.equal(other[name], value), name


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def wrapped(way: str, net: torch.nn.Module, store: Any, kind: Any = torch.optim.SGD, **options: Any) -> tuple[Any, Any]:
    """A module and an optimizer that changes nothing, of which one is the store's. way: "model" or "optimizer"."""
    optimizer = kind(net.parameters(), lr=0.0)
    if way == "model":
        return mt.DistributedModel(net, store, **options), optimizer
    return net, mt.DistributedOptimizer(optimizer, net.named_parameters(), store=store, **options)
