"""The program of an optimizer's update, and when one that was traced before can be used again.

A trace takes about as long as all else that the host does for a short key. Many keys have the same formula with the
same numbers: all of a bucket, and where nothing counts updates all rounds. So what was traced is kept, beside what it
hangs on: the optimizer's attributes, the dtypes, and those fields of the step that the formula has looked at
(`TracedFormula`). A key for which all of that is equal is given the same program and the same numbers, without a call
of the formula.

A number that changes, such as a learning rate or the update's number t, means one trace more, since only the formula
can say what it makes of it; then all keys of the round share that one.

Cost: a comparison of an optimizer's attributes for a key that finds its program; a trace (tracing.py) for one that
does not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.spaces.base import TracedFormula
from mpikv.spaces.program import ROUND
from mpikv.spaces.tracing import NotingArray, Stage, trace_stages


class Kind(NamedTuple):
    """The dtypes of an update, see `Space.update`. arrays: names and dtypes. master: whether there is one."""

    weight: np.dtype[Any]
    terms: tuple[np.dtype[Any], ...]
    arrays: tuple[tuple[str, np.dtype[Any]], ...]
    master: bool
    dtype: np.dtype[Any]
    temporaries: int
    elementwise: bool = True

    @property
    def arguments(self) -> list[np.dtype[Any]]:
        """Of the weight, the terms, the state's arrays, and the master where there is one."""
        masters = [self.dtype] * self.master
        return [self.weight, *self.terms, *(dtype for _, dtype in self.arrays), *masters]

    @property
    def scratch(self) -> list[np.dtype[Any]]:
        """Temporary memory behind these: the formula's own, the weight and the gradient in its arithmetic.

        An elementwise formula has these in registers.
        """
        return [] if self.elementwise else [self.dtype] * (self.temporaries + 2)


def update_stages(formula: Callable[..., Any], kind: Kind) -> list[Stage]:
    """What does what `HostSpace.update` does, with the same bits: one program, or several where there are sums.

    Their arguments: those of `Kind.arguments`, `Kind.scratch`, and the sums so far. The formula is called once, here.
    Raises NotAProgram, and what the formula raises.
    """
    n_terms, n_arrays = len(kind.terms), len(kind.arrays)

    def update(stored: Any, *rest: Any) -> None:
        sources, state = rest[:n_terms], rest[n_terms : n_terms + n_arrays]
        behind = rest[n_terms + n_arrays :]
        masters, scratch = behind[: kind.master], list(behind[kind.master :])
        notes = stored.notes
        if kind.elementwise:
            scratch = [NotingArray(notes, kind.dtype, None) for _ in range(kind.temporaries)]
        w = stored
        if kind.weight != kind.dtype:
            w = masters[0] if masters else stored.astype(kind.dtype)
        g = sources[0]
        for source in sources[1:]:
            total: Any = NotingArray(notes, kind.terms[0], None)
            g = np.add(g, source, out=total)
        g = g.astype(kind.dtype, copy=False)
        if not kind.elementwise:  # what is no argument must be in memory, where a sum can find it
            w, g = _in_memory(w, stored, masters, scratch[-2]), _in_memory(g, sources[0], (), scratch[-1])
        names = [name for name, _ in kind.arrays]
        formula(w, g, dict(zip(names, state, strict=True)), scratch[: kind.temporaries])
        if w is not stored:
            rounds = kind.weight.kind in "iu"
            value = notes.read(w, kind.dtype)
            stored.value = notes.add(ROUND, kind.weight, (value,)) if rounds else notes.cast(value, kind.weight)

    return trace_stages(update, kind.arguments, kind.scratch)


def _in_memory(array: Any, own: Any, masters: Sequence[Any], memory: Any) -> Any:
    """The array where it is an argument, else the memory, which holds it."""
    if array is own or any(array is one for one in masters):
        return array
    np.copyto(memory, array)
    return memory


class _Kept(NamedTuple):
    """A trace. fields, values: what the formula has looked at in its step, and what was there."""

    fields: tuple[str, ...]
    values: Hashable
    stages: list[Stage]


class UpdatePrograms:
    """Those of one space. traces: how many were made."""

    MOST_ALIKE = 16  # that differ in the step alone: groups of keys with factors of their own, and rounds under way
    MOST = 64  # sets of attributes and dtypes; a schedule of the learning rate makes a new one in each round

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[_Kept]] = {}
        self.traces = 0

    def of(self, formula: Callable[..., Any], kind: Kind) -> list[Stage]:
        """What `update_stages` returns for the same arguments, traced if it has to be."""
        constants = formula.constants() if isinstance(formula, TracedFormula) else None
        if constants is None or not isinstance(formula, TracedFormula):
            self.traces += 1
            return update_stages(formula, kind)
        what = constants, kind
        alike = self._kept.get(what, [])
        for one in alike:
            if formula.values(one.fields) == one.values:
                return one.stages
        noting, looked_at = formula.noting()
        self.traces += 1
        stages = update_stages(noting, kind)
        fields = tuple(sorted(looked_at))
        values = formula.values(fields)
        if values is not None:
            if what not in self._kept and len(self._kept) >= self.MOST:
                self._kept.clear()
            self._kept[what] = [_Kept(fields, values, stages), *alike[: self.MOST_ALIKE - 1]]
        return stages
