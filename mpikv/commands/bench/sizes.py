"""Sizes in bytes: sweeping from one to another by a factor, and printing them short."""

from __future__ import annotations

from mpikv.commands.numbers import BYTES


def sweep(min_bytes: int, max_bytes: int, factor: int, itemsize_bytes: int) -> list[int]:
    """The sizes from `min_bytes` to `max_bytes`, each `factor` (2 or more) times the last.

    A size that is no multiple of `itemsize_bytes` is rounded up. Raises ValueError where nothing is left to measure.
    """
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
        if n_bytes >= BYTES[unit] and n_bytes % BYTES[unit] == 0:
            return f"{n_bytes // BYTES[unit]}{unit}"
    return str(n_bytes)
