"""Attributes of an optimizer that change while it is at work reach the owners with the pushes made under them."""

from __future__ import annotations

import numpy as np
import pytest
from store_modes import BOUND, FEW, FEW_DIST_SYNC, mode_id

from mpikv import optimizers
from mpikv.optimizers.owner import Owner
from mpikv.placement import keys
from mpikv.spaces.named import Spaces

SYNC_KINDS = pytest.mark.parametrize("mode", FEW_DIST_SYNC, ids=mode_id)
N = 3 * BOUND


def ones():
    return np.ones(N, np.float32)


def uniform(array):
    """The one value of an array whose parts may have had different owners."""
    (value,) = np.unique(array).tolist()
    return value


@pytest.mark.parametrize("mode", FEW, ids=mode_id)
def test_learning_rate_changed_between_pushes(mode):
    def body(store):
        store.init("w", np.zeros(N, np.float32))
        optimizer = optimizers.create("sgd", learning_rate=1.0)
        store.set_optimizer(optimizer)
        found = []
        for rate in (1.0, 2.0, 4.0, 1.0):
            optimizer.learning_rate = rate
            store.push("w", ones())
            store.barrier()
            found.append(uniform(store.pull("w")))
            store.barrier()
        optimizer.lr_mult = {"w": 0.5}
        optimizer.rescale_grad = 8.0
        store.push("w", ones())
        store.barrier()
        return [*found, uniform(store.pull("w"))]

    W = mode.workers
    assert mode.run(body) == [[-1.0 * W, -3.0 * W, -7.0 * W, -8.0 * W, -12.0 * W]] * W


@SYNC_KINDS
def test_each_round_has_the_rate_it_was_pushed_under(mode):
    """All workers push rounds ahead without waiting, at paces of their own."""
    rates = [1.0, 2.0, 4.0, 8.0, 1.0, 8.0, 1.0, 1.0]  # also back to what it was

    def body(store):
        store.init("w", np.zeros(N, np.float32))
        optimizer = optimizers.create("sgd", learning_rate=1.0)
        store.set_optimizer(optimizer)
        outs = []
        for rate in rates:
            optimizer.learning_rate = rate
            store.push("w", ones())
            outs.append(store.pull_async("w"))
        return [uniform(out.wait()) for out in outs]

    expected = [-mode.workers * sum(rates[: i + 1]) for i in range(len(rates))]
    assert mode.run(body, late=True) == [expected] * mode.workers


@SYNC_KINDS
def test_a_change_does_not_reach_back(mode):
    """Round 1 of 'late' was pushed at rate 1 on every worker, and completes after round 1 of 'soon' at rate 64."""

    def body(store):
        store.init(["late", "soon"], [np.zeros(N, np.float32)] * 2)
        optimizer = optimizers.create("sgd", learning_rate=1.0)
        store.set_optimizer(optimizer)
        if store.rank == 0:
            store.push("late", ones())
            optimizer.learning_rate = 64.0
            store.push("soon", ones())
        else:
            optimizer.learning_rate = 64.0
            store.push("soon", ones())
            store.pull("soon")
            optimizer.learning_rate = 1.0
            store.push("late", ones())
        return uniform(store.pull("late")), uniform(store.pull("soon"))

    assert mode.run(body) == [(-1.0 * mode.workers, -64.0 * mode.workers)] * mode.workers


@SYNC_KINDS
def test_a_schedule_put_in_later(mode):
    def body(store):
        store.init("w", np.zeros(N, np.float32))
        optimizer = optimizers.create("sgd", learning_rate=1.0)
        store.set_optimizer(optimizer)
        store.push("w", ones())
        optimizer.lr_scheduler = optimizers.FactorScheduler(step=1, factor=0.5, base_lr=16.0)
        for _ in range(3):
            store.push("w", ones())
        return uniform(store.pull("w"))

    schedule = optimizers.FactorScheduler(step=1, factor=0.5, base_lr=16.0)
    expected = -(1.0 + sum(schedule(t) for t in (2, 3, 4)))
    assert mode.run(body) == [expected * mode.workers] * mode.workers


@SYNC_KINDS
def test_attributes_of_two_optimizers_do_not_meet(mode):
    def body(store):
        store.init(["a", "b"], [np.zeros(N, np.float32)] * 2)
        first, second = (optimizers.create("sgd", learning_rate=rate) for rate in (1.0, 2.0))
        store.strategy.set_optimizer(first, ["a"])
        store.strategy.set_optimizer(second, ["b"])
        for step in range(4):
            store.push("a", ones())
            store.push("b", ones())
            second.learning_rate *= 2
            if step == 1:
                first.learning_rate = 10.0
        return uniform(store.pull("a")), uniform(store.pull("b"))

    W = mode.workers
    assert mode.run(body) == [(-22.0 * W, -30.0 * W)] * W


def test_owner_remembers_attributes_that_are_still_in_use():
    """Two workers; one optimizer whose rate changed once, beside one whose rate changes at every step."""
    owner = Owner(Spaces())
    for slot in (1, 2):
        owner.set_optimizer(slot, optimizers.create("sgd", learning_rate=1.0), [slot])
    infos = {slot: keys.KeyInfo(str(slot), slot, (2,), np.dtype(np.float32)) for slot in (1, 2)}
    weights = {slot: np.zeros(2, np.float32) for slot in (1, 2)}
    for worker in (0, 1):
        owner.add_attributes(1, worker, 1, {"learning_rate": 2.0})
    for step in range(6000):
        for worker in (0, 1):
            owner.add_attributes(2, worker, step + 2, {"learning_rate": 0.5})
            owner.apply(infos[2], weights[2], np.ones(2, np.float32), (worker, step + 2))
            owner.apply(infos[1], weights[1], np.ones(2, np.float32), (worker, 1))
    assert weights[1].tolist() == [-24000.0] * 2
    assert weights[2].tolist() == [-6000.0] * 2
