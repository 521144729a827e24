"""Readers of `mpikv plan`'s numbers with units, for argparse, whose ArgumentTypeError says what to write instead."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping

BITS_PER_S: Mapping[str, float] = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
SECONDS: Mapping[str, float] = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)")
_SHARE = re.compile(r"(\d*)\s*w(?:\s*/\s*(\d+))?", re.IGNORECASE)
MOST = 16384  # workers


def _quantity(text: str, units: Mapping[str, float], example: str) -> float:
    found = _NUMBER.fullmatch(text.strip().lower())
    if found is None or found[2] not in units:
        raise ArgumentTypeError(f"{text!r} is none of the form {example}")
    return float(found[1]) * units[found[2]]


def rate(text: str) -> float:
    """Read `10gbit`, `200mbit` (also with `/s`) as bytes per second."""
    found = _quantity(text.removesuffix("/s"), BITS_PER_S, "10gbit or 200mbit") / 8
    if found <= 0:
        raise ArgumentTypeError(f"{text!r}: a link carries something")
    return found


def duration(text: str) -> float:
    """Read `20us`, `1.5ms` as seconds."""
    return _quantity(text, SECONDS, "20us or 1.5ms")


def milliseconds(text: str) -> float:
    """Read a number of milliseconds, from 0 on."""
    try:
        return 1e3 * duration(f"{text}ms")
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is no number of milliseconds from 0 on") from None


def counts(text: str) -> list[int]:
    """Read `8..1024` as 8, 16, 32, ... up to 1024, and `8,12,16` as these; both forms may be mixed."""
    found: list[int] = []
    for word in text.split(","):
        first, dots, last = word.strip().partition("..")
        if not first.isdigit() or (dots and not last.isdigit()) or int(first) < 1:
            raise ArgumentTypeError(f"{word!r} is none of the form 8, 8,16 or 8..1024 (doubling)")
        number, end = int(first), int(last or first)
        if end < number:
            raise ArgumentTypeError(f"{word!r} goes downwards")
        if end > MOST:
            raise ArgumentTypeError(f"{word!r} is more than {MOST}, which is the most that can be predicted in minutes")
        while number <= end:
            found.append(number)
            number *= 2
    return list(dict.fromkeys(found))


def server_counts(text: str) -> list[Callable[[int], int]]:
    """Read `0,W/2,W,2W,4`: for each word a function from the number of workers to that of servers, at least one."""
    return [_server_count(word.strip()) for word in text.split(",")]


def _server_count(word: str) -> Callable[[int], int]:
    if word.isdigit():
        number = int(word)
        return lambda workers: number
    found = _SHARE.fullmatch(word)
    if found is None or found[2] == "0" or found[1] == "0":
        raise ArgumentTypeError(f"{word!r} is no number of servers: write 0, 4, W, W/2 or 2W")
    times, divisor = int(found[1] or 1), int(found[2] or 1)
    return lambda workers: max(1, workers * times // divisor)
