"""Optimizers where the owner is: against a local store that is pushed the summed gradient, exactly."""

from __future__ import annotations

import numpy as np
import pytest
from on_workers import on, uniform
from store_modes import ADDING, ASYNC_KINDS, BOUND, FEW_DIST_SYNC, HYBRID, KINDS, SYNC_KINDS, Mode

from mpikv import ConfigError, MpikvError, UnsupportedError, kv, optimizers
from mpikv.optimizers.owner import Owner
from mpikv.placement import keys
from mpikv.spaces.named import Spaces

SHAPES = {"s": (), "a": (BOUND - 1,), "b": (5, 7), "c": (64, 3), "empty": (0, 2)}
ROUNDS = 4
MODES = (
    Mode("dist_sync", 2, 0, "owners"),
    Mode("dist_sync", 3, 0, "ring"),
    Mode("dist_sync", 5, 0, "owners"),
    Mode("dist_sync", 1, 1),
    Mode("dist_sync", 3, 2),
    Mode("dist_sync", 2, 3),
    Mode("dist_async", 1, 0),
    Mode("dist_async", 1, 2),
    HYBRID[2],
    ADDING[0],
)


def own_rule(weight, grad, state):
    """A user's function, with a state of its own."""
    total = grad if state is None else state + grad
    weight -= 0.25 * total
    return total


OPTIMIZERS = {
    "sgd": lambda: optimizers.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01),
    "adam": lambda: optimizers.create("adam", learning_rate=0.05),
    "rmsprop": lambda: optimizers.create("rmsprop", learning_rate=0.05, centered=True),
    "lamb": lambda: optimizers.create("lamb", learning_rate=0.05),
    "lars": lambda: optimizers.create("lars", learning_rate=0.05, momentum=0.9),
    "callable": lambda: own_rule,
    "multi_precision": lambda: optimizers.create("sgd", learning_rate=0.1, momentum=0.5, multi_precision=True),
    "schedule": lambda: optimizers.create("sgd", lr_scheduler=optimizers.FactorScheduler(step=1, factor=0.5)),
}


def gradient(key, worker, round_):
    n = int(np.prod(SHAPES[key], dtype=int))
    return ((np.arange(n) * 5 + 3 * worker + round_) % 7 - 3).reshape(SHAPES[key])


def trained(store, name, gradients, *, set_first):
    """The values after some rounds; gradients(key, round_) are pushed."""
    dtype = np.float16 if name == "multi_precision" else np.float32
    if set_first:
        store.set_optimizer(OPTIMIZERS[name]())
    store.init(list(SHAPES), [np.full(shape, 2, dtype) for shape in SHAPES.values()])
    if not set_first:
        store.set_optimizer(OPTIMIZERS[name]())
    for round_ in range(ROUNDS):
        for key in SHAPES:
            store.push(key, gradients(key, round_).astype(dtype))
    return [store.pull(key).tobytes() for key in SHAPES]


