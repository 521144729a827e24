"""Readers of files of data, and wrong files: each is an error that names the file, and says what is wrong with it.

What is read of good files: test_datasets.py, test_recordio.py and test_image_records.py.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits import idx_bytes

from mpikv.data import (
    Cifar10,
    Cifar100,
    ImageHeader,
    ImageRecords,
    Mnist,
    RecordFile,
    load_images,
    open_idx,
    pack,
    read_idx,
)
from mpikv.data.recordio import encoded

Files = dict[str, bytes]
PICTURES = Path(__file__).parents[2] / "fixtures" / "records" / "pictures"


def idx(array: Any) -> bytes:
    return idx_bytes(np.asarray(array))


def idx_head(*shape: int, code: int = 8) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, code, len(shape), *shape)


def drain(read: Any) -> list[Any]:
    return [read[i] for i in range(len(read))]


# Each gets a folder and reads all that its data set has there.
READERS: dict[str, Callable[[Path], Any]] = {
    "read_idx": lambda folder: read_idx(folder / "file", ndim=2),
    "open_idx": lambda folder: open_idx(folder / "file", ndim=2),
    "mnist": lambda folder: drain(Mnist(folder)),
    "images": load_images,
    "cifar10": lambda folder: drain(Cifar10(folder, train=False)),
    "cifar100": lambda folder: drain(Cifar100(folder, train=False)),
    "records": lambda folder: list(RecordFile(folder / "a.rec")),
    "index": lambda folder: drain(RecordFile(folder / "a.rec", index=True)),
    "image records": lambda folder: drain(ImageRecords(RecordFile(folder / "a.rec"))),
}
X, Y = "-images-idx3-ubyte", "-labels-idx1-ubyte"
MNIST = {f"train{X}": idx(np.full((2, 28, 28), 3)), f"train{Y}": idx([1, 2])}
BOTH = {**MNIST, f"t10k{X}": idx(np.zeros((1, 28, 28))), f"t10k{Y}.gz": gzip.compress(idx([9]))}
CIFAR10, CIFAR100 = bytes([7]) + bytes(3072), bytes([3, 42]) + bytes(3072)
IDX = idx([[0, 1, 2], [3, 4, 5]])
PNG, JPEG = ((PICTURES / name).read_bytes() for name in ("cat/0.png", "dog/3.jpg"))
RECORDS = {"a.rec": encoded(b"a") + encoded(b"bb"), "a.idx": b"0\t0\n1\t12\n"}
GOOD: dict[str, Files] = {
    "read_idx": {"file": IDX},
    "open_idx": {"file": IDX},
    "mnist": MNIST,
    "images": BOTH,
    "cifar10": {"test_batch.bin": CIFAR10},
    "cifar100": {"test.bin": CIFAR100},
    "records": RECORDS,
    "index": RECORDS,
    "image records": {"a.rec": encoded(pack(ImageHeader(1.0), PNG))},
}


def damages() -> Iterator[tuple[str, Files, str]]:
    """A reader, its files, and what the error says behind the name of the file that is wrong."""
    for content, words in (
        (b"", "truncated IDX file: 0 bytes"),
        (b"\0\0\x08", "truncated IDX file: 3 bytes"),
        (IDX[:9], "truncated IDX file: 9 bytes, the header of 2 axes has 12"),
        (IDX[:-1], r"truncated IDX file: shape \(2, 3\).*makes 18 bytes; the file has 17"),
        (IDX + b"\0", "too long IDX file"),
        (b"PNG, or so", "not an IDX file: it starts with 50 4e 47 2c"),
        (b"\0\0\x07\x01" + IDX[4:], "not an IDX file"),
        (idx_head(*(2**32 - 1,) * 3), "the array has 3 axes, expected 2"),
        (idx_head(*(2**32 - 1,) * 2), "truncated IDX file"),
        (gzip.compress(IDX)[:-4], "damaged or truncated gzip file"),
        (gzip.compress(IDX)[:12] + b"\xff" * 20, "damaged or truncated gzip file"),
        (b"\x1f\x8b not gzip", "damaged or truncated gzip file"),
        (gzip.compress(IDX[:-1]), "truncated IDX file.*the file has 17"),
        (gzip.compress(IDX + b"\0"), "too long IDX file.*the file has more"),
        (gzip.compress(idx_head(*(2**32 - 1,) * 2)), "truncated IDX file"),
        (gzip.compress(b"PNG, or so"), "not an IDX file: it starts with 50 4e 47 2c"),
    ):
        yield "read_idx", {"file": content}, f"/file: {words}"
        yield "open_idx", {"file": content}, f"/file: {words}"

    missing = rf"^images in {{folder}}; missing: train{X}\[.gz\], train{Y}\[.gz\]"
    yield "mnist", {}, f"{missing}$"
    yield "images", {}, rf"{missing}, t10k{X}\[.gz\], t10k{Y}\[.gz\]$"
    for reader, good in (("mnist", MNIST), ("images", BOTH)):
        yield reader, {**good, f"train{Y}": idx([1])}, f"{X} has 2 images, but .*{Y} has 1 labels"
        yield reader, {**good, f"train{X}": idx(np.zeros((2, 784)))}, f"{X}: the array has 2 axes, expected 3"
        yield reader, {**good, f"train{X}": idx_head(2, 1, 1, code=9) + b"ab"}, f"{X}: elements of int8, expected uint8"
    yield "images", {**BOTH, f"train{X}": idx(np.zeros((2, 8, 8)))}, rf"{X}: images of \(8, 8\) pixels"
    yield "images", {**BOTH, f"train{Y}": idx([1, 10])}, f"{Y}: labels from 1 to 10; expected 0 to 9"
    yield "images", {**BOTH, f"t10k{X}": idx(np.zeros((0, 28, 28))), f"t10k{Y}.gz": idx([])}, f"t10k{X} has no images"

    yield "cifar10", {}, r"^{folder}; expected there, or in cifar-10-batches-bin there: test_batch\.bin$"
    yield "cifar100", {}, r"^{folder}; expected there, or in cifar-100-binary there: test\.bin$"
    # Pickled files, which are programs: one line says what to put there instead.
    for reader, folder, name, archive in (
        ("cifar10", "cifar-10-batches-py", "test_batch", "cifar-10-binary"),
        ("cifar100", "cifar-100-python", "test", "cifar-100-binary"),
    ):
        words = rf" has .*pickled files, which are not read, .*{archive}\.tar\.gz there instead: {name}\.bin$"
        yield reader, {name: b""}, f"^{{folder}}{words}"
        yield reader, {f"{folder}/{name}": b""}, f"^{{folder}}/{folder}{words}"
    for size in (0, 1, 3072, 3074, 2 * 3073 + 3072):
        words = rf"no whole number of records of 3073 bytes .*offset {size // 3073 * 3073}"
        yield "cifar10", {"test_batch.bin": bytes(size)}, rf"/test_batch\.bin: {size} bytes, which is {words}"
    yield "cifar10", {"test_batch.bin": CIFAR10 + b"\x0a" * 3073}, r"/test_batch\.bin: labels from 10 to 10; expected 0"
    yield "cifar100", {"test.bin": b"\0" + b"\x64" * 3073}, r"/test\.bin: labels from 100 to 100; expected 0 to 99"

    for line, words in (
        ("a\t0", r"line 2: .*expected a key and an offset, two whole numbers"),
        ("5", "expected a key and an offset"),
        ("5\t99999999999999999999999", "two whole numbers"),
        ("5\t6", "key 5 has offset 6; expected a multiple of 4"),
        ("5\t-4", "key 5 has offset -4"),
        ("5\t20", "key 5 has offset 20; .* in a file of 24 bytes"),
        ("0\t12", "key 0 comes twice"),
        ("5\t0", "offset 0 comes twice"),
    ):
        yield "index", {**RECORDS, "a.idx": f"0\t0\n{line}\n".encode()}, rf"/a\.idx.*{words}"
    yield "index", {**RECORDS, "a.idx": b""}, r"/a\.idx: an empty index, of a file of 24 bytes"
    inside = {"a.rec": encoded(b"abcdefgh"), "a.idx": b"0\t0\n1\t8\n"}
    yield "index", inside, r"/a\.rec: damaged record at offset 8: no RecordIO head.*index is of another file"

    several = pack(ImageHeader([1.0, 2.0]), b"")
    for record, words in (
        (b"", "0 bytes, the header alone has 24"),
        (several[:28], "28 bytes, but a header of 2 labels has 32"),
        (pack(ImageHeader(1.0), b"GIF or so"), "that Pillow can decode .* begins with 47 49 46 20"),
        (pack(ImageHeader(1.0), JPEG[:300]), "that Pillow can decode .*begins with ff d8"),
    ):
        first = encoded(pack(ImageHeader(1.0), PNG))
        what = rf"/a\.rec: damaged record at offset {len(first)}: no image.*{words}"
        yield "image records", {"a.rec": first + encoded(record)}, what


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


DAMAGES = list(damages())


@pytest.mark.parametrize(("reader", "files", "words"), DAMAGES, ids=[f"{one[0]} {i}" for i, one in enumerate(DAMAGES)])
def test_a_wrong_file_is_named(tmp_path: Path, reader: str, files: Files, words: str) -> None:
    write(tmp_path, files)
    with pytest.raises((ValueError, FileNotFoundError), match=words.replace("{folder}", str(tmp_path))):
        READERS[reader](tmp_path)


@pytest.mark.parametrize("reader", READERS)
def test_no_folder(tmp_path: Path, reader: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/elsewhere"):
        READERS[reader](tmp_path / "elsewhere")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("cut", [True, False])
def test_a_file_that_is_cut_or_changed_anywhere(tmp_path: Path, reader: str, cut: bool) -> None:
    """It is read as something else or refused with its name, and nothing else happens."""
    write(tmp_path, GOOD[reader])
    READERS[reader](tmp_path)
    errors = []
    for name, content in GOOD[reader].items():
        for at in {*range(min(40, len(content))), len(content) - 1, len(content) // 2}:
            changed = content[:at] if cut else content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
            (tmp_path / name).write_bytes(changed)
            try:
                READERS[reader](tmp_path)
            except ValueError as error:
                errors.append(str(error))
        (tmp_path / name).write_bytes(content)
    assert errors
    assert all(str(tmp_path) in error for error in errors)
