"""Learning rate schedules: pure functions from the number of updates to a learning rate.

A schedule is a frozen value. Called with the update's number t (1 for the first update of a key) it returns the same
learning rate every time. While t < warmup_steps the rate rises from `warmup_begin_lr` to `base_lr` in equal steps
(`warmup_mode='linear'`) or stays at `warmup_begin_lr` (`'constant'`); steps and decay below count all updates.
`dataclasses.replace(schedule, base_lr=...)` makes a changed schedule.

Names, defaults and values are those of MXNet 1.9, with two differences. A schedule of MXNet remembers its last update,
so that a call for an earlier one returns a later rate. And an optimizer's `learning_rate` overwrites its `base_lr`, but
not the rate from which the warm-up and the decay start.

Source: MXNet 1.9, python/mxnet/lr_scheduler.py; cosine: Loshchilov and Hutter, SGDR, ICLR 2017, without restarts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mpikv.common import checks
from mpikv.common.checks import shown
from mpikv.errors import UnsupportedError
from mpikv.optimizers.declared import Check, Field, check_by
from mpikv.optimizers.identity import identity


def _of(check: Check, wanted: str, doc: str) -> dict[str, Any]:
    """Return the metadata of an argument: how `Scheduler.__post_init__` checks it, and its description."""
    return {"check": check, "wanted": wanted, "doc": doc}


_rate, _count, _from_zero = check_by(checks.number, 0.0), check_by(checks.whole, 1), check_by(checks.whole, 0)
_mode = check_by(checks.one_of, ("linear", "constant"))


def _reduction(owner: str, name: str, value: Any) -> float:
    result = _rate(owner, name, value)
    if result > 1.0:
        raise ValueError(f"{owner}: {name} must be at most 1, so that the learning rate never grows, not {result:g}")
    return result


def _steps(owner: str, name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise checks.wrong(f"{owner}: {name}", "a list of update numbers", value)
    steps = tuple(_count(owner, f"each {name}", item) for item in value)
    if not steps or any(after <= before for before, after in itertools.pairwise(steps)):
        raise ValueError(f"{owner}: {name} must hold at least one number and rise, not {shown(value)}")
    return steps


@dataclass(frozen=True)
class Scheduler:
    """The base of all schedules; by itself it is a warm-up, followed by `base_lr` for ever.

    To write one of your own, derive a frozen dataclass from it, list its fields and define `after_warmup`. Raises
    TypeError or ValueError for invalid values.

    >>> warm_up = optimizers.Scheduler(base_lr=0.5, warmup_steps=2)
    >>> [warm_up(t) for t in (1, 2, 3)], warm_up.after_warmup(3), warm_up.config()['warmup_steps']
    ([0.25, 0.5, 0.5], 0.5, 2)
    """

    base_lr: float = field(default=0.01, metadata=_of(_rate, "at least 0", "the rate after the warm-up"))
    warmup_steps: int = field(default=0, metadata=_of(_from_zero, "at least 0", "updates that the warm-up covers"))
    warmup_begin_lr: float = field(
        default=0.0, metadata=_of(_rate, "from 0 to base_lr", "the rate at the warm-up's begin")
    )
    warmup_mode: str = field(
        default="linear", metadata=_of(_mode, "'linear' or 'constant'", "whether the rate rises during the warm-up")
    )

    def __post_init__(self) -> None:
        name = type(self).__name__
        for one in fields(self):
            if "check" in one.metadata:
                value = one.metadata["check"](name, one.name, getattr(self, one.name))
                object.__setattr__(self, one.name, value)  # how a frozen dataclass sets its fields
        if self.warmup_begin_lr > self.base_lr:
            raise ValueError(
                f"{name}: the warm-up rises, so warmup_begin_lr ({self.warmup_begin_lr:g}) "
                f"must not exceed base_lr ({self.base_lr:g})"
            )

    def __call__(self, num_update: int) -> float:
        """Return the learning rate of update `num_update` (at least 0). Local; the same value every time."""
        t = _from_zero(type(self).__name__, "num_update", num_update)
        if t >= self.warmup_steps:
            return self.after_warmup(t)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * t / self.warmup_steps

    def after_warmup(self, num_update: int) -> float:
        """Return the learning rate of an update after the warm-up."""
        del num_update
        return self.base_lr

    def config(self) -> dict[str, Any]:
        """Return the schedule as JSON: its name and its fields, the base's first; see `schedule_from_config`."""
        values = asdict(self)
        common = {one.name: values[one.name] for one in fields(Scheduler)}
        return {"name": type(self).__name__, **common, **values}


# --- MXNet's schedules. Their own arguments come before those of `Scheduler`. Since `dataclass` takes the fields of the
# last base first, each schedule has its own fields in a base class of their own. A field of `Scheduler` that is named
# there again is named for its position; its declaration in `Scheduler` counts.


@dataclass(frozen=True)
class _Factor:
    step: int = field(metadata=_of(_count, "at least 1", "updates from one reduction to the next"))
    factor: float = field(default=1.0, metadata=_of(_reduction, "from 0 to 1", "by what the rate is multiplied"))
    stop_factor_lr: float = field(default=1e-8, metadata=_of(_rate, "at least 0", "a reduced rate is no lower"))


