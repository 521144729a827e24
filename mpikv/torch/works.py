"""What an asynchronous call of `torch.distributed` returns, and its future.

`wait` moves the transfers on itself. A future is made when somebody asks for it and completed by a thread of its own:
what is chained to it may well make further calls, and wait for them, which whoever moves transfers on must never do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from mpikv.groups.group import Call

Submit = Callable[[Callable[[], None]], Any]
COMPLETERS = 64  # threads at most: as many futures may wait for others in what is chained to them


def completer() -> ThreadPoolExecutor:
    """What completes futures. Starts a thread only when there is something to complete and none is free."""
    return ThreadPoolExecutor(COMPLETERS, "mpikv-futures")


class CallWork(Work):
    """Some calls that were made together. result: the output tensors. submit: has a function run by another thread."""

    def __init__(self, calls: Sequence[Call], result: list[torch.Tensor], submit: Submit) -> None:
        super().__init__()
        self.calls, self._result, self._submit = list(calls), result, submit
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all is done. Raises what went wrong; StallError after `timeout`, where one is given."""
        limit_s = None if timeout is None or timeout <= timedelta(0) else timeout.total_seconds()
        for call in self.calls:
            call.wait(limit_s)
        return True

    def synchronize(self) -> None:
        """`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all is done, well or not."""
        return all(call.done for call in self.calls)

    def is_success(self) -> bool:
        """Whether all is done well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return next((call.error for call in self.calls if call.error is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._result

    def source_rank(self) -> int:
        """Who has sent what `recv` from any rank has received. Blocks."""
        return int(self.calls[0].wait())

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """A `torch.futures.Future` of the output tensors."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._complete(0)
        return self._future

    def get_future_result(self) -> Any:
        """The future of `get_future`."""
        return self.get_future()

    def _complete(self, i: int) -> None:
        """Complete the future, or see to it that this is gone on with when call number i is done."""
        for j in range(i, len(self.calls)):
            if self.calls[j].when_done(lambda: self._submit(lambda: self._complete(j))):  # noqa: B023 - returns
                return
        error = self.exception()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)
