"""PyTorch's models and optimizers with the gradients on a GPU: the same weights, no copy to the host, and the order."""

from __future__ import annotations

import warnings
from typing import Any

import frameworks
import numpy as np
import pytest
from fake_cupy import Machine
from fake_gpus import gpu_of, gpus_of, one_gpu, spaces_of
from torch_on_gpu import TorchOnGpu, cuda  # noqa: F401 - a fixture

from mpikv.config import Config
from mpikv.create.assembly import local_store
from mpikv.create.spec import parse
from mpikv.kvstore import KVStore
from mpikv.spaces.gpu import Gpu
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores

torch = frameworks.need("torch")
from torch import nn  # noqa: E402

import mpikv  # noqa: E402
import mpikv.torch as mt  # noqa: E402
from mpikv.torch import arrays, gpu_calls  # noqa: E402
from mpikv.torch.buckets import GradientBucket  # noqa: E402

STEPS = 3


def network(dtype: Any) -> Any:
    net = nn.Sequential(nn.Linear(6, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 3))
    random = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.from_numpy(random.standard_normal(tuple(parameter.shape))))
    return net.to(dtype)


def data(step: int, rank: int, dtype: Any) -> tuple[Any, Any]:
    random = np.random.default_rng([step, rank])
    return torch.from_numpy(random.standard_normal((4, 6))).to(dtype), torch.from_numpy(random.integers(0, 3, 4))


def bits(net: Any) -> list[bytes]:
    return [
        one.detach().contiguous().view(torch.uint8).numpy().tobytes() for one in net.state_dict().values() if one.ndim
    ]


def workers(
    gpus: list[Gpu] | None, n: int, body: Any, on_gpu: TorchOnGpu, *, path: str = "ipc", hosts: Any = None
) -> Any:
    """What `body` returns on each worker, whose tensors are on its GPU, or in host memory where there are no GPUs."""

    def rank(store: KVStore) -> Any:
        on_gpu.host_rank() if gpus is None else on_gpu.use(gpus[store.rank])
        return body(store)

    config = Config(timeout_s=TEST_TIMEOUT_S, device_path="auto" if gpus is None else path)
    return spawn_stores("dist_sync", n, rank, config=config, gpus=gpus, hosts=hosts)


def trained(
    store: KVStore, on_gpu: TorchOnGpu, kind: str, *, dtype: Any = torch.float32, **options: Any
) -> list[bytes]:
    """The weights and buffers after some steps; by `ipc` nothing is copied to the host in the last one, but a norm is.

    kind: DistributedModel, DistributedOptimizer or Trainer.
    """
    net = on_gpu.put(network(dtype))
    model, trainer, optimizer = net, None, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if kind == "trainer":
        trainer = mpikv.Trainer(net, "adam", {"learning_rate": 0.1}, kvstore=store, **options)
    elif kind == "model":
        model = mt.DistributedModel(net, store, bucket_bytes=400)
    else:
        optimizer = mt.DistributedOptimizer(optimizer, net.named_parameters(), store, bucket_bytes=400)
    for step in range(STEPS):
        before = store.stats()
        (trainer or optimizer).zero_grad()
        x, y = data(step, store.rank, dtype)
        nn.functional.cross_entropy(model(x), y).backward()
        (trainer or optimizer).step()
    now, n_norms = store.stats(), int("clip_global_norm" in options)
    if now.get("device_path") == "ipc":
        assert [now[way] - before[way] for way in ("copies_up", "copies_down")] == [0, n_norms]
    if trainer is not None:
        trainer.sync_buffers()
    return bits(net)


