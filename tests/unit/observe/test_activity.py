"""What a worker tells of itself to those who wait for it."""

from __future__ import annotations

import contextlib
import re

from mpikv.observe.activity import Activity


def two_stores() -> tuple[Activity, Activity]:
    asked, other = Activity(), Activity()
    asked.others = lambda: [other]
    return asked, other


def test_inside_and_outside_of_calls() -> None:
    asked, _ = two_stores()
    assert re.fullmatch(r"outside the store for 0\.\d s, its last call was kv\.create", asked.text())
    with asked.during("pull of key 'w'"):
        assert re.fullmatch(r"in pull of key 'w' for 0\.\d s", asked.text())
    assert asked.text().endswith("its last call was pull of key 'w'")
    asked.note("push of key 'w'")
    assert asked.text().endswith("its last call was push of key 'w'")


def test_a_call_of_another_store_that_is_waited_in_or_has_failed() -> None:
    asked, other = two_stores()
    with contextlib.suppress(ValueError), other.during("close"):
        assert re.fullmatch(r"in close of another store for 0\.\d s", asked.text())
        raise ValueError
    assert re.fullmatch(r"its close of another store failed 0\.\d s ago", asked.text())
    with asked.during("barrier"):
        assert asked.text().startswith("in barrier")
    with other.during("barrier"):
        pass
    assert asked.text().startswith("outside the store")
