"""Limits of arrays on a GPU against numbers worked out by hand, and what is to be reached."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import frameworks
import numpy as np
import pytest
from jobs import ROOT

from mpikv.__main__ import _parser, main
from mpikv.bench import device_codec, train_report
from mpikv.bench.codec import SHORT_ELEMS, variants
from mpikv.bench.device import GOALS, goal_lines, limit_of, way_of
from mpikv.bench.device_limits import DeviceRates, Ranks, device_limit, staged_limit, update_bytes, work_limit
from mpikv.bench.device_work import WorkRow, line
from mpikv.bench.gpu import DevicePattern, Gpu
from mpikv.bench.limits import Limit, Rates
from mpikv.bench.measure import Result
from mpikv.bench.options import DEVICE_PATHS
from mpikv.bench.pattern import Pattern
from mpikv.bench.report import Row, rows_of
from mpikv.bench.statistics import Summary
from mpikv.bench.updates import TABLE, has_bits_of_host
from mpikv.codecs.base import Codec
from mpikv.codecs.on_device import BYTE
from mpikv.spaces.device import DeviceSpace
from mpikv.strategies.device_pieces import DevicePieces
from mpikv.testing.fake_gpu import FakeGpu

RATES = DeviceRates(1e-6, 10e-6, 1e12, 2e10, 4e10, 4e10)
ONE_GPU = Ranks(2, 2, 1)


def test_memory_of_the_gpu() -> None:
    """Two ranks of one GPU, 1 GB each: 4 GB are read and written, as in a copy of 2 GB."""
    assert device_limit(10**9, ONE_GPU, RATES) == (2e-3, "device")
    assert device_limit(10**9, Ranks(4, 4, 1), RATES) == (4e-3, "device")
    assert device_limit(10**9, Ranks(4, 1, 1), RATES) == (1e-3, "device")


def test_page_locked_copies() -> None:
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
    for what, by in {
        "ipc": "device",
        "ipc, zeros, sgd": "device",
        "mpi": "device",
        "nccl, zeros": "device",
        "staged, out=": "pinned",
        "host": "pinned",
        "raw MPI": "pinned",
    }.items():
        assert limit_of(what, 10**9, ONE_GPU, RATES).by == by
    assert way_of("staged, zeros, sgd") == "staged"


def test_updates() -> None:
    """Adam: the gradient is read; the weight and two states are read and written."""
    moved = update_bytes(1000, [1000, 1000, 1000])
    assert moved == 7000
    assert work_limit(2 * 10**12, RATES) == (1.0, "device")
    assert work_limit(moved, RATES) == (10e-6, "latency")


def rows(what: str, n_bytes: int, median_s: float, limit_s: float) -> list[Row]:
    result = Result(what, Summary(7, median_s, median_s, median_s, median_s), 0)
    rates, limit = Rates(1e-6, 1e10, 2e10, 2e10), Limit(limit_s, "device")
    return rows_of([result], n_bytes=n_bytes, arrays=1, ranks=2, counts={}, rates=rates, limits={}, limit=limit)


def test_what_is_to_be_reached() -> None:
    found = [
        *rows("ipc", 16 << 20, 1.2e-3, 1e-3),
        *rows("ipc, zeros", 64 << 20, 1.4e-3, 1e-3),
        *rows("ipc", 4, 99e-6, 20e-6),
        *rows("ipc", 1 << 20, 1.0, 1e-6),  # of no goal
        *rows("staged", 16 << 20, 1e-3, 1e-3),
        *rows("raw MPI", 16 << 20, 9.0, 1e-3),
    ]
    assert goal_lines("allreduce", found) == [
        "ipc, 16M and more: 1.40 times the limit (ipc, zeros); to reach: 1.30, NOT REACHED",
        "ipc, 4: 99 us (ipc); to reach: 100 us",
        "staged, 16M and more: 1.00 times the limit (staged); to reach: 1.25",
    ]
    assert goal_lines("model", rows("ipc", 99, 1.5e-3, 1e-3)) == ["ipc: 1.50 times the limit (ipc); to reach: 1.50"]
    assert goal_lines("allreduce", []) == goal_lines("allreduce", rows("ipc", 4, 1e-3, 0.0)) == []  # one rank alone
    assert {goal.way for goal in GOALS} <= set(DEVICE_PATHS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_are_filled_and_compared(dtype: str) -> None:
    driver = FakeGpu(eager=0.5)
    gpu, values = Gpu(driver), Pattern(np.dtype(dtype), 0, 1)
    pattern = DevicePattern(gpu, values, 800)
    array = pattern.zeros((2, 50))
    assert array.get().tobytes() == bytes(array.nbytes)
    for sign in (1, -1, 0, 1):
        pattern.fill(array, sign)
        pattern.finish()
        assert pattern.is_total(array, sign)
        assert not pattern.is_total(array, sign + 1)
    assert pattern.is_total(array.get())  # what a pull of a key in host memory returns
    array[1][49:50] = 0
    pattern.finish()
    assert not pattern.is_total(array)
    del array
    before = driver.left_bytes
    gpu.close()
    assert driver.left_bytes > before


def test_bits_of_updates() -> None:
    space = DeviceSpace(FakeGpu(eager=0.5))
    assert has_bits_of_host(space, "adam", np.dtype("float32"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(space, "to_host", lambda array: DeviceSpace.to_host(space, array) + np.float32(1))
        assert not has_bits_of_host(space, "adam", np.dtype("float32"))


@pytest.mark.parametrize(
    "codec",
    [one for name in ("none", "fp16", "2bit", "int8", "topk", "randomk") for _, one in variants(name)],
    ids=repr,
)
@pytest.mark.parametrize("wrong", ["", "encode", "decode", "add", "residual"])
def test_bits_of_codecs(wrong: str, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared, each by itself: what travels, what it comes to, and what is owed."""
    space, dtype = DeviceSpace(FakeGpu(eager=0.5)), np.dtype("float32")
    if wrong == "encode":
        nothing = space.zeros(1, BYTE)
        monkeypatch.setattr(DevicePieces, "encode_all", lambda _, values, parts: dict.fromkeys(parts, nothing))
    elif wrong == "residual":
        if not getattr(codec.on_device(dtype), "remembers", False):
            pytest.skip("nothing is owed")
        whole, found, nothing = (0, SHORT_ELEMS), DevicePieces.states_on_host, np.zeros(SHORT_ELEMS, dtype)
        spoilt = {"residual": nothing}
        monkeypatch.setattr(DevicePieces, "states_on_host", lambda one: {whole: {**found(one)[whole], **spoilt}})
    elif wrong:
        monkeypatch.setattr(DevicePieces, wrong, lambda *_: None)
    assert device_codec.has_bits_of_host(space, codec, dtype) == (not wrong)