@pytest.mark.parametrize("set_first", [True, False], ids=["before_init", "after_init"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_as_local_on_the_summed_gradient(name, set_first):
    for mode in MODES:

        def summed(key, round_, workers=mode.workers):
            return sum(gradient(key, worker, round_) for worker in range(workers))

        def body(store):
            return trained(store, name, lambda key, round_: gradient(key, store.rank, round_), set_first=set_first)

        with kv.create("local") as store:
            expected = trained(store, name, summed, set_first=set_first)
        assert mode.run(body) == [expected] * mode.workers, mode


@on(Mode("local", 1), *FEW_DIST_SYNC, late=True)
def test_values_stay_and_states_start_anew_with_another_optimizer(store, W):
    """Rounds before it are done without, and with the old one; keys that were cut are gathered for LAMB."""
    store.init("w", np.zeros(4 * BOUND, np.float32))
    g = np.ones(4 * BOUND, np.float32)
    found = []
    store.push("w", g)
    momentum = {"learning_rate": 1.0, "momentum": 0.5}
    lamb, plain = ("lamb", {"learning_rate": 0.1}), ("sgd", {"learning_rate": 1.0})
    for name, options in (("test", {}), ("sgd", momentum), ("sgd", momentum), lamb, plain):
        store.set_optimizer(optimizers.create(name, **options))
        before = store.pull("w")
        for _ in range(2):
            store.push("w", g)
        found.append(uniform(store.pull("w") - before))
    assert found[:3] == [2 * W, -2.5 * W, -2.5 * W]
    assert found[3] < 0
    assert found[4] == pytest.approx(-2.0 * W, abs=1e-5)


@on(*KINDS)
def test_optimizers_of_some_keys(store, W):
    store.init(["a", "b", "c"], [np.zeros(3 * BOUND, np.float32)] * 3)
    store.set_optimizer(optimizers.create("test"))
    store.strategy.set_optimizer(optimizers.create("test", rescale_grad=10), ["b"])
    store.strategy.set_optimizer(optimizers.create("test", rescale_grad=100), ["c"])
    for key in "abc":
        store.push(key, np.ones(3 * BOUND, np.float32))
    store.barrier()
    first = [np.unique(store.pull(key)).tolist() for key in "abc"]
    store.barrier()
    store.strategy.set_optimizer(optimizers.create("test", rescale_grad=1000), ["c"])
    store.set_optimizer(optimizers.create("test", rescale_grad=5))
    for key in "abc":
        store.push(key, np.ones(3 * BOUND, np.float32))
    store.barrier()
    expected = ([[W], [10 * W], [100 * W]], [[6 * W], [20 * W], [1100 * W]])
    assert (first, [np.unique(store.pull(key)).tolist() for key in "abc"]) == expected


@on(*SYNC_KINDS, *ASYNC_KINDS)
def test_different_optimizers_are_an_error_on_every_worker(store, W):
    store.init("w", np.zeros(3, np.float32))
    me = store.rank
    for optimizer, parts in (
        (optimizers.create("sgd", learning_rate=0.1 * (1 + me)), ("0.1", "0.2")),
        (optimizers.create("sgd" if me else "adam"), ("adam",)),
        (optimizers.create("sgd", momentum=0.5 if me == 1 else 0.0), ()),
        ((lambda weight, grad, state: state) if me else own_rule, ()),
    ):
        with pytest.raises(ConfigError) as caught:
            store.set_optimizer(optimizer)
        for part in ("worker 0 on localhost", "worker 1 on localhost", *parts):
            assert part in str(caught.value)
    with pytest.raises(ConfigError):
        store.strategy.set_optimizer(optimizers.create("sgd", learning_rate=1.0 + me), ["w"])
    store.set_optimizer(optimizers.create("test"))
    store.push("w", np.ones(3, np.float32))
    store.barrier()
    assert store.pull("w").tolist() == [W] * 3


@on(*KINDS)
def test_what_is_refused(store, mode, W):
    for wrong in (3, None, "sdg", dict, ("a", "b")):
        with pytest.raises((TypeError, ValueError)):
            store.set_optimizer(wrong)
    if mode.workers > 1:
        with pytest.raises(UnsupportedError, match="set_optimizer"):
            store.set_updater(lambda key, pushed, stored: None)
    store.init("w", np.zeros(2, np.float32))
    if mode.synchronous:
        store.push("w", np.ones(2, np.float32))
        assert store.pull("w").tolist() == [float(W)] * 2
        return
    for call in (store.push, store.pushpull):
        with pytest.raises(MpikvError, match=r"'w'.*set_optimizer"):
            call("w", np.ones(2, np.float32))
    assert store.pull("w").tolist() == [0.0] * 2


def test_keys_are_spread_over_the_servers_by_bytes():
    """Those of a function, which needs them whole."""
    sizes = dict(zip("abcdef", (6, 1, 1, 4, 3, 3), strict=True))

    def body(store):
        store.init([*sizes], [np.zeros(n, np.float32) for n in sizes.values()])
        store.set_optimizer(own_rule)
        keys = store.strategy.owners._keys
        owners = {key: [route.owner for route in keys[store.session.infos[key].id].routes] for key in sizes}
        return sorted(sorted(4 * sizes[key] for key in sizes if owners[key] == [server]) for server in range(3))

    assert Mode("dist_sync", 2, 3).run(body) == [[[4, 12, 12], [4, 16], [24]]] * 2


@on(Mode("local", 1), Mode("device", 1))
def test_updater_of_a_local_store(store):
    seen, half = [], np.ones((2, 3), np.float16)

    def updater(key, pushed, stored):
        seen.append((key, pushed.shape, stored.dtype))
        stored += 2 * pushed

    def fails(key, pushed, stored):
        raise ZeroDivisionError(key)

    store.init([7, 9], [half, np.ones((), np.float32)])
    store.set_optimizer(optimizers.create("test"))
    store.set_updater(updater)
    store.push([7, 9], [[half] * 3, np.float32(4)])
    assert seen == [(7, (2, 3), np.float16), (9, (), np.float32)]
    assert [uniform(store.pull(key)) for key in (7, 9)] == [7, 9]
    with pytest.raises(TypeError, match="updater is a function"):
        store.set_updater(3)
    store.set_updater(fails)
    for call in (store.push, store.pushpull):
        with pytest.raises(ZeroDivisionError, match="7"):
            call(7, half)
    store.set_optimizer(optimizers.create("test"))
    store.push(9, np.float32(1))
    assert store.pull(9) == 10


# --- attributes that change while it is at work reach the owners with the pushes made under them

N = 3 * BOUND


def ones():
    return np.ones(N, np.float32)


@on(*KINDS)
def test_learning_rate_changed_between_pushes(store, W):
    """Rounds that are pushed ahead: test_store_labels.py."""
    store.init("w", np.zeros(N, np.float32))
    store.set_optimizer(optimizer := optimizers.create("sgd", learning_rate=1.0))
    for rate, expected in ((1.0, -1), (2.0, -3), (4.0, -7), (1.0, -8), (0.5, -12)):
        optimizer.learning_rate = rate
        if rate == 0.5:
            optimizer.lr_mult, optimizer.rescale_grad = {"w": 2.0}, 4.0
        store.push("w", ones())
        store.barrier()
        assert uniform(store.pull("w")) == expected * W
        store.barrier()


@on(*SYNC_KINDS)
def test_a_schedule_put_in_later(store, W):
    store.init("w", np.zeros(N, np.float32))
    store.set_optimizer(optimizer := optimizers.create("sgd", learning_rate=1.0))
    store.push("w", ones())
    optimizer.lr_scheduler = schedule = optimizers.FactorScheduler(step=1, factor=0.5, base_lr=16.0)
    for _ in range(3):
        store.push("w", ones())
    assert uniform(store.pull("w")) == -(1.0 + sum(schedule(t) for t in (2, 3, 4))) * W


def test_owner_remembers_attributes_that_are_still_in_use():
    """Two workers; one optimizer whose rate changed once, beside one whose rate changes at every step."""
    owner = Owner(Spaces())
    for slot in (1, 2):
        owner.set_optimizer(slot, optimizers.create("sgd", learning_rate=1.0), [slot])
    infos = {slot: keys.KeyInfo(str(slot), slot, (2,), np.dtype(np.float32)) for slot in (1, 2)}
    weights = {slot: np.zeros(2, np.float32) for slot in (1, 2)}
    for worker in (0, 1):
        owner.add_attributes(1, worker, 1, {"learning_rate": 2.0})
    for step in range(600):
        for worker in (0, 1):
            owner.add_attributes(2, worker, step + 2, {"learning_rate": 0.5})
            owner.apply(infos[2], weights[2], np.ones(2, np.float32), (worker, step + 2))
            owner.apply(infos[1], weights[1], np.ones(2, np.float32), (worker, 1))
    assert weights[1].tolist() == [-2400.0] * 2
    assert weights[2].tolist() == [-600.0] * 2


@pytest.mark.parametrize("servers", [1, 2])
def test_a_round_that_some_have_pushed_is_refused_where_keys_are_cut_anew(servers):
    """Its values would be lost; another optimizer of the same kind takes the round."""

    def body(store):
        store.init("w", np.zeros(8 * BOUND, np.float32))
        store.set_optimizer(optimizers.create("sgd"))
        if store.rank == 1:
            store.push("w", np.ones(8 * BOUND, np.float32))
        store.set_optimizer(optimizers.create("adam"))
        with pytest.raises(ConfigError, match="key 'w' was pushed 0, 1 times by workers 0, 1"):  # on both workers
            store.set_optimizer(optimizers.create("lamb"))
        if store.rank == 0:
            store.push("w", np.ones(8 * BOUND, np.float32))
        store.set_optimizer(optimizers.create("lamb"))

    Mode("dist_sync", 2, servers, part_bytes=32).run(body)
