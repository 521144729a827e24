"""One update of a key: what a formula knows of it, and what of that it looks at.

On a GPU a formula is not run for each key and update: it is traced to a program, and what it looks at in its step says
for which other keys the same program with the same numbers will do (spaces/update_programs.py). So a formula must hang
on nothing but its optimizer's attributes, its step and its arrays.

Cost: for each key and update, one comparison of the optimizer's attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from mpikv.keys import Key
from mpikv.spaces.base import Formula, SpaceArray, TracedFormula

if TYPE_CHECKING:
    from mpikv.optimizers.base import Optimizer

State = dict[str, Any]
"""The state of one key or slice: "t", the int number of updates so far, and by name flat arrays of the weight's number
of elements and plain numbers. What a user's own function keeps may be anything (function.py)."""


class Step(NamedTuple):
    """What a formula knows of the update it makes.

    t: the update's number, 1 for the first. learning_rate, wd: those of the key, factors included. global_rate: the
    learning rate without the key's factor. real: makes a number that keeps the arithmetic's dtype. shape: the weight's.
    state: the state, for its numbers; the arrays come as blocks.

    >>> optimizers.Step('w', 1, 0.5, wd=0.0, global_rate=0.5, real=np.float32, shape=(2,), state={}).real(0.25).dtype
    dtype('float32')
    """

    key: Key
    t: int
    learning_rate: float
    wd: float
    global_rate: float
    real: Callable[[float], Any]
    shape: tuple[int, ...]
    state: State


class _NotingStep(Step):
    """A step that notes which of its fields are looked at."""

    looked_at: set[str]

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Step:  # type: ignore[override]
        """What `_replace` makes, which has looked at all fields."""
        return Step._make(iterable)

    def __iter__(self) -> Iterator[Any]:
        self.looked_at.update(self._fields)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self.looked_at.update(self._fields)
        return super().__getitem__(index)


def _noting(name: str) -> property:
    read = getattr(Step, name).__get__

    def look(step: _NotingStep) -> Any:
        step.looked_at.add(name)
        return read(step)

    return property(look)


for _name in Step._fields:
    setattr(_NotingStep, _name, _noting(_name))


class _Unknown(Exception):  # noqa: N818 - caught here
    """A value of which equal ones need not do the same."""


def _comparable(value: Any) -> Hashable:
    """The same for two values only where both have the same bits."""
    kind = type(value)
    if kind is float and value == 0.0:
        return kind, repr(value)  # 0.0 and -0.0 are equal
    if value is None or kind in (bool, int, float, str) or isinstance(value, type):
        return kind, value
    if kind is tuple:
        return tuple(map(_comparable, value))
    if kind is dict:
        return tuple((_comparable(key), _comparable(one)) for key, one in value.items())
    raise _Unknown


class StepFormula(TracedFormula):
    """An optimizer's formula in one update."""

    __slots__ = ("_optimizer", "_step")

    def __init__(self, optimizer: Optimizer, step: Step) -> None:
        self._optimizer, self._step = optimizer, step

    def __call__(self, w: SpaceArray, g: SpaceArray, arrays: Any, tmp: list[SpaceArray], /) -> None:
        """See `Formula`. Where it fails the state's numbers are as before: it may be run again, elsewhere."""
        state: State = cast(Any, tuple).__getitem__(self._step, -1)  # nobody has looked at it yet
        before = dict(state)
        try:
            self._optimizer.formula(self._step, w, g, arrays, tmp)
        except BaseException:
            state.update(before)
            raise

    def constants(self) -> Hashable | None:
        """See `TracedFormula`. A schedule has had its say in the step."""
        try:
            attributes = [
                (name, _comparable(value))
                for name, value in vars(self._optimizer).items()
                if name not in ("_host", "lr_scheduler")
            ]
        except _Unknown:
            return None
        return type(self._optimizer), tuple(attributes)

    def values(self, names: Sequence[str]) -> Hashable | None:
        """See `TracedFormula`. A state is the key's own, and may be changed by the formula."""
        if "state" in names:
            return None
        try:
            return tuple([_comparable(getattr(self._step, name)) for name in names])
        except _Unknown:
            return None

    def noting(self) -> tuple[Formula, set[str]]:
        """See `TracedFormula`."""
        step = _NotingStep(*self._step)
        step.looked_at = set()
        return StepFormula(self._optimizer, step), step.looked_at
