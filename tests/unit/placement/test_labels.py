"""What pushes are made under: numbers of attributes, labels, and by what a worker's own values are multiplied."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from mpikv import optimizers
from mpikv.placement import labels
from mpikv.placement.labels import NO_OPTIMIZER, AttributeLog, scaled
from mpikv.spaces.base import Space

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


def watched(*, exact: bool = False, scales: bool = True, **params: float):
    optimizer, log = optimizers.create("sgd", **params), AttributeLog()
    log.watch(1, optimizer, exact=exact, scales=scales)
    return optimizer, log


def factor_in(label: labels.Label) -> float:
    return json.loads(label.text)["rescale_grad"]


def test_a_key_that_no_optimizer_serves():
    assert AttributeLog().push_label(0, exact=False) == (NO_OPTIMIZER, None)


def test_attributes_are_numbered_as_they_change():
    optimizer, log = watched(learning_rate=0.5)
    under, new = log.push_label(1, exact=False)
    assert (under.number, under.ratio, under.label, new) == (0, 1.0, log.as_set(1), None)
    optimizer.learning_rate = 0.25
    under, new = log.push_label(1, exact=False)
    assert (under.number, new and new["learning_rate"]) == (1, 0.25)
    assert under.label != log.as_set(1)
    assert log.push_label(1, exact=False) == (under, None)
    optimizer.lr_mult["w"] = 2.0  # changed in place
    assert log.push_label(1, exact=False)[0].number == 2


def test_another_factor_scales_values_and_changes_no_label():
    optimizer, log = watched(rescale_grad=0.5)
    optimizer.rescale_grad = 0.25
    under, new = log.push_label(1, exact=False)
    assert (under.number, under.ratio, under.label, new) == (0, 0.5, log.as_set(1), None)
    optimizer.rescale_grad = 0.0
    assert log.push_label(1, exact=False)[0].ratio == 0.0
    log.agree(1, 0.125)
    optimizer.rescale_grad = 0.25
    under, new = log.push_label(1, exact=False)
    assert (under.number, under.ratio, factor_in(under.label)) == (1, 2.0, 0.125)
    assert new is not None
    assert log.factor(1) == new["rescale_grad"] == 0.125


@pytest.mark.parametrize(("values", "slot", "agreed"), [(True, False, 1.0), (False, True, 1.0), (False, False, 0.0)])
def test_what_cannot_be_scaled_has_its_own_factor_in_the_label(values, slot, agreed):
    optimizer, log = watched(exact=slot, rescale_grad=agreed)
    optimizer.rescale_grad = 0.25
    under, new = log.push_label(1, exact=values)
    assert (under.number, under.ratio, factor_in(under.label)) == (1, 1.0, 0.25)
    assert new is not None
    assert values or log.factor(1) == 0.25


def test_pushes_that_no_step_is_made_with_are_not_scaled():
    optimizer, log = watched(scales=False)
    optimizer.rescale_grad = 0.25
    assert log.push_label(1, exact=False)[0].ratio == 1.0
    with log.scaling(1):
        assert log.push_label(1, exact=False)[0].ratio == 0.25
    under, _ = log.push_label(1, exact=False)
    assert (under.ratio, under.label) == (1.0, log.as_set(1))


def test_the_next_push_says_what_an_update_was_made_with():
    optimizer, log = watched(scales=False, learning_rate=0.5)
    log.push_label(1, exact=False)
    assert log.updates() == []
    optimizer.rescale_grad = 0.25
    log.updated(1)
    ((slot, update),) = log.updates()
    assert (slot, update["the last update's rescale_grad"], update["the last update's learning_rate"]) == (1, 0.25, 0.5)
    label = log.push_label(1, exact=False)[0].label
    assert json.loads(label.text)["the last update's rescale_grad"] == 0.25
    assert log.updates() == []  # it has been said


def test_scaled_values():
    space, values = Space(), np.random.default_rng(1).standard_normal(100).astype(F32)
    assert scaled(space, values, 1.0) is values
    assert scaled(space, values, 0.3).tobytes() == (values * np.float32(0.3)).tobytes()
    for dtype in (F16, np.dtype(ml_dtypes.bfloat16)):
        half = values.astype(dtype)
        product = half.astype(F32) * np.float32(0.3)
        assert scaled(space, half, 0.3).tobytes() == product.astype(dtype).tobytes()  # rounded once
        assert scaled(space, half, 0.3, F32).tobytes() == product.tobytes()