@dataclass(frozen=True)
class FactorScheduler(Scheduler, _Factor):
    """Multiply by `factor` after every `step` updates: base_lr * factor^k with k = floor((t - 1) / step).

    From the first reduction on, the rate is at least `stop_factor_lr`.

    >>> [optimizers.FactorScheduler(step=2, factor=0.5, base_lr=1.0)(t) for t in (1, 2, 3, 5)]
    [1.0, 1.0, 0.5, 0.25]
    """

    def after_warmup(self, num_update: int) -> float:
        reductions = max(0, (num_update - 1) // self.step)
        return max(self.base_lr * self.factor**reductions, self.stop_factor_lr) if reductions else self.base_lr


@dataclass(frozen=True)
class _MultiFactor:
    step: list[int] | tuple[int, ...] = field(
        metadata=_of(_steps, "rising, each at least 1", "updates after which the rate is reduced")
    )
    factor: float = field(default=1.0, metadata=_of(_reduction, "from 0 to 1", "by what the rate is multiplied"))


@dataclass(frozen=True)
class MultiFactorScheduler(Scheduler, _MultiFactor):
    """Multiply by `factor` after each update in `step` (rising): base_lr * factor^k, k = how many of `step` are < t.

    >>> [optimizers.MultiFactorScheduler(step=[1, 3], factor=0.5, base_lr=1.0)(t) for t in (1, 2, 4)]
    [1.0, 0.5, 0.25]
    """

    def after_warmup(self, num_update: int) -> float:
        return self.base_lr * self.factor ** sum(step < num_update for step in self.step)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "step": list(self.step)}


@dataclass(frozen=True)
class _Decay:
    max_update: int = field(metadata=_of(_count, "more than warmup_steps", "the update at which the fall ends"))
    base_lr: float


@dataclass(frozen=True)
class _Falling(Scheduler, _Decay):
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_update <= self.warmup_steps:
            raise ValueError(
                f"{type(self).__name__}: max_update ({self.max_update}) must be more than "
                f"warmup_steps ({self.warmup_steps})"
            )

    def _progress(self, num_update: int) -> float:
        return (min(num_update, self.max_update) - self.warmup_steps) / (self.max_update - self.warmup_steps)


@dataclass(frozen=True)
class _Poly(_Decay):
    pwr: float = field(default=2.0, metadata=_of(_rate, "at least 0", "the power of the polynomial"))
    final_lr: float = field(default=0.0, metadata=_of(_rate, "at least 0", "the rate in the end"))


@dataclass(frozen=True)
class PolyScheduler(_Falling, _Poly):
    """Fall as a polynomial: final_lr + (base_lr - final_lr) * (1 - x)^pwr.

    x runs from 0 at the end of the warm-up to 1 at `max_update`, and stays there.

    >>> [optimizers.PolyScheduler(max_update=4, base_lr=1.0, pwr=1)(t) for t in (1, 4, 5)]
    [0.75, 0.0, 0.0]
    """

    def after_warmup(self, num_update: int) -> float:
        x = self._progress(num_update)
        return self.final_lr + (self.base_lr - self.final_lr) * math.pow(1.0 - x, self.pwr)


@dataclass(frozen=True)
class _Cosine(_Decay):
    final_lr: float = field(default=0.0, metadata=_of(_rate, "at least 0", "the rate in the end"))


@dataclass(frozen=True)
class CosineScheduler(_Falling, _Cosine):
    """Fall as half a cosine wave: final_lr + (base_lr - final_lr) * (1 + cos(pi * x)) / 2.

    x runs from 0 at the end of the warm-up to 1 at `max_update`, and stays there.

    >>> [round(optimizers.CosineScheduler(max_update=4, base_lr=1.0)(t), 2) for t in (1, 2, 4)]
    [0.85, 0.5, 0.0]
    """

    def after_warmup(self, num_update: int) -> float:
        x = self._progress(num_update)
        return self.final_lr + (self.base_lr - self.final_lr) * (1.0 + math.cos(math.pi * x)) / 2.0


SCHEDULES: Mapping[str, type[Scheduler]] = {
    cls.__name__: cls for cls in (Scheduler, FactorScheduler, MultiFactorScheduler, PolyScheduler, CosineScheduler)
}


def schedule_from_config(config: Mapping[str, Any], like: object = None) -> Scheduler:
    """Make a schedule from its `Scheduler.config`; also one of the class of `like`, for a user's own.

    Raises ValueError for an unknown name and for invalid values, TypeError for unknown fields.
    """
    known = dict(SCHEDULES)
    if isinstance(like, Scheduler):
        known.setdefault(type(like).__name__, type(like))
    given = checks.options("a schedule's config", config)
    name = given.pop("name", None)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown schedule {shown(name)}; known: {', '.join(known)}")
    make: Callable[..., Scheduler] = known[name]
    return make(**given)


def schedule(*, doc: str) -> Any:
    """Declare a hyperparameter of an optimizer that is a function from update number to learning rate, or None."""

    def check(owner: str, name: str, value: Any) -> Any:
        if value is None or callable(value):
            return value
        raise checks.wrong(f"{owner}: {name}", "a schedule (a function from update number to rate) or None", value)

    def to_json(value: Any) -> Any:
        if isinstance(value, Scheduler):
            return value.config()
        return None if value is None else {"function": identity(value)}

    def from_json(owner: str, name: str, sent: Any, current: Any) -> Any:
        if not isinstance(sent, Mapping):
            return sent
        if "function" not in sent:
            return schedule_from_config(sent, current)
        if current is None or to_json(current) != sent:
            raise UnsupportedError(
                f"{owner}: {name} is a function ({sent['function']}), which only the whole optimizer carries"
            )
        return current

    kind, wanted = Callable[[int], float] | None, "a function from update number to rate, or None"
    return Field(None, check, kind, wanted, doc, to_json=to_json, from_json=from_json)
