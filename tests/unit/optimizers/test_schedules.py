"""Schedules against their closed forms, and that they are functions: the same value whatever was asked before."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import numpy as np
import pytest

from mpikv.optimizers import CosineScheduler, FactorScheduler, MultiFactorScheduler, PolyScheduler, Scheduler
from mpikv.optimizers.schedules import schedule_from_config

ALL = [
    Scheduler(0.5, 3, 0.1),
    FactorScheduler(3, 0.5, stop_factor_lr=0.2, base_lr=1.0),
    FactorScheduler(4, 0.9, base_lr=2.0, warmup_steps=6, warmup_begin_lr=0.5, warmup_mode="constant"),
    MultiFactorScheduler([2, 5, 9], 0.1, base_lr=1.0),
    MultiFactorScheduler((4, 8), 0.5, base_lr=1.0, warmup_steps=5),
    PolyScheduler(10, 0.3, 2, 0.1),
    PolyScheduler(12, 0.3, pwr=3, warmup_steps=4, warmup_begin_lr=0.05),
    CosineScheduler(10, 0.3, 0.1),
    CosineScheduler(12, 0.3, warmup_steps=4, warmup_mode="constant", warmup_begin_lr=0.2),
]


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_is_a_function_of_the_update_alone(schedule: Scheduler) -> None:
    forwards = [schedule(t) for t in range(25)]
    assert [schedule(t) for t in reversed(range(25))] == forwards[::-1]
    again = schedule_from_config(json.loads(json.dumps(schedule.config())))
    assert again == schedule
    assert [again(t) for t in range(25)] == forwards
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert schedule(np.int64(7)) == forwards[7]
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.base_lr = 1.0


# Of each schedule the rates of some updates.
RATES = [
    (FactorScheduler(1, 0.5, 1e-8, base_lr=1.0), {1: 1.0, 2: 0.5, 3: 0.25, 40: 1e-8}),
    (FactorScheduler(10, 0.5, base_lr=1.0), {0: 1.0, 1: 1.0, 10: 1.0, 11: 0.5, 20: 0.5, 21: 0.25}),
    # As in MXNet the floor holds from the first reduction on.
    (FactorScheduler(2, 0.5, stop_factor_lr=0.1, base_lr=0.01), {1: 0.01, 2: 0.01, 3: 0.1, 9: 0.1}),
    (MultiFactorScheduler([5, 8], 0.1, base_lr=1.0), {1: 1.0, 5: 1.0, 6: 0.1, 8: 0.1, 9: 0.01, 10**9: 0.01}),
    (PolyScheduler(10, 0.3, 2, 0.1), {t: 0.1 + 0.2 * (1 - min(t, 10) / 10) ** 2 for t in (*range(12), 10**6)}),
    (
        CosineScheduler(10, 0.3, 0.1),
        {t: 0.1 + 0.2 * (1 + math.cos(math.pi * min(t, 10) / 10)) / 2 for t in (*range(12), 10**6)},
    ),
    # The fall begins at the end of the warm-up.
    (PolyScheduler(12, 0.3, pwr=1, warmup_steps=4), {4: 0.3, 8: 0.15, 12: 0.0}),
    (CosineScheduler(12, 0.3, warmup_steps=4), {4: 0.3, 8: 0.15, 12: 0.0}),
]


@pytest.mark.parametrize(("schedule", "rates"), RATES, ids=repr)
def test_rates(schedule: Scheduler, rates: dict[int, float]) -> None:
    assert {t: schedule(t) for t in rates} == pytest.approx(rates, rel=1e-14)


@pytest.mark.parametrize(
    "make",
    [
        lambda **warmup: FactorScheduler(2, 0.5, base_lr=0.8, **warmup),
        lambda **warmup: MultiFactorScheduler([1, 20], 0.5, base_lr=0.8, **warmup),
        lambda **warmup: PolyScheduler(30, 0.8, **warmup),
        lambda **warmup: CosineScheduler(30, 0.8, **warmup),
        lambda **warmup: Scheduler(0.8, **warmup),
    ],
)
def test_warm_up(make) -> None:
    linear = make(warmup_steps=5, warmup_begin_lr=0.3)
    assert [linear(t) for t in range(5)] == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7], rel=1e-15)
    constant = make(warmup_steps=5, warmup_begin_lr=0.3, warmup_mode="constant")
    assert [constant(t) for t in range(5)] == [0.3] * 5
    # The update numbered warmup_steps is the first without it.
    assert linear(5) == constant(5) == linear.after_warmup(5)
    if isinstance(linear, (FactorScheduler, MultiFactorScheduler)):  # steps count from the beginning
        assert [linear(t) for t in range(5, 30)] == [make()(t) for t in range(5, 30)]
    assert make()(0) == 0.8


@pytest.mark.parametrize(
    ("error", "text", "make"),
    [
        (ValueError, "step must be at least 1", lambda: FactorScheduler(0)),
        (TypeError, "step is a whole number", lambda: FactorScheduler(1.5)),
        (ValueError, "factor must be at most 1", lambda: FactorScheduler(1, 1.1)),
        (ValueError, "factor must be at least 0", lambda: FactorScheduler(1, -0.1)),
        (ValueError, "must hold at least one number and rise", lambda: MultiFactorScheduler([])),
        (ValueError, "must hold at least one number and rise", lambda: MultiFactorScheduler([3, 3])),
        (ValueError, "each step must be at least 1", lambda: MultiFactorScheduler([0, 3])),
        (TypeError, "step is a list of update numbers", lambda: MultiFactorScheduler(3)),
        (ValueError, "max_update must be at least 1", lambda: PolyScheduler(0)),
        (ValueError, "must be more than warmup_steps", lambda: PolyScheduler(5, warmup_steps=5)),
        (ValueError, "must be more than warmup_steps", lambda: CosineScheduler(5, warmup_steps=6)),
        (TypeError, "max_update is a whole number", lambda: CosineScheduler(None)),
        (ValueError, "must not exceed base_lr", lambda: Scheduler(0.1, 5, 0.2)),
        (ValueError, "'linear', 'constant'; got 'cubic'", lambda: Scheduler(0.1, 5, 0.05, "cubic")),
        (ValueError, "warmup_steps must be at least 0", lambda: Scheduler(0.1, -1)),
        (ValueError, "base_lr must be at least 0", lambda: Scheduler(-0.1)),
        (ValueError, "base_lr must be finite", lambda: Scheduler(float("nan"))),
        (TypeError, "base_lr is a number", lambda: Scheduler("0.1")),
        (ValueError, "num_update must be at least 0", lambda: Scheduler()(-1)),
        (TypeError, "num_update is a whole number", lambda: Scheduler()(1.0)),
        (ValueError, "unknown schedule 'Saw'; known: Scheduler", lambda: schedule_from_config({"name": "Saw"})),
        (TypeError, "speed", lambda: schedule_from_config({"name": "Scheduler", "speed": 1})),
    ],
)
def test_mistakes_are_named(error: type[Exception], text: str, make) -> None:
    with pytest.raises(error, match=text):
        make()
