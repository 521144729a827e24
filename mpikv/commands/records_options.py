"""The options of `mpikv records`."""

from __future__ import annotations

import argparse
from typing import Any

from mpikv.commands.numbers import at_least
from mpikv.data.image_lists import EXTENSIONS

EXAMPLES = """examples:
  mpikv records pack photos train.rec                       a folder for each class; writes train.idx, too
  mpikv records pack photos train.rec --resize 256 --quality 90 --shuffle
  mpikv records pack train.lst train.rec --root photos      a list as MXNet's im2rec makes it
  mpikv records list train.rec -n 20
  mpikv records check train.rec --images

exit status: 0; 1 where something is damaged, which is told with its offset; 2 for wrong options or files that cannot be
read."""


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
        parser.set_defaults(run=_run, action=action)


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
    parser.set_defaults(run=_run, action="pack")


def _run(options: argparse.Namespace) -> int:
    from mpikv.commands.records_command import run  # noqa: PLC0415 - needed for this command alone

    return run(options)


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
