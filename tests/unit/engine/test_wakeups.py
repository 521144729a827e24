"""No order of two threads loses a wake-up: one ends a transfer, and the other takes up what waits for that end.

So it is in process groups: a caller moves its call on by itself, without the engine's lock. Another one begins the next
call, gives up polling for it, and gives it to the engine, which leaves it alone from then on until it is woken.

Every order of two changes between the threads, line by line; a thorough run has two more, which come soon after.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import grids
import pytest

from mpikv.engine import engine as engine_module
from mpikv.engine import running as running_module
from mpikv.engine.engine import Engine
from mpikv.engine.operation import Done, Steps
from mpikv.engine.running import Ended, Running

FILES = {running_module.__file__, engine_module.__file__}
MOST_LINES = 1000  # of one of the threads


class Turns:
    """Two threads of which one runs at any moment. lines: how many each runs until the other's turn, one by one."""

    def __init__(self, lines: tuple[int, ...]) -> None:
        self._lines = iter((*lines, MOST_LINES, MOST_LINES))
        self._turns = threading.Semaphore(0), threading.Semaphore(0)
        self._left, self._alive = next(self._lines), [True, True]
        self.n_lines = [0, 0]

    def _trace(self, me: int) -> Callable[..., Any]:
        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in FILES:
                return None
            if event == "line":
                self.n_lines[me] += 1
                while self._left == 0 and self._alive[1 - me]:
                    self._hand_over(me)
                self._left -= 1
            return trace

        return trace

    def _hand_over(self, me: int) -> None:
        self._left = next(self._lines)
        self._turns[1 - me].release()
        self._turns[me].acquire()

    def run(self, *bodies: Callable[[], None]) -> None:
        errors: list[BaseException] = []

        def thread(me: int) -> None:
            self._turns[me].acquire()
            sys.settrace(self._trace(me))
            try:
                bodies[me]()
            except BaseException as error:
                errors.append(error)
            finally:
                sys.settrace(None)
                self._alive[me] = False
                self._left = MOST_LINES
                self._turns[1 - me].release()

        threads = [threading.Thread(target=thread, args=(me,), daemon=True) for me in (0, 1)]
        for one in threads:
            one.start()
        self._turns[0].release()
        for one in threads:
            one.join(60)
        assert not errors, errors


def is_woken(lines: tuple[int, ...], *, polled: bool) -> tuple[bool, list[int]]:
    """Whether the engine ends the second transfer when the first one has ended; how many lines each thread ran.

    polled: the thread that begins it has moved it on by itself before.
    """

    def first() -> Steps[None]:
        yield Done()

    def second() -> Steps[None]:
        yield Ended(before)

    engine = Engine(threaded=False, on_fatal=lambda error: None)
    before, after = Running(first(), "before"), Running(second(), "after")

    def begins() -> None:
        if polled:
            after.advance()
        engine.take(after)
        engine.step()

    turns = Turns(lines)
    turns.run(begins, lambda: before.advance() and None)
    assert before.done
    engine.step()
    return after.done, turns.n_lines


def lost(*, polled: bool) -> list[tuple[int, ...]]:
    """The orders in which the second transfer is not woken."""
    begins, ends = is_woken((), polled=polled)[1]
    later = ((0, 1), (1, ends)) if grids.is_thorough() else ((1,), (1,))
    orders = itertools.product(range(begins + 1), range(ends + 1), *later)
    return [lines for lines in orders if not is_woken(lines, polled=polled)[0]]


@pytest.mark.parametrize("polled", [True, False])
def test_no_order_loses_a_wake_up(polled: bool) -> None:
    assert lost(polled=polled) == []
