"""PyTorch's models and optimizers with the gradients on a GPU: the same weights, no copy to the host, and the order."""

from __future__ import annotations

import warnings
from typing import Any

import frameworks
import pytest
from fake_cupy import Machine
from fake_gpus import cut_as_on_the_host, gpu_of, one_gpu, spaces_of
from store_modes import Mode
from torch_on_gpu import OnGpus, TorchOnGpu, cuda  # noqa: F401 - a fixture

from mpikv.create.assembly import local_store
from mpikv.create.spec import parse
from mpikv.kvstore import KVStore

torch = frameworks.need("torch")
import torch_nets as nets  # noqa: E402
from torch import nn  # noqa: E402

import mpikv  # noqa: E402
import mpikv.torch as mt  # noqa: E402
from mpikv.torch import arrays  # noqa: E402

STEPS = 3
OPS = {mt.Average: lambda x, y: (x + y) / 2, mt.Sum: torch.add, mt.Max: torch.maximum, mt.Product: torch.multiply}


def network(dtype: Any = torch.float32) -> Any:
    net = nets.seeded(lambda: nn.Sequential(nn.Linear(16, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 3)))
    return net.to(dtype)


def backward(net: Any, store: KVStore, step: int, dtype: Any = torch.float32) -> None:
    nets.loss_of(net(nets.batch(step, store.rank).flatten(1).to(dtype))).backward()


def workers(gpus: bool, n: int, body: Any, on_gpu: TorchOnGpu, *, path: str = "nccl", hosts: Any = None) -> Any:
    """What `body` returns on each worker, whose tensors are on its GPU, or in host memory where there are no GPUs."""
    if gpus:
        return OnGpus("dist_sync", n, device=path, hosts=hosts or "").run(body, on_gpu=on_gpu)
    mode = Mode("dist_sync", n, 0, "ring" if path == "mpi" else "auto", hosts=hosts or "")
    return mode.run(lambda store: (on_gpu.host_rank(), body(store))[1])


def trained(
    store: KVStore, on_gpu: TorchOnGpu, kind: str, *, dtype: Any = torch.float32, **options: Any
) -> list[bytes]:
    """The weights and buffers after some steps; by `mpi` nothing is copied to the host in the last one, but a norm is.

    kind: DistributedModel, DistributedOptimizer or Trainer.
    """
    net = on_gpu.put(network(dtype))
    model, trainer, optimizer = net, None, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if kind == "trainer":
        trainer = mpikv.Trainer(net, "adam", {"learning_rate": 0.1}, kvstore=store, **options)
    elif kind == "model":
        model = mt.DistributedModel(net, store, bucket_bytes=400)
    else:
        optimizer = mt.DistributedOptimizer(optimizer, net.named_parameters(), store=store, bucket_bytes=400)
    for step in range(STEPS):
        before = store.stats()
        (trainer or optimizer).zero_grad()
        backward(model, store, step, dtype)
        (trainer or optimizer).step()
    now, n_norms = store.stats(), int("clip_global_norm" in options)
    if now.get("device_path") == "mpi":
        assert [now[way] - before[way] for way in ("copies_up", "copies_down")] == [0, n_norms]
    if trainer is not None:
        trainer.sync_buffers()
    tensors = [one.detach().contiguous() for one in net.state_dict().values() if one.ndim]
    return [one.view(torch.uint8).numpy().tobytes() for one in tensors]


@pytest.mark.parametrize(
    ("kind", "hosts", "options"),
    [
        ("model", None, {}),
        ("model", "aab", {}),
        ("optimizer", None, {"dtype": torch.bfloat16}),
        *(("trainer", None, {"update_on_kvstore": on_store}) for on_store in (True, False)),
        ("trainer", None, {"overlap": True, "clip_global_norm": 0.01}),
    ],
    ids=str,
)
def test_the_hosts_weights(cuda: TorchOnGpu, kind: str, hosts: Any, options: Any) -> None:  # noqa: F811
    def body(store: KVStore) -> list[bytes]:
        return trained(store, cuda, kind, **options)

    path = "host" if hosts else "mpi"
    expected = workers(False, 3, body, cuda, path=path, hosts=hosts)
    with warnings.catch_warnings(), cut_as_on_the_host():
        warnings.simplefilter("error")
        assert workers(True, 3, body, cuda, path=path, hosts=hosts) == expected


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_the_optimizers_stream_waits_for_the_passes_stream(cuda: TorchOnGpu, hosts: Any) -> None:  # noqa: F811
    """Gradients leave in the streams that produce them; the step is made in another one."""

    def body(store: KVStore) -> list[tuple[int, list[int]]]:
        net = cuda.put(network())
        optimizer = mt.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), store=store, bucket_bytes=400)
        found = []
        for step in range(STEPS):
            with cuda.stream() as stream:
                backward(net, store, step)
            cuda.current_stream().waited.clear()
            optimizer.step()
            found.append((stream.cuda_stream, list(cuda.current_stream().waited)))
        return found

    for found in workers(True, 2, body, cuda, path="host" if hosts else "nccl", hosts=hosts):
        for stream, waited in found[1:]:  # in the first step the buckets are made
            assert set(waited) == {stream}


