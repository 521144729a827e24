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

MODES = (nets.MODES[1], nets.MODES[2], Mode("dist_sync", 3, 1), OnGpus("dist_sync", 3, device="nccl"))
MODES += nets.DEVICE_MODES


@on(*MODES)
def test_allreduce(store: Any) -> None:
    rank = store.rank
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype) * (rank + 1)
        mean = mt.allreduce(mine, name="mine", store=store)
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
    assert mt.synchronize(handle) is mine
    assert mt.poll(handle)
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
    mt.barrier(store=store)


@on(*MODES)
def test_reducescatter_and_grouped_forms(store: Any) -> None:
    rank = store.rank
    mine = torch.arange(8.0).reshape(4, 2) * (rank + 1)
    rows = [[[0, 2], [4, 6]], [[8, 10]], [[12, 14]]][rank]  # the first worker has one row more
    assert mt.reducescatter(mine, store=store).tolist() == rows
    whole = torch.tensor([-7 * rank, 1, rank])
    sums, means = torch.tensor([-21, 3, 3]), torch.tensor([-7, 1, 1])
    assert mt.grouped_reducescatter([whole, mine], op=mt.Sum, store=store)[0].tolist() == [sums[rank]]
    assert mt.synchronize(mt.reducescatter_async(whole, store=store)).tolist() == [means[rank]]
    halves = mt.synchronize(mt.grouped_reducescatter_async([mine.half()], postscale_factor=0.5, store=store))
    assert halves[0].tolist() == [[value / 2 for value in row] for row in rows]
    assert [one.tolist() for one in mt.grouped_allgather([mine[:1, 1], whole[:rank]], store=store)] == [
        [1, 2, 3],
        [-7, -14, 1],
    ]
    assert mt.allgather_object({"rank": rank}, store=store) == [{"rank": i} for i in range(3)]


@on(*MODES)
def test_whole_numbers_stay_whole(store: Any) -> None:
    """The quotient towards zero, and the product with a factor, as Horovod has them."""
    for dtype in (torch.int32, torch.int64, torch.uint8):
        mine = torch.tensor([store.rank, 1, 5], dtype=dtype)
        mean = mt.allreduce(mine, store=store)
        assert (mean.dtype, mean.tolist()) == (dtype, [1, 1, 5])
        scaled = mt.allreduce(mine, average=False, prescale_factor=1.5, store=store)
        assert (scaled.dtype, scaled.tolist()) == (dtype, [4, 3, 21])
    negative = torch.tensor([[-1, -2, -4][store.rank]])  # their sum is -7
    assert mt.allreduce(negative, store=store).item() == -2
    assert mt.allreduce(negative, op=mt.Sum, postscale_factor=0.4, store=store).item() == -2
    half = torch.full((1,), 60000.0, dtype=torch.float16)  # whose sum is too large for it
    assert mt.allreduce(half, store=store).item() == 60000


@on(*MODES[:3])  # tensors on a device are exchanged in the caller's stream, at once
def test_begun_calls_do_not_block(store: Any) -> None:
    """A worker may begin calls long before the others come; the ones that block come after them."""
    rank = store.rank
    handles = []
    if rank == 0:
        handles = [mt.allreduce_async(torch.ones(3), op=mt.Sum, name="early", store=store)]
        with pytest.raises(ValueError, match="'early' is under way"):
            mt.allreduce_async(torch.ones(3), op=mt.Sum, name="early", store=store)
        assert not mt.poll(handles[0])
    store.barrier()  # no other worker has made the call before this
    if rank:
        handles = [mt.allreduce_async(torch.ones(3), op=mt.Sum, name="early", store=store)]
    values = torch.full((2,), float(rank))
    handles += [mt.broadcast_async_(values, 2, store=store), mt.allgather_async(torch.ones(rank), store=store)]
    handles += [mt.alltoall_async(torch.arange(3), [1, 1, 1], store=store)]
    handles += [mt.grouped_allreduce_async_([torch.ones(1), torch.zeros(2)], op=mt.Max, store=store)]
    assert mt.allreduce(torch.ones(1), store=store).item() == 1
    assert all(map(mt.poll, handles))
    found = [mt.synchronize(handle) for handle in handles]
    assert found[0].tolist() == [3, 3, 3]
    assert found[1] is values
    assert values.tolist() == [2, 2]
    assert found[2].tolist() == [1, 1, 1]
    assert [one.tolist() for one in found[3]] == [[rank] * 3, [1, 1, 1]]
    assert [one.tolist() for one in found[4]] == [[1], [0, 0]]


@on(nets.MODES[1], nets.MODES[2])
def test_gradients_flow_through_calls(store: Any) -> None:
    """A loss that each worker computes from what all have counts once, as Horovod has it."""
    rank, n = store.rank, store.num_workers

    def gradient(call: Any, shape: tuple[int, ...] = (3,)) -> Any:
        mine = torch.full(shape, rank + 1.0, requires_grad=True)
        result = call(mine)
        result = result[0] if isinstance(result, (list, tuple)) else result
        (result * torch.arange(1.0, len(result) + 1)).sum().backward()
        return mine.grad.tolist()

    assert gradient(lambda x: mt.allreduce(x, store=store)) == [1, 2, 3]
    assert gradient(lambda x: mt.allreduce(x, op=mt.Sum, prescale_factor=2.0, store=store)) == [2 * n, 4 * n, 6 * n]
    assert gradient(lambda x: mt.grouped_allreduce([x * 2, x], store=store)) == [2, 4, 6]
    assert gradient(lambda x: mt.allgather(x, store=store), (rank + 1,)) == [
        sum(range(1, rank + 1)) + i + 1 for i in range(rank + 1)
    ]
    assert gradient(lambda x: mt.broadcast(x, 1, store=store)) == ([1, 2, 3] if rank == 1 else [0, 0, 0])
    assert gradient(lambda x: mt.reducescatter(x, store=store), (n,)) == [1] * n
    assert gradient(lambda x: mt.reducescatter(x, op=mt.Sum, store=store), (n,)) == [n] * n
    assert gradient(lambda x: mt.alltoall(x, [1] * n, store=store), (n,)) == [rank + 1] * n
    with pytest.raises(UnsupportedError, match="no gradient flows"):
        gradient(lambda x: mt.allreduce(x, op=mt.Max, store=store))


