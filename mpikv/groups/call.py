"""One call of a group, under way or done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mpikv.common.clock import Clock
from mpikv.engine.backoff import Backoff
from mpikv.engine.operation import Steps
from mpikv.engine.running import Running
from mpikv.errors import StallError
from mpikv.observe.stall import Waiting

if TYPE_CHECKING:
    from mpikv.groups.group import RankGroup

SPIN_S = 5e-3  # how long the caller alone moves a call through memory on, while it waits for other ranks


class Options(NamedTuple):
    """Of any call. timeout_s: the limit to its waiting, None: the group's. finish: called where it has succeeded."""

    timeout_s: float | None = None
    finish: Callable[[], None] | None = None


DEFAULT = Options()


class GroupCall:
    """One call. number: counts the group's calls, the same on all ranks; -1 for a message between two ranks.

    text: describes the call; the same on all ranks. before: the call that ends before `steps` begin; queued: that has
    not ended.
    need: what other ranks must come to before it can end, as `World` knows it; None: unknown. waited_s, asked: for
    watch.py: how long it has waited since it began, and whether the other ranks have been asked about it.
    """

    def __init__(
        self,
        group: RankGroup,
        number: int,
        text: str,
        options: Options,
        steps: Steps[Any],
        *,
        before: GroupCall | None = None,
    ) -> None:
        self.group, self.number, self.text = group, number, text
        self.timeout_s = group.timeout_s if options.timeout_s is None else options.timeout_s
        self.finish = options.finish
        self.running = Running(group.watched(self, steps, before), text)
        self.started_s = group.engine.clock.now_s()
        self.waited_s = 0.0
        self.asked = self.queued = False
        self.need: tuple[str, Any] | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended, with an error or without."""
        return self.running.done

    @property
    def error(self) -> BaseException | None:
        return self.running.error

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until it has ended, and return its result. Raises its error, or StallError after `timeout_s`."""
        if not self.running.done:
            engine = self.group.engine
            limit_s = float("inf") if timeout_s is None else timeout_s
            which = f", call {self.number} of process group {self.group.number}" if self.number >= 0 else ""
            waiting = Waiting(f"{self.text}{which}", agreed=self.need)

            def look() -> None:
                if (why := hopeless()) is not None:
                    self.group.fail(self, StallError(f"{self.group.label} waits in {waiting}. {why}"))

            with self.group.stalls.watched(waiting, free=None if timeout_s is None else lambda: True) as hopeless:
                engine.wait(self.running, limit_s, lambda: self.group.stalled(self, limit_s), look)
        self.running.test()
        return self.running.result

    def when_done(self, callback: Callable[[], None]) -> bool:
        """Let `callback` be called when the call ends, by whoever moves it on; False if it has ended already."""
        with self.group.engine.lock:
            if self.running.done:
                return False
            self._callbacks.append(callback)
            return True

    def ended(self) -> None:
        for callback in self._callbacks:
            callback()


def spin(running: Running[Any], clock: Clock) -> None:
    """Move a call through memory on until it has not moved for SPIN_S; no other transfer is moved on meanwhile."""
    backoff, deadline_s = Backoff(clock=clock), None
    while not running.done:
        if running.advance():
            backoff.reset()
            deadline_s = None
            continue
        now_s = clock.now_s()
        if deadline_s is None:
            deadline_s = now_s + SPIN_S
        if now_s > deadline_s:
            return
        backoff.pause()
