"""Sizes in bytes: reading `256M`, sweeping from one to another by a factor, and printing them short.

K, M and G are powers of 1024, as in nccl-tests.
"""

from __future__ import annotations

import re

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`4`, `64K`, `1.5MiB` as bytes. Raises ValueError for anything else, and for a size under one byte."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is no size in bytes; write 4, 64K, 256M or 1G")
    n_bytes = float(found[1]) * UNITS[found[2].upper()]
    if n_bytes < 1 or n_bytes != int(n_bytes):
        raise ValueError(f"{text!r} is no whole number of bytes, at least 1")
    return int(n_bytes)


def sweep(min_bytes: int, max_bytes: int, factor: int, itemsize_bytes: int) -> list[int]:
    """The sizes from `min_bytes` to `max_bytes`, each `factor` times the last, whole elements of `itemsize_bytes`.

    A size that is no multiple of the element is rounded up. Raises ValueError where nothing is left to measure.
    """
    if factor < 2:
        raise ValueError(f"the factor between sizes must be at least 2, not {factor}")
    if min_bytes > max_bytes:
        raise ValueError(f"the smallest size, {short(min_bytes)}, is larger than the largest, {short(max_bytes)}")
    sizes, n_bytes = [], min_bytes
    while n_bytes <= max_bytes:
        whole = -(-n_bytes // itemsize_bytes) * itemsize_bytes
        if whole not in sizes:
            sizes.append(whole)
        n_bytes *= factor
    return sizes


def short(n_bytes: int) -> str:
    """`4`, `64K`, `1M`: with a unit where it divides the number, else the number itself."""
    for unit in ("G", "M", "K"):
        if n_bytes >= UNITS[unit] and n_bytes % UNITS[unit] == 0:
            return f"{n_bytes // UNITS[unit]}{unit}"
    return str(n_bytes)
