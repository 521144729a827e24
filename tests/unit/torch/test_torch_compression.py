"""Compression of mpikv.torch's gradients: what arrives, against references; flags and buffers travel as they are."""

from __future__ import annotations

from typing import Any

import frameworks
import numpy as np
import pytest

torch = frameworks.need("torch")

import torch_nets as nets  # noqa: E402
from on_workers import on  # noqa: E402
from store_modes import Mode  # noqa: E402
from torch_on_gpu import OnGpus  # noqa: E402

import mpikv.torch as mt  # noqa: E402
from mpikv import Trainer, optimizers  # noqa: E402
from mpikv.errors import ConfigError  # noqa: E402
from mpikv.transports.faulty import Deaths, Faults  # noqa: E402

MODES = (nets.HERE, Mode("dist_sync", 2, 1, hosts="abc"), Mode("dist_sync", 3, hosts="abc"))
MODES += (OnGpus("dist_sync_device", 2, 1, device="host", hosts="abc"),)


def forced(params: Any) -> dict[str, Any]:
    return {**({"type": params} if isinstance(params, str) else params), "force": True}


def parts(names: str = "abc", n: int = 3) -> Any:
    return nets.Parts(dict.fromkeys(names, n))


# --- what arrives


@on(*MODES)
@pytest.mark.parametrize("what", ["model", "optimizer"])
@pytest.mark.parametrize("params", [mt.Compression.fp16, "2bit", {"type": "fp16", "error_feedback": False}], ids=repr)
def test_a_bucket_travels_as_a_key_with_this_codec_and_a_buffer_as_it_is(store: Any, what: str, params: Any) -> None:
    n, exact = 21, 1 + 2.0**-20
    store.set_gradient_compression(forced(params), ["key"])
    store.init("key", np.zeros(n, np.float32))
    net = parts("a", n)
    net.register_buffer("seen", torch.tensor([exact if store.rank == 0 else 0.0]))
    run, optimizer = nets.wrapped(what, net, store, compression=forced(params))
    for step in range(5):
        values = np.random.default_rng([store.rank, step]).normal(size=n).astype(np.float32)
        run(a=values).backward()
        optimizer.step()
        # One float32 product, as of tensors; a division has other bits.
        store.pushpull("key", share := values * np.float32(1 / store.num_workers))
        assert net.a.grad.tolist() == share.tolist()
        optimizer.zero_grad()
    assert store.stats()["encoded_bytes"] > 0
    assert net.seen.item() == (exact if what == "model" or store.rank == 0 else 0.0)


@on(*MODES)
def test_what_was_sent_of_parameters_that_nobody_used_comes_again(store: Any) -> None:
    """Each push of 3 is sent as 1 in each of three rounds. In some of them nobody takes the sum."""
    model = mt.DistributedModel(
        parts("ab"), store, average=False, compression=forced({"type": "2bit", "threshold": 1.0})
    )
    net, taken = model.module, 0.0
    for step in range(30):
        used = step in {0, 3, 4} or step > 6
        model(a=[0.0] * 3, **({"b": [3.0 if step in {0, 4} else 0.0] * 3} if used else {})).backward()
        assert (net.b.grad is None) == (not used)
        assert net.a.grad.tolist() == [0.0] * 3
        taken += net.b.grad[0].item() if used else 0.0
        model.zero_grad()
        if step == 5:  # a gradient that stays from before is pushed, and given back, too
            net.b.grad = torch.full((3,), 5.0)
            model(a=[0.0] * 3).backward()
            assert net.b.grad.tolist() == [5.0] * 3
            model.zero_grad()
    assert taken == 6 * store.num_workers


def test_after_a_death_it_comes_again_in_means_over_who_is_there() -> None:
    """Pushes of 3 / 4 are sent as 1 / 4 in each of three rounds; of two of them, one after the death, nobody takes the
    sum.
    """
    mode, deaths = Mode("dist_sync", 4, hosts="abcd"), Deaths()

    def body(store: Any) -> float:
        number, taken = store.session.number, 0.0
        model = mt.DistributedModel(parts("ab"), store, compression=forced({"type": "2bit", "threshold": 0.25}))
        for step in range(20):
            if step == 2 and number == 3:
                deaths.die_in(store.session.members.workers[3], 1)
            used, value = step not in {1, 2}, 3.0 if step == 0 and number < 3 else 0.0
            model(a=[0.0] * 3, **({"b": [value] * 3} if used else {})).backward()
            taken += model.module.b.grad[0].item() if used else 0.0
            model.zero_grad()
        return taken

    assert mode.run_continued(body, deaths, Faults) == [pytest.approx(3 / 4 + 3 / 3 + 3 / 3)] * 3 + [None]


# --- what is never compressed


