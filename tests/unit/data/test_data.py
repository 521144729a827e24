"""Splitting, devices, IDX files and the choice of images: exact values, and the words of each error."""

from __future__ import annotations

import gzip
import itertools
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import frameworks
import numpy as np
import pytest

from mpikv.arrays import devices
from mpikv.arrays.devices import gpu_number
from mpikv.data import SplitSampler, images, load_images, read_idx, split_and_load, split_data
from mpikv.errors import UnsupportedError

# ---- SplitSampler


def test_order_is_fixed_for_good() -> None:
    """Worked out once from PCG64's raw stream; another machine, another NumPy or another part must find the same."""
    sampler = SplitSampler(10, seed=7)
    sampler.set_epoch(2)
    raw = np.random.PCG64(np.random.SeedSequence((7, 2))).random_raw(10)
    assert list(sampler) == sorted(range(10), key=lambda i: raw[i])
    assert list(sampler) == [8, 6, 4, 0, 5, 7, 1, 3, 9, 2]


def test_part_takes_every_pth_place() -> None:
    assert list(SplitSampler(8, 3, 1, shuffle=False)) == [1, 4, 7]
    assert list(SplitSampler(8, 3, 2, shuffle=False)) == [2, 5]
    assert list(SplitSampler(8, 3, 2, shuffle=False, last="wrap")) == [2, 5, 0]
    assert list(SplitSampler(8, 3, 0, shuffle=False, last="drop")) == [0, 3]
    assert list(SplitSampler(2, 5, 4, shuffle=False, last="wrap")) == [0]


def test_epochs_and_seeds_differ_and_repeat() -> None:
    sampler = SplitSampler(100, seed=1)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    assert second == list(sampler)
    sampler.set_epoch(0)
    assert first == list(sampler)
    assert first != list(SplitSampler(100, seed=2))
    assert all(type(i) is int for i in first)


def test_a_running_epoch_is_not_changed_by_set_epoch() -> None:
    sampler = SplitSampler(50)
    expected = list(sampler)
    running = iter(sampler)
    head = [next(running) for _ in range(10)]
    sampler.set_epoch(5)
    assert head + list(running) == expected


def test_for_store() -> None:
    store = SimpleNamespace(rank=2, num_workers=3)
    assert list(SplitSampler.for_store(8, store, shuffle=False, last="drop")) == [2, 5]
    assert list(SplitSampler.for_store(8, store, seed=4)) == list(SplitSampler(8, 3, 2, seed=4))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((-1,), ValueError, "length must be at least 0"),
        ((5, 0), ValueError, "num_parts must be at least 1"),
        ((5, -2), ValueError, "num_parts must be at least 1"),
        ((5, 2, 2), ValueError, r"part_index must be in 0..1.* got 2"),
        ((5, 2, -1), ValueError, "part_index must be at least 0"),
        ((5.0,), TypeError, "length is a whole number, not float"),
        ((5, "2"), TypeError, "num_parts is a whole number, not str"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SplitSampler(*arguments)


def test_equal_steps_where_it_shuffles_and_everything_where_it_does_not() -> None:
    training = [SplitSampler(8, 3, part, seed=1) for part in range(3)]
    had, left = [], []
    for epoch in range(4):
        for part in training:
            part.set_epoch(epoch)
        assert [len(part) for part in training] == [2, 2, 2]
        assert all(part.left.tolist() == training[0].left.tolist() for part in training)
        had.append({index for part in training for index in part})
        left.append(frozenset(training[0].left.tolist()))
        assert had[-1] | left[-1] == set(range(8))
        assert len(left[-1]) == 2
    assert len(set(left)) > 1  # not always the same
    assert set.union(*had) == set(range(8))
    evaluation = [SplitSampler(8, 3, part, shuffle=False) for part in range(3)]
    assert [len(part) for part in evaluation] == [3, 3, 2]
    assert evaluation[0].left.size == 0
    training[0].set_epoch(0, start=1)
    assert training[0].left.tolist() == SplitSampler(8, seed=1).indices()[7:].tolist()


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="last must be one of 'uneven', 'drop', 'wrap'; got 'keep'"):
        SplitSampler(5, last="keep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed must be at least 0"):
        SplitSampler(5, seed=-1)
    with pytest.raises(ValueError, match="epoch must be at least 0"):
        SplitSampler(5).set_epoch(-1)


def test_torch_data_loader() -> None:
    torch_data = frameworks.need("torch.utils.data")
    sampler = SplitSampler(10, 2, 1, seed=3)
    loader = torch_data.DataLoader(list(range(100, 110)), batch_size=2, sampler=sampler)
    assert [i for batch in loader for i in batch.tolist()] == [100 + i for i in sampler]


# ---- split_data, split_and_load


