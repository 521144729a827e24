"""The work object that an asynchronous call of `torch.distributed` returns, and its future.

A future is made when it is first asked for, and completed by a separate thread: functions that are chained to it may
make further calls and wait for them, and the thread that advances transfers must never wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from mpikv.groups.call import GroupCall

Submit = Callable[[Callable[[], None]], Any]


class CallWork(Work):
    """Some calls that are waited for as one. result: the output tensors. submit: runs a function in another thread."""

    def __init__(self, calls: Sequence[GroupCall], result: list[torch.Tensor], submit: Submit) -> None:
        super().__init__()
        self.calls, self._result, self._submit = list(calls), result, submit
        self._ended: Any = None
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all calls are done. Raises a call's error, and StallError after `timeout`, if one is given."""
        limit_s = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        for call in self.calls:
            call.wait(limit_s)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(call.done for call in self.calls)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return next((call.error for call in self.calls if call.error is not None), None)

    def result(self) -> list[torch.Tensor]:
        return self._result

    def source_rank(self) -> int:
        """Return the rank whose tensor `recv` from any rank has received. Blocks."""
        return int(self.calls[0].wait())

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a `torch.futures.Future` of the output tensors. Its error is a RuntimeError with the call's text."""
        if self._future is None:
            self._ended = torch.futures.Future()
            # C++ code, such as DDP's, sees the error of a callback; one by `set_exception` is a value to it, which
            # it takes for a tensor and crashes.
            self._future = self._ended.then(self._outcome)
            self._complete(0)
        return self._future

    get_future_result = get_future

    def _complete(self, i: int) -> None:
        """Complete the future if all calls from number i on are done; else do this again when the next one is."""
        for j in range(i, len(self.calls)):
            if self.calls[j].when_done(lambda: self._submit(lambda: self._complete(j))):  # noqa: B023 - returns
                return
        self._ended.set_result(None)

    def _outcome(self, _ended: Any) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        return self._result
