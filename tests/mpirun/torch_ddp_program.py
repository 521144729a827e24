"""What test_torch_ddp.py starts: the same training by DistributedDataParallel over Gloo, and by mpikv.torch.

Argument: a file by which the processes of Gloo find each other.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpikv.torch as mt
from mpikv.data import SplitSampler

STEPS = 20
EPOCHS = 2


class Net(torch.nn.Module):
    """Convolutions, batch normalisations, a frozen layer, one that nobody uses and one that odd workers use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3, stride=2)
        )
        self.norm = torch.nn.BatchNorm2d(8)
        self.frozen = torch.nn.Linear(8 * 9, 32).requires_grad_(False)
        self.unused = torch.nn.Linear(4, 4)
        self.odd = torch.nn.Linear(32, 10)
        self.head = torch.nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = torch.tanh(self.frozen(torch.relu(self.norm(self.body(x))).flatten(1)))
        return self.head(x) + self.odd(x) if odd else self.head(x)


def train(forward: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """The steps of one worker. What each worker sees depends on its rank alone."""
    data = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        images = torch.randn(6, 1, 9, 9, generator=data)
        labels = torch.randint(10, (6,), generator=data)
        odd = bool(rank % 2) and step % 3 > 0
        torch.nn.functional.cross_entropy(forward(images, odd), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def check(what: str, net: torch.nn.Module, expected: torch.nn.Module, *, buffers: bool) -> None:
    names = [name for name, _ in net.named_parameters()]
    wanted = dict(expected.state_dict())
    for name, value in net.state_dict().items():
        if name in names or buffers:
            difference = (value - wanted[name]).abs().max() / wanted[name].abs().max()
            assert difference < 1e-5, f"{what}: {name} differs by {difference}"
    print(f"{what}: equal")


def check_loader(rank: int, size: int) -> None:
    """A loader with a process of its own, which is forked from a rank whose store is open."""
    sampler = SplitSampler.for_store(20, mt.default_store(), last="uneven")
    loader = torch.utils.data.DataLoader(
        range(100, 120), batch_size=3, sampler=sampler, num_workers=1, persistent_workers=True
    )
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        expected = SplitSampler(20, size, rank, last="uneven")
        expected.set_epoch(epoch)
        found = [int(i) for batch in loader for i in batch]
        assert found == [100 + i for i in expected], found
        everything = mt.allgather(torch.tensor(found)).tolist()
        assert sorted(everything) == list(range(100, 120)), everything


def main(path: str) -> None:
    mt.init()
    rank, size = mt.rank(), mt.size()
    assert (mt.local_rank(), mt.local_size()) == (rank, size)
    torch.manual_seed(0)
    start = Net()
    plain = copy.deepcopy(start)
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True, bucket_cap_mb=0.002)
    train(ddp, sgd(plain), rank)
    for buffer in plain.buffers():  # those of DistributedDataParallel are equal only after the next forward pass
        dist.broadcast(buffer, 0)

    torch.manual_seed(rank)  # worker 0's weights must come to all
    net = copy.deepcopy(start) if rank == 0 else Net()
    model = mt.DistributedModel(net, mt.default_store(), bucket_bytes=2000)
    train(model, sgd(model), rank)
    check("DistributedModel", net, plain, buffers=True)

    net = copy.deepcopy(start)
    mt.broadcast_parameters(net.state_dict())
    train(net, mt.DistributedOptimizer(sgd(net), net.named_parameters(), bucket_bytes=2000), rank)
    check("DistributedOptimizer", net, plain, buffers=False)
    check_loader(rank, size)
    dist.barrier()
    dist.destroy_process_group()
    mt.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
