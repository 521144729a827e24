"""How many values the codecs send that send a share of them."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from mpikv.common.checks import number


def ratio(what: str, value: object) -> float:
    """Check a share: more than 0, at most 1. Raises ValueError or TypeError."""
    found = number(what, value)
    if not 0 < found <= 1:
        raise ValueError(f"{what} must be more than 0 and at most 1, not {found:g}")
    return found


@lru_cache(maxsize=1024)
def count(share: float, n_elems: int) -> int:
    """Return max(1, ceil(share n)), 0 where n is; `share` counts as the decimal number that a user has written.

    7 % of 100 values are 7: in floating point 0.07 * 100 is more than that.
    """
    sent = Fraction(repr(share)) * n_elems
    return min(n_elems, max(1, -(-sent.numerator // sent.denominator)))
