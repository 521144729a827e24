"""A base class that makes constructor, checks, JSON and help from declarations of attributes (fields.py).

It does for optimizers what `dataclasses` does for records, and type checkers treat it so (PEP 681). Unlike there, every
value is checked whenever it is set; errors about unknown arguments and attributes, and about positional arguments, list
the valid names; and a subclass may change a default alone, by `learning_rate = 0.1`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from mpikv.common.checks import meant, options, shown
from mpikv.optimizers.fields import Field, factors, field, flag, number, texts
from mpikv.optimizers.schedules import schedule
from mpikv.runtime.abort import tells

if TYPE_CHECKING:
    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:  # `typing` has it since Python 3.11
        return lambda cls: cls


class _Closing(type):
    """Marks an object after its constructor, so that it accepts no new attributes."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        object.__setattr__(made, "_closed", True)
        return made


@dataclass_transform(kw_only_default=True, field_specifiers=(factors, field, flag, number, schedule, texts))
class Declared(metaclass=_Closing):
    """The base of classes with declared attributes. `fields` has those of the class and its bases, by name.

    Setting an attribute that the object was not made with raises AttributeError, unless its name begins with `_`.
    """

    name: ClassVar[str] = ""
    fields: ClassVar[Mapping[str, Field]] = {}
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.__dict__.get("name") or cls.__name__.lower()
        if "fields" in cls.__dict__:
            raise TypeError(f"{cls.__name__}: a field is declared like `factor: float = number(default=0.5, doc=...)`")
        bases = [base for base in reversed(cls.__mro__) if base is not Declared and issubclass(base, Declared)]
        fields = {key: one for base in bases for key, one in base.fields.items()}
        for key, value in list(cls.__dict__.items()):
            if isinstance(value, Field):
                fields[key] = value
            elif key in fields:
                fields[key] = replace(fields[key], default=fields[key].check(cls.name, key, value))
            if key in fields:
                type.__delattr__(cls, key)  # so that a missing attribute of an instance is not found as the declaration
        cls.fields = fields
        cls._set_signature()
        common = {} if bases[0] is cls else bases[0].fields
        own = {key: one for key, one in fields.items() if one is not common.get(key)}
        if cls.__doc__ and own:
            lines = (f"    {key} = {one.default!r}: {one.doc} ({one.wanted})" for key, one in own.items())
            cls.__doc__ = "\n".join([cls.__doc__.rstrip(), "", "    Attributes, their defaults and values:", *lines])

    @classmethod
    def _set_signature(cls) -> None:
        """Set the constructor's signature, for `inspect`, `help` and errors about arguments."""
        if cls.__init__ is not Declared.__init__:
            signature = inspect.signature(cls.__init__)
            cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
            return
        arguments = [(key, one) for key, one in cls.fields.items() if one.init]
        cls.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    key,
                    inspect.Parameter.KEYWORD_ONLY if one.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=one.default,
                    annotation=one.type,
                )
                for key, one in sorted(arguments, key=lambda pair: pair[1].kw_only)
            ],
            return_annotation=None,
        )

    def __new__(cls, *args: Any, **_kwargs: Any) -> Self:
        """Refuse positional arguments: MXNet, PyTorch and this class have them in different orders."""
        if args:
            positional = [one for one in cls.__signature__.parameters.values() if one.kind <= one.VAR_POSITIONAL]
            if len(args) > len(positional) and not any(one.kind is one.VAR_POSITIONAL for one in positional):
                what = f"{', '.join(one.name for one in positional)} by position and others" if positional else "all"
                raise TypeError(f"{cls.__name__} takes {what} by name: {', '.join(cls._arguments())}")
        return super().__new__(cls)

    @tells
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        valid = self._arguments()
        unknown = sorted(kwargs.keys() - set(valid))
        if unknown:
            near = meant(unknown[0], valid)
            raise TypeError(
                f"{self.name} has no parameter {', '.join(unknown)[:200]}; it has {', '.join(valid)}.{near}"
            )
        for key, value in zip((key for key, one in self.fields.items() if not one.kw_only), args, strict=False):
            if key in kwargs:
                raise TypeError(f"{self.name}: {key} is given twice, by position and by name")
            kwargs[key] = value
        given = self.completed(kwargs)
        for key, one in self.fields.items():
            setattr(self, key, given.get(key, one.default))

    def completed(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the constructor's arguments, in which a subclass may fill in one from another."""
        return given

    @classmethod
    def _arguments(cls) -> list[str]:
        return [key for key, one in cls.fields.items() if one.init]

    def __setattr__(self, name: str, value: Any) -> None:
        field = self.fields.get(name)
        if field is None and "_closed" in self.__dict__ and not (name.startswith("_") or hasattr(self, name)):
            self._refuse(name)
        object.__setattr__(self, name, value if field is None else field.check(self.name, name, value))

    def _refuse(self, name: str) -> NoReturn:
        names = self._settable()
        raise AttributeError(f"{self.name} has no attribute {name!r}; it has {', '.join(names)}.{meant(name, names)}")

    def _settable(self) -> list[str]:
        return list(self.fields)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.fields)
        return f"{type(self).__name__}({values})"

    def attributes(self) -> dict[str, Any]:
        """Return the present value of every hyperparameter, as JSON; of a user's function its identity."""
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
        for name, sent in options("attributes", values).items():
            field = self.fields.get(name)
            if field is None:
                near = meant(name, self.fields)
                raise ValueError(f"{self.name} has no attribute {shown(name)}; it has {', '.join(self.fields)}.{near}")
            checked[name] = field.check(self.name, name, field.from_json(self.name, name, sent, getattr(self, name)))
        for name, value in checked.items():
            object.__setattr__(self, name, value)
