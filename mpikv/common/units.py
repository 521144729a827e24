"""Numbers with units, as users write them: `10gbit`, `200mbit`, `20us`. ValueError has the end of a sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping

BITS_PER_S: Mapping[str, float] = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
SECONDS: Mapping[str, float] = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)")


def _quantity(text: str, units: Mapping[str, float], example: str) -> float:
    found = _NUMBER.fullmatch(text.strip().lower())
    if found is None or found[2] not in units:
        raise ValueError(f"is none of the form {example}")
    return float(found[1]) * units[found[2]]


def rate(text: str) -> float:
    """Read `10gbit`, `200mbit` (also with `/s`) as bytes per second.

    >>> from mpikv.common.units import rate
    >>> rate('200mbit')
    25000000.0
    """
    found = _quantity(text.removesuffix("/s"), BITS_PER_S, "10gbit or 200mbit") / 8
    if found <= 0:
        raise ValueError("is no rate: a link carries something")
    return found


def duration(text: str) -> float:
    """Read `20us`, `1.5ms` as seconds.

    >>> from mpikv.common.units import duration
    >>> duration('1.5ms')
    0.0015
    """
    return _quantity(text, SECONDS, "20us or 1.5ms")
