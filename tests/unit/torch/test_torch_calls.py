"""Horovod's calls on tensors."""

from __future__ import annotations

from typing import Any

import frameworks
import pytest

torch = frameworks.need("torch")

import torch_nets as nets  # noqa: E402
from on_workers import on  # noqa: E402
from store_modes import Mode  # noqa: E402
from torch_on_gpu import OnGpus  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv import kv  # noqa: E402
from mpikv.errors import ShapeMismatch, UnsupportedError  # noqa: E402

MODES = (nets.MODES[1], nets.MODES[2], Mode("dist_sync", 3, 1), OnGpus("dist_sync", 3, device="ipc"))
MODES += nets.DEVICE_MODES[:3]


@on(*MODES)
def test_allreduce(store: Any) -> None:
    rank = store.rank
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype) * (rank + 1)
        mean = mt.allreduce(mine, "mine", store=store)
        assert mean.dtype == dtype
        assert mean.tolist() == [[2, 4], [6, 8]]
        assert mine[0, 0] == rank + 1
    ints = torch.tensor([rank, 2, -rank])
    assert mt.allreduce(ints, op=mt.Sum, store=store).tolist() == [3, 6, -3]
    assert mt.allreduce(ints, op=mt.Min, store=store).tolist() == [0, 2, -2]
    assert mt.allreduce(ints, op=mt.Max, store=store).tolist() == [2, 2, 0]
    assert mt.allreduce(ints + 1, op=mt.Product, store=store).tolist() == [6, 27, 0]
    scaled = mt.allreduce(torch.ones(2), op=mt.Sum, prescale_factor=2.0, postscale_factor=0.5, store=store)
    assert scaled.tolist() == [3, 3]
    strided = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(mt.allreduce(strided, store=store), strided)
    parameter = torch.nn.Parameter(torch.full((), rank + 1.0))
    assert mt.allreduce_(parameter, store=store) is parameter
    assert parameter.item() == 2
    handle = mt.allreduce_async_(mine, store=store)
    assert mt.poll(handle)
    assert mt.synchronize(handle) is mine
    assert mt.synchronize(mt.allreduce_async(ints, op=mt.Sum, store=store)).tolist() == [3, 6, -3]
    grouped = mt.grouped_allreduce([torch.ones(1), torch.ones(2, dtype=torch.float64)], op=mt.Sum, store=store)
    assert [one.tolist() for one in grouped] == [[3], [3, 3]]
    pair = [torch.ones(1), torch.ones(2)]
    assert mt.grouped_allreduce_(pair, op=mt.Sum, store=store)[1] is pair[1]
    assert pair[1].tolist() == [3, 3]


@on(*MODES)
def test_allgather_broadcast_alltoall(store: Any) -> None:
    rank = store.rank
    gathered = mt.allgather(torch.full((rank, 2), float(rank)), store=store)
    assert gathered.tolist() == [[1, 1], [2, 2], [2, 2]]
    assert mt.allgather(torch.tensor([rank == 1]), store=store).tolist() == [False, True, False]
    for root in range(3):
        values = torch.tensor([rank + 1j, 2])
        assert mt.broadcast(values, root, store=store).tolist() == [root + 1j, 2]
        half = torch.full((3,), rank + 0.5, dtype=torch.bfloat16)
        assert mt.broadcast_(half, root, store=store) is half
        assert half.tolist() == [root + 0.5] * 3
    sent = torch.arange(6) + 10 * rank
    assert mt.alltoall(sent, store=store).tolist() == [10 * i + 2 * rank + j for i in range(3) for j in range(2)]
    splits = [[0, 2, 1], [3, 0, 0], [1, 1, 1]]
    mine = torch.tensor([[10 * rank + i] * 2 for i, n in enumerate(splits[rank]) for _ in range(n)])
    received, counts = mt.alltoall(mine, splits[rank], store=store)
    assert counts.tolist() == [splits[i][rank] for i in range(3)]
    assert received.tolist() == [[10 * i + rank] * 2 for i in range(3) for _ in range(splits[i][rank])]
    mt.barrier(store)


@on(nets.HERE)
def test_what_differs_and_bad_arguments(store: Any) -> None:
    with pytest.raises(ShapeMismatch, match=r"\(2,\).*\(3,\)"):
        mt.allreduce(torch.ones(2 + store.rank), store=store)
    with pytest.raises(ShapeMismatch, match=r"'a'.*'b'"):
        mt.allreduce(torch.ones(2), "ab"[store.rank], store=store)
    for call, error in (
        (lambda: mt.allreduce([1.0], store=store), TypeError),
        (lambda: mt.allreduce(torch.ones(1), True, store=store), TypeError),
        (lambda: mt.allreduce(torch.ones(1), op="average", store=store), ValueError),
        (lambda: mt.allreduce(torch.ones(1, dtype=torch.int64), store=store), UnsupportedError),
        (lambda: mt.allreduce(torch.ones(2).to_sparse(), store=store), UnsupportedError),
        (lambda: mt.broadcast(torch.ones(1), 2, store=store), ValueError),
        (lambda: mt.allgather(torch.ones(()), store=store), ValueError),
        (lambda: mt.alltoall(torch.ones(3), store=store), ValueError),
        (lambda: mt.alltoall(torch.ones(3), [4, -1], store=store), ValueError),
        (lambda: mt.synchronize(torch.ones(1)), TypeError),
    ):
        with pytest.raises(error):
            call()
    assert mt.allreduce(torch.ones(1), op=mt.Sum, store=store).item() == 2


def test_the_default_store() -> None:
    assert not mt.is_initialized()
    store = kv.create("local")
    mt.init(store)
    try:
        assert mt.is_initialized()
        assert (mt.rank(), mt.size(), mt.local_rank(), mt.local_size()) == (0, 1, 0, 1)
        assert mt.allreduce(torch.ones(2)).tolist() == [1, 1]
        model = mt.DistributedModel(nets.Parts({"a": 2}))
        model(1.0, "a").backward()
        assert model.a.grad.tolist() == [1, 1]
        mt.init(store)
        mt.init()
        with kv.create("local") as other, pytest.raises(RuntimeError, match="shutdown"):
            mt.init(other)
    finally:
        mt.shutdown()
    assert not mt.is_initialized()
    mt.shutdown()
