"""Hyperparameters of optimizers, each declared in one line, and the base class that works by the declarations.

    momentum: float = number(default=0.9, low=0.0, below=1.0, doc="factor of the last step in the new one")

From this line come an argument of the constructor with its default, the check of every value that the attribute is set
to, its description in `help()` and in docs/optimizers.md, and its form as JSON, in which it is sent to other ranks and
saved in files. A subclass may change a default alone, by `momentum = 0.5`.

`number`, `flag`, `texts` and `factors` declare common kinds of values; `field` declares any other kind. All arguments
are given by name, so that type checkers understand the declarations (PEP 681).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from mpikv.common import checks
from mpikv.common.checks import meant, shown
from mpikv.placement.keys import Key, check_key
from mpikv.runtime.abort import tells

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:  # `typing` has it since Python 3.11
        return lambda cls: cls


Value = TypeVar("Value")
Check = Callable[[str, str, Any], Any]
"""Gets the optimizer's name, the attribute's name and a value. Returns the value in one type, so that NumPy's numbers
become Python's, or raises TypeError or ValueError."""


def check_by(check: Callable[..., Value], *limits: Any) -> Callable[[str, str, Any], Value]:
    """Return the check of an attribute by a function of common/checks.py, which takes these limits, too."""
    return lambda owner, name, value: check(f"{owner}: {name}", value, *limits)


class Field(NamedTuple):
    """The declaration of a hyperparameter.

    default: checked, too, whenever an optimizer is made. type: for signatures. wanted: which values are valid, in
    words. init: whether it is an argument of the constructor. kw_only: whether that must be given by name. to_json:
    returns a value's JSON. from_json: the inverse; gets the optimizer's name, the attribute's name, the JSON, and the
    present value of the rank that reads it.
    """

    default: Any
    check: Check
    type: Any
    wanted: str
    doc: str
    init: bool = True
    kw_only: bool = True
    to_json: Callable[[Any], Any] = lambda value: value
    from_json: Callable[[str, str, Any, Any], Any] = lambda owner, name, sent, current: sent


def field(*, default: Any, check: Check, doc: str, type: Any = Any, wanted: str = "", **more: Any) -> Any:  # noqa: A002
    """Declare a hyperparameter of any kind; its values are JSON, or become JSON by `to_json`. See `Field`."""
    return Field(default, check, type, wanted, doc, **more)


def number(
    *, default: float | None, low: float | None = None, below: float | None = None, doc: str, kw_only: bool = True
) -> Any:
    """Declare a finite float of at least `low` and less than `below`; None is allowed if it is the default.

    >>> class Strange(optimizers.Optimizer):
    ...     decay: float = optimizers.number(default=0.5, low=0.0, below=1.0, doc='how much is lost')
    >>> Strange(decay=1.5)
    Traceback (most recent call last):
    ValueError: strange: decay must be less than 1, not 1.5
    """
    optional = default is None
    bounds = [f"at least {low:g}"] if low is not None else []
    bounds += [f"less than {below:g}"] if below is not None else []
    wanted = (" and ".join(bounds) or "any number") + (", or None" if optional else "")

    def check(owner: str, name: str, value: Any) -> float | None:
        if value is None and optional:
            return None
        if type(value) is float and (low is None or value >= low) and below is None and math.isfinite(value):
            return value  # a fast path, since a Trainer sets rescale_grad in every step
        kind = "a number or None" if optional else "a number"
        return checks.number(f"{owner}: {name}", value, low, below=below, wanted=kind)

    return Field(default, check, float | None if optional else float, wanted, doc, kw_only=kw_only)


def flag(*, default: bool, doc: str) -> Any:
    """Declare a hyperparameter that is True or False.

    >>> class Strange(optimizers.Optimizer):
    ...     centered: bool = optimizers.flag(default=False, doc='whether the mean is subtracted')
    >>> Strange(centered=True).centered
    True
    """
    return Field(default, check_by(checks.flag), bool, "True or False", doc)


