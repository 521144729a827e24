"""What every run makes of a grid of parameters, and of Hypothesis's examples; `scripts/test --full` makes all.

Of a test with several parameters `scripts/test` makes so many cases that each value of each is in one of them; with
--thorough all, but where the test has the mark `grid`: then so many that each two values meet, or, with `grid(1)`, each
value once. What goes wrong does so with one value, or with two that meet. The other cases get the mark `full`, and
`scripts/test --full` makes them, too. Parameters of one decorator go together; with the mark `grid` the fields of a
parameter that is a named tuple count as parameters of their own.

Of those cases of a test that starts whole jobs every run makes a third, at least one, and --thorough all. A test with
the mark `thorough` is made with that option and --full alone.

Of the examples of a property every run makes a third.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

GRID = "grid"
THOROUGH = "thorough"
WHOLE_JOBS = ("tests/mpirun/", "tests/gpu/test_gpu_jobs.py")
VARIABLE = "MPIKV_TEST_CASES"  # "thorough" or "full", as the options of scripts/test
PART_VARIABLE = "MPIKV_TEST_PART"  # K/N: every N-th of the tests that were chosen, from the K-th on


def examples(n: int) -> int:
    """How many examples of `n` this run makes."""
    return n if is_full() else -(-n // 3)


def is_full() -> bool:
    """Whether all cases and examples are to be made."""
    return os.environ.get(VARIABLE) == "full"


def is_thorough() -> bool:
    """Whether more than every run makes is to be made."""
    return os.environ.get(VARIABLE) in (THOROUGH, "full")


def part(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of the part that is asked for. Neighbours take about as long as each other, so all parts do."""
    k, n = map(int, (os.environ.get(PART_VARIABLE) or "1/1").split("/"))
    return list(items[k - 1 :: n])


def thin(items: Sequence[pytest.Item]) -> None:
    """Give the mark `full` to the cases that this run does not need."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("full"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        grid = cases[0].get_closest_marker(GRID)
        if grid:
            brings, strength = [values(case.callspec.params) for case in cases], (*grid.args, 2)[0]
        else:
            brings, strength = [decorators(case) for case in cases], 1
        if grid or not is_thorough():
            kept = covering(brings, strength if is_thorough() else 1)
            if not is_thorough() and cases[0].nodeid.startswith(WHOLE_JOBS):
                kept = set(sorted(kept)[zlib.crc32(name.encode()) % min(3, len(kept)) :: 3])
            for i, case in enumerate(cases):
                if i not in kept:
                    case.add_marker("full")


def leave_to_thorough(items: Sequence[pytest.Item]) -> None:
    """Give the mark `full` to what is made with --thorough alone, where that is not given."""
    for item in () if is_thorough() else items:
        if item.get_closest_marker(THOROUGH):
            item.add_marker("full")


def share_out(items: Sequence[pytest.Item]) -> None:
    """Give the mark `full` to cases on device memory, so that every run makes each test on two paths of it or three.

    On the first one that the test names, on those of one process, and on one of the others, by the test's name.
    """
    tests: dict[str, dict[str, list[pytest.Function]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker(GRID):
            several = [one for one in item.callspec.params.values() if getattr(one, "workers", 1) > 1]
            on_device = [one for one in several if getattr(one, "device", "")]
            if on_device:
                paths = tests.setdefault(item.nodeid.partition("[")[0], {})
                paths.setdefault(repr(on_device[0]), []).append(item)
    for name, paths in tests.items():
        others = list(paths.values())[1:]
        kept = zlib.crc32(name.encode()) % len(others) if others else 0
        for case in (case for i, cases in enumerate(others) if i != kept for case in cases):
            case.add_marker("full")


def covering(cases: Sequence[set[tuple[str, str]]], strength: int) -> set[int]:
    """Which cases to make: each value (strength 1) or each two (2) that are together in a case are so in one of these.

    Always the same ones: again and again the first of those that bring the most that is new.
    """
    brings = [set(itertools.combinations_with_replacement(sorted(case), strength)) for case in cases]
    missing, kept = set().union(*brings), set()
    while missing:
        best = max(range(len(brings)), key=lambda i: len(brings[i] & missing))
        kept.add(best)
        missing -= brings[best]
    return kept


def decorators(case: pytest.Function) -> set[tuple[str, str]]:
    """What each decorator, or fixture with parameters, gives to the test; all cases have the same objects."""
    parameters = {name: id(value) for name, value in case.callspec.params.items()}
    marks = [mark.args[0] for mark in case.iter_markers("parametrize")]
    together = [one.replace(" ", "").split(",") if isinstance(one, str) else one for one in marks]
    given = {",".join(names): str([parameters.pop(name, None) for name in names]) for names in together}
    return {*given.items(), *((name, str(value)) for name, value in parameters.items())}


def values(parameters: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The name and the value of each parameter."""
    found: set[tuple[str, str]] = set()
    for name, value in parameters.items():
        if hasattr(value, "_asdict"):
            found |= {(f"{name}.{field}", text) for field, text in values(value._asdict())}
        else:
            found.add((name, repr(value)))
    return found
