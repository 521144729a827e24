"""Benchmarks of arrays on a GPU: that wrong results are found."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cupy import Machine

from mpikv.commands.bench.gpu import GpuPattern
from mpikv.spaces.gpu import Gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_are_filled_and_compared(dtype: str) -> None:
    pattern = GpuPattern(Gpu(0, Machine().process(), lambda _: True), np.dtype(dtype), 0, 1)
    array = pattern.zeros((2, 50))
    assert array.get().tobytes() == bytes(array.nbytes)
    for sign in (1, -1, 0, 1):
        pattern.fill(array, sign)
        pattern.finish()
        assert pattern.is_total(array, sign)
        assert not pattern.is_total(array, sign + 1)
    assert pattern.is_total(array.get())  # what a pull of a key in host memory returns
    array[1, 49:] = 0
    assert not pattern.is_total(array)
