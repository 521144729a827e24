"""Sums of squares, and formulas that ask for them: the bits of the host, without a copy to it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from mpikv import optimizers
from mpikv.optimizers.norms import norm
from mpikv.spaces import folded
from mpikv.spaces.device import DeviceSpace
from mpikv.spaces.tracing import NotAProgram, trace_stages, where_positive
from mpikv.testing.fake_gpu import FakeGpu

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 272, 4096, 4097, 16 * folded.BLOCK_ELEMS + 16 * 5 + 3]
CROSSINGS = ("host_to_device", "device_to_host")


def values_of(n: int, dtype: Any) -> np.ndarray:
    rng = np.random.default_rng(n)
    return (rng.standard_normal(n) * 10.0 ** rng.integers(-3, 4, n)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", LENGTHS)
def test_the_same_number_on_the_host_and_on_a_gpu(n: int, dtype: Any) -> None:
    space = DeviceSpace(FakeGpu())
    values = values_of(n, dtype)
    found = folded.on_host(values)
    wide = values.astype(np.float64)
    assert math.isclose(found, math.fsum(wide * wide), rel_tol=1e-14)
    on_gpu = space.from_host(values)
    total = folded.on_device(space, space.launch, on_gpu)
    assert space.to_host(total).tolist() == [found]
    assert space.to_host(on_gpu).tobytes() == values.tobytes()


def test_nothing_and_what_is_no_number() -> None:
    assert folded.on_host(np.empty(0, np.float32)) == 0.0
    assert math.isnan(folded.on_host(np.array([1.0, np.nan])))
    assert folded.on_host(np.array([1.0, -np.inf])) == math.inf
    assert norm(np.array([3.0, 4.0], np.float32)) == 5.0


def test_which_of_two() -> None:
    nan = math.nan
    for condition, first in itertools.product((1.0, 0.0, -1.0, nan, math.inf), (2.0, nan)):
        found = where_positive(np.float64(condition), np.float64(first), 3.0)
        assert str(found) == str(first if condition > 0.0 else 3.0)


# --- formulas


CASES: list[tuple[str, dict[str, Any]]] = [
    ("lamb", {}),
    ("lamb", {"wd": 0.1, "lower_bound": 2.0, "upper_bound": 3.0, "clip_gradient": 0.3, "rescale_grad": 0.5}),
    ("lamb", {"bias_correction": False}),
    ("lars", {}),
    ("lars", {"momentum": 0.9, "wd": 0.1, "eta": 0.5, "rescale_grad": -0.5}),
    ("lars", {"momentum": 0.9, "clip_gradient": 0.3, "eps": 0.1}),
]


@pytest.mark.grid
@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
@pytest.mark.parametrize("precise", [False, True])
def test_updates_have_the_hosts_bits_and_copy_nothing(
    name: str, options: dict[str, Any], dtype: str, precise: bool
) -> None:
    """Also of keys without a norm: of zeros, and those that LARS leaves out."""
    gpu = FakeGpu()
    space = DeviceSpace(gpu)
    for key, scale in (("w", 5.0), ("bias", 5.0), ("zeros", 0.0)):
        host, device = (optimizers.create(name, multi_precision=precise, **options) for _ in range(2))
        weight = (values_of(273, np.float64) * scale).astype(dtype)
        held = space.from_host(weight.copy())
        state, on_device = host.init(weight), device.init(held)
        for step in range(3):
            host.learning_rate = device.learning_rate = 0.5 / (step + 1)
            grad = values_of(300 + step, np.float32)[:273] * (step != 2)
            pushed = space.from_host(grad)
            before = [gpu.counts[one] for one in CROSSINGS]
            state = host.update(key, weight, grad, state)
            on_device = device.update(key, held, pushed, on_device)
            assert [gpu.counts[one] for one in CROSSINGS] == before
            assert space.to_host(held).tobytes() == weight.tobytes()
            assert state.keys() == on_device.keys()
            for part, value in state.items():
                found = on_device[part]
                if isinstance(value, np.ndarray):
                    assert space.to_host(found).tobytes() == value.tobytes(), part
                else:
                    assert found == value, part


def test_nothing_to_update() -> None:
    space = DeviceSpace(FakeGpu())
    optimizer, held = optimizers.create("lamb"), space.from_host(np.empty(0, np.float32))
    assert optimizer.update("w", held, held, optimizer.init(held))["t"] == 1


def test_keys_with_equal_numbers_have_one_trace_of_lamb() -> None:
    """That of LARS hangs on each key's state, the last learning rate."""
    space = DeviceSpace(FakeGpu())
    for name, traces in (("lamb", 1), ("lars", 4)):
        optimizer, before = optimizers.create(name), space.programs.traces
        for key in range(4):
            held = space.from_host(np.ones(5, np.float32))
            optimizer.update(key, held, held, optimizer.init(held))
        assert space.programs.traces - before == traces


