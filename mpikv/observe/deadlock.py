"""Ranks that wait for each other in a circle, so that none of them can ever go on.

A fact is that one wait cannot end before another one has: the rank that is in the second has not come to what the first
one needs, and comes to nothing while it waits. A fact stays true whenever it was found out, for as long as the two
waits last. So a circle of facts is a deadlock, though they come from different moments and different stores: each wait
in it cannot end before the next one.

This is the condition of Chandy, Misra and Haas, "Distributed deadlock detection" (1983), for a rank that needs all that
it waits for. An `init` needs more care: where all who have not come to it are in an `init` of the same store
themselves, or come to one, they are released (session/agreement.py). So such a wait is said to come after those waits
alone that are none of these, and had begun before all of those in between were seen. Pure: no clock, no MPI.
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpikv.observe.stall import INIT


class WaitFact(NamedTuple):
    """`wait` cannot end before `other` has. Both are ids; the text says who waits, in which call and where."""

    wait: str
    other: str
    text: str


class Blocked(NamedTuple):
    """A wait that a rank is in. id: of all waits of the job. needs: what each other worker must come to, by store: an
    item, and how much of it (`Need`). free: the rank may go on all the same: this wait ends now, or at a limit of its
    own, or another thread makes calls.
    """

    id: str
    text: str
    needs: Sequence[tuple[str, tuple[Any, int]]]
    free: bool = False


def compare(
    waits: Mapping[int, Blocked],
    workers: Iterable[int],
    reached: Callable[[int, str, Any], int],
    seen: Container[str] = (),
) -> tuple[list[WaitFact], list[int]]:
    """Return the facts of these waits, by worker, and which workers have not come to what somebody waits for.

    reached(worker, store, item): how far a worker had come, while it was in the wait that `waits` has of it; -1 where
    nobody knows. seen: ids of waits that were seen before all of `waits`.
    """
    late_of: dict[int, dict[int, None]] = {}  # for each wait
    late_for: dict[tuple[str, str, int], dict[int, None]] = {}  # most workers wait for the same
    for waiter, blocked in waits.items():
        late = late_of[waiter] = {}
        for store, (item, n) in blocked.needs:
            need = store, str(item), n
            if need not in late_for:
                late_for[need] = {worker: None for worker in workers if 0 <= reached(worker, store, item) < n}
            late |= late_for[need]
    facts: list[WaitFact] = []
    for waiter, blocked in waits.items():
        others, init_in = dict(late_of[waiter]), _init_in(blocked)
        todo = [*others] if init_in else []
        while todo:
            worker = todo.pop()
            if worker in waits and _init_in(waits[worker]) == init_in:
                todo += late_of[worker].keys() - others.keys()
                others |= late_of[worker]
        for other in (waits[worker] for worker in others if worker in waits):
            ends_before = not init_in or (_init_in(other) != init_in and other.id in seen)
            if ends_before and not (blocked.free or other.free):
                facts.append(WaitFact(blocked.id, other.id, blocked.text))
    return facts, [*dict.fromkeys(itertools.chain(*late_of.values()))]


def _init_in(blocked: Blocked) -> str | None:
    return next(
        (store for store, (item, _) in blocked.needs if isinstance(item, (list, tuple)) and item[0] == INIT), None
    )


def circle(facts: Iterable[WaitFact]) -> list[WaitFact]:
    """Return facts of which each begins with the wait that the one before ends with; [] where there is no circle."""
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
    waits = " waits for ".join(fact.text for fact in facts)
    return f"Deadlock: {waits} waits for {facts[0].text}; none of them can go on."
