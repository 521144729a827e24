"""Readers of `mpikv plan`'s numbers with units, for argparse, whose ArgumentTypeError says what to write instead."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable

from mpikv.common import units
from mpikv.config import Config
from mpikv.errors import ConfigError

_SHARE = re.compile(r"(\d*)\s*w(?:\s*/\s*(\d+))?", re.IGNORECASE)
MOST = 16384  # workers


def _read(reader: Callable[[str], float], text: str) -> float:
    try:
        return reader(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} {error}") from None


def rate(text: str) -> float:
    """Read `10gbit`, `200mbit` (also with `/s`) as bytes per second."""
    return _read(units.rate, text)


def share(text: str) -> float | str:
    """Read `MPIKV_SERVERS_TAKE`."""
    try:
        found: float | str = Config(servers_take=text).servers_take
    except ConfigError as error:
        raise ArgumentTypeError(str(error).partition(": ")[2]) from None
    return found


def duration(text: str) -> float:
    """Read `20us`, `1.5ms` as seconds."""
    return _read(units.duration, text)


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