@pytest.mark.parametrize("hosts", [None, "aab"])
@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_hosts_weights(cuda: TorchOnGpu, kind: str, hosts: Any, dtype: Any) -> None:  # noqa: F811
    def body(store: KVStore) -> list[bytes]:
        return trained(store, cuda, kind, dtype=dtype)

    expected = workers(None, 3, body, cuda, hosts=hosts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = "staged" if hosts else "ipc"
        assert workers(gpus_of(Machine(), 3), 3, body, cuda, path=path, hosts=hosts) == expected


@pytest.mark.parametrize(
    "options",
    [{"update_on_kvstore": True}, {"update_on_kvstore": False}, {"overlap": True, "clip_global_norm": 0.01}],
    ids=["on store", "here", "overlap"],
)
def test_a_trainer_with_the_tensors_of_a_module(cuda: TorchOnGpu, options: dict[str, Any]) -> None:  # noqa: F811
    def body(store: KVStore) -> list[bytes]:
        return trained(store, cuda, "trainer", **options)

    assert workers(gpus_of(Machine(), 2), 2, body, cuda) == workers(None, 2, body, cuda)


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_the_optimizers_stream_waits_for_the_passes_stream(cuda: TorchOnGpu, hosts: Any) -> None:  # noqa: F811
    """Gradients leave in the streams that produce them; the step is made in another one."""

    def body(store: KVStore) -> list[tuple[int, list[int]]]:
        net = cuda.put(network(torch.float32))
        optimizer = mt.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), store=store, bucket_bytes=400)
        found = []
        for step in range(3):
            x, y = data(step, store.rank, torch.float32)
            with cuda.stream() as stream:
                nn.functional.cross_entropy(net(x), y).backward()
            cuda.current_stream().waited.clear()
            optimizer.step()
            found.append((stream.cuda_stream, list(cuda.current_stream().waited)))
        return found

    for found in workers(gpus_of(Machine(), 2), 2, body, cuda, path="staged" if hosts else "ipc", hosts=hosts):
        for stream, waited in found[1:]:  # in the first step the buckets are made
            assert set(waited) == {stream}


@pytest.mark.parametrize("on_gpu", [True, False])
def test_on_one_host_buckets_leave_during_a_backward_pass_on_gpus_alone(cuda: TorchOnGpu, on_gpu: bool) -> None:  # noqa: F811
    """In host memory, where nothing travels, all are added in one call at the end."""

    def body(store: KVStore) -> list[list[bool]]:
        net = cuda.put(network(torch.float32))
        model = mt.DistributedModel(net, store, bucket_bytes=400)
        assert on_gpu == (store.stats().get("device_path") == "ipc")
        found = []
        # The first layer's gradient is the last one; before it has been taken, its own bucket cannot have left.
        net[0].weight.register_hook(lambda grad: found.append([one.sent for one in model._gradients._buckets]))
        for step in range(STEPS):
            x, y = data(step, store.rank, torch.float32)
            nn.functional.cross_entropy(model(x), y).backward()
            assert not any(one.sent for one in model._gradients._buckets)  # all have come
        return found

    for found in workers(gpus_of(Machine(), 2) if on_gpu else None, 2, body, cuda):
        assert found[0] == []  # buckets are made at the end of the first pass
        for left in found[1:]:
            assert len(left) > 2
            assert any(left) == on_gpu
            assert not all(left)


def test_a_bucket_leaves_behind_all_streams_that_wrote_to_it(cuda: TorchOnGpu) -> None:  # noqa: F811
    cuda.use(one_gpu()[1])
    bucket = GradientBucket("key", torch.zeros(4))
    with cuda.stream() as first:
        bucket.written()
    with cuda.stream() as second:
        bucket.written()
        bucket.wait_for_streams()
        assert second.waited == [first.cuda_stream]
        bucket.wait_for_streams()
        assert second.waited == [first.cuda_stream]
    bucket.wait_for_streams()
    assert cuda.current_stream().waited == [second.cuda_stream]


def test_a_model_elsewhere_is_told_why_it_is_slow(cuda: TorchOnGpu) -> None:  # noqa: F811
    cuda.use(one_gpu()[1])
    with pytest.warns(UserWarning, match="go through host memory, which is slow: the store uses no GPU"):
        mt.DistributedModel(nn.Linear(2, 1), mpikv.kv.create("local"))
    store = local_store("local", parse("local"), spaces=spaces_of(gpu_of(Machine(2).process(), 1)))
    with pytest.warns(UserWarning, match=r"here: .*the store uses GPU 1.*MPIKV_LOCAL_DEVICE"):
        arrays.warn_of_host_memory("here", [torch.zeros(2)], store, 1)


