"""Benchmarks of arrays on a GPU: that wrong results are found, and options that do not fit."""

from __future__ import annotations

import subprocess
import sys

import frameworks
import numpy as np
import pytest
from fake_cupy import Machine
from jobs import ROOT

from mpikv.commands.bench.device import DevicePattern
from mpikv.spaces.gpu import Gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_are_filled_and_compared(dtype: str) -> None:
    pattern = DevicePattern(Gpu(0, Machine().process(), lambda _: True), np.dtype(dtype), 0, 1, 800)
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


def test_training_on_a_gpu_that_is_not_there() -> None:
    torch = frameworks.need("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    line = [sys.executable, "-m", "mpikv", "bench", "train", "--device"]
    job = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert job.returncode == 2
    assert f"mpikv bench: error: --device: torch {torch.__version__} sees no GPU" in job.stderr
