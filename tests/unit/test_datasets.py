"""Arrays, MNIST's and CIFAR's files as data sets: the values, the parts, the memory, and files that are wrong."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def text2(value: bytes) -> bytes:
    return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value


def python2_batch(images: np.ndarray, fields: dict[str, list[int]], fortran: bool = False) -> bytes:
    """A batch in the instructions that Python 2 wrote with protocol 2: strings of bytes, memo, marks."""
    n = len(images)
    content = images.tobytes(order="F" if fortran else "C")
    numbers = {name: b"".join(b"M" + struct.pack("<H", i) for i in values) for name, values in fields.items()}
    lists = b"".join(text2(name.encode()) + b"q\x04]q\x05(" + numbers[name] + b"e" for name in fields)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x06cnumpy\nndarray\nq\x07K\x00\x85U\x01b\x87Rq\x08("
        b"K\x01M" + struct.pack("<H", n) + b"M\x00\x0c\x86cnumpy\ndtype\nq\x09U\x02u1K\x00K\x01\x87Rq\x0a("
        b"K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb" + (b"\x88" if fortran else b"\x89")
    )
    names = b"](" + b"".join(text2(b"leptodactylus_%d.png" % i) for i in range(n)) + b"e"
    return (
        b"\x80\x02}q\x01(" + text2(b"batch_label") + text2(b"training batch 1 of 5") + lists
        + text2(b"data") + array + text2(content) + b"tb" + text2(b"filenames") + names + b"u."
    )  # fmt: skip


def python3_batch(protocol: int) -> Callable[..., bytes]:
    def write(images: np.ndarray, fields: dict[str, list[int]]) -> bytes:
        held = {b"data": images.copy(), **{name.encode(): values for name, values in fields.items()}}
        return pickle.dumps({b"batch_label": b"one of them", **held}, protocol=protocol)

    return write


def binary_batch(images: np.ndarray, fields: dict[str, list[int]]) -> bytes:
    columns = [np.array(values, np.uint8)[:, None] for values in fields.values()]
    return np.concatenate([*columns, images], axis=1).tobytes()


WRITERS: dict[str, tuple[Callable[..., bytes], str]] = {
    "binary": (binary_batch, ".bin"),
    "python2": (python2_batch, ""),
    "python2 fortran": (lambda *values: python2_batch(*values, fortran=True), ""),
    "python3 protocol 3": (python3_batch(3), ""),
    "python3 protocol 4": (python3_batch(4), ""),
}
RNG = np.random.default_rng(5)
IMAGES = RNG.integers(0, 256, (15, 3072)).astype(np.uint8)
LABELS = RNG.integers(0, 10, 15).tolist()


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("below", [True, False])
def test_cifar10(tmp_path: Path, kind: str, below: bool) -> None:
    write, suffix = WRITERS[kind]
    folder = tmp_path / ("cifar-10-batches-bin" if suffix else "cifar-10-batches-py") if below else tmp_path
    folder.mkdir(exist_ok=True)
    for i in range(5):
        mine = slice(3 * i, 3 * i + 3)
        (folder / f"data_batch_{i + 1}{suffix}").write_bytes(write(IMAGES[mine], {"labels": LABELS[mine]}))
    (folder / f"test_batch{suffix}").write_bytes(write(IMAGES[:2], {"labels": [0, 9]}))
    data = Cifar10(tmp_path)
    order = RNG.permutation(15)
    images, labels = data.take(order)
    assert np.array_equal(images, IMAGES[order].reshape(15, 3, 32, 32))
    assert (labels.tolist(), labels.dtype) == ([LABELS[i] for i in order], np.int64)
    assert data[14][0].shape == (3, 32, 32)
    assert Cifar10(tmp_path, train=False).take([1, 0])[1].tolist() == [9, 0]
    parts = [Cifar10(tmp_path, num_parts=4, part_index=p) for p in range(4)]
    assert [int(label) for part in parts for label in part.take(range(len(part)))[1]] == LABELS


@pytest.mark.parametrize("kind", WRITERS)
def test_cifar100(tmp_path: Path, kind: str) -> None:
    write, suffix = WRITERS[kind]
    fields = {"coarse_labels": [1, 19, 0], "fine_labels": [99, 5, 0]}
    (tmp_path / f"train{suffix}").write_bytes(write(IMAGES[:3], fields))
    images, labels = Cifar100(tmp_path).take([0, 1, 2])
    assert np.array_equal(images.reshape(3, 3072), IMAGES[:3])
    assert labels.tolist() == [99, 5, 0]
    assert Cifar100(tmp_path, coarse=True).take([0, 1, 2])[1].tolist() == [1, 19, 0]


def test_cifar_files_that_are_missing(tmp_path: Path) -> None:
    for i in range(1, 5):
        (tmp_path / f"data_batch_{i}").touch()
    with pytest.raises(FileNotFoundError, match=r"expected there, or in cifar-10-batches-bin or .*data_batch_5"):
        Cifar10(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no such directory"):
        Cifar100(tmp_path / "elsewhere")


GOOD = python2_batch(IMAGES[:3], {"labels": [1, 2, 3]})
ARRAY_CALL = b"cnumpy.core.multiarray\n_reconstruct\n"


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "offset 0: not a pickle of plain data: its instructions make no sense: damaged or truncated"),
        (GOOD[:-1], "damaged or truncated"),
        (GOOD[:5000], r"a string of 9216 bytes, where the file ends after \d+"),
        (pickle.dumps(Harmful(), protocol=2), r"offset 2: .*it names posix\.mkdir; nothing of it was executed"),
        (pickle.dumps({b"data": Harmful()}, protocol=4), r"it names posix\.mkdir; nothing of it was executed"),
        (pickle.dumps({b"data": Harmful()}, protocol=0), "instruction 0x|damaged"),
        (b"(S'echo'\nios\nsystem\n.", "instruction 0x53, which such files do not have"),
        (b"\x80\x02\x82\x01.", "instruction 0x82"),  # what is registered in the process
        (b"\x80\x02U\x01aQ.", "instruction 0x51"),  # a persistent id
        (GOOD.replace(ARRAY_CALL, b"cnumpy\ndtype\n"), "a call other than those that make an array of uint8"),
        (GOOD.replace(b"U\x02u1", b"U\x02f4"), "a call other than those that make an array of uint8"),
        (b"\x80\x02cnumpy\ndtype\n}b.", "the state of something that is no array"),
        (b"\x80\x02" + b"]" * 9 + b"aaaaaaaau.", "damaged"),
        (b"\x80\x02]q\x00.", "a pickle of no dict, but list"),
        (b"\x80\x02}.", "no data and no labels in it"),
        (pickle.dumps({b"data": 3, b"labels": []}, protocol=2), r"it names _codecs\.encode"),
        (pickle.dumps({b"data": 3, b"labels": []}, protocol=3), "data is no array of uint8, but int"),
        (pickle.dumps({b"data": IMAGES[:9, :99], b"labels": []}, protocol=3),
         r"shape \(9, 99\), expected \(n, 3072\)"),
        (python2_batch(IMAGES[:3], {"labels": [1, 2]}), "3 images, but 2 labels"),
        (python2_batch(IMAGES[:3], {"labels": [1, 2, 10]}), "labels is no list of whole numbers from 0 to 9"),
        (python2_batch(IMAGES[:3], {"fine_labels": [1, 2, 3]}), "no labels in it; it has .*'fine_labels'"),
        (GOOD.replace(b"K\x01M\x03\x00", b"K\x01M\x04\x00"),
         r"data has 9216 bytes, but its shape \(4, 3072\) makes 12288"),
    ],
)  # fmt: skip
def test_pickles_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}/test_batch[:,] .*({words})"):
        Cifar10(tmp_path, train=False)
    assert not (tmp_path / "executed").exists()


def test_a_pickle_damaged_anywhere_is_an_error_or_harmless(tmp_path: Path) -> None:
    """Never another kind of error than ValueError, whichever byte outside of the images is another one."""
    start = GOOD.index(IMAGES[:3].tobytes())
    for at in [*range(start), *range(start + 9216, len(GOOD))]:
        for flip in (0x01, 0xFF):
            content = bytearray(GOOD)
            content[at] ^= flip
            (tmp_path / "test_batch").write_bytes(content)
            try:
                Cifar10(tmp_path, train=False).take([0])
            except ValueError as error:
                assert str(tmp_path) in str(error)  # noqa: PT017


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