class Own(optimizers.Optimizer):
    """Its formula is the test's. It says in its state how often it was run to the end."""

    elementwise = False
    states = (optimizers.Scalar("runs", "how often", 0.0),)
    body: Any = None

    def formula(self, step: Any, w: Any, g: Any, arrays: Any, tmp: Any) -> None:
        step.state["runs"] += 1.0
        type(self).body(step, w, g, tmp)


def _early(step: Any, w: Any, g: Any, tmp: Any) -> None:
    """A norm goes into what another norm is of, and is used behind both."""
    first = norm(g)
    np.multiply(w, (first * 0.25).astype(w.dtype), out=tmp[0])
    second = norm(tmp[0])
    tmp[1][...] = g
    third = norm(tmp[1])
    w -= tmp[0] * ((first + second) / (third + 1.0)).astype(w.dtype)


def _own_array(step: Any, w: Any, g: Any, tmp: Any) -> None:
    w -= g * norm(w * g).astype(w.dtype)


def _kept_array(step: Any, w: Any, g: Any, tmp: Any) -> None:
    change = w * g
    w -= change * norm(w).astype(w.dtype)


@pytest.mark.parametrize(("body", "on_host"), [(_early, False), (_own_array, True), (_kept_array, True)])
def test_formulas_of_ones_own(body: Any, on_host: bool) -> None:
    """What no program can say runs on the host, once: the trace before it has left the state alone."""

    class Made(Own):
        pass

    Made.body = staticmethod(body)
    gpu = FakeGpu()
    space = DeviceSpace(gpu)
    weight, grad = values_of(50, np.float32), values_of(51, np.float32)[:50]
    held, pushed = space.from_host(weight), space.from_host(grad)
    before = [gpu.counts[one] for one in CROSSINGS]
    state = Made().update("w", held, pushed, Made().init(held))
    copied = [gpu.counts[one] for one in CROSSINGS] != before
    Made().update("w", weight, grad, Made().init(weight))
    assert space.to_host(held).tobytes() == weight.tobytes()
    assert copied == on_host
    assert state["runs"] == 1.0


def test_temporary_memory_is_written_only_where_it_is_read_later() -> None:
    def function(w: Any, kept: Any, other: Any) -> None:
        np.multiply(w, np.float32(2), out=kept)
        np.multiply(w, np.float32(3), out=other)
        total = norm(w)
        kept += other * np.float32(0)
        w -= kept * total.astype(np.float32)

    f4 = np.dtype(np.float32)
    first, second = trace_stages(function, [f4], [f4, f4])
    assert (first.squares, second.squares) == (0, None)
    assert [one.last is not None for one in first.program.arguments] == [False, True, True]
    assert [one.last is not None for one in second.program.arguments] == [True, False, False, False]
    assert [one.layout.all for one in second.program.arguments] == [False, False, False, True]

    def dead(w: Any, kept: Any) -> None:
        np.multiply(w, np.float32(2), out=kept)
        w += norm(w).astype(np.float32)

    first, second = trace_stages(dead, [f4], [f4])
    assert all(one.last is None for one in first.program.arguments)  # nothing is left to do


def test_a_sum_of_an_array_of_its_own_is_no_program() -> None:
    with pytest.raises(NotAProgram, match="an array of its own"):
        trace_stages(lambda w: norm(w + w), [np.dtype(np.float32)])
