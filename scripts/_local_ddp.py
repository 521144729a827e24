"""What examples/local_training.py does, with PyTorch's own DistributedDataParallel over Gloo in place of mpikv.

The network, the data and their order, batches, optimizer, evaluation and lines printed are those of the example. With
`every` steps between exchanges it is PyTorch's post-local SGD, from the first step on: a communication hook leaves each
worker its own gradients, and an optimizer makes the weights their mean every so many steps. As in the example all
workers have the same weights before they are evaluated.

MPI starts the ranks and says who they are; sums go by Gloo, over the interface `eth0`.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fetched import load_images  # these two lie in examples/, which is on the path by now
from local_training import network
from mpi4py import MPI
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.utils.data import DataLoader
from torch_mnist import tensors

from mpikv import SplitSampler
from mpikv.commands.bench.gloo import process_group


def main(every: int, epochs: int) -> None:
    """Train, and print the accuracy after each epoch. every: steps between exchanges of weights; 0: sum gradients."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    comm = MPI.COMM_WORLD
    names = tuple(dict.fromkeys(comm.allgather(MPI.Get_processor_name())))
    job: Any = SimpleNamespace(comm=comm, rank=comm.rank, size=comm.size, host_names=names)
    images = load_images(None)
    train, test = tensors(images.train_x, images.train_y), tensors(images.test_x, images.test_y)
    with process_group(job, wanted=True):
        _train(every, epochs, train, test)


def _train(every: int, epochs: int, train: Any, test: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    net = nn.parallel.DistributedDataParallel(network())
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=2e-3)
    if every:
        state = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
        net.register_comm_hook(state, post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=every, warmup_steps=0))
    sampler = SplitSampler(len(train), size, rank, last="drop")
    loader = DataLoader(train, batch_size=64, sampler=sampler)
    part = SplitSampler(len(test), size, rank, shuffle=False)
    trained_s = 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        begin_s = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        if every:
            average_parameters(net.parameters(), dist.group.WORLD)
        dist.barrier()
        trained_s += time.perf_counter() - begin_s
        with torch.no_grad():
            right = sum((net.module(x).argmax(1) == y).sum() for x, y in DataLoader(test, batch_size=500, sampler=part))
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {right / len(test):.4f}, {trained_s:.1f} s", flush=True)