def texts(*, default: tuple[str, ...], doc: str) -> Any:
    """Declare a hyperparameter that is a tuple of strings."""

    def check(owner: str, name: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise checks.wrong(f"{owner}: {name}", "a list or tuple of strings", value)
        return tuple(value)

    return Field(default, check, tuple[str, ...], "strings", doc, to_json=list)


def factors(*, init: bool, doc: str) -> Any:
    """Declare a dict from key to a factor of at least 0, empty by default.

    A list of pairs is accepted, too: JSON holds these, sorted, since its objects cannot have keys that are ints.
    """

    def check(owner: str, name: str, value: Any) -> dict[Key, float]:
        if isinstance(value, (Mapping, list, tuple)):
            pairs = list(value.items()) if isinstance(value, Mapping) else list(value)
            if all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
                what = f"{owner}: {name}"
                return {check_key(key): checks.number(f"{what}[{shown(key)}]", one, 0.0) for key, one in pairs}
        raise checks.wrong(f"{owner}: {name}", "a dict from key to factor", value)

    def pairs(value: Mapping[Key, float]) -> list[list[Key | float]]:
        return [[key, value[key]] for key in sorted(value, key=lambda key: (isinstance(key, str), key))]

    wanted = "a dict from key to a number of at least 0"
    return Field({}, check, dict[Key, float], wanted, doc, init=init, to_json=pairs)


class _Declaring(type):
    """The class of classes with declarations."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Mark an object after its constructor, so that it accepts no new attributes."""
        made = super().__call__(*args, **kwargs)
        object.__setattr__(made, "_closed", True)
        return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """Of the constructor, for `inspect`, `help` and editors."""
        init: Any = cls.__init__  # type: ignore[misc]
        if init is not Declared.__init__:
            own = inspect.signature(init)
            return own.replace(parameters=list(own.parameters.values())[1:])
        kinds = {True: inspect.Parameter.KEYWORD_ONLY, False: inspect.Parameter.POSITIONAL_OR_KEYWORD}
        arguments: Any = [(key, one) for key, one in cls.fields.items() if one.init]  # type: ignore[attr-defined]
        return inspect.Signature(
            [
                inspect.Parameter(key, kinds[one.kw_only], default=one.default, annotation=one.type)
                for key, one in sorted(arguments, key=lambda pair: pair[1].kw_only)
            ]
        )


@dataclass_transform(kw_only_default=True, field_specifiers=(factors, field, flag, number, texts))
class Declared(metaclass=_Declaring):
    """The base of classes with declared attributes. `fields` has those of the class and its bases, by name.

    Setting an attribute that the object was not made with raises AttributeError, unless its name begins with `_`.
    """

    name: ClassVar[str] = ""
    fields: ClassVar[Mapping[str, Field]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__dict__.get("name") or cls.__name__.lower()
        if "fields" in cls.__dict__:
            raise TypeError(f"{cls.__name__}: a field is declared like `factor: float = number(default=0.5, doc=...)`")
        bases = [base for base in reversed(cls.__mro__[1:]) if issubclass(base, Declared) and base is not Declared]
        fields = {key: one for base in bases for key, one in base.fields.items()}
        for key, value in list(cls.__dict__.items()):
            if isinstance(value, Field):
                fields[key] = value
            elif key in fields:
                fields[key] = fields[key]._replace(default=fields[key].check(cls.name, key, value))
            if key in fields:
                type.__delattr__(cls, key)  # so that a missing attribute of an instance is not found as the declaration
        cls.fields = fields
        common = bases[0].fields if bases else {}
        own = {key: one for key, one in fields.items() if one is not common.get(key)}
        if cls.__doc__ and own:
            lines = (f"    {key} = {one.default!r}: {one.doc} ({one.wanted})" for key, one in own.items())
            cls.__doc__ = "\n".join([cls.__doc__.rstrip(), "", "    Attributes, their defaults and values:", *lines])

    @tells
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        valid = [key for key, one in self.fields.items() if one.init]
        by_position = [key for key in valid if not self.fields[key].kw_only]
        if len(args) > len(by_position):  # MXNet, PyTorch and this class have them in different orders
            what = f"{', '.join(by_position)} by position and others" if by_position else "all"
            raise TypeError(f"{type(self).__name__} takes {what} by name: {', '.join(valid)}")
        unknown = sorted(kwargs.keys() - set(valid))
        if unknown:
            named, near = ", ".join(unknown)[:200], meant(unknown[0], valid)
            raise TypeError(f"{self.name} has no parameter {named}; it has {', '.join(valid)}.{near}")
        for key, value in zip(by_position, args, strict=False):
            if key in kwargs:
                raise TypeError(f"{self.name}: {key} is given twice, by position and by name")
            kwargs[key] = value
        given = self.completed(kwargs)
        for key, one in self.fields.items():
            setattr(self, key, given.get(key, one.default))

    def completed(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the constructor's arguments, in which a subclass may fill in one from another."""
        return given

    def __setattr__(self, name: str, value: Any) -> None:
        field = self.fields.get(name)
        if field is None and "_closed" in self.__dict__ and not (name.startswith("_") or hasattr(self, name)):
            names = self._settable()
            raise AttributeError(
                f"{self.name} has no attribute {name!r}; it has {', '.join(names)}.{meant(name, names)}"
            )
        object.__setattr__(self, name, value if field is None else field.check(self.name, name, value))

    def _settable(self) -> list[str]:
        return list(self.fields)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.fields)
        return f"{type(self).__name__}({values})"

    def attributes(self) -> dict[str, Any]:
        """Return the present value of every hyperparameter, as JSON; of a user's function its identity.

        Example: see `set_attributes`.
        """
        return {name: field.to_json(getattr(self, name)) for name, field in self.fields.items()}

    def set_attributes(self, values: Mapping[str, Any]) -> None:
        """Set all or some hyperparameters from values that `attributes` returned; on an error nothing is changed.

        Raises ValueError for an unknown name, UnsupportedError for the identity of a function that this optimizer does
        not have, and TypeError or ValueError for a wrong value.

        >>> optimizer = optimizers.SGD()
        >>> optimizer.set_attributes({'momentum': 0.9})
        >>> optimizer.attributes()['momentum']
        0.9
        """
        checked: dict[str, Any] = {}
        for name, sent in checks.options("attributes", values).items():
            field = self.fields.get(name)
            if field is None:
                near = meant(name, self.fields)
                raise ValueError(f"{self.name} has no attribute {shown(name)}; it has {', '.join(self.fields)}.{near}")
            checked[name] = field.check(self.name, name, field.from_json(self.name, name, sent, getattr(self, name)))
        for name, value in checked.items():
            object.__setattr__(self, name, value)
