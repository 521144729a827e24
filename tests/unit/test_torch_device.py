"""PyTorch's models and optimizers with the gradients on a GPU: the same weights, no copy to the host, and the order."""

from __future__ import annotations

import warnings
from typing import Any

import frameworks
import numpy as np
import pytest
from torch_on_gpu import TorchOnGpu, cuda  # noqa: F401 - a fixture

from mpikv.config import Config
from mpikv.kvstore import KVStore
from mpikv.spaces import pool
from mpikv.testing.fake_gpu import FakeGpu
from mpikv.testing.stores import TEST_TIMEOUT_S, spawn_stores

torch = frameworks.need("torch")
from torch import nn  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv.torch import buckets  # noqa: E402

STEPS = 3


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CHUNK_BYTES", 1 << 16)


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


def trained(
    kind: str,
    workers: int,
    gpus: list[FakeGpu] | None,
    on_gpu: TorchOnGpu,
    *,
    dtype: Any = torch.float32,
    **options: Any,
) -> tuple[list[list[bytes]], list[Any]]:
    """The weights of all workers, and what each has copied between host and GPU in its last step."""
    counted = [None] * workers

    def body(store: KVStore) -> list[bytes]:
        net = network(dtype)
        if gpus is not None:
            on_gpu.use(gpus[store.rank])
            on_gpu.put(net)
        else:
            on_gpu.host_rank()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model = net
        if kind == "model":
            model = mt.DistributedModel(net, store, bucket_bytes=400)
        else:
            optimizer = mt.DistributedOptimizer(optimizer, net.named_parameters(), store, bucket_bytes=400)
        for step in range(STEPS):
            before = dict(gpus[store.rank].counts) if gpus is not None else {}
            optimizer.zero_grad()
            x, y = data(step, store.rank, dtype)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if gpus is not None:
                now = gpus[store.rank].counts
                counted[store.rank] = [now[way] - before[way] for way in ("host_to_device", "device_to_host")]
        return bits(net)

    config = Config(timeout_s=TEST_TIMEOUT_S, **options.pop("config", {}))
    return spawn_stores("dist_sync", workers, body, config=config, drivers=gpus, **options), counted


def gpus_of(workers: int) -> list[FakeGpu]:
    first = FakeGpu(eager=1.0)
    return [first.view() for _ in range(workers)]


@pytest.mark.parametrize("hosts", [None, "aab"])
@pytest.mark.parametrize("kind", ["model", "optimizer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_hosts_weights(cuda: TorchOnGpu, kind: str, hosts: Any, dtype: Any) -> None:  # noqa: F811
    expected, _ = trained(kind, 3, None, cuda, dtype=dtype, hosts=hosts)
    config = {"device_path": "ipc" if hosts is None else "staged"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, counted = trained(kind, 3, gpus_of(3), cuda, dtype=dtype, hosts=hosts, config=config)
    assert found == expected
    if hosts is None:
        assert counted == [[0, 0]] * 3