@on(*MODES)
def test_flags_and_errors_are_those_without(store: Any) -> None:
    """1 bit for each element sends -1 for a flag of 0: nothing would be left of the flags."""
    one = store.rank == 1
    model = mt.DistributedModel(parts("abc"), store, compression=forced("1bit"))
    net = model.module
    for _ in range(2):
        model(a=[1.0] * 3, **({"b": [1.0] * 3} if one else {})).backward()
        assert [grad is None for grad in nets.grads_of(model)] == [False, False, True]
        model.zero_grad()
    net.c.requires_grad_(not one)
    with pytest.raises(ConfigError, match="requires_grad of 'c' differs"):
        model(a=[1.0] * 3).backward()
    net.c.requires_grad_(False)
    model.zero_grad()
    model(a=[1.0] * 3).backward()
    net.c.requires_grad_(True)
    model(a=[1.0] * 3, c=[1.0] * 3).backward()
    assert net.c.grad is not None


@on(*MODES)
def test_a_store_that_compresses_all_keys_leaves_flags_and_calls_alone(store: Any) -> None:
    net = parts("ab")
    mt.broadcast_parameters(net.state_dict(), store=store)  # its keys are not in the way of what follows
    store.set_gradient_compression(forced("1bit"))
    model = mt.DistributedModel(net, store)
    model(a=[1.0] * 3).backward()
    assert model.a.grad.tolist() == [-store.num_workers] * 3  # each worker's share is below the threshold
    assert model.b.grad is None
    mean = mt.allreduce(torch.tensor([store.rank + 0.25]), store=store)
    assert mean.item() == (store.num_workers - 1) / 2 + 0.25
    plain = mt.DistributedModel(parts("ab"), store, compression="none")
    plain(a=[0.25] * 3).backward()
    assert plain.a.grad.tolist() == [0.25] * 3
    weight = torch.nn.Parameter(torch.ones(2))  # the table of examples is exact, too
    trainer = Trainer([weight], optimizers.SGD(learning_rate=1.0), kvstore=store, update_on_kvstore=False)
    weight.grad = torch.ones(2)
    trainer.step(examples=store.rank + 1)
    assert trainer.examples == sum(range(1, store.num_workers + 1))


# --- bytes, and arguments


def test_the_bytes_that_leave() -> None:
    """Of two workers on two hosts: 1000 gradients in two buckets, and as they are flags, one sum, and what they add."""
    n, rest = 500, 500

    def body(store: Any) -> tuple[int, ...]:
        model = mt.DistributedModel(parts("ab", n), store, compression=compression, bucket_bytes=4 * n)
        counts = []
        for _ in range(3):
            before = store.stats()
            model(a=np.ones(n, np.float32), b=np.ones(n, np.float32)).backward()
            after = store.stats()
            names = "encoded_from_bytes", "encoded_bytes", "bytes_sent"
            counts.append(tuple(after.get(name, 0) - before.get(name, 0) for name in names))
        assert counts[1][:2] == counts[2][:2]
        return counts[2]

    for compression, pushed, came_back in (
        (None, 0, 4 * 2 * n),
        (forced("2bit"), 2 * (n // 4), 0),  # each worker gets all that the other has pushed
        (forced("fp16"), 2 * 2 * n, 0),
        (mt.Compression.fp16, 2 * 2 * n, 0),  # half to the owner of the other half, and half back
    ):
        for before, after, sent in Mode("dist_sync", 2, hosts="ab").run(body, link="10mbit"):
            assert (before, after) == ((4 * 2 * n, pushed) if compression else (0, 0))
            assert pushed + came_back <= sent <= pushed + came_back + rest


@on(nets.HERE)
@pytest.mark.parametrize("way", ["model", "optimizer"])
def test_arguments(store: Any, way: str) -> None:
    net = torch.nn.Linear(2, 1)
    for params, error, text in (
        ("zip", ValueError, "unknown compression type 'zip'"),
        ({"threshold": 1}, TypeError, "'type'"),
        (mt.Compression, TypeError, "the name of a codec, or a dict"),
        (16, TypeError, "the name of a codec, or a dict"),
        ({"type": "2bit", "threshold": -1}, ValueError, "threshold"),
        (mt.Compression.fp16 if store.rank else None, ConfigError, "compression="),
        ({"type": "2bit", "threshold": 1 + store.rank}, ConfigError, "compression="),
    ):
        with pytest.raises(error, match=text):
            nets.wrapped(way, net, store, compression=params)
    nets.wrapped(way, net, store, compression=mt.Compression.none)
    store.set_gradient_compression({"type": "fp16"} if store.rank else None)
    with pytest.raises(ConfigError, match="compression="):
        nets.wrapped(way, net, store)
