"""Arrays, MNIST's and CIFAR's files as data sets: the values, the parts, the memory. Wrong files: test_readers.py."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits import CODES, idx_bytes

from mpikv.data import ArrayDataset, Cifar10, Cifar100, Mnist, RecordFile, load_images, mnist, open_idx, read_idx
from mpikv.data.recordio import MAGIC
from mpikv.errors import UnsupportedError


def own_memory_kib() -> int:
    """This process's memory that is no page of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


# ---- ArrayDataset


def test_items_and_batches() -> None:
    x, y = np.arange(12).reshape(6, 2), np.arange(6) * 10
    both, alone = ArrayDataset(x, y), ArrayDataset(x)
    assert [part.tolist() for part in both[2]] == [[4, 5], 20]
    assert alone[-1].tolist() == [10, 11]
    assert [part.tolist() for part in both.take([5, 0])] == [[[10, 11], [0, 1]], [50, 0]]
    batch = alone.take(np.array([1, 1]))
    batch[:] = 7  # the caller's own memory
    assert x[1].tolist() == [2, 3]


@pytest.mark.parametrize(("n", "num_parts"), [(10, 3), (2, 5), (0, 2), (6, 1)])
def test_parts_cover_all(n: int, num_parts: int) -> None:
    parts = [ArrayDataset(np.arange(n), num_parts=num_parts, part_index=p) for p in range(num_parts)]
    found = [[int(part[i]) for i in range(len(part))] for part in parts]
    assert found == [part.tolist() for part in np.array_split(np.arange(n), num_parts)]


def test_array_dataset_refuses() -> None:
    for arguments, error, words in (
        ((), ValueError, "one array or more"),
        ((np.zeros(3), np.zeros(4)), ValueError, "equally long, not 3, 4"),
        ((np.zeros(3), np.float32(1)), TypeError, "array 1 of a data set is an array of one axis or more"),
        (("file.npy",), TypeError, r"array 0 of a data set is an array \(np.load"),
    ):
        with pytest.raises(error, match=words):
            ArrayDataset(*arguments)
    part = ArrayDataset(np.arange(5), num_parts=2, part_index=1)
    assert part[-2] == part[0] == 3
    for bad in (2, -3):
        with pytest.raises(IndexError, match=f"example {bad} of 2 in part 1 of 2"):
            part[bad]
    with pytest.raises(ValueError, match=r"part_index must be in 0\.\.1"):
        ArrayDataset(np.zeros(5), num_parts=2, part_index=2)


# ---- IDX


@pytest.mark.parametrize("code", list(CODES))
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_idx_round_trip(tmp_path: Path, code: str, pack: Any) -> None:
    array = np.arange(24).reshape(2, 3, 4) - (0 if code == "u1" else 5)
    (tmp_path / "file").write_bytes(pack(idx_bytes(array, code)))
    got, mapped = (read(tmp_path / "file", ndim=3) for read in (read_idx, open_idx))
    assert np.array_equal(got, array)
    assert np.array_equal(mapped, array)
    assert got.dtype == np.dtype(code).newbyteorder("=")
    got[0] = 0  # the caller's own memory
    if pack is bytes:
        assert isinstance(mapped, np.memmap)
        assert not mapped.flags.writeable
    parts = [open_idx(tmp_path / "file", num_parts=3, part_index=i).tolist() for i in range(3)]
    assert parts == [[array[0].tolist()], [array[1].tolist()], []]


def test_idx_of_no_elements_and_of_no_such_part(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(idx_bytes(np.zeros((0, 28, 28))))
    assert read_idx(tmp_path / "file").shape == open_idx(tmp_path / "file").shape == (0, 28, 28)
    with pytest.raises(ValueError, match="part_index must be in"):
        open_idx(tmp_path / "file", num_parts=3, part_index=3)


def test_gzip_is_unpacked_no_further_than_the_header_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of zeros are 64 KiB here."""
    (tmp_path / "file").write_bytes(gzip.compress(idx_bytes(np.zeros((2, 3))) + bytes(1 << 26)))
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


# ---- MNIST


def test_mnist(tmp_path: Path) -> None:
    images = np.arange(5 * 6).reshape(5, 2, 3)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_bytes(images))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.arange(5))))
    found = Mnist(tmp_path, num_parts=2, part_index=1)
    assert len(found) == 2
    image, label = found[0]
    assert (image.tolist(), int(label), label.dtype) == ([images[3].tolist()], 3, np.int64)


def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    """64 MiB of images, in a file without blocks on the disk, are gone through; memory of the process's own stays."""
    n = 2**26 // 784
    with open(tmp_path / "train-images-idx3-ubyte", "wb") as file:
        file.write(struct.pack(">HBB3I", 0, 8, 3, n, 28, 28))
        file.truncate(16 + n * 784)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(n)))
    data = Mnist(tmp_path)
    data.take(range(10))
    before = own_memory_kib()
    for start in range(0, n, 5000):
        data.take(range(start, min(start + 5000, n)))
        assert own_memory_kib() - before < 16 * 1024  # a batch has 4 MiB