@pytest.mark.parametrize("op", [mt.Average, mt.Sum, mt.Max, mt.Product])
def test_horovods_allreduce(cuda: TorchOnGpu, op: Any) -> None:  # noqa: F811
    """Of several dtypes and lengths, in one call; later calls cross nothing but what they compare."""

    def body(store: KVStore) -> Any:
        sizes = {torch.float32: 5, torch.bfloat16: 70, torch.float64: (2, 3)}
        given = [torch.full((n,) if isinstance(n, int) else n, store.rank + 1.0, dtype=d) for d, n in sizes.items()]
        given.append(torch.arange(float(2 * (4 << 20) // 4 + 3)) + store.rank)  # in three pieces
        for _ in range(2):
            before = store.stats()["copies_down"]
            found = mt.grouped_allreduce(given, op=op, store=store)
        assert store.stats()["copies_down"] == before
        assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in given]
        return [one.double().numpy() for one in found]

    reduce = {mt.Average: lambda x, y: (x + y) / 2, mt.Sum: np.add, mt.Max: np.maximum, mt.Product: np.multiply}[op]
    for found in workers(gpus_of(Machine(), 2), 2, body, cuda):
        for one in found[:3]:
            assert np.array_equal(one, np.full(one.shape, reduce(1.0, 2.0)))
        long = np.arange(found[3].size, dtype=np.float32)
        assert np.array_equal(found[3], reduce(long, long + np.float32(1)).astype(np.float32))


def tensors_of(rank: int) -> list[Any]:
    """Of dtypes that a store cannot add, too, and of no elements; the last in three pieces."""
    numbers = np.random.default_rng(rank)
    return [
        torch.from_numpy(numbers.standard_normal((3, 5)).astype(np.float32)).T,
        torch.tensor([True, False, rank == 1]),
        torch.tensor(rank + 1j),
        torch.zeros(0, 4),
        torch.full((7,), rank + 0.5, dtype=torch.bfloat16),
        torch.from_numpy(numbers.integers(0, 1 << 30, (9 << 20) // 8 + 3)),
    ]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_horovods_broadcast(cuda: TorchOnGpu, n: int) -> None:  # noqa: F811
    """Bits of the root's; later calls cross nothing but what they compare."""
    root = n - 1

    def body(store: KVStore) -> None:
        for _ in range(2):
            before = store.stats()["copies_down"]
            found = [mt.broadcast(one, root, store=store) for one in tensors_of(store.rank)]
        assert store.stats()["copies_down"] == before
        named = {str(i): one.clone() for i, one in enumerate(tensors_of(store.rank))}
        mt.broadcast_parameters(named, root, store=store)
        for one, other, expected in zip(found, named.values(), tensors_of(root), strict=True):
            assert one.dtype == expected.dtype
            assert torch.equal(one, expected)
            assert torch.equal(other, expected)
        with pytest.raises(ValueError, match="root is a worker"):
            mt.broadcast(found[0], n, store=store)

    workers(gpus_of(Machine(), n), n, body, cuda)


def test_horovods_allgather_and_alltoall(cuda: TorchOnGpu) -> None:  # noqa: F811
    """Of other lengths on each worker, of none on one of them."""
    lengths = [2, 0, 5]

    def given(rank: int) -> Any:
        return torch.arange(lengths[rank] * 4).reshape(lengths[rank], 4) + 100 * rank

    def body(store: KVStore) -> None:
        for _ in range(2):
            before = store.stats()["copies_down"]
            found = mt.allgather(given(store.rank), store=store)
            parts, received = mt.alltoall(given(2) + store.rank, splits=[1, 3, 1], store=store)
        assert store.stats()["copies_down"] == before
        assert torch.equal(found, torch.cat([given(rank) for rank in range(3)]))
        rows = slice(*[(0, 1), (1, 4), (4, 5)][store.rank])
        assert torch.equal(parts, torch.cat([given(2)[rows] + rank for rank in range(3)]))
        assert received.tolist() == [[1, 3, 1][store.rank]] * 3
        with pytest.raises(ValueError, match="without dimensions"):
            mt.allgather(torch.tensor(1.0), store=store)

    workers(gpus_of(Machine(), 3), 3, body, cuda)


def test_tensors_that_are_on_a_gpu_of_some_workers_go_through_the_host(cuda: TorchOnGpu) -> None:  # noqa: F811
    def body(store: KVStore) -> None:
        if store.rank:
            cuda.host_rank()
        assert mt.broadcast(torch.full((3,), float(store.rank)), 1, store=store).tolist() == [1.0] * 3
        assert mt.allgather(torch.full((2,), float(store.rank)), store=store).tolist() == [0.0, 0.0, 1.0, 1.0]

    workers(gpus_of(Machine(), 2), 2, body, cuda)


def test_keys_of_calls_on_a_gpu_have_few_sizes() -> None:
    for n in range(1, 5000):
        size = gpu_calls.size_class(n)
        assert n <= size <= max(gpu_calls.LEAST_BYTES, 1.25 * n)
        assert size % 8 == 0
        assert gpu_calls.size_class(size) == size
    assert gpu_calls.size_class(gpu_calls.STEP_BYTES) == gpu_calls.STEP_BYTES
