"""What the workers' optimizers say where every worker updates its own weights and the store only adds.

The sum has no label there, and no owner that could compare. So each step of such a trainer is a round of a series
(session/contests): workers whose attributes have changed agree, before they contribute, on what it is added in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpikv.common.labels import Label
from mpikv.optimizers.base import FACTOR, Optimizer
from mpikv.optimizers.owner import DEFAULT_SLOT, AttributeLog
from mpikv.placement.keys import Key
from mpikv.session.contests import Series

if TYPE_CHECKING:
    from mpikv.session.workers import Workers


class OwnUpdates:
    """The steps of one trainer. Making one is collective: ConfigError on all workers for different optimizers.

    exact: its values are integers.
    """

    def __init__(self, workers: Workers, optimizer: Optimizer, keys: Sequence[Key], *, exact: bool) -> None:
        self._workers = workers
        self._log = AttributeLog()
        self._log.watch(DEFAULT_SLOT, optimizer)
        base = self._log.label(DEFAULT_SLOT)
        number = workers.agree_on_own_updates(optimizer, keys)
        what = f"the step of a trainer of {len(keys)} parameters"
        with workers.engine.lock:
            self._series: Series = workers.control.comparing.series(number, base, what, exact=exact)

    def _label(self, *, separate: bool) -> Label:
        self._log.number(DEFAULT_SLOT)
        label = self._log.label(DEFAULT_SLOT)
        return Label(f'{{"{FACTOR}": {label.factor!r}, {label.text[1:]}', 1.0) if separate else label

    def may_leave(self) -> bool:
        """Whether gradients of the next step may be contributed before it begins. Local."""
        with self._workers.engine.lock:
            usual, n = self._series.usual, self._series.round + 1
            return any(usual(self._label(separate=separate), n) for separate in (False, True))

    def begin(self, *, separate: bool = False, contributed: bool = False) -> float:
        """The next step begins: what this worker's gradients are to be multiplied by before they are contributed.

        separate: they have been added before, so that the factor must be equal too. contributed: some have left.
        Blocks where labels differ. Raises what is left of the step before (`settle`).
        """
        self.settle()
        label = self._label(separate=separate)
        with self._workers.engine.lock:
            self._series.begin(label, contributed=contributed)
        self._wait()
        return self._series.ratio

    def end(self) -> float | None:
        """The gradients are added: the factor to update with, None: one's own. Blocks where need be.

        Raises ConfigError, on every worker, where nothing must be updated.
        """
        self.settle()
        return self._series.units

    def settle(self) -> None:
        """Raise what others have found wrong with the last step after it ended here."""
        self._wait()
        with self._workers.engine.lock:
            self._series.end()

    def _wait(self) -> None:
        if not self._series.test():
            self._workers.wait_for(self._series, "step")
