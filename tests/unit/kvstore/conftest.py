"""Fixtures of several tests of stores: what workers tell each other, and patience."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from mpikv.hostmemory.common_calls import CommonCalls
from mpikv.session import waits
from mpikv.testing.stores import TEST_TIMEOUT_S


@pytest.fixture
def told() -> threading.Event:
    """By which one worker lets others go on, beside the store."""
    return threading.Event()


@pytest.fixture
def patient(monkeypatch) -> None:
    """Nobody withdraws from a call because another rank gets no processor for long."""
    monkeypatch.setattr("mpikv.strategies.direct.CommonCalls", partial(CommonCalls, wait_s=TEST_TIMEOUT_S))


@pytest.fixture
def silent(monkeypatch) -> None:
    """Nobody answers who reports a stall: some have ended, or wait for other things."""
    monkeypatch.setattr(waits, "ANSWER_S", 0.1)


@pytest.fixture
def answers(monkeypatch) -> None:
    """Who reports a stall waits for the answer of every worker, however long that takes."""
    monkeypatch.setattr(waits, "ANSWER_S", TEST_TIMEOUT_S)
