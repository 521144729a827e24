"""`mpikv records`: its options, and what its three actions do.

`pack` holds one image at a time; `list` and `check` read a file from its beginning to its end, and go on behind damage.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np

from mpikv.commands.numbers import at_least
from mpikv.common.files import open_regular
from mpikv.common.progress import Progress
from mpikv.data.image_lists import EXTENSIONS, Listed, read_folder, read_list, with_labels
from mpikv.data.image_records import ImageHeader, decode_image, image_size, in_8_bits, pack, turned, unpack
from mpikv.data.record_file import RecordFile, RecordWriter
from mpikv.data.recordio import Index, index_path, read_index
from mpikv.errors import MpikvError

DAMAGED, BAD_INPUT = 1, 2
_JPEG_QUALITY = 95  # im2rec's


EXAMPLES = """examples:
  mpikv records pack photos train.rec                       a folder for each class; writes train.idx, too
  mpikv records pack photos train.rec --resize 256 --quality 90 --shuffle
  mpikv records pack train.lst train.rec --root photos      a list as MXNet's im2rec makes it
  mpikv records list train.rec -n 20
  mpikv records check train.rec --images

exit status: 0; 1 where something is damaged, which is told with its offset; 2 for wrong options or files that cannot be
read."""


# ---- options


def add_parser(commands: Any) -> None:
    """Add `records` to the commands of `mpikv`."""
    records = commands.add_parser(
        "records",
        help="pack images into RecordIO files as MXNet's im2rec does, list what is in one, check one",
        description="RecordIO files, the .rec files of MXNet.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = records.add_subparsers(metavar="ACTION", required=True)
    _add_pack(actions)
    show = actions.add_parser(
        "list",
        help="the records of a file: offset, length, and of images label, id and size",
        description="Print a line for each record of a file.",
    )
    show.add_argument("-n", dest="first", type=at_least(1), metavar="N", help="the first N records only")
    check = actions.add_parser(
        "check",
        help="read a whole file and its index, and tell what is damaged",
        description="Read every record of a file, and compare its index with it. Prints every damaged place.",
    )
    check.add_argument("--images", action="store_true", help="decode every image, too (Pillow)")
    for parser, action in ((show, "list"), (check, "check")):
        parser.add_argument("file", metavar="FILE", help="the .rec file")
        parser.add_argument(
            "--index", metavar="FILE", help="its index (default NAME.idx beside NAME.rec, if it is there)"
        )
        parser.add_argument("--no-index", action="store_true", help="without an index, though there is one")
        parser.set_defaults(run=run, action=action)


def _add_pack(actions: Any) -> None:
    parser = actions.add_parser(
        "pack",
        help="write images and their labels into a file and its index",
        description="Write images and their labels into a RecordIO file, whole or not at all. Without --resize, "
        "--center-crop, --quality, --encoding and --grey the images' files go into it as they are.",
    )
    add = parser.add_argument
    add("source", metavar="DIR|LIST", help="a folder (each folder in it with images is a class, numbered by name), or "
        "a list: lines of number, labels and path, with tabs between them")  # fmt: skip
    add("out", metavar="OUT", help="the .rec file to write; NAME.idx goes beside NAME.rec")
    add("--root", metavar="DIR", help="where the paths of a list begin (default: the list's folder)")
    add("--label-file", metavar="FILE", help="labels for a folder: lines of path (from the folder on), tab, labels")
    add("--resize", type=at_least(1), metavar="N", help="make the shorter edge N pixels long")
    add("--center-crop", action="store_true", help="cut a square out of the middle, before --resize")
    add("--quality", type=_quality, metavar="Q", help="encode as JPEG of this quality, 1 to 100 (95 where one is made)")
    add("--encoding", choices=("jpg", "png"), help="encode as this (jpg, where an image is changed)")
    add("--grey", action="store_true", help="without colours")
    add("--shuffle", action="store_true", help="in random order, which is good for reading from beginning to end")
    add("--seed", type=at_least(0), default=0, help="of the random order (0)")
    add("--extensions", type=_extensions, default=EXTENSIONS, metavar="E", help="of images (.jpeg,.jpg,.png)")
    add("--no-index", action="store_true", help="write no index; one that is there stays")
    add(
        "--skip-damaged",
        action="store_true",
        help="leave out images that cannot be decoded (and exit with 1)",
    )
    parser.set_defaults(run=run, action="pack")


def _quality(text: str) -> int:
    found = at_least(1)(text)
    if found > 100:
        raise argparse.ArgumentTypeError(f"{text}: JPEG's quality is 1 to 100")
    return found


def _extensions(text: str) -> tuple[str, ...]:
    words = tuple(word.strip().lower() for word in text.split(",") if word.strip())
    if not words:
        raise argparse.ArgumentTypeError("no extension is given; write .jpg,.png")
    return tuple(word if word.startswith(".") else f".{word}" for word in words)


# ---- actions


class _DamagedImageError(ValueError):
    """An image file that cannot be decoded."""


def run(options: argparse.Namespace) -> int:
    """Do what the options say, and return the status to exit with."""
    try:
        with _ended_by_sigterm():
            status: int = {"pack": _pack, "list": _list, "check": _check}[options.action](options)
            sys.stdout.flush()
    except BrokenPipeError:  # of `mpikv records list FILE | head`
        # Python writes what is left once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except _DamagedImageError as error:
        print(f"mpikv records: {error}; nothing was written (--skip-damaged leaves such images out)", file=sys.stderr)
        return DAMAGED
    except (OSError, ValueError, MpikvError) as error:
        print(f"mpikv records: {error}", file=sys.stderr)
        return BAD_INPUT
    return status


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as an error does, so that what is half-written is removed."""

    def end(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- pack


def _pack(options: argparse.Namespace) -> int:
    if options.quality and options.encoding == "png":
        raise ValueError("--quality is of JPEG, and --encoding png makes none")
    images, classes = _images(options)
    if options.shuffle:
        random.Random(options.seed).shuffle(images)
    for label, name in enumerate(classes):
        print(f"label {label}: {name}")
    damaged = 0
    with (
        RecordWriter(options.out, index=not options.no_index) as writer,
        Progress(f"pack {options.out}", len(images), "images") as progress,
    ):
        for done, image in enumerate(images, start=1):
            try:
                content = _content(image.path, options)
            except _DamagedImageError as error:
                if not options.skip_damaged:
                    raise
                damaged += 1
                progress.say(f"left out: {error}", error=True)
            else:
                labels: Any = image.labels[0] if len(image.labels) == 1 else np.array(image.labels, np.float32)
                writer.write(pack(ImageHeader(labels, image.number), content), key=image.number)
            progress.to(done)
        count = len(writer)
    index = "without an index" if options.no_index else f"index {index_path(options.out)}"
    print(f"{options.out}: {count} images, {os.path.getsize(options.out)} bytes, {index}")
    if damaged:
        print(f"{damaged} damaged images were left out")
    return DAMAGED if damaged else 0


def _images(options: argparse.Namespace) -> tuple[list[Listed], list[str]]:
    """Return the images, and the names of the classes where folders are classes."""
    if not os.path.isdir(options.source):
        if options.label_file is not None:
            raise ValueError(f"--label-file is for a folder; {options.source} is a list, which has labels")
        return read_list(options.source, options.root), []
    if options.root is not None:
        raise ValueError(f"--root is for a list; {options.source} is a folder")
    images, classes = read_folder(options.source, options.extensions)
    if options.label_file is None:
        return images, classes
    return with_labels(images, options.source, options.label_file), []


def _content(path: str, options: argparse.Namespace) -> bytes:
    """Return what goes into the record: the file's own bytes, or the changed image's."""
    with open_regular(path) as file:
        content = file.read()
    changed = options.resize or options.center_crop or options.grey or options.encoding or options.quality
    try:
        image = turned(content)
        if not changed:
            return content
        image = in_8_bits(image, color=not options.grey)
    except ValueError as error:
        raise _DamagedImageError(f"{path}: {error}") from error
    if options.center_crop:
        edge = min(image.size)
        left, top = ((length - edge) // 2 for length in image.size)
        image = image.crop((left, top, left + edge, top + edge))
    if options.resize:
        edge = min(image.size)
        width, height = (options.resize if length == edge else length * options.resize // edge for length in image.size)
        image = image.resize((width, height))
    out = io.BytesIO()
    if (options.encoding or "jpg") == "png":
        image.save(out, "png")
    else:
        image.save(out, "jpeg", quality=options.quality or _JPEG_QUALITY)
    return out.getvalue()


# ---- list, check


def _list(options: argparse.Namespace) -> int:
    index = _index(options)
    with RecordFile(options.file, damaged="skip") as records:
        keys = {} if index is None else dict(zip(index.offsets.tolist(), index.keys.tolist(), strict=True))
        print(f"{'record':>8} {'offset':>12} {'bytes':>10} {'key':>8}  content")
        for number, (offset, record) in enumerate(records.walk()):
            if number == options.first:
                break
            key = keys.get(offset, "-")
            print(f"{number:8} {offset:12} {len(record):10} {key:>8}  {_described(record)}")
        for damage in records.damages:
            print(damage, file=sys.stderr)
        return DAMAGED if records.skipped else 0


def _described(record: bytes) -> str:
    """Describe a record: an image by its size, labels and id, anything else by its first bytes."""
    try:
        header, content = unpack(record)
        width, height = image_size(content)
    except (ValueError, MpikvError):
        return record[:16].hex(" ") if record else "nothing"
    labels = ", ".join(f"{label:g}" for label in np.atleast_1d(header.label))
    return f"image {width} x {height}, label {labels}, id {header.id}"


def _check(options: argparse.Namespace) -> int:
    index = _index(options)
    problems, found, undecodable = 0, [], 0
    with RecordFile(options.file, damaged="skip") as records:
        size = os.path.getsize(options.file)
        with Progress(f"check {options.file}", size, "bytes") as progress:
            for offset, record in records.walk():
                found.append(offset)
                problem = _undecodable(record) if options.images else ""
                if problem:
                    undecodable += 1
                    progress.say(f"{options.file}: record at offset {offset}: {problem}")
                progress.to(offset)
            progress.to(size)
            for line in (*map(str, records.damages), *_against_index(options, index, found)):
                problems += 1
                progress.say(line)
    problems += undecodable
    known = "" if index is None else f", {len(index.keys)} in its index"
    end = f"{problems} problem{'s' * (problems > 1)}" if problems else "nothing is damaged"
    print(f"{options.file}: {len(found)} good records in {size} bytes{known}; {end}")
    return DAMAGED if problems else 0


def _undecodable(record: bytes) -> str:
    try:
        decode_image(unpack(record)[1])
    except ValueError as error:
        return str(error)
    return ""


def _against_index(options: argparse.Namespace, index: Index | None, found: list[int]) -> Iterator[str]:
    """Say which records are in the index and not in the file, and which in the file and not in the index."""
    if index is None:
        return
    name, good, listed = options.index or index_path(options.file), set(found), set(index.offsets.tolist())
    for key, offset in zip(index.keys.tolist(), index.offsets.tolist(), strict=True):
        if offset not in good:
            yield f"{name}: key {key} has offset {offset}, where no good record begins"
    for offset in found:
        if offset not in listed:
            yield f"{name}: the record at offset {offset} is not in it"


def _index(options: argparse.Namespace) -> Index | None:
    """Return the index that was named, or that lies beside the file."""
    if options.no_index:
        if options.index is not None:
            raise ValueError("--index and --no-index contradict each other")
        return None
    path = options.index or index_path(options.file)
    size = os.stat(options.file).st_size
    if options.index is None and not os.path.exists(path):
        return None
    return read_index(path, size)
