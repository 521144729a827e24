"""Parts of what can be counted: part p of P of n things in their order.

Each part is one piece, and the first n % P parts are longer by one: the rule of `numpy.array_split`, and of
`SplitSampler` with 'uneven'. The parts are disjoint and together all; with fewer things than parts the last ones are
empty.
"""

from __future__ import annotations

from mpikv.common import checks


def check_part(num_parts: int, part_index: int) -> tuple[int, int]:
    """Return both as ints. TypeError for what is no whole number, ValueError unless 0 <= part_index < num_parts."""
    num_parts = checks.whole("num_parts", num_parts, 1)
    part_index = checks.whole("part_index", part_index)
    if part_index >= num_parts:
        raise ValueError(f"part_index must be in 0..{num_parts - 1}, as num_parts is {num_parts}; got {part_index}")
    return num_parts, part_index


def bounds(n: int, num_parts: int, part_index: int) -> tuple[int, int]:
    """Return the number of the part's first thing, and of the one behind its last."""
    whole, rest = divmod(n, num_parts)
    begin = whole * part_index + min(part_index, rest)
    return begin, begin + whole + (part_index < rest)