@on(nets.MODES[1], nets.MODES[2])
def test_compression_objects_and_sparse_tensors(store: Any) -> None:
    rank, n = store.rank, store.num_workers
    fine = torch.full((2,), 1 + 2.0**-12 * rank)
    assert mt.allreduce(fine, compression=mt.Compression.fp16, store=store).tolist() == [1, 1]
    assert mt.reducescatter(fine.repeat(n), "name", mt.Compression.fp16, store=store).dtype == torch.float32
    mine = torch.zeros(4, 2)
    mine[rank], mine[3] = 2.0, 1.0
    handle = mt.sparse_allreduce_async(mine.to_sparse(1), "table", mt.Sum, store=store)
    total = handle()
    assert total.is_sparse
    assert total.to_dense().tolist() == [[2, 2]] * n + [[0, 0]] * (3 - n) + [[n, n]]
    mean = mt.synchronize(mt.sparse_allreduce_async(mine.to_sparse(1), store=store))
    torch.testing.assert_close(mean.to_dense(), mt.allreduce(mine, store=store))


@on(nets.HERE)
def test_what_differs_and_bad_arguments(store: Any) -> None:
    with pytest.raises(ShapeMismatch, match=r"\(2,\).*\(3,\)"):
        mt.allreduce(torch.ones(2 + store.rank), store=store)
    with pytest.raises(ShapeMismatch, match=r"'a'.*'b'"):
        mt.allreduce(torch.ones(2), name="ab"[store.rank], store=store)
    for call, error in (
        (lambda: mt.allreduce([1.0], store=store), TypeError),
        (lambda: mt.allreduce(torch.ones(1), "name", store=store), TypeError),
        (lambda: mt.allreduce(torch.ones(1), op="average", store=store), ValueError),
        (lambda: mt.allreduce(torch.ones(1, dtype=torch.bool), store=store), UnsupportedError),
        (lambda: mt.allreduce(torch.ones(2).to_sparse(), store=store), UnsupportedError),
        (lambda: mt.allreduce(torch.ones(1), True, op=mt.Sum, store=store), ValueError),
        (lambda: mt.allreduce(torch.ones(1), op=mt.Adasum, store=store), UnsupportedError),
        (lambda: mt.allreduce(torch.ones(1), compression="fp16", store=store), TypeError),
        (lambda: mt.allreduce(torch.ones(1), process_set=mt.ProcessSet([0]), store=store), ValueError),
        (lambda: mt.allreduce(torch.ones(1), process_set=store), TypeError),
        (lambda: mt.reducescatter(torch.ones(()), store=store), ValueError),
        (lambda: mt.alltoall(torch.ones(2), torch.ones(2), store=store), ValueError),
        (lambda: mt.sparse_allreduce_async(torch.ones(2), store=store), TypeError),
        (lambda: mt.ProcessSet([]), ValueError),
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
        model = mt.DistributedModel(nets.Parts({"a": 2}))
        model(1.0, "a").backward()
        assert model.a.grad.tolist() == [1, 1]
        mine = mt.add_process_set([0])
        assert mine.process_set_id == 1
        assert mt.remove_process_set(mine)
        with pytest.raises(ValueError, match="is not added"):
            mt.allreduce(torch.ones(1), process_set=mine)
        for ranks in ([1], mt.global_process_set):
            with pytest.raises(ValueError, match="is added already, or has others"):
                mt.add_process_set(ranks)
        assert mt.join() == 0
        mt.init(store)
        mt.init()
        with kv.create("local") as other, pytest.raises(RuntimeError, match="shutdown"):
            mt.init(other)
    finally:
        mt.shutdown()
    assert not mt.is_initialized()
    mt.shutdown()


# The public names of `horovod.torch`, at its version 0.28.
HOROVOD = """
Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum SyncBatchNorm
add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_
alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object
broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built ddl_built elastic
global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled
mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built shutdown
size sparse_allreduce_async start_timeline stop_timeline synchronize
"""


def test_every_name_of_horovod_is_there_or_says_what_to_use() -> None:
    for name in HOROVOD.split():
        if name in ("SyncBatchNorm", "cross_rank", "cross_size", "elastic", "start_timeline", "stop_timeline"):
            with pytest.raises(AttributeError, match=f"'{name}'; .*[a-z]"):
                getattr(mt, name)
        elif name.endswith(("_built", "_enabled", "_supported")):
            assert getattr(mt, name)() in (True, False)
        else:
            assert name in mt.__all__, name
            assert not isinstance(getattr(mt, name), type(mt)), f"{name} is a module"
