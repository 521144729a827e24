"""64 bits that stand for something: ranks compare them in place of what it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

MASK = (1 << 64) - 1


def digest(*parts: object) -> int:
    """64 bits that differ for different parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def history_hash(digests: Iterable[int]) -> int:
    """The sum of keys' digests: the same in whatever order they are pushed."""
    return sum(digests) & MASK