@pytest.mark.parametrize("on_gpu", [True, False])
def test_on_one_host_buckets_leave_during_a_backward_pass_on_gpus_alone(cuda: TorchOnGpu, on_gpu: bool) -> None:  # noqa: F811
    """In host memory, where nothing travels, all are added in one call at the end."""

    def body(store: KVStore) -> list[list[bool]]:
        net = cuda.put(network())
        model = mt.DistributedModel(net, store, bucket_bytes=400)
        assert on_gpu == (store.stats().get("device_path") == "nccl")
        found = []
        # The first layer's gradient is the last one; before it has been taken, its own bucket cannot have left.
        net[0].weight.register_hook(lambda grad: found.append([one.sent for one in model._gradients._buckets]))
        for step in range(STEPS):
            backward(model, store, step)
            assert not any(one.sent for one in model._gradients._buckets)  # all have come
        return found

    for found in workers(on_gpu, 2, body, cuda):
        assert found[0] == []  # buckets are made at the end of the first pass
        for left in found[1:]:
            assert len(left) > 2
            assert any(left) == on_gpu
            assert not all(left)


def test_all_gradients_have_left_before_the_host_waits_for_buffers(cuda: TorchOnGpu, monkeypatch: Any) -> None:  # noqa: F811
    def body(store: KVStore) -> list[list[bool]]:
        found, model = [], mt.DistributedModel(cuda.put(network()), store, bucket_bytes=400)

        def others_changed() -> bool:
            found.append([one.sent for one in model._gradients._buckets if not one.has_tail])
            return False

        monkeypatch.setattr(model._gradients._buffers, "others_changed", others_changed)
        for step in range(STEPS):
            backward(model, store, step)
        return found

    for found in workers(True, 2, body, cuda, path="nccl"):
        assert len(found) == STEPS
        assert all(len(sent) > 1 and all(sent) for sent in found)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_sync_device"])
def test_parameters_are_arrays_as_others_are(cuda: TorchOnGpu, kind: str) -> None:  # noqa: F811
    def body(store: KVStore) -> None:
        weight, bias = cuda.put(nn.Linear(2, 1)).parameters()
        with torch.no_grad():
            weight.fill_(1.0 + store.rank)
        store.init("w", weight)
        store.init("b", bias.detach())
        store.push("w", weight)
        store.pull("w", out=(found := nn.Parameter(torch.zeros(1, 2))))
        assert found.tolist() == [[3.0, 3.0]]
        store.pushpull(["w", "b"], [weight, bias])
        assert weight.tolist() == [[3.0, 3.0]]

    OnGpus(kind, 2, device="nccl").run(body, on_gpu=cuda)


def test_a_model_elsewhere_is_told_why_it_is_slow(cuda: TorchOnGpu) -> None:  # noqa: F811
    cuda.use(one_gpu()[1])
    with pytest.warns(UserWarning, match="go through host memory, which is slow: the store uses no GPU"):
        mt.DistributedModel(nn.Linear(2, 1), mpikv.kv.create("local"))
    store = local_store("local", parse("local"), spaces=spaces_of(gpu_of(Machine(2).process(), 1)))
    with pytest.warns(UserWarning, match=r"here: .*the store uses GPU 1.*MPIKV_LOCAL_DEVICE"):
        arrays.warn_of_host_memory("here", [torch.zeros(2)], store, 1)


def test_an_allreduce_copies_nothing_to_the_host(cuda: TorchOnGpu, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Of tensors in several pieces, once their keys are there."""
    monkeypatch.setattr("mpikv.torch.gpu_calls.STEP_BYTES", 1 << 14)

    def given(rank: int) -> list[Any]:
        long = torch.arange(float(2 * (1 << 14) // 4 + 3)) + rank
        return [long, torch.full((70,), rank + 1.0, dtype=torch.bfloat16), torch.full((2, 3), rank + 1.0).double()]

    def body(store: KVStore) -> None:
        mt.grouped_allreduce(given(store.rank), store=store)
        before = store.stats()["copies_down"]
        for op, combined in OPS.items():
            found = mt.grouped_allreduce(given(store.rank), op=op, store=store)
            for one, *pair in zip(found, given(0), given(1), strict=True):
                assert (one.dtype, torch.equal(one, combined(*pair))) == (pair[0].dtype, True)
        assert store.stats()["copies_down"] == before

    workers(True, 2, body, cuda)
