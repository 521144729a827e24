"""Calls that a thread makes one after another."""

from __future__ import annotations

import threading

import pytest

from mpikv.groups.workers import CallsInTurn


def test_calls_are_made_in_order_and_do_not_block() -> None:
    calls, may_end, order = CallsInTurn(threaded=True), threading.Event(), list[int]()

    def first() -> str:
        assert may_end.wait(20)
        calls.wait()  # within a call there is nothing to wait for
        order.append(1)
        return "one"

    one = calls.begin(first, "name")
    two = calls.begin(lambda: order.append(2))
    with pytest.raises(ValueError, match="'name' is under way"):
        calls.begin(lambda: None, "name")
    assert not one.done()
    may_end.set()
    calls.wait()
    assert (one.result(), order) == ("one", [1, 2])
    assert two.done()
    again = calls.begin(lambda: 1 // 0, "name")  # the thread has ended, and the name is free
    with pytest.raises(ZeroDivisionError):
        again.result()


def test_a_name_is_free_as_soon_as_the_result_is_there() -> None:
    calls = CallsInTurn(threaded=True)
    assert [calls.begin(lambda i=i: i, "name").result() for i in range(200)] == list(range(200))


def test_without_threads_the_caller_makes_the_call() -> None:
    calls = CallsInTurn(threaded=False)
    assert calls.begin(threading.get_ident, "name").result() == threading.get_ident()
    assert isinstance(calls.begin(lambda: 1 // 0, "name").exception(), ZeroDivisionError)
