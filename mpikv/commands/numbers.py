"""Numbers and words on the command line: readers for argparse, whose ArgumentTypeError says what is wrong."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from mpikv.common.checks import LONGEST_S

BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}  # as in nccl-tests
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def at_least(minimum: int, most: int | None = None) -> Callable[[str], int]:
    """Make a reader of whole numbers from `minimum` on, up to `most`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number} is less than {minimum}")
        if most is not None and number > most:
            raise argparse.ArgumentTypeError(f"{number} is more than {most}")
        return number

    return parse


def seconds(text: str) -> float:
    """Read a number of seconds, more than 0 and at most `LONGEST_S`."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, at most {LONGEST_S:g}")
    return number


def size(text: str) -> int:
    """Read `4`, `64K`, `1.5MiB` as bytes, at least one."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size in bytes; write 4, 64K, 256M or 1G")
    n_bytes = float(found[1]) * BYTES[found[2].upper()]
    if n_bytes < 1 or n_bytes != int(n_bytes):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of bytes, at least 1")
    return int(n_bytes)


def keys(text: str) -> tuple[int, int]:
    """Read `1000` or `1000x4K` as a number of keys and the bytes of each, 1 KiB by default."""
    number, _, n_bytes = text.partition("x")
    return at_least(1)(number), size(n_bytes or "1K")


def short(n_bytes: int) -> str:
    """`4`, `64K`, `1M`: with a unit where it divides the number, else the number itself."""
    for unit in ("G", "M", "K"):
        if n_bytes >= BYTES[unit] and n_bytes % BYTES[unit] == 0:
            return f"{n_bytes // BYTES[unit]}{unit}"
    return str(n_bytes)


def words(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """Some of these words, with commas, each once; `all` for all of them."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
        if found == ("all",):
            return known
        unknown = [word for word in found if word not in known]
        if unknown or not found:
            wrong = repr(unknown[0]) if unknown else "nothing"
            raise argparse.ArgumentTypeError(f"{wrong} is none of {', '.join(known)}; write some with commas, or all")
        return found

    return parse
