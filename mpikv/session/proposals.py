"""What a worker proposes to worker 0, and what it gets back (agreement.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpikv.errors import MpikvError
from mpikv.session.agreement import ERRORS, Item


class Decision(NamedTuple):
    """What worker 0 decided on one proposal."""

    result: Any
    error: tuple[str, str] | None
    final: bool

    def exception(self) -> MpikvError:
        """The error that was decided."""
        name, text = self.error or ("MpikvError", "")
        return ERRORS.get(name, MpikvError)(text)

    def unwrap(self) -> Any:
        """The result; raises the error that was decided."""
        if self.error is not None:
            raise self.exception()
        return self.result


class Proposal:
    """A request that is done when each of its items has a verdict."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = tuple(items)
        self.decisions: dict[Item, Decision] = {}  # in the order in which they came
        self._missing = set(items)

    def take(self, item: Item, decision: Decision) -> bool:
        """Note a verdict; False where it is not one that this proposal waits for."""
        if item not in self._missing:
            return False
        self._missing.remove(item)
        self.decisions[item] = decision
        return True

    def test(self) -> bool:
        """Whether all verdicts are there."""
        return not self._missing
