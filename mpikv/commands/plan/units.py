"""Numbers with units, as they are written on a command line. Pure; ValueError says what was wrong and what to write."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

BITS_PER_S: Mapping[str, float] = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
SECONDS: Mapping[str, float] = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z/]*)")
MOST = 16384  # workers


def _quantity(text: str, units: Mapping[str, float], example: str) -> float:
    found = _NUMBER.fullmatch(text.strip().lower())
    unit = "" if found is None else found[2]
    if found is None or unit not in units:
        raise ValueError(f"{text!r} is none of the form {example}")
    return float(found[1]) * units[unit]


def rate(text: str) -> float:
    """Read `10gbit`, `200mbit` (also with `/s`) as bytes per second."""
    bits = {**BITS_PER_S, **{f"{unit}/s": factor for unit, factor in BITS_PER_S.items()}}
    found = _quantity(text, bits, "10gbit or 200mbit") / 8
    if found <= 0:
        raise ValueError(f"{text!r}: a link carries something")
    return found


def duration(text: str) -> float:
    """Read `20us`, `1.5ms` as seconds."""
    return _quantity(text, SECONDS, "20us or 1.5ms")


def counts(text: str) -> list[int]:
    """Read `8..1024` as 8, 16, 32, ... up to 1024, and `8,12,16` as these; both forms may be mixed."""
    found: list[int] = []
    for word in text.split(","):
        first, dots, last = word.strip().partition("..")
        if not first.isdigit() or (dots and not last.isdigit()) or int(first) < 1:
            raise ValueError(f"{word!r} is none of the form 8, 8,16 or 8..1024 (doubling)")
        number, end = int(first), int(last or first)
        if end < number:
            raise ValueError(f"{word!r} goes downwards")
        if end > MOST:
            raise ValueError(f"{word!r} is more than {MOST}, which is the most that can be predicted in minutes")
        while number <= end:
            found.append(number)
            number *= 2
    return list(dict.fromkeys(found))


_SHARE = re.compile(r"(\d*)\s*w(?:\s*/\s*(\d+))?", re.IGNORECASE)


def server_counts(text: str) -> list[Callable[[int], int]]:
    """Read `0,W/2,W,2W,4`: for each word a function from the number of workers to that of servers, at least one."""
    return [_server_count(word.strip()) for word in text.split(",")]


def _server_count(word: str) -> Callable[[int], int]:
    if word.isdigit():
        number = int(word)
        return lambda workers: number
    found = _SHARE.fullmatch(word)
    if found is None or found[2] == "0" or found[1] == "0":
        raise ValueError(f"{word!r} is no number of servers: write 0, 4, W, W/2 or 2W")
    times, parts = int(found[1] or 1), int(found[2] or 1)
    return lambda workers: max(1, workers * times // parts)