def test_memory_does_not_grow_with_the_records(tmp_path: Path) -> None:
    path, n = tmp_path / "a.rec", 64
    with open(path, "wb") as file:
        for i in range(n):
            file.seek(i * 2**20)
            file.write(MAGIC + struct.pack("<I", 2**20 - 8))
        file.truncate(n * 2**20)
    with RecordFile(path, num_parts=2, part_index=1) as records:
        before = own_memory_kib()
        for read in (iter(records), (records[i] for i in range(len(records)))):
            assert sum(map(len, read)) == n // 2 * (2**20 - 8)
            assert own_memory_kib() - before < 16 * 1024


# ---- CIFAR


def binary(images: np.ndarray, *labels: Any) -> bytes:
    return np.column_stack([*labels, images]).astype(np.uint8).tobytes()


RNG = np.random.default_rng(5)
IMAGES = RNG.integers(0, 256, (15, 3072)).astype(np.uint8)
LABELS = RNG.integers(0, 10, 15)


@pytest.mark.parametrize("below", [True, False])
def test_cifar(tmp_path: Path, below: bool) -> None:
    for name in ("cifar-10-batches-bin", "cifar-100-binary"):
        folder = tmp_path / name if below else tmp_path
        folder.mkdir(exist_ok=True)
        if name.startswith("cifar-100"):
            (folder / "train.bin").write_bytes(binary(IMAGES[:3], [1, 19, 0], [99, 5, 0]))
            continue
        for i, start in enumerate(range(0, 15, 3), 1):
            mine = slice(start, start + 3)
            (folder / f"data_batch_{i}.bin").write_bytes(binary(IMAGES[mine], LABELS[mine]))
        (folder / "test_batch.bin").write_bytes(binary(IMAGES[:2], [0, 9]))
    data, order = Cifar10(tmp_path), RNG.permutation(15)
    images, labels = data.take(order)
    assert np.array_equal(images, IMAGES[order].reshape(15, 3, 32, 32))
    assert (labels.tolist(), labels.dtype) == (LABELS[order].tolist(), np.int64)
    assert data[14][0].shape == (3, 32, 32)
    assert Cifar10(tmp_path, train=False).take([1, 0])[1].tolist() == [9, 0]
    parts = [Cifar10(tmp_path, num_parts=4, part_index=p) for p in range(4)]
    assert [int(label) for part in parts for label in part.take(range(len(part)))[1]] == LABELS.tolist()
    images, labels = Cifar100(tmp_path).take([0, 1, 2])
    assert np.array_equal(images.reshape(3, 3072), IMAGES[:3])
    assert labels.tolist() == [99, 5, 0]
    assert Cifar100(tmp_path, coarse=True).take([0, 1, 2])[1].tolist() == [1, 19, 0]


# ---- load_images


def test_load_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder, packed or not; without one Debian's comes before the digits."""
    for start, n, value in (("train", 5, 3), ("t10k", 2, 4)):
        (tmp_path / f"{start}-images-idx3-ubyte").write_bytes(idx_bytes(np.full((n, 28, 28), value)))
        (tmp_path / f"{start}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.arange(n))))
    monkeypatch.setattr(mnist, "DEBIAN_DIR", tmp_path)
    for got in (load_images(tmp_path), load_images()):
        assert [x.shape for x in (got.train_x, got.test_x)] == [(5, 1, 28, 28), (2, 1, 28, 28)]
        assert got.train_x.dtype == np.uint8
        assert [np.unique(x).tolist() for x in (got.train_x, got.test_x)] == [[3], [4]]
        assert [y.tolist() for y in (got.train_y, got.test_y)] == [[0, 1, 2, 3, 4], [0, 1]]
        assert got.source == f"5 training and 2 test images from {tmp_path}"


def test_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    monkeypatch.setattr(mnist, "DEBIAN_DIR", tmp_path)
    got = load_images()
    assert (got.train_x.shape, got.test_x.shape, got.train_x.dtype) == ((1500, 1, 28, 28), (297, 1, 28, 28), np.uint8)
    small = datasets.load_digits().images
    assert np.array_equal(got.train_x[7, 0, 3:26:3, 3:26:3], np.rint(small[7] * 15.9375))
    assert got.train_x[:, 0, [0, 1, 26, 27]].max() == 0
    assert got.train_x.max() == 255
    assert np.bincount(got.test_y, minlength=10).min() > 20
    assert "scikit-learn's handwritten digits" in got.source


def test_nothing_to_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "DEBIAN_DIR", tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UnsupportedError, match=r"dataset-fashion-mnist.*pip install scikit-learn"):
        load_images()
