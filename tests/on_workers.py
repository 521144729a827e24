"""Tests that are written as what one worker does: `store` is its store, and what it asserts every worker asserts.

    @on(*FEW)
    def test_a_sum(store, W):
        store.init("w", np.zeros(4))
        store.push("w", np.ones(4))
        assert store.pull("w").tolist() == [W] * 4

W is the number of workers. Other parameters are the test's own: fixtures, what other decorators bring, and `mode`. What
workers share or tell each other needs a test that has a function inside, and calls `mode.run(body)`.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from store_modes import Mode, mode_id

Test = Callable[..., Any]


def full(value: Any, n: Any = 4, dtype: Any = np.float32) -> np.ndarray:
    """The array that most of these tests push."""
    return np.full(n, value, dtype)


def uniform(array: Any) -> Any:
    """The one value that all elements have, whoever owns them."""
    (value,) = np.unique(array).tolist()
    return value


def until(condition: Callable[[], Any]) -> None:
    """Wait until another thread has made it true."""
    limit_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.005)


@contextmanager
def limit(store: Any, limit_s: float = 0.2) -> Iterator[None]:
    """Let this worker's waits end after so long within the block, which waits in vain; others may take any time."""
    waits = store.session.waits
    usual_s, waits.timeout_s = waits.timeout_s, limit_s
    try:
        yield
    finally:
        waits.timeout_s = usual_s


def counted(store: Any, call: Callable[[], Any], *names: str) -> list[int]:
    """How much a call that all workers make at one time adds to these counts of `store.stats()`."""
    store.barrier()
    before = store.stats()
    call()
    after = store.stats()
    store.barrier()
    return [after.get(name, 0) - before.get(name, 0) for name in names]


def taken_of(body: Test, run: Callable[..., None], *more: str, brings: Sequence[str] = ()) -> Test:
    """A test that calls `run(worker, given)`. given: what pytest gives. worker(store, **others): `body` with that.

    The first parameter of `body` is the store, or what else `run` gives to the worker. more: what `run` needs of pytest
    besides the parameters of `body`. brings: those that it gives to the worker itself.
    """
    wanted = [name for name in list(inspect.signature(body).parameters)[1:] if name not in brings]

    @functools.wraps(body)
    def test(**given: Any) -> None:
        run(lambda store, **others: body(store, **{name: given[name] for name in wanted}, **others), given)

    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in dict.fromkeys([*wanted, *more])]
    test.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return test


def on(*modes: Mode, **options: Any) -> Callable[[Test], Test]:
    """Make a test in each of these modes: of a function of `store` what each worker does, else one that has `mode`.

    options: of `Mode.run`.
    """

    def decorate(body: Test) -> Test:
        parameters = inspect.signature(body).parameters
        made = body
        if "store" in parameters:
            assert not inspect.isgeneratorfunction(body), "nobody takes what it yields"

            def run(worker: Test, given: dict[str, Any]) -> None:
                mode = given["mode"]
                more = {"W": mode.workers} if "W" in parameters else {}
                assert len(mode.run(lambda store: worker(store, **more), **options)) == mode.workers

            made = taken_of(body, run, "mode", brings=["W"])
        return pytest.mark.parametrize("mode", modes, ids=mode_id)(made)

    return decorate
