"""Updates of several keys as one array: the same bits as one by one, in host memory and on a GPU, with fewer calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_gpus import one_gpu

from mpikv import optimizers
from mpikv.optimizers.owner import AS_SET, JoinedKey, Owner
from mpikv.placement.keys import KeyInfo
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.named import Spaces

F4 = np.dtype(np.float32)
SIZES = (3, 40, 1, 7, 200)
INFOS = [KeyInfo(f"w{i}", i, (n,), F4) for i, n in enumerate(SIZES)]


def parts(skipped: int | None = None) -> list[JoinedKey]:
    ends = np.cumsum([0, *SIZES]).tolist()
    return [JoinedKey(info, ends[i], ends[i + 1], 0) for i, info in enumerate(INFOS) if i != skipped]


def run(kind: str, together: bool, dtype: Any = F4, *, mult: bool = False, skipped: int | None = None) -> Any:
    owner, optimizer = Owner(Spaces()), optimizers.create(kind, learning_rate=0.25, multi_precision=True)
    if mult:
        optimizer.set_lr_mult({"w2": 0.5})
    owner.set_optimizer(0, optimizer, [])
    weight = np.linspace(-1, 1, sum(SIZES)).astype(dtype)
    for step in range(4):
        total = np.linspace(step, -2, sum(SIZES), dtype=F4)
        some = parts(skipped if step == 1 else None)
        if together:
            owner.apply_joined(some, weight, total)
        else:
            for one in some:
                owner.apply(one.info, weight[one.begin : one.end], total[one.begin : one.end], AS_SET)
        if step == 2:  # as from a file
            owner.set_state(INFOS[1], {n: v.copy() if hasattr(v, "dtype") else v for n, v in owner.states[1].items()})
    return weight.tobytes(), {
        i: {n: v.tobytes() if hasattr(v, "dtype") else v for n, v in one.items()} for i, one in owner.states.items()
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", sorted(set(optimizers.names()) - {"lamb", "lars", "test"}))
def test_the_same_bits_as_one_by_one(kind: str, dtype: Any) -> None:
    for more in ({}, {"mult": True}, {"skipped": 2}):
        assert run(kind, True, dtype, **more) == run(kind, False, dtype, **more), more


def test_many_keys_cost_as_many_launches_as_one() -> None:
    cupy, gpu = one_gpu()
    space = DeviceSpace(gpu)
    counts = []
    for some in (parts()[:1], parts()):
        owner = Owner(Spaces(device=space))
        owner.set_optimizer(0, optimizers.create("adam"), [])
        on_gpu = [one._replace(info=one.info._replace(space="device")) for one in some]
        weight, total = space.zeros(sum(SIZES), F4), space.from_host(np.ones(sum(SIZES), F4))
        with space.in_stream():
            owner.apply_joined(on_gpu, weight, total)
            before = cupy.machine.counts["launches"]
            owner.apply_joined(on_gpu, weight, total)
        counts.append(cupy.machine.counts["launches"] - before)
    assert counts[0] == counts[1]


class Mine(optimizers.SGD):
    """Whose formula may look at the key."""

    def formula(self, step: Any, w: Any, g: Any, arrays: Any, tmp: Any) -> None:
        w -= len(str(step.key)) * g


def test_formulas_of_the_users_are_run_key_by_key() -> None:
    owner = Owner(Spaces())
    owner.set_optimizer(0, Mine(), [])
    weight = np.zeros(sum(SIZES), F4)
    infos = [one._replace(info=one.info._replace(key="a" * (i + 1))) for i, one in enumerate(parts())]
    owner.apply_joined(infos, weight, np.ones(sum(SIZES), F4))
    assert [weight[one.begin] for one in infos] == [-1, -2, -3, -4, -5]
