"""`tests/grids.py`: no value and no two values that a grid has together are lost."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import grids
import pytest


class Both(NamedTuple):
    """As the modes of the tests are."""

    name: str
    workers: int


CASES = [
    {"mode": Both(name, workers), "n": n, "dtype": dtype}
    for name, workers, n, dtype in itertools.product("ab", (1, 2, 3), (0, 5, 7), (float, int))
    if (name, n) != ("b", 7)  # not every two values meet
]


@pytest.mark.parametrize("strength", [1, 2])
def test_what_is_together_in_a_case_is_so_in_a_case_that_is_kept(strength: int) -> None:
    kept = grids.covering([grids.values(case) for case in CASES], strength)

    def together(cases):
        return {pair for case in cases for pair in itertools.combinations(sorted(grids.values(case)), strength)}

    assert together(CASES[i] for i in kept) == together(CASES)
    assert len(kept) <= {1: 4, 2: 13}[strength]  # of 30; 3 and 9 are the least possible


TESTS = """
import pytest

abc = [pytest.mark.parametrize(name, [1, 2]) for name in "abc"]

@abc[0]
@abc[1]
@abc[2]
@pytest.mark.grid
def test_pairs(a, b, c): pass

@abc[0]
@abc[1]
@abc[2]
@pytest.mark.grid(1)
def test_values(a, b, c): pass

@abc[0]
@abc[1]
@abc[2]
def test_all(a, b, c): pass

@pytest.mark.parametrize("a,b", [(1, 1), (1, 2), (2, 1)])
@abc[2]
def test_common_calls(a, b, c): pass

@abc[0]
def test_one(a): pass

@pytest.mark.thorough
def test_slow(): pass
"""


def test_the_others_are_full(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeconftest(
        "import grids\n"
        "def pytest_configure(config):\n"
        "    for name in ('grid', 'full', 'thorough'): config.addinivalue_line('markers', name)\n"
        "def pytest_collection_modifyitems(items):\n    grids.leave_to_thorough(items)\n    grids.thin(items)\n"
    )
    pytester.makepyfile(TESTS)
    for cases, made in (("thorough", 5 + 2 + 8 + 6 + 2 + 1), ("", 2 + 2 + 2 + 3 + 2)):
        monkeypatch.setenv(grids.VARIABLE, cases)
        pytester.runpytest("-m", "not full").assert_outcomes(passed=made, deselected=33 - made)
        pytester.runpytest("-m", "full").assert_outcomes(passed=33 - made, deselected=made)


def test_a_third_of_the_cases_of_whole_jobs(monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester) -> None:
    monkeypatch.setattr(grids, "WHOLE_JOBS", ("test_jobs.py",))
    pytester.makepyfile(
        test_jobs="import pytest\n"
        "@pytest.mark.parametrize('a', range(10))\ndef test_ten(a): pass\n"
        "@pytest.mark.parametrize('mpi', ['openmpi', 'mpich'])\ndef test_two(mpi): pass\n"
        "def test_one(): pass\n"
    )
    for cases, made in (("thorough", {"ten": 10, "two": 2, "one": 1}), ("", {"ten": 3, "two": 1, "one": 1})):
        monkeypatch.setenv(grids.VARIABLE, cases)
        items, _ = pytester.inline_genitems()
        grids.thin(items)
        left = [item.name for item in items if not item.get_closest_marker("full")]
        # Of ten cases three or four, by the name of the test.
        for name, n in made.items():
            assert n <= sum(one.startswith(f"test_{name}") for one in left) <= n + (n == 3)


def test_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    for cases, made in (("", [1, 34, 50]), ("full", [1, 100, 150])):
        monkeypatch.setenv(grids.VARIABLE, cases)
        assert [grids.examples(n) for n in (1, 100, 150)] == made
