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

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpikv.spaces.base import TracedFormula
from mpikv.spaces.program import ROUND, Numbers, Program
from mpikv.spaces.tracing import NotingArray, trace


def update_program(
    formula: Callable[..., Any],
    weight: np.dtype[Any],
    terms: Sequence[np.dtype[Any]],
    arrays: Mapping[str, np.dtype[Any]],
    *,
    master: bool,
    dtype: np.dtype[Any],
    temporaries: int,
) -> tuple[Program, Numbers]:
    """The program of `Space.update`, and its numbers: it does what `HostSpace.update` does, with the same bits.

    Its arguments, in this order: the weight, the terms, the state's arrays in the order of `arrays`, the master where
    there is one. formula, dtype, temporaries: see `Space.update`; the formula is elementwise, and is called once, here.
    weight, terms, arrays: dtypes. Raises NotAProgram, and what the formula raises.
    """
    n_terms, names = len(terms), list(arrays)

    def update(stored: Any, *rest: Any) -> None:
        sources, state, masters = rest[:n_terms], rest[n_terms : n_terms + len(names)], rest[n_terms + len(names) :]
        notes = stored.notes

        def temporary(dtype: np.dtype[Any]) -> Any:
            return NotingArray(notes, dtype, None)

        w = stored
        if weight != dtype:
            w = masters[0] if masters else stored.astype(dtype)
        g = sources[0]
        for source in sources[1:]:
            g = np.add(g, source, out=temporary(terms[0]))
        g = g.astype(dtype, copy=False)
        formula(w, g, dict(zip(names, state, strict=True)), [temporary(dtype) for _ in range(temporaries)])
        if w is not stored:
            rounds = weight.kind in "iu"
            stored.value = notes.add(ROUND, weight, (notes.read(w, dtype),)) if rounds else notes.read(w, weight)

    return trace(update, [weight, *terms, *arrays.values(), *([dtype] if master else [])])


class _Kept(NamedTuple):
    """A trace. fields, values: what the formula has looked at in its step, and what was there."""

    fields: tuple[str, ...]
    values: Hashable
    program: Program
    numbers: Numbers


class UpdatePrograms:
    """Those of one space. traces: how many were made."""

    MOST_ALIKE = 16  # that differ in the step alone: groups of keys with factors of their own, and rounds under way
    MOST = 64  # sets of attributes and dtypes; a schedule of the learning rate makes a new one in each round

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[_Kept]] = {}
        self.traces = 0

    def of(
        self,
        formula: Callable[..., Any],
        weight: np.dtype[Any],
        terms: Sequence[np.dtype[Any]],
        arrays: Mapping[str, np.dtype[Any]],
        *,
        master: bool,
        dtype: np.dtype[Any],
        temporaries: int,
    ) -> tuple[Program, Numbers]:
        """What `update_program` returns for the same arguments, traced if it has to be."""
        constants = formula.constants() if isinstance(formula, TracedFormula) else None
        if constants is None or not isinstance(formula, TracedFormula):
            self.traces += 1
            return update_program(formula, weight, terms, arrays, master=master, dtype=dtype, temporaries=temporaries)
        what = constants, weight, tuple(terms), tuple(arrays.items()), master, dtype, temporaries
        alike = self._kept.get(what, [])
        for one in alike:
            if formula.values(one.fields) == one.values:
                return one.program, one.numbers
        noting, looked_at = formula.noting()
        self.traces += 1
        program, numbers = update_program(
            noting, weight, terms, arrays, master=master, dtype=dtype, temporaries=temporaries
        )
        fields = tuple(sorted(looked_at))
        values = formula.values(fields)
        if values is not None:
            if what not in self._kept and len(self._kept) >= self.MOST:
                self._kept.clear()
            self._kept[what] = [_Kept(fields, values, program, numbers), *alike[: self.MOST_ALIKE - 1]]
        return program, numbers
