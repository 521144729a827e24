"""Which cases of parametrised tests, and how many of Hypothesis's examples, a run makes; `scripts/test --full` all.

Every run makes so many cases that each value of each parameter is in one of them, and of a test that starts whole jobs
one. --thorough makes all of a test that has not more than MANY, and of one that starts whole jobs each value. The
others get the mark `full`, as do tests with the mark `thorough` in a run without that option. Parameters of one
decorator go together.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import pytest

THOROUGH = "thorough"
CLUSTER_FULL = "cluster_full"  # the mark of a test on clusters that --cluster alone makes: all of them
MANY = 24
WHOLE_JOBS = ("tests/mpirun/", "tests/gpu/test_gpu_jobs.py")
VARIABLE = "MPIKV_TEST_CASES"  # "thorough" or "full", as the options of scripts/test
PART_VARIABLE = "MPIKV_TEST_PART"  # K/N: every N-th of the tests that were chosen, from the K-th on


def is_full() -> bool:
    """Whether all cases and examples are to be made."""
    return os.environ.get(VARIABLE) == "full"


def is_thorough() -> bool:
    """Whether more than every run makes is to be made."""
    return os.environ.get(VARIABLE) in (THOROUGH, "full")


def examples(n: int) -> int:
    """How many examples of `n` this run makes."""
    return n if is_full() else -(-n // 3)


def part(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of the part that is asked for. Neighbours take about as long as each other, so all parts do."""
    k, n = map(int, (os.environ.get(PART_VARIABLE) or "1/1").split("/"))
    return list(items[k - 1 :: n])


def thin(items: Sequence[pytest.Item]) -> None:
    """Give the mark `full` to what this run does not need."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker(THOROUGH) and not is_thorough():
            item.add_marker("full")
        elif hasattr(item, "callspec") and not any(item.get_closest_marker(one) for one in ("full", CLUSTER_FULL)):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        of_jobs = name.startswith(WHOLE_JOBS)
        if is_full() or (is_thorough() and len(cases) <= MANY and not of_jobs):
            continue
        kept = covering([given(case) for case in cases])
        if of_jobs and not is_thorough():
            kept = [one_of(name, kept, cases)]
        for i in set(range(len(cases))) - set(kept):
            cases[i].add_marker("full")


def one_of(name: str, kept: Sequence[int], cases: Sequence[pytest.Function]) -> int:
    """Which of these cases every run makes: always the same, of two tests in three one with MPICH, where there is one.

    It starts a job in a third of the time that Open MPI needs.
    """
    number = zlib.crc32(name.encode())
    of_mpich = [i for i in kept if "mpich" in map(str, cases[i].callspec.params.values())]
    some = of_mpich if number % 3 else [i for i in kept if i not in of_mpich]
    some = some or list(kept)
    return some[number // 3 % len(some)]


def covering(cases: Sequence[set[tuple[str, str]]]) -> list[int]:
    """Which cases have each value: always the same, again and again the first of those that bring the most new ones."""
    missing, kept = set().union(*cases), []
    while missing:
        kept.append(max(range(len(cases)), key=lambda i: len(cases[i] & missing)))
        missing -= cases[kept[-1]]
    return kept


def given(case: pytest.Function) -> set[tuple[str, str]]:
    """What each decorator, or fixture with parameters, gives to the test; all cases have the same objects."""
    parameters = {name: str(id(value)) for name, value in case.callspec.params.items()}
    marks = [mark.args[0] for mark in case.iter_markers("parametrize")]
    together = [one.replace(" ", "").split(",") if isinstance(one, str) else one for one in marks]
    found = {",".join(names): str([parameters.pop(name, "") for name in names]) for names in together}
    return {*found.items(), *parameters.items()}
