"""Learning rate schedules: pure functions from the number of updates to a learning rate.

A schedule is a frozen value. Called with the update's number t (1 for the first update of a key) it returns the same
learning rate every time, whatever was asked before, so it can be evaluated on any rank and after a restart. While
t < warmup_steps the rate rises from `warmup_begin_lr` to `base_lr` in equal steps (`warmup_mode='linear'`) or stays at
`warmup_begin_lr` (`'constant'`); steps and decay below count all updates, those of the warm-up included.

Differs from MXNet 1.9, whose names, defaults and values these are: there a schedule remembers where it was, so that
asking for an earlier update gives a later rate, and an optimizer's `learning_rate` overwrites `base_lr` but not the
rate that the warm-up and the decay start from. `dataclasses.replace(schedule, base_lr=...)` makes a changed one.

Source: MXNet 1.9, python/mxnet/lr_scheduler.py; cosine: Loshchilov and Hutter, SGDR, ICLR 2017, without restarts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from mpikv import checks
from mpikv.checks import shown
from mpikv.errors import UnsupportedError
from mpikv.optimizers.fields import Field
from mpikv.optimizers.identity import identity

WARMUP_MODES = ("linear", "constant")


def _rate(owner: str, name: str, value: Any) -> float:
    return checks.number(f"{owner}: {name}", value, 0.0)


def whole(owner: str, name: str, value: Any, low: int) -> int:
    """`value` as an int of at least `low`."""
    return checks.whole(f"{owner}: {name}", value, low)


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """Base of the schedules; alone it is the warm-up followed by `base_lr` for ever.

    A schedule of your own: a frozen dataclass that derives from this one, lists its fields (these four among them) and
    defines `after_warmup`. Raises TypeError or ValueError for values that make no schedule.

    >>> warm_up = optimizers.Scheduler(base_lr=0.5, warmup_steps=2)
    >>> [warm_up(t) for t in (1, 2, 3)], warm_up.after_warmup(3), warm_up.config()['warmup_steps']
    ([0.25, 0.5, 0.5], 0.5, 2)
    """

    base_lr: float = 0.01
    warmup_steps: int = 0
    warmup_begin_lr: float = 0.0
    warmup_mode: str = "linear"

    def __post_init__(self) -> None:
        name = type(self).__name__
        self._set(base_lr=_rate(name, "base_lr", self.base_lr))
        self._set(warmup_begin_lr=_rate(name, "warmup_begin_lr", self.warmup_begin_lr))
        self._set(warmup_steps=whole(name, "warmup_steps", self.warmup_steps, 0))
        checks.one_of(f"{name}: warmup_mode", self.warmup_mode, WARMUP_MODES)
        if self.warmup_begin_lr > self.base_lr:
            raise ValueError(
                f"{name}: the warm-up rises, so warmup_begin_lr ({self.warmup_begin_lr:g}) "
                f"must not exceed base_lr ({self.base_lr:g})"
            )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the way to finish a frozen dataclass

    def __call__(self, num_update: int) -> float:
        """The learning rate of update `num_update` (at least 0). Local; the same value every time."""
        t = whole(type(self).__name__, "num_update", num_update, 0)
        if t >= self.warmup_steps:
            return self.after_warmup(t)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * t / self.warmup_steps

    def after_warmup(self, num_update: int) -> float:
        """The learning rate of an update that the warm-up does not cover."""
        del num_update
        return self.base_lr

    def config(self) -> dict[str, Any]:
        """The schedule as JSON: its name and its fields. `schedule_from_config` is the inverse."""
        return {"name": type(self).__name__, **dataclasses.asdict(self)}


def _decay_length(scheduler: Scheduler, max_update: Any) -> int:
    """Check `max_update`, which must lie behind the warm-up."""
    name = type(scheduler).__name__
    result = whole(name, "max_update", max_update, 1)
    if result <= scheduler.warmup_steps:
        raise ValueError(f"{name}: max_update ({result}) must be more than warmup_steps ({scheduler.warmup_steps})")
    return result


@dataclasses.dataclass(frozen=True)
class FactorScheduler(Scheduler):
    """Multiply by `factor` after every `step` updates: base_lr * factor^k with k = floor((t - 1) / step).

    From the first reduction on, the rate is at least `stop_factor_lr`.

    >>> [optimizers.FactorScheduler(step=2, factor=0.5, base_lr=1.0)(t) for t in (1, 2, 3, 5)]
    [1.0, 1.0, 0.5, 0.25]
    """

    step: int = dataclasses.field(default=0)
    factor: float = 1.0
    stop_factor_lr: float = 1e-8

    def __init__(  # noqa: PLR0917 - MXNet's signature
        self,
        step: int,
        factor: float = 1.0,
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        name = type(self).__name__
        self._set(step=whole(name, "step", step, 1), factor=_reduction(name, factor))
        self._set(stop_factor_lr=_rate(name, "stop_factor_lr", stop_factor_lr))
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)

    def after_warmup(self, num_update: int) -> float:
        """See the class."""
        reductions = max(0, (num_update - 1) // self.step)
        return max(self.base_lr * self.factor**reductions, self.stop_factor_lr) if reductions else self.base_lr


def _reduction(owner: str, factor: Any) -> float:
    result = _rate(owner, "factor", factor)
    if result > 1.0:
        raise ValueError(f"{owner}: factor must be at most 1, so that the learning rate never grows, not {result:g}")
    return result


@dataclasses.dataclass(frozen=True)
class MultiFactorScheduler(Scheduler):
    """Multiply by `factor` after each update listed in `step` (rising): base_lr * factor^k, k = #{s in step: s < t}.

    >>> [optimizers.MultiFactorScheduler(step=[1, 3], factor=0.5, base_lr=1.0)(t) for t in (1, 2, 4)]
    [1.0, 0.5, 0.25]
    """

    step: tuple[int, ...] = ()
    factor: float = 1.0

    def __init__(  # noqa: PLR0917 - MXNet's signature
        self,
        step: list[int] | tuple[int, ...],
        factor: float = 1.0,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        name = type(self).__name__
        if not isinstance(step, (list, tuple)):
            raise checks.wrong(f"{name}: step", "a list of update numbers", step)
        steps = tuple(whole(name, "each step", item, 1) for item in step)
        if not steps or any(after <= before for before, after in itertools.pairwise(steps)):
            raise ValueError(f"{name}: step must hold at least one number and rise, not {shown(step)}")
        self._set(step=steps, factor=_reduction(name, factor))
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)

    def after_warmup(self, num_update: int) -> float:
        """See the class."""
        return self.base_lr * self.factor ** sum(step < num_update for step in self.step)

    def config(self) -> dict[str, Any]:
        """See `Scheduler.config`."""
        return {**super().config(), "step": list(self.step)}


@dataclasses.dataclass(frozen=True)
class PolyScheduler(Scheduler):
    """Fall as a polynomial: final_lr + (base_lr - final_lr) * (1 - x)^pwr.

    x runs from 0 at the end of the warm-up to 1 at `max_update`, and stays there.

    >>> [optimizers.PolyScheduler(max_update=4, base_lr=1.0, pwr=1)(t) for t in (1, 4, 5)]
    [0.75, 0.0, 0.0]
    """

    max_update: int = 1
    pwr: float = 2.0
    final_lr: float = 0.0

    def __init__(  # noqa: PLR0917 - MXNet's signature
        self,
        max_update: int,
        base_lr: float = 0.01,
        pwr: float = 2.0,
        final_lr: float = 0.0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        name = type(self).__name__
        self._set(pwr=_rate(name, "pwr", pwr), final_lr=_rate(name, "final_lr", final_lr))
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self._set(max_update=_decay_length(self, max_update))

    def after_warmup(self, num_update: int) -> float:
        """See the class."""
        x = _progress(num_update, self.warmup_steps, self.max_update)
        return self.final_lr + (self.base_lr - self.final_lr) * math.pow(1.0 - x, self.pwr)


@dataclasses.dataclass(frozen=True)
class CosineScheduler(Scheduler):
    """Fall as half a cosine wave: final_lr + (base_lr - final_lr) * (1 + cos(pi * x)) / 2.

    x runs from 0 at the end of the warm-up to 1 at `max_update`, and stays there.

    >>> [round(optimizers.CosineScheduler(max_update=4, base_lr=1.0)(t), 2) for t in (1, 2, 4)]
    [0.85, 0.5, 0.0]
    """

    max_update: int = 1
    final_lr: float = 0.0

    def __init__(  # noqa: PLR0917 - MXNet's signature
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0.0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        self._set(final_lr=_rate(type(self).__name__, "final_lr", final_lr))
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self._set(max_update=_decay_length(self, max_update))

    def after_warmup(self, num_update: int) -> float:
        """See the class."""
        x = _progress(num_update, self.warmup_steps, self.max_update)
        return self.final_lr + (self.base_lr - self.final_lr) * (1.0 + math.cos(math.pi * x)) / 2.0


def _progress(num_update: int, begin: int, end: int) -> float:
    return (min(num_update, end) - begin) / (end - begin)


SCHEDULES: Mapping[str, type[Scheduler]] = {
    cls.__name__: cls for cls in (Scheduler, FactorScheduler, MultiFactorScheduler, PolyScheduler, CosineScheduler)
}


def schedule_from_config(config: Mapping[str, Any], like: object = None) -> Scheduler:
    """The schedule that `Scheduler.config` described.

    like: a schedule whose class is known too, for classes of the user's own. Raises ValueError for an unknown name and
    for values that make no schedule, TypeError for unknown fields.
    """
    known = dict(SCHEDULES)
    if isinstance(like, Scheduler):
        known.setdefault(type(like).__name__, type(like))
    fields = checks.options("a schedule's config", config)
    name = fields.pop("name", None)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown schedule {shown(name)}; known: {', '.join(known)}")
    make: Callable[..., Scheduler] = known[name]
    return make(**fields)


# --- as a field of an optimizer


def schedule(*, default: None = None, doc: str) -> Any:
    """A hyperparameter that is a schedule, any function from the update's number to a learning rate, or None."""

    def check(owner: str, name: str, value: Any) -> Any:
        if value is None or callable(value):
            return value
        raise checks.wrong(f"{owner}: {name}", "a schedule (a function from update number to rate) or None", value)

    kind, wanted = Callable[[int], float] | None, "a function from update number to rate, or None"
    return Field(default, check, kind, wanted, doc, to_json=_schedule_json, from_json=_schedule_sent)


def _schedule_json(value: Any) -> Any:
    if isinstance(value, Scheduler):
        return value.config()
    return None if value is None else {"function": identity(value)}


def _schedule_sent(owner: str, name: str, value: Any, current: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "function" not in value:
        return schedule_from_config(value, current)
    if current is None or _schedule_json(current) != value:
        raise UnsupportedError(
            f"{owner}: {name} is a function ({value['function']}), which only the whole optimizer carries"
        )
    return current
