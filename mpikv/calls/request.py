"""A call that is under way: what calls of the `_async` kind return, and which arrays belong to it until it is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from mpikv.arrays import tensors
from mpikv.calls.forms import Values, finished
from mpikv.common import checks
from mpikv.session.base import Pending, Session
from mpikv.session.given import GivenErrors


class Request:
    """A call of the `_async` kind that is under way. The arrays of the call must not be touched until it is done.

    >>> store = kv.create('local')
    >>> store.init('w', np.zeros(2))
    >>> request = store.pushpull_async('w', np.ones(2, 'float64'), out=(out := np.empty(2)))
    >>> request.wait()
    >>> request.test(), out.tolist()
    (True, [1.0, 1.0])
    """

    # The arrays that a `pushpull` brings results to, by their addresses, held until all of them are there: of a list
    # of keys some are done before others, and the memory of an array that is gone would soon be another array's.
    held: Mapping[int, Any] = MappingProxyType({})

    def __init__(self, session: Session, pending: list[Pending], form: Any = None) -> None:
        self._session = session
        self.pending = pending
        self._form = form
        self._result: Any = None

    def test(self) -> bool:
        """Return whether the call is done. Never blocks. Raises the error that ended the call, if one did."""
        self._session.check_process("test")
        if self.pending:
            self._session.progress()
            try:
                self.pending = [entry for entry in self.pending if not entry.request.test()]
            except Exception as error:
                self._session.given.note(error, (entry.waiting.key_id for entry in self.pending))
                raise
        if self.pending:
            return False
        self.held = {}
        return True

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until the call is done, and return what the blocking call would return.

        timeout_s: seconds, by default MPIKV_TIMEOUT_S. Raises StallError when the time is up; the call then goes on,
        and may be waited for again.
        """
        if timeout_s is not None:
            timeout_s = checks.seconds("timeout_s", timeout_s)
        while self.pending:
            self._session.check_process("wait")
            self._session.wait(self.pending[0], timeout_s, self.pending)
            self.pending.pop(0)
        self.held = {}
        if self._form is not None:
            self._result, self._form = finished(self._form), None
        return self._result


def not_given(request: Request, given: GivenErrors) -> Iterator[BaseException]:
    """The errors that have ended a call, and of which no caller knows. Never blocks."""
    for pending in request.pending:
        try:
            pending.request.test()
        except Exception as error:  # noqa: BLE001 - `close` of the store raises it
            if not given.has(error, (pending.waiting.key_id,)):
                yield error


def writable(arrays: Values) -> dict[int, Any]:
    """Return by address the arrays with elements, of one or of lists in lists, that can be written to in place."""
    if isinstance(arrays, (list, tuple)):
        return {address: array for one in arrays for address, array in writable(one).items()}
    if isinstance(arrays, np.ndarray):
        return {arrays.__array_interface__["data"][0]: arrays} if arrays.size else {}
    return {address: arrays} if tensors.is_tensor(arrays) and (address := tensors.address_of(arrays)) else {}


def is_over(request: Request, given: GivenErrors) -> bool:
    """Whether a call is done, or its caller has been given the error that ended it. Never blocks."""
    try:
        return all(pending.request.test() for pending in request.pending) and request.test()
    except Exception as error:  # noqa: BLE001 - `wait_all` or `close` raises it
        return given.has(error, (pending.waiting.key_id for pending in request.pending))
