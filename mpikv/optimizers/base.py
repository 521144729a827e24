"""The base of optimizers: declared hyperparameters and states, a formula, and a pure pair `init` / `update`.

`init(weight)` makes the state of one key, or of one slice of a key; `update` changes the weight in place and returns
the new state. The optimizer itself keeps nothing of a key, so that one object serves any number of keys and slices, and
a state can be saved, cut, joined and moved to another rank (states.py).

How an update runs. The weight is seen flat. blocks.py runs the formula, an elementwise one on blocks of the weight; no
result depends on where blocks or slices begin. Arithmetic is in float32 or float64, and each element is rounded once to
the weight's dtype. With `multi_precision` the state of a float16 or bfloat16 weight has a float32 copy of it, which the
formula changes and from which the weight is rounded. docs/optimizers.md shows a new one.

Source of the interface and of the common parameters: MXNet 1.9, python/mxnet/optimizer/optimizer.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mpikv.arrays.as_numpy import BFLOAT16, HostArray, is_space_array
from mpikv.common.checks import shown
from mpikv.errors import ShapeMismatch, UnsupportedError
from mpikv.optimizers import blocks
from mpikv.optimizers.blocks import Scratch, check_array, work_dtype
from mpikv.optimizers.declared import Declared, factors, flag, number
from mpikv.optimizers.schedules import Scheduler, schedule
from mpikv.optimizers.step import Array, Arrays, Scalar, State, Step, limit
from mpikv.placement.keys import Key
from mpikv.spaces.base import SpaceArray

if TYPE_CHECKING:
    from typing_extensions import Self


class Optimizer(Declared):
    """The base of all optimizers. Attributes may be changed at any time; each new value is checked.

    With an `lr_scheduler` the rate of an update is `lr_scheduler(t)`, where t counts the updates of the key, and
    `learning_rate` is not used; one that is given to the constructor replaces the schedule's `base_lr`. None stands for
    the default. `lr_mult` and `wd_mult` apply to every key in them, whatever its name is.

    Raises TypeError or ValueError, which name the parameter, for a value of the wrong kind.

    >>> optimizer, weight, grad = optimizers.SGD(learning_rate=0.5, momentum=0.9), np.ones(2), np.ones(2)
    >>> optimizer.check_update('w', weight, grad)
    >>> state = optimizer.update('w', weight, grad, optimizer.init(weight))
    >>> weight, state
    (array([0.5, 0.5]), {'t': 1, 'momentum': array([-0.5, -0.5])})
    >>> state = optimizer.update_sum('w', weight, [grad, grad], state)  # with the sum of the two
    >>> optimizer.complete_arrays(weight, state, ['momentum'])
    >>> optimizer.check_state(weight, state)
    >>> optimizer.set_learning_rate(0.1), optimizer.set_lr_mult({'bias': 2.0}), optimizer.set_wd_mult({'bias': 0.0})
    (None, None, None)
    >>> optimizer.config()['name'], optimizer.state_names(), optimizer.sums
    ('sgd', ['momentum'], True)
    """

    learning_rate: float = number(default=0.01, low=0.0, doc="the rate of an update if there is no lr_scheduler")
    rescale_grad: float = number(
        default=1.0, doc="the gradient is multiplied by it first; a Trainer sets it to 1 / batch size"
    )
    wd: float = number(default=0.0, low=0.0, doc="weight decay")
    clip_gradient: float | None = number(
        default=None, doc="the gradient's elements are limited to +- this; None or <= 0: not"
    )
    lr_scheduler: Callable[[int], float] | None = schedule(doc="the rate of each update")
    multi_precision: bool = flag(default=False, doc="float16 and bfloat16 weights have a float32 copy in the state")
    lr_mult: dict[Key, float] = factors(init=False, doc="factors of the learning rate; keys without one have 1")
    wd_mult: dict[Key, float] = factors(init=False, doc="factors of the weight decay; keys without one have 1")

    elementwise = True
    """False if the formula needs the whole value of a key, which is then not cut."""
    lazy: ClassVar[bool] = False
    """True if `formula` may be applied to the pushed rows of a row-sparse key alone; other rows do not change then."""
    states: ClassVar[tuple[Array | Scalar, ...]] = ()
    """What a state holds beside "t", the number of updates, and "master", the float32 copy of `multi_precision`."""
    scratch: ClassVar[int] = 2
    """How many temporary arrays `formula` needs."""

    _temporaries: ClassVar[Scratch]  # of each instance; without ClassVar type checkers would take it for a field
    _arrays: ClassVar[Mapping[str, Array]] = {}
    _always: ClassVar[tuple[str, ...] | None] = ()  # the names of all arrays; None if some depend on a field
    _numbers: ClassVar[Mapping[str, float]] = {"t": 0}  # the first values of the numbers in a state

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._arrays = {one.name: one for one in cls.states if isinstance(one, Array)}
        cls._always = None if any(one.where for one in cls._arrays.values()) else tuple(cls._arrays)
        cls._numbers = {"t": 0, **{one.name: one.begin for one in cls.states if isinstance(one, Scalar)}}
        if cls.__doc__ and cls.states:
            lines = (f"    {one.name}: {one.doc}" for one in cls.states)
            cls.__doc__ = "\n".join([cls.__doc__, "", "    State:", *lines])

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        made = super().__new__(cls)
        object.__setattr__(made, "_temporaries", Scratch())  # of its own
        return made

    def completed(self, given: dict[str, Any]) -> dict[str, Any]:
        """See `Declared`. The learning rate and the `base_lr` of a schedule become one value.

        >>> optimizers.SGD(learning_rate=0.5, lr_scheduler=optimizers.FactorScheduler(10)).lr_scheduler.base_lr
        0.5
        """
        rate, schedule = given.get("learning_rate"), given.get("lr_scheduler")
        if isinstance(schedule, Scheduler):
            given["lr_scheduler"] = schedule = schedule if rate is None else replace(schedule, base_lr=rate)
            given["learning_rate"] = schedule.base_lr
        elif rate is None:
            given.pop("learning_rate", None)
        return given

    # --- hyperparameters

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate. Raises UnsupportedError if there is a schedule."""
        if self.lr_scheduler is not None:
            raise UnsupportedError(
                f"{self.name} takes its learning rate from its lr_scheduler; set lr_scheduler to None or to another one"
            )
        self.learning_rate = learning_rate

    def set_lr_mult(self, lr_mult: Mapping[Key, float]) -> None:
        """Replace the factors of the learning rate; keys without one have 1."""
        self.lr_mult = lr_mult  # type: ignore[assignment] # checked, and made a dict

    def set_wd_mult(self, wd_mult: Mapping[Key, float]) -> None:
        """Replace the factors of the weight decay; keys without one have 1."""
        self.wd_mult = wd_mult  # type: ignore[assignment] # as above

    def config(self) -> dict[str, Any]:
        """Return {"name", "attributes"} as JSON. Optimizers with equal configs make the same updates."""
        return {"name": self.name, "attributes": self.attributes()}

    # --- state

    def state_names(self) -> Sequence[str]:
        """Return the names of a state's arrays under the present hyperparameters."""
        if self._always is not None:
            return self._always
        return [name for name, one in self._arrays.items() if not one.where or getattr(self, one.where)]

    def init(self, weight: HostArray) -> State:
        """Make the state of a key, or a slice of one, that has this value. Local; keeps no reference to `weight`.

        Raises TypeError for a weight that is no NumPy array or has an unsupported dtype.
        """
        check_array(self.name, "weight", weight)
        return self._complete(weight.reshape(-1), dict(self._numbers), self.state_names())

    def _complete(self, flat: HostArray, state: State, names: Sequence[str]) -> State:
        """Add and remove arrays of the state, if hyperparameters have changed since the last update."""
        if self.multi_precision and flat.dtype in (np.float16, BFLOAT16):
            if "master" not in state:
                state["master"] = self._copy(flat, np.dtype(np.float32))
        else:
            state.pop("master", None)
        self.complete_arrays(flat, state, names)
        return state

    def complete_arrays(self, flat: HostArray, state: State, names: Sequence[str]) -> None:
        """Add missing arrays of these names, remove others. Raises ValueError for an array of wrong size or dtype."""
        work = work_dtype(flat.dtype)
        for name in [name for name in state if name not in names and name not in ("t", "master")]:
            if is_space_array(state[name]):
                del state[name]
        for name in names:
            if name not in state:
                from_weight = self._arrays[name].from_weight
                state[name] = self._copy(flat, work) if from_weight else np.zeros_like(flat, dtype=work)
            elif state[name].shape != flat.shape or state[name].dtype != work:
                found = _described(state[name])
                raise ValueError(f"{self.name}: {name!r} of the state is {found}, of this weight {work}{flat.shape}")

    def _copy(self, flat: SpaceArray, dtype: np.dtype[Any]) -> SpaceArray:
        made = np.empty_like(flat, dtype=dtype)
        blocks.round_into(made, flat)
        return made

    def check_state(self, weight: HostArray, state: State) -> None:
        """Raise ValueError if `state`, for example from a file, cannot be a state of `weight` by this optimizer."""
        expected = self.init(weight)
        if type(state) is not dict or set(state) != set(expected):
            raise ValueError(f"a state of {self.name} holds {_listed(expected)}, this one {_listed(state)}")
        for name, value in expected.items():
            wanted, found = _described(value), _described(state[name])
            if wanted != found:
                given = found if is_space_array(state[name]) else repr(state[name])
                raise ValueError(f"{name!r} in a state of {self.name} is {wanted}, not {given}")

    # --- update

    def update(self, key: Key, weight: HostArray, grad: HostArray, state: State) -> State:
        """Make one update: change `weight` in place and return the new state, which reuses the memory of the old one.
        Local.

        weight: any supported dtype; the whole value of a key in its shape, or a flat slice of it if `elementwise`.
        grad: same shape, any supported dtype, not changed. state: of `init` or of the last update.
        Raises ShapeMismatch, TypeError, or ValueError for a read-only weight; the weight is unchanged then.
        """
        return self.update_sum(key, weight, (grad,), state)

    @property
    def sums(self) -> bool:
        """Whether `update_sum` accepts several terms: if it is elementwise and has no `update` of its own."""
        return self.elementwise and type(self).update is Optimizer.update

    @property
    def updates_rows(self) -> bool:
        """Whether it can update a row-sparse key: it is `lazy`, and its `lazy_update`, if it has one, is True.

        >>> optimizers.SGD().updates_rows, optimizers.SGD(lazy_update=False).updates_rows
        (True, False)
        """
        return self.lazy and self.sums and getattr(self, "lazy_update", True)

    def update_sum(self, key: Key, weight: HostArray, terms: Sequence[HostArray], state: State) -> State:
        """Do what `update` does, with the sum of `terms`: arrays like `grad`, of one dtype, added in their order.

        They are added block by block as the formula runs. Several terms are allowed only if `sums` is True.
        """
        for term in terms:
            self.check_update(key, weight, term)
        if type(state) is not dict or type(state.get("t")) is not int:
            raise TypeError(f"{self.name}: a state is what init or the last update returned, not {shown(state)}")
        flat = weight.reshape(-1) if weight.flags.c_contiguous else weight.flatten()
        names = self.state_names()
        self._complete(flat, state, names)
        step = self._step(key, flat, weight.shape, state)
        # An overflow or a NaN is visible in the weight; no user would see a warning that a server prints.
        with np.errstate(all="ignore"):
            blocks.run(
                functools.partial(self.formula, step),
                flat,
                [term.reshape(-1) for term in terms],
                {name: state[name] for name in names},
                self._temporaries,
                master=state.get("master"),
                dtype=work_dtype(flat.dtype),
                temporaries=self.scratch,
                elementwise=self.elementwise,
            )
        if not weight.flags.c_contiguous:
            weight[...] = flat.reshape(weight.shape)
        state["t"] = step.t
        return state

    def check_update(self, key: Key, weight: HostArray, grad: HostArray) -> None:
        """Raise what `update` raises for wrong arrays."""
        check_array(self.name, "weight", weight)
        check_array(self.name, "grad", grad)
        if grad.shape != weight.shape:
            raise ShapeMismatch(f"{self.name}: key {shown(key)} has shape {weight.shape}, its gradient {grad.shape}")
        if isinstance(weight, np.ndarray) and not weight.flags.writeable:
            raise ValueError(f"{self.name}: the weight of key {shown(key)} is read-only; an update changes it in place")

    def _step(self, key: Key, flat: HostArray, shape: tuple[int, ...], state: State) -> Step:
        t = state["t"] + 1
        rate = self.learning_rate if self.lr_scheduler is None else self.lr_scheduler(t)
        return Step(
            key=key,
            t=t,
            learning_rate=rate * self.lr_mult.get(key, 1.0),
            wd=self.wd * self.wd_mult.get(key, 1.0),
            global_rate=rate,
            real=work_dtype(flat.dtype).type,
            shape=shape,
            state=state,
        )

    def formula(self, step: Step, w: HostArray, g: HostArray, arrays: Arrays, tmp: list[HostArray]) -> None:
        """Change the block `w` and the state's `arrays` in place. g: the gradient, not to be changed. tmp: scratch.

        All arrays are flat, of one length and in the arithmetic's dtype. If the optimizer is elementwise, the result
        must not depend on where in the weight the block begins. Example: see `prepared`.
        """
        raise UnsupportedError(f"{type(self).__name__} defines no formula")

    def prepared(
        self, step: Step, w: HostArray, g: HostArray, tmp: list[HostArray], *, decay: bool = False, scale: float = 1.0
    ) -> HostArray:
        """Return `scale` * clip(rescale_grad * g [+ wd * w if `decay`]).

        It is in tmp[0], or is `g` itself if that is equal. tmp[1] is used if `decay` is True and wd is not 0.

        >>> class Plain(optimizers.Optimizer):
        ...     def formula(self, step, w, g, arrays, tmp):
        ...         w -= self.prepared(step, w, g, tmp, decay=True, scale=step.learning_rate)
        >>> optimizer, weight = Plain(learning_rate=0.5, wd=1.0), np.ones(2)
        >>> optimizer.update('w', weight, np.zeros(2), {'t': 0})
        {'t': 1}
        """
        real, bound = step.real, self.clip_gradient
        decay = decay and step.wd != 0.0
        clip = bound is not None and bound > 0.0
        rescale = self.rescale_grad if clip or decay else self.rescale_grad * scale
        if rescale == 1.0 and not clip and not decay:
            return g
        out: HostArray = np.multiply(g, real(rescale), out=tmp[0])
        if decay:
            out += np.multiply(w, real(step.wd), out=tmp[1])
        limit(out, bound, real)
        if scale != 1.0 and (clip or decay):
            out *= real(scale)
        return out


def _described(value: Any) -> str:
    return f"{value.dtype}{value.shape}" if is_space_array(value) else f"a number ({type(value).__name__})"


def _listed(state: Any) -> str:
    return ", ".join(sorted(map(str, state))) if type(state) is dict else shown(state)
