"""Ranks that wait for each other in a circle, so that none of them can ever go on.

A fact is that one wait cannot end before another one has: the rank that is in the second has not come to what the first
one needs, and comes to nothing while it waits. A fact stays true whenever it was found out, for as long as the two
waits last. So a circle of facts is a deadlock, though they come from different moments and different stores: each wait
in it cannot end before the next one.

This is the condition of Chandy, Misra and Haas, "Distributed deadlock detection" (1983), for a rank that needs all that
it waits for. Pure: no clock, no MPI.
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class WaitFact(NamedTuple):
    """`wait` cannot end before `other` has. Both are ids; the texts say who waits, in which call and where."""

    wait: str
    other: str
    text: str
    other_text: str


class Blocked(NamedTuple):
    """A wait that a rank is in. id: of all waits of the job. needs: what each other worker must come to, by store: an
    item, and how much of it (`Need`). free: the rank may go on all the same, after a limit of this wait's own or in
    another thread.
    """

    id: str
    text: str
    needs: Sequence[tuple[str, tuple[Any, int]]]
    free: bool = False


def compare(
    waits: Mapping[int, Blocked], workers: Iterable[int], reached: Callable[[int, str, Any], int]
) -> tuple[list[WaitFact], list[int]]:
    """Return the facts of these waits, by worker, and which workers have not come to what somebody waits for.

    reached(worker, store, item): how far a worker had come, while it was in the wait that `waits` has of it; -1 where
    nobody knows.
    """
    facts: list[WaitFact] = []
    missing: dict[int, None] = {}
    late_for: dict[tuple[str, str, int], dict[int, None]] = {}  # most workers wait for the same
    for blocked in waits.values():
        late: dict[int, None] = {}
        for store, (item, n) in blocked.needs:
            need = store, str(item), n
            if need not in late_for:
                late_for[need] = {worker: None for worker in workers if 0 <= reached(worker, store, item) < n}
            late |= late_for[need]
        others = [waits[worker] for worker in late if worker in waits and not (blocked.free or waits[worker].free)]
        facts += [WaitFact(blocked.id, other.id, blocked.text, other.text) for other in others]
        missing |= late
    return facts, [*missing]


def circle(facts: Iterable[WaitFact]) -> list[WaitFact]:
    """Return facts of which each begins with the wait that the one before ends with; [] where there is no circle.

    >>> from mpikv.observe.deadlock import WaitFact, circle
    >>> one, back = WaitFact('a', 'b', 'A', 'B'), WaitFact('b', 'a', 'B', 'A')
    >>> circle([one])
    []
    >>> [fact.wait for fact in circle([one, WaitFact('c', 'a', 'C', 'A'), back])]
    ['a', 'b']
    """
    by_ends = {(fact.wait, fact.other): fact for fact in facts}
    order = graphlib.TopologicalSorter[str]()
    for wait, other in by_ends:
        order.add(other, wait)
    try:
        order.prepare()
    except graphlib.CycleError as error:
        waits = error.args[1]  # the first is the last one, too
        return [by_ends[ends] for ends in itertools.pairwise(waits)]
    return []


def hopeless(facts: Iterable[WaitFact], found: Iterable[WaitFact]) -> set[str]:
    """Return the waits of a circle that was found, and those that cannot end before them."""
    waits = {fact.wait for fact in found}
    before: dict[str, set[str]] = {}
    for fact in facts:
        before.setdefault(fact.other, set()).add(fact.wait)
    todo = [*waits]
    while todo:
        new = before.get(todo.pop(), set()) - waits
        waits |= new
        todo += new
    return waits


def deadlocks(facts: Iterable[WaitFact]) -> Iterator[tuple[list[WaitFact], set[str]]]:
    """Find circle after circle, each with the waits that cannot end because of it; no wait is in two of these sets."""
    left = [*facts]
    while found := circle(left):
        waits = hopeless(left, found)
        yield found, waits
        left = [fact for fact in left if fact.wait not in waits]


def circle_text(facts: list[WaitFact]) -> str:
    """Return a circle as a sentence."""
    waits = " waits for ".join(fact.text for fact in facts)
    return f"Deadlock: {waits} waits for {facts[0].text}; none of them can go on."
