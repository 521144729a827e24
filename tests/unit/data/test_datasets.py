"""Arrays, MNIST's and CIFAR's files as data sets: the values, the parts, the memory, and files that are wrong."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from mpikv.data import ArrayDataset, Cifar10, Cifar100, Mnist, RecordFile, open_idx, read_idx
from mpikv.data.recordio import MAGIC
from mpikv.data.rows import Rows


def own_memory_kib() -> int:
    """This process's memory that is no page of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


# ---- Rows


@pytest.mark.parametrize("cuts", [[], [3], [1, 1, 6]])
def test_rows_are_the_joined_array(cuts: list[int]) -> None:
    whole = np.arange(24).reshape(8, 3)
    rows = Rows(np.split(whole, cuts), np.float32)
    assert (len(rows), rows.shape, rows.dtype) == (8, (8, 3), np.float32)
    for which in (0, -1, np.int64(5), slice(None), slice(6, 1, -2), [7, 0, 0, -8], np.array([], dtype=int)):
        assert rows[which].tolist() == whole[which].tolist()
        assert rows[which].dtype == np.float32
    assert np.array_equal(np.asarray(rows), whole)
    for bad in (8, -9, [0, 8]):
        with pytest.raises(IndexError, match=r"row -?\d of 8"):
            rows[bad]
    with pytest.raises(TypeError, match="a row is a whole number"):
        rows[1.5]


def test_rows_of_one_kind() -> None:
    with pytest.raises(ValueError, match="of one shape and dtype"):
        Rows([np.zeros((2, 3)), np.zeros((2, 4))])


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
    part = ArrayDataset(np.zeros(5), num_parts=2, part_index=1)
    for bad in (2, -3):
        with pytest.raises(IndexError, match=f"example {bad} of 2 in part 1 of 2"):
            part[bad]
    with pytest.raises(ValueError, match=r"part_index must be in 0\.\.1"):
        ArrayDataset(np.zeros(5), num_parts=2, part_index=2)


# ---- IDX


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def test_open_idx_maps(tmp_path: Path) -> None:
    values = np.arange(-4, 20).reshape(2, 3, 4)
    (tmp_path / "f").write_bytes(struct.pack(">HBB3I", 0, 0x0C, 3, 2, 3, 4) + values.astype(">i4").tobytes())
    found = open_idx(tmp_path / "f", ndim=3)
    assert isinstance(found, np.memmap)
    assert not found.flags.writeable
    assert np.array_equal(found, values)
    parts = [open_idx(tmp_path / "f", num_parts=3, part_index=i).tolist() for i in range(3)]
    assert parts == [[values[0].tolist()], [values[1].tolist()], []]
    with pytest.raises(ValueError, match="part_index must be in"):
        open_idx(tmp_path / "f", num_parts=3, part_index=3)
    (tmp_path / "f").write_bytes(idx_bytes(np.zeros((0, 28, 28))))
    assert open_idx(tmp_path / "f").shape == (0, 28, 28)
    (tmp_path / "f").write_bytes(gzip.compress(idx_bytes(np.arange(3))))
    assert open_idx(tmp_path / "f").tolist() == [0, 1, 2]
    for content in (b"", b"\0\0\x08\x01\0\0\0\x04abc", idx_bytes(np.arange(3)) + b"d", b"\0\0\x08\x02abcd"):
        (tmp_path / "f").write_bytes(content)
        messages = []
        for read in (open_idx, read_idx):
            with pytest.raises(ValueError, match=str(tmp_path / "f")) as caught:
                read(tmp_path / "f")
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_mnist(tmp_path: Path) -> None:
    images = np.arange(5 * 6).reshape(5, 2, 3)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_bytes(images))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(np.arange(5))))
    found = Mnist(tmp_path, num_parts=2, part_index=1)
    assert len(found) == 2
    image, label = found[0]
    assert (image.tolist(), int(label), label.dtype) == ([images[3].tolist()], 3, np.int64)
    with pytest.raises(FileNotFoundError, match=r"missing: t10k-images-idx3-ubyte, or t10k-images-idx3-ubyte\.gz"):
        Mnist(tmp_path, train=False)
    with pytest.raises(FileNotFoundError, match="there is no such directory"):
        Mnist(tmp_path / "elsewhere")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(4)))
    with pytest.raises(ValueError, match=r"ubyte has 5 images, but .*ubyte has 4 labels"):
        Mnist(tmp_path)


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