def test_split_data_makes_views() -> None:
    data = np.zeros((6, 2))
    for i, piece in enumerate(split_data(data, 3)):
        piece[:] = i
    assert data[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_split_data_of_a_list() -> None:
    assert [piece.tolist() for piece in split_data([1, 2, 3], 2, even_split=False)] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.zeros((7, 2)), 2), r"7 examples along axis 0 .* do not divide into 2"),
        ((np.zeros((7, 2)), 0), "num_slice must be at least 1"),
        ((np.zeros((7, 2)), 1, 2), r"batch_axis 2 is out of range for data of shape \(7, 2\)"),
        ((np.float32(1), 1), "batch_axis 0 is out of range"),
    ],
)
def test_split_data_errors(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_data(*arguments)


def test_split_and_load_on_the_cpu() -> None:
    data = np.arange(12).reshape(2, 6)
    pieces = split_and_load(data, ["cpu:0", "CPU", "cpu(2)"], batch_axis=1)
    assert [piece.tolist() for piece in pieces] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert all(np.shares_memory(piece, data) for piece in pieces)
    assert split_and_load([1, 2], "cpu")[0].tolist() == [1, 2]
    with pytest.raises(ValueError, match="devices is empty"):
        split_and_load(data, [])


class FakeDevice:
    def __int__(self) -> int:
        return 3


def test_device_names() -> None:
    names = ["cpu", "cpu:1", "gpu", "gpu:2", "cuda:1", "GPU(4)", 0, np.int64(5), FakeDevice()]
    assert [gpu_number(name) for name in names] == [None, None, 0, 2, 1, 4, 0, 5, 3]
    for bad in ("tpu", "cpu:x", "", "cpu:0 gpu", -1, None, 1.5, "gpu:-1"):
        with pytest.raises(ValueError, match="is no device; write 'cpu'"):
            gpu_number(bad)  # type: ignore[arg-type]


def test_gpu_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match=r"'gpu:0' needs CuPy.*pip install cupy-cuda12x"):
        split_and_load(np.zeros(2), ["gpu:0"])


def test_gpu_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(UnsupportedError, match="'gpu:2' does not exist: this process sees 2 GPUs"):
        split_and_load(np.zeros(2), ["gpu:2"])


class Runtime:
    """CUDA's, in a process with contexts on these GPUs."""

    def __init__(self, *contexts: int) -> None:
        self.contexts, self.device = {*contexts}, 0

    def getDevice(self) -> int:  # noqa: N802 - CUDA's names
        return self.device

    def setDevice(self, number: int) -> None:  # noqa: N802
        self.device = number
        self.contexts.add(number)


def test_no_context_is_made_on_a_gpu_that_nobody_uses() -> None:
    runtime = Runtime()
    for number, contexts, back in ((1, {1}, 1), (1, {1}, 1), (2, {1, 2}, 1)):
        with devices.current(number, runtime, runtime.contexts.__contains__):
            assert runtime.device == number
        assert (runtime.contexts, runtime.device) == (contexts, back)


@pytest.mark.parametrize(("number", "active"), [(0, True), (1, False), (2, False)])
def test_contexts(number: int, active: bool) -> None:
    """Of a process that sees two GPUs and uses the first."""

    class Driver:
        def cuDeviceGet(self, device: Any, n: int) -> int:  # noqa: N802 - CUDA's names
            device._obj.value = 70 + n
            return 0 if n < 2 else 101

        def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> int:  # noqa: N802
            active._obj.value = device.value == 70
            return 0

    assert devices.has_context(number, lambda _: Driver()) == active
    assert not devices.has_context(number, lambda _: object())


# ---- IDX files

CODES = {"u1": 8, "i1": 9, ">i2": 11, ">i4": 12, ">f4": 13, ">f8": 14}


def idx_bytes(array: np.ndarray, code: str = "u1") -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, CODES[code], array.ndim, *array.shape)
    return header + array.astype(code).tobytes()


@pytest.mark.parametrize("code", list(CODES))
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_round_trip(tmp_path: Path, code: str, pack: Any) -> None:
    array = np.arange(24).reshape(2, 3, 4) - (0 if code == "u1" else 5)
    (tmp_path / "file").write_bytes(pack(idx_bytes(array, code)))
    got = read_idx(tmp_path / "file", ndim=3)
    assert np.array_equal(got, array)
    assert got.dtype == np.dtype(code).newbyteorder("=")
    got[0] = 0  # the caller's own memory


