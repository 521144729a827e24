"""Sets of moments as sorted spans that do not touch: how long something lasted that several records say together."""

from __future__ import annotations

from collections.abc import Iterable

Spans = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return the moments that are in any of the spans."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > begin:
            found.append((begin, end))
    return found


def common(one: Spans, other: Spans) -> Spans:
    """Return the moments that are in both."""
    found, i, j = Spans(), 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def total(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
