"""Benchmarks of arrays on a GPU: limits against numbers worked out by hand, and that wrong results are found."""

from __future__ import annotations

import subprocess
import sys

import frameworks
import numpy as np
import pytest
from fake_cupy import Machine
from jobs import ROOT

from mpikv.__main__ import _parser, main
from mpikv.commands.bench.device import limit_of
from mpikv.commands.bench.device_limits import DeviceRates, Ranks, device_limit, staged_limit
from mpikv.commands.bench.gpu import DevicePattern
from mpikv.commands.bench.pattern import Pattern
from mpikv.placement.buckets import LIMIT_BYTES
from mpikv.spaces.gpu import Gpu

RATES = DeviceRates(1e-6, 10e-6, 1e12, 2e10, 4e10, 4e10)
ONE_GPU = Ranks(2, 2, 1)


def fake_gpu() -> Gpu:
    return Gpu(0, Machine().process(), lambda _: True)


def test_limits() -> None:
    """Two ranks of one GPU, 1 GB each: 4 GB are read and written, as in a copy of 2 GB."""
    assert device_limit(10**9, ONE_GPU, RATES) == (2e-3, "device")
    assert device_limit(10**9, Ranks(4, 1, 1), RATES) == (1e-3, "device")
    # 1 GB down at 20 GB/s and up at 40 GB/s: 75 ms; both at once at 40 GB/s for the two together: 50 ms.
    assert staged_limit(10**9, ONE_GPU, RATES) == (0.05, "pinned")
    one_by_one = staged_limit(10**9, ONE_GPU, RATES._replace(both_bytes_per_s=1e10))
    assert one_by_one == (pytest.approx(0.075), "pinned")


@pytest.mark.parametrize("limit", [device_limit, staged_limit])
def test_short_values_and_links(limit) -> None:
    assert limit(4, ONE_GPU, RATES) == (pytest.approx(11e-6), "latency")
    assert limit(4, Ranks(5, 5, 1), RATES) == (pytest.approx(13e-6), "latency")
    assert limit(10**9, Ranks(1, 1, 1), RATES) == (0.0, "latency")
    # Two hosts at 1 GB/s: 2 * 1/2 * 1 GB.
    assert limit(10**9, Ranks(2, 1, 2), RATES._replace(link_bytes_per_s=1e9)) == (1.0, "link")


def test_ways_through_the_host() -> None:
    by = {"device": ("ipc", "ipc, zeros, sgd", "mpi", "nccl, zeros"), "pinned": ("staged, out=", "host", "raw MPI")}
    for limit, names in by.items():
        assert {limit_of(what, 10**9, ONE_GPU, RATES).by for what in names} == {limit}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_are_filled_and_compared(dtype: str) -> None:
    pattern = DevicePattern(fake_gpu(), Pattern(np.dtype(dtype), 0, 1), 800)
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


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["allreduce", "--device-paths", "ipc"], "--device-paths compares ways of arrays on a GPU: give --device, too"),
        (["allreduce", "--device", "--algorithms", "ring"], "--algorithms is of arrays in host memory"),
        (["model", "--device", "--vs", "gloo"], "--vs is of arrays in host memory"),
    ],
)
def test_bad_options(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert text in capsys.readouterr().err


def test_options() -> None:
    found = _parser().parse_args(["bench", "model", "--device-paths", "staged,host"])
    assert (found.device, found.device_paths) == (False, ("staged", "host"))
    sizes = [_parser().parse_args(["bench", "train", *more]).bucket_bytes for more in ([], ["--bucket-bytes", "4G"])]
    assert sizes == [LIMIT_BYTES, 4 << 30]


def test_training_on_a_gpu_that_is_not_there() -> None:
    torch = frameworks.need("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    line = [sys.executable, "-m", "mpikv", "bench", "train", "--device"]
    job = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert job.returncode == 2
    assert f"mpikv bench: error: --device: torch {torch.__version__} sees no GPU" in job.stderr