def test_what_is_said_of_a_codec_that_falls_short() -> None:
    row = WorkRow("2bit, encode", 1 << 20, 7 << 20, 5, 1e-3, 2e-3, 0.5e-3, "device", 50.0, 4e9, 0)
    assert device_codec.said([row]) == ["2bit, encode: 50 % of the limit; to reach: 60 %, NOT REACHED"]
    more = [dataclasses.replace(row, what=what, limit_percent=one) for what, one in (("a", 70.0), ("b", 60.0))]
    assert device_codec.said(more) == ["b, the slowest: 60 % of the limit; to reach: 60 %"]
    assert device_codec.said([]) == []


def test_rows_of_updates() -> None:
    row = WorkRow("adam", 1 << 20, 7 << 20, 5, 1e-3, 2e-3, 0.9e-3, "device", 90.0, 4e9, 0)
    assert line(TABLE, row).split() == ["1M", "adam", "1000.0", "2000.0", "7.3", "8.0", "device", "90"]
    assert line(TABLE, dataclasses.replace(row, wrong=1)).endswith("WRONG: not the bits of the host")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["optimizers", "--optimizers", "adam,none"], "--optimizers none: there are adadelta"),
        (["optimizers", "--dtype", "int32"], "--dtype int32: an optimizer needs one of float32"),
        (["optimizers", "--plot", "x.png"], "--plot draws bandwidths over sizes"),
        (["allreduce", "--device-paths", "ipc"], "--device-paths compares ways of arrays on a GPU: give --device, too"),
        (["allreduce", "--device", "--algorithms", "ring"], "--algorithms is of arrays in host memory"),
        (["model", "--device", "--vs", "gloo"], "--vs is of arrays in host memory"),
    ],
)
def test_bad_options(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert text in capsys.readouterr().err


def test_options() -> None:
    found = _parser().parse_args(["bench", "allreduce", "--device"])
    assert (found.device, found.device_paths) == (True, ())
    found = _parser().parse_args(["bench", "model", "--device-paths", "staged,host"])
    assert (found.device, found.device_paths) == (False, ("staged", "host"))


def train_row(what: str, step_s: float) -> train_report.TrainRow:
    """Of a run whose step alone takes 0.1 s."""
    times = {"median_s": step_s, "p95_s": step_s, "min_s": step_s, "max_s": step_s}
    more = {"ratio_to_alone": step_s / 0.1, "ratio_p95": step_s / 0.1, "difference": 0.0, "wrong": 0}
    return train_report.TrainRow("resnet18", 128, what, 4, iterations=3, steps=2, **times, **more)


def test_what_a_step_of_training_is_to_reach() -> None:
    frameworks.need("torch")
    from mpikv.bench.train import goal_lines as lines_of

    found = [train_row(what, step_s) for what, step_s in (("alone", 0.1), ("Trainer", 0.104), ("raw MPI, each", 0.3))]
    said = "Trainer, batch 128: 1.040 times the step alone; to reach: 1.05"
    assert lines_of(found) == [said]
    found += [train_row("DDP, Gloo", 0.208), train_row("DistributedModel", 0.2)]
    assert lines_of(found) == [
        f"{said}; 0.500 times DDP; to reach: 1",
        "DistributedModel, batch 128: 2.000 times the step alone; to reach: 1.05, NOT REACHED; 0.962 times DDP; "
        "to reach: 1",
    ]


def test_training_on_a_gpu_that_is_not_there() -> None:
    torch = frameworks.need("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    job = subprocess.run(
        [sys.executable, "-m", "mpikv", "bench", "train", "--device"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert job.returncode == 2
    assert f"mpikv bench: error: --device: torch {torch.__version__} sees no GPU" in job.stderr
