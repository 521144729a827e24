"""What test_torch_backend.py starts: a program for Horovod, with the import changed, on three workers."""

from __future__ import annotations

import pytest
import torch

import mpikv.torch as hvd


class Halves:
    """A compression object of the program's own."""

    seen: list[torch.Size]

    def __init__(self) -> None:
        self.seen = []

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.seen.append(tensor.shape)
        return tensor / 2, None

    def decompress(self, tensor: torch.Tensor, ctx: None) -> torch.Tensor:
        return tensor * 2


def process_sets(rank: int) -> None:
    outer, last = hvd.add_process_set([2, 0]), hvd.add_process_set(hvd.ProcessSet([2]))
    assert (outer.ranks, outer.size(), outer.rank()) == ([0, 2], 2, (0, None, 1)[rank])
    assert hvd.global_process_set.ranks == [0, 1, 2]
    everybody = hvd.allreduce_async(torch.tensor([rank]), op=hvd.Sum, name="everybody")
    mine = torch.tensor([float(rank)])
    if outer.included():
        assert hvd.allreduce(mine, op=hvd.Sum, process_set=outer).tolist() == [2]
        assert hvd.allgather(mine, process_set=outer).tolist() == [0, 2]
        assert hvd.broadcast(mine, 2, process_set=outer).tolist() == [2]  # a number among all workers
        assert hvd.broadcast_object("of 2" if rank == 2 else None, 2, process_set=outer) == "of 2"
        assert hvd.allgather_object(rank, process_set=outer) == [0, 2]
        hvd.barrier(outer)
    else:
        with pytest.raises(ValueError, match="worker 1 is not in"):
            hvd.allreduce(mine, process_set=outer)
    assert hvd.synchronize(everybody).item() == 3
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), process_set=outer)
    net(torch.full((1, 1), rank + 1.0)).sum().backward()
    optimizer.step()
    assert net.weight.item() == (-1 if outer.included() else -1.0), net.weight  # 1 - (1 + 3) / 2; alone 1 - 2 is -1
    assert hvd.remove_process_set(last)
    assert not hvd.remove_process_set(last)
    assert last.size() is None  # `outer` is closed by shutdown


def optimizers(rank: int) -> None:
    """One with a compression object as third argument; one with sparse gradients, kept so or made dense."""
    halves = Halves()
    net = torch.nn.Linear(2, 1)
    hvd.broadcast_parameters(net.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), halves)
    net(torch.full((1, 2), float(rank))).sum().backward()
    optimizer.synchronize()
    assert net.weight.grad is not None
    assert net.weight.grad.tolist() == [[1, 1]]
    assert halves.seen == [net.weight.shape, net.bias.shape]
    for as_dense in (False, True):
        table = torch.nn.Embedding(5, 2, sparse=True)
        head = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(head.weight)
        hvd.broadcast_parameters(table.state_dict())
        groups = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.0)
        optimizer = hvd.DistributedOptimizer(groups, sparse_as_dense=as_dense)
        for _ in range(2):
            head(table(torch.tensor([rank, 4]))).sum().backward()
            optimizer.step()
            grad = table.weight.grad
            assert grad is not None
            assert grad.is_sparse
            torch.testing.assert_close(grad.to_dense()[:, 0], torch.tensor([1 / 3, 1 / 3, 1 / 3, 0, 1]))
            optimizer.zero_grad()


def join(rank: int) -> None:
    """Workers make 1, 2 and 4 steps, with a call between them; what is missing counts as zero."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), op=hvd.Sum)
    for step in range((1, 2, 4)[rank]):
        optimizer.zero_grad()
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        workers = [3, 2, 1, 1][step]
        assert net.weight.grad.item() == workers  # type: ignore[union-attr]
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [workers] * 2
    assert hvd.join() == 2
    hvd.broadcast_parameters(net.state_dict(), root_rank=2)
    assert net.weight.item() == -7
    assert hvd.join() == 2  # nobody had anything more to do: the largest number


def main() -> None:
    hvd.init()
    rank = hvd.rank()
    assert (hvd.size(), hvd.mpi_enabled(), hvd.nccl_built()) == (3, True, False)
    process_sets(rank)
    optimizers(rank)
    join(rank)
    hvd.shutdown()
    print("all as Horovod has it")


main()
