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
    kept = grids.covering(CASES, strength)

    def together(cases):
        return {pair for case in cases for pair in itertools.combinations(sorted(grids.values(case)), strength)}

    assert together(CASES[i] for i in kept) == together(CASES)
    assert len(kept) <= {1: 4, 2: 13}[strength]  # of 30; 3 and 9 are the least possible
    assert kept == grids.covering(CASES, strength)


def test_the_others_are_full(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeconftest(
        "import grids\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'grid')\n"
        "    config.addinivalue_line('markers', 'full')\n"
        "def pytest_collection_modifyitems(items): grids.thin(items)\n"
    )
    pytester.makepyfile(
        "import pytest\n"
        "abc = [pytest.mark.parametrize(name, [1, 2]) for name in 'abc']\n"
        "@abc[0]\n@abc[1]\n@abc[2]\n@pytest.mark.grid\ndef test_pairs(a, b, c): pass\n"
        "@abc[0]\n@abc[1]\n@abc[2]\n@pytest.mark.grid(1)\ndef test_values(a, b, c): pass\n"
        "@abc[0]\n@abc[1]\n@abc[2]\ndef test_all(a, b, c): pass\n"
    )
    for cases, made in (("pairs", 5 + 2 + 8), ("", 2 + 2 + 8)):
        monkeypatch.setenv(grids.VARIABLE, cases)
        pytester.runpytest("-m", "not full").assert_outcomes(passed=made, deselected=24 - made)
        pytester.runpytest("-m", "full").assert_outcomes(passed=24 - made, deselected=made)


def test_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    for cases, made in (("", [1, 34, 50]), ("full", [1, 100, 150])):
        monkeypatch.setenv(grids.VARIABLE, cases)
        assert [grids.examples(n) for n in (1, 100, 150)] == made