def test_idx_of_no_elements(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(idx_bytes(np.zeros((0, 28, 28))))
    assert read_idx(tmp_path / "file").shape == (0, 28, 28)


GOOD = idx_bytes(np.arange(6).reshape(2, 3))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated IDX file: 0 bytes"),
        (b"\0\0\x08", "truncated IDX file: 3 bytes"),
        (GOOD[:9], "truncated IDX file: 9 bytes, the header of 2 axes has 12"),
        (GOOD[:-1], r"truncated IDX file: shape \(2, 3\).*makes 18 bytes; the file has 17"),
        (GOOD + b"\0", "too long IDX file"),
        (b"PNG, or so", "not an IDX file: it starts with 50 4e 47 2c"),
        (b"\0\0\x07\x01" + GOOD[4:], "not an IDX file"),
        (struct.pack(">HBB3I", 0, 8, 3, *(2**32 - 1,) * 3), "the array has 3 axes, expected 2"),
        (struct.pack(">HBB2I", 0, 8, 2, *(2**32 - 1,) * 2), "truncated IDX file"),
        (gzip.compress(GOOD)[:-4], "damaged or truncated gzip file"),
        (gzip.compress(GOOD)[:12] + b"\xff" * 20, "damaged or truncated gzip file"),
        (b"\x1f\x8b not gzip", "damaged or truncated gzip file"),
        (gzip.compress(GOOD[:-1]), "truncated IDX file.*the file has 17"),
        (gzip.compress(GOOD + b"\0"), "too long IDX file.*the file has more"),
        (gzip.compress(struct.pack(">HBB2I", 0, 8, 2, *(2**32 - 1,) * 2)), "truncated IDX file"),
        (gzip.compress(b"PNG, or so"), "not an IDX file: it starts with 50 4e 47 2c"),
    ],
    ids=itertools.count(),  # a gzip file holds the time, and a test's name must be the same in each process
)
def test_damaged_idx(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=rf"file: .*{words}"):
        read_idx(tmp_path / "file", ndim=2)


def test_gzip_is_unpacked_no_further_than_the_header_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of zeros are 64 KiB here."""
    (tmp_path / "file").write_bytes(gzip.compress(GOOD + bytes(1 << 26)))
    read = []

    class Counting(gzip.GzipFile):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            read.append(len(data))
            return data

    monkeypatch.setattr(gzip, "GzipFile", Counting)
    with pytest.raises(ValueError, match="too long IDX file"):
        read_idx(tmp_path / "file", ndim=2)
    assert sum(read) < 4096


# ---- images

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def write_images(directory: Path, **changed: np.ndarray) -> None:
    arrays = {
        "train_x": np.full((5, 28, 28), 3),
        "train_y": np.arange(5),
        "test_x": np.full((2, 28, 28), 4),
        "test_y": np.arange(2),
    }
    for i, (name, array) in enumerate(zip(NAMES, (arrays | changed).values(), strict=True)):
        raw = idx_bytes(array)
        (directory / (name + (".gz" if i % 2 else ""))).write_bytes(gzip.compress(raw) if i % 2 else raw)


def test_images_from_files(tmp_path: Path) -> None:
    write_images(tmp_path)
    got = load_images(tmp_path)
    assert got.train_x.shape == (5, 1, 28, 28)
    assert got.test_x.shape == (2, 1, 28, 28)
    assert got.train_x.dtype == np.uint8
    assert (got.train_x == 3).all()
    assert (got.test_x == 4).all()
    assert got.train_y.tolist() == [0, 1, 2, 3, 4]
    assert got.test_y.tolist() == [0, 1]
    assert got.source == f"5 training and 2 test images from {tmp_path}"


def test_debian_directory_comes_before_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "DEBIAN_DIR", tmp_path)
    write_images(tmp_path)
    assert str(tmp_path) in load_images().source


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_images(tmp_path)
    (tmp_path / NAMES[0]).unlink()
    (tmp_path / (NAMES[3] + ".gz")).unlink()
    with pytest.raises(FileNotFoundError, match=rf"missing: {NAMES[0]}\[.gz\], {NAMES[3]}\[.gz\]$"):
        load_images(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no such directory"):
        load_images(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"train_y": np.arange(4)}, "has 5 images, but .* has 4 labels"),
        ({"train_x": np.zeros((5, 8, 8))}, r"images of uint8, \(8, 8\) pixels"),
        ({"test_y": np.array([1, 10])}, "labels from 1 to 10; expected 0 to 9"),
        ({"test_x": np.zeros((2, 784))}, "2 axes, expected 3"),
        ({"test_x": np.zeros((0, 28, 28)), "test_y": np.zeros(0)}, "has no images"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, changed: dict[str, np.ndarray], words: str) -> None:
    write_images(tmp_path, **changed)
    with pytest.raises(ValueError, match=words):
        load_images(tmp_path)


def test_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    monkeypatch.setattr(images, "DEBIAN_DIR", tmp_path)
    got = load_images()
    assert got.train_x.shape == (1500, 1, 28, 28)
    assert got.test_x.shape == (297, 1, 28, 28)
    assert got.train_x.dtype == np.uint8
    small = datasets.load_digits().images
    assert np.array_equal(got.train_x[7, 0, 3:26:3, 3:26:3], np.rint(small[7] * 15.9375))
    assert got.train_x[:, 0, [0, 1, 26, 27]].max() == 0
    assert got.train_x.max() == 255
    assert np.bincount(got.test_y, minlength=10).min() > 20
    assert "scikit-learn's handwritten digits" in got.source


def test_nothing_to_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "DEBIAN_DIR", tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UnsupportedError, match=r"dataset-fashion-mnist.*pip install scikit-learn"):
        load_images()
