"""What a worker says of itself to those who wait for it."""

from __future__ import annotations

import contextlib

from mpikv.common.clock import VirtualClock
from mpikv.observe.activity import Activity


def test_calls_of_a_store_and_of_another_one() -> None:
    clock = VirtualClock()
    asked, other = Activity(clock), Activity(clock)
    asked.others = lambda: [other]
    clock.advance(5.0, lookers=0)
    assert asked.text() == "outside the store for 5.0 s, its last call was kv.create"
    with asked.during("pull of key 'w'"):
        assert asked.text() == asked.waiting() == "in pull of key 'w' for 0.0 s"
    assert asked.waiting() is None
    assert asked.text().endswith("its last call was pull of key 'w'")
    asked.note("push of key 'w'")
    assert asked.text().endswith("its last call was push of key 'w'")

    with contextlib.suppress(ValueError), other.during("close"):
        clock.advance(2.0, lookers=0)
        assert asked.text() == "in close of another store for 2.0 s"
        raise ValueError
    clock.advance(1.0, lookers=0)
    assert asked.text() == "its close of another store failed 1.0 s ago"
    with asked.during("barrier"):
        assert asked.text().startswith("in barrier")
    with other.during("barrier"):
        pass
    assert asked.text().startswith("outside the store for 0.0 s")
