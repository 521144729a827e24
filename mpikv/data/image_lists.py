"""Which images are packed, and with which labels: from a folder, or from a list as `im2rec` makes them.

A list has a line for each image: a whole number, one label or several, and the path, with tabs between them. A folder
is gone through in the order of names; each folder that has images in it is a class, numbered from 0 in that order, as
`im2rec --list --recursive` does it. Source of the form: MXNet's tools/im2rec.py.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mpikv.common.checks import shown
from mpikv.common.files import open_regular

EXTENSIONS = (".jpeg", ".jpg", ".png")


class Listed(NamedTuple):
    """An image to be packed. number: its id and its key in the index."""

    number: int
    labels: tuple[float, ...]
    path: str


class Folder(NamedTuple):
    """The images of a folder, and its classes' names by their labels."""

    images: list[Listed]
    classes: list[str]


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers from 1 on."""
    with open_regular(path) as file:
        for number, line in enumerate(io.TextIOWrapper(file, "utf-8", "surrogateescape"), start=1):
            if line.strip():
                yield number, line


def read_list(path: str, root: str | None = None) -> list[Listed]:
    """The images of a list. root: where its paths begin; default the list's folder. Raises ValueError with the line."""
    folder = root or os.path.dirname(path)
    found: list[Listed] = []
    seen: dict[int, int] = {}
    for line_number, line in _lines(path):
        words = [word.strip() for word in line.rstrip("\n").split("\t")]
        where = f"{path}, line {line_number}"
        try:
            number, labels = int(words[0]), tuple(map(float, words[1:-1]))
        except ValueError:
            labels = ()
        if not labels or not words[-1] or number < 0:
            raise ValueError(f"{where}: {shown(line)}; expected a number, labels and a path, with tabs between them")
        if seen.setdefault(number, line_number) != line_number:
            raise ValueError(f"{where}: number {number} stands in line {seen[number]}, too")
        found.append(Listed(number, labels, os.path.join(folder, words[-1])))
    if not found:
        raise ValueError(f"{path}: a list of no images")
    return found


def read_folder(folder: str, extensions: tuple[str, ...] = EXTENSIONS) -> Folder:
    """The images in a folder and those below it. Raises ValueError where there are none."""
    images: list[Listed] = []
    classes: list[str] = []
    for place, below, names in os.walk(folder, followlinks=True, onerror=_raise):
        # Not into a link to a folder that it lies in, which would never end.
        inside = {*map(os.path.realpath, (place, *map(str, Path(place).parents)))}
        below[:] = sorted(one for one in below if os.path.realpath(os.path.join(place, one)) not in inside)
        mine = [name for name in sorted(names) if Path(name).suffix.lower() in extensions]
        for name in mine:
            images.append(Listed(len(images), (float(len(classes)),), os.path.join(place, name)))
        if mine:
            classes.append(os.path.relpath(place, folder))
    if not images:
        raise ValueError(f"{folder}: no images in it, nor below it; looked for {', '.join(extensions)}")
    return Folder(images, classes)


def _raise(error: OSError) -> None:
    raise error


def with_labels(images: list[Listed], folder: str, label_file: str) -> list[Listed]:
    """The images with the labels in a file: a line for each, the path from `folder` on, a tab, and the labels.

    Raises ValueError where a line is wrong, an image has no line, or a line no image.
    """
    labels: dict[str, tuple[float, ...]] = {}
    for line_number, line in _lines(label_file):
        words = line.rstrip("\n").split("\t")
        name = os.path.normpath(words[0])
        try:
            values = tuple(map(float, words[1:]))
        except ValueError:
            values = ()
        if not values:
            raise ValueError(f"{label_file}, line {line_number}: {shown(line)}; expected a path, a tab and labels")
        if name in labels:
            raise ValueError(f"{label_file}, line {line_number}: {shown(name)} has labels already")
        labels[name] = values
    found = []
    for image in images:
        name = os.path.relpath(image.path, folder)
        if name not in labels:
            raise ValueError(f"{label_file}: no labels for {shown(name)}, which is in {folder}")
        found.append(image._replace(labels=labels.pop(name)))
    if labels:
        raise ValueError(f"{label_file}: labels for {shown(next(iter(labels)))}, which is not in {folder}")
    return found