def binary_batch(images: np.ndarray, fields: dict[str, list[int]]) -> bytes:
    columns = [np.array(values, np.uint8)[:, None] for values in fields.values()]
    return np.concatenate([*columns, images], axis=1).tobytes()


RNG = np.random.default_rng(5)
IMAGES = RNG.integers(0, 256, (15, 3072)).astype(np.uint8)
LABELS = RNG.integers(0, 10, 15).tolist()


@pytest.mark.parametrize("below", [True, False])
def test_cifar10(tmp_path: Path, below: bool) -> None:
    folder = tmp_path / "cifar-10-batches-bin" if below else tmp_path
    folder.mkdir(exist_ok=True)
    for i in range(5):
        mine = slice(3 * i, 3 * i + 3)
        (folder / f"data_batch_{i + 1}.bin").write_bytes(binary_batch(IMAGES[mine], {"labels": LABELS[mine]}))
    (folder / "test_batch.bin").write_bytes(binary_batch(IMAGES[:2], {"labels": [0, 9]}))
    data = Cifar10(tmp_path)
    order = RNG.permutation(15)
    images, labels = data.take(order)
    assert np.array_equal(images, IMAGES[order].reshape(15, 3, 32, 32))
    assert (labels.tolist(), labels.dtype) == ([LABELS[i] for i in order], np.int64)
    assert data[14][0].shape == (3, 32, 32)
    assert Cifar10(tmp_path, train=False).take([1, 0])[1].tolist() == [9, 0]
    parts = [Cifar10(tmp_path, num_parts=4, part_index=p) for p in range(4)]
    assert [int(label) for part in parts for label in part.take(range(len(part)))[1]] == LABELS


@pytest.mark.parametrize("below", [True, False])
def test_cifar100(tmp_path: Path, below: bool) -> None:
    folder = tmp_path / "cifar-100-binary" if below else tmp_path
    folder.mkdir(exist_ok=True)
    fields = {"coarse_labels": [1, 19, 0], "fine_labels": [99, 5, 0]}
    (folder / "train.bin").write_bytes(binary_batch(IMAGES[:3], fields))
    images, labels = Cifar100(tmp_path).take([0, 1, 2])
    assert np.array_equal(images.reshape(3, 3072), IMAGES[:3])
    assert labels.tolist() == [99, 5, 0]
    assert Cifar100(tmp_path, coarse=True).take([0, 1, 2])[1].tolist() == [1, 19, 0]


def test_cifar_files_that_are_missing(tmp_path: Path) -> None:
    for i in range(1, 5):
        (tmp_path / f"data_batch_{i}.bin").touch()
    with pytest.raises(
        FileNotFoundError, match=r"expected there, or in cifar-10-batches-bin there: .*data_batch_5\.bin"
    ):
        Cifar10(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no such directory"):
        Cifar100(tmp_path / "elsewhere")


@pytest.mark.parametrize("below", [True, False])
def test_pickled_files_are_not_read(tmp_path: Path, below: bool) -> None:
    """One line says what to put there instead."""
    for dataset, folder, name in (
        (Cifar10, "cifar-10-batches-py", "test_batch"),
        (Cifar100, "cifar-100-python", "test"),
    ):
        place = tmp_path / folder if below else tmp_path
        place.mkdir(exist_ok=True)
        (place / name).touch()
        archive = "cifar-10-binary" if dataset is Cifar10 else "cifar-100-binary"
        words = rf"^{place} has .*pickled files, which are not read, .*{archive}\.tar\.gz there instead: {name}\.bin$"
        with pytest.raises(FileNotFoundError, match=words):
            dataset(tmp_path, train=False)


@pytest.mark.parametrize("size", [0, 1, 3072, 3074, 2 * 3073 + 3072])
def test_binary_files_of_a_wrong_size(tmp_path: Path, size: int) -> None:
    (tmp_path / "test_batch.bin").write_bytes(bytes(size))
    words = rf"{size} bytes, which is no whole number of records of 3073 bytes .*offset {size // 3073 * 3073}"
    with pytest.raises(ValueError, match=rf"test_batch\.bin: {words}"):
        Cifar10(tmp_path, train=False)


def test_binary_labels_out_of_range(tmp_path: Path) -> None:
    (tmp_path / "test_batch.bin").write_bytes(binary_batch(IMAGES[:3], {"labels": [1, 10, 2]}))
    data = Cifar10(tmp_path, train=False)
    assert data[0][1] == 1
    with pytest.raises(ValueError, match=r"test_batch\.bin: labels from 10 to 10; expected 0 to 9"):
        data[1]
