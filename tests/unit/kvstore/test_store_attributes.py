"""Attributes of an optimizer that change while it is at work reach the owners with the pushes made under them."""

from __future__ import annotations

import numpy as np
from on_workers import on, uniform
from store_modes import BOUND, FEW, FEW_DIST_SYNC

from mpikv import optimizers
from mpikv.optimizers.owner import Owner
from mpikv.placement import keys
from mpikv.spaces.named import Spaces

SYNC_KINDS = on(*FEW_DIST_SYNC)
N = 3 * BOUND


def ones():
    return np.ones(N, np.float32)


def begun(store, *keys):
    store.init([*keys], [np.zeros(N, np.float32) for _ in keys])
    optimizer = optimizers.create("sgd", learning_rate=1.0)
    store.set_optimizer(optimizer)
    return optimizer


@on(*FEW)
def test_learning_rate_changed_between_pushes(store, W):
    optimizer = begun(store, "w")
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
    assert [*found, uniform(store.pull("w"))] == [-1.0 * W, -3.0 * W, -7.0 * W, -8.0 * W, -12.0 * W]


@on(*FEW_DIST_SYNC, late=True)
def test_each_round_has_the_rate_it_was_pushed_under(store, W):
    """All workers push rounds ahead without waiting, at paces of their own."""
    rates = [1.0, 2.0, 4.0, 8.0, 1.0, 8.0, 1.0, 1.0]  # also back to what it was
    optimizer = begun(store, "w")
    outs = []
    for rate in rates:
        optimizer.learning_rate = rate
        store.push("w", ones())
        outs.append(store.pull_async("w"))
    expected = [-W * sum(rates[: i + 1]) for i in range(len(rates))]
    assert [uniform(out.wait()) for out in outs] == expected


@SYNC_KINDS
def test_a_change_does_not_reach_back(store, W):
    """Round 1 of 'late' was pushed at rate 1 on every worker, and completes after round 1 of 'soon' at rate 64."""
    optimizer = begun(store, "late", "soon")
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
    assert (uniform(store.pull("late")), uniform(store.pull("soon"))) == (-1.0 * W, -64.0 * W)


@SYNC_KINDS
def test_a_schedule_put_in_later(store, W):
    optimizer = begun(store, "w")
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
    for step in range(6000):
        for worker in (0, 1):
            owner.add_attributes(2, worker, step + 2, {"learning_rate": 0.5})
            owner.apply(infos[2], weights[2], np.ones(2, np.float32), (worker, step + 2))
            owner.apply(infos[1], weights[1], np.ones(2, np.float32), (worker, 1))
    assert weights[1].tolist() == [-24000.0] * 2
    assert weights[2].tolist() == [-6000.0] * 2
