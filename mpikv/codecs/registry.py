"""Codecs by name, and the registry in which users add their own.

`create({'type': '2bit', 'threshold': 0.5})` makes one of its name and its configuration. A package that installs a
codec names its class in the group of entry points "mpikv.codecs", where it is found by its name; a program calls
`register`. Every rank that meets the codec must know it, servers too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.metadata import entry_points
from typing import Any, TypeVar

from mpikv.checks import meant, shown
from mpikv.codecs.base import Codec
from mpikv.codecs.cast import BFloat16, Float16
from mpikv.codecs.identity import Identity

ENTRY_POINTS = "mpikv.codecs"

_registry: dict[str, type[Codec]] = {}

CodecClass = TypeVar("CodecClass", bound=type[Codec])


def register(cls: CodecClass) -> CodecClass:
    """Make a codec class known by its `name`; a decorator. Local.

    Raises TypeError for anything but a Codec class with a name, ValueError where another class has the name.
    """
    if not (isinstance(cls, type) and issubclass(cls, Codec) and isinstance(getattr(cls, "name", None), str)):
        raise TypeError(f"register takes a class derived from Codec, with a name, not {shown(cls)}")
    other = _registry.setdefault(cls.name, cls)
    if other is not cls:
        raise ValueError(
            f"the codec name {cls.name!r} belongs to {other.__module__}.{other.__qualname__}; "
            f"give {cls.__module__}.{cls.__qualname__} another `name`"
        )
    return cls


for _cls in (Identity, Float16, BFloat16):
    register(_cls)


def names() -> tuple[str, ...]:
    """Return the names that are known, sorted: those registered, and those of installed packages."""
    return tuple(sorted({*_registry, *(point.name for point in entry_points(group=ENTRY_POINTS))}))


def _class_of(name: str) -> type[Codec]:
    if name not in _registry:
        for point in entry_points(group=ENTRY_POINTS, name=name):
            register(point.load())
    if name not in _registry:
        raise ValueError(f"unknown compression type {shown(name)}; known: {', '.join(names())}.{meant(name, names())}")
    return _registry[name]


def create(params: Mapping[str, Any] | str | Codec) -> Codec:
    """Make a codec from its name, or from a dict with 'type' and its configuration. Local.

    A codec is returned as it is. Raises ValueError for an unknown name (lists the names) or a value that the codec does
    not take, TypeError for anything else and for parameters that it does not have (lists those it has).
    """
    if isinstance(params, Codec):
        return params
    if isinstance(params, str):
        params = {"type": params}
    if not isinstance(params, Mapping) or not isinstance(params.get("type"), str):
        raise TypeError(f"a codec is a name, or a dict with 'type', its name, not {shown(params)}")
    cls = _class_of(params["type"])
    given = {name: value for name, value in params.items() if name != "type"}
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    if unknown := [name for name in given if name not in known]:
        takes = f"takes {', '.join(known)}" if known else "takes no parameters"
        raise TypeError(f"compression type {cls.name!r} {takes}, not {', '.join(map(shown, unknown))}")
    return cls(**given)


def params_of(codec: Codec) -> dict[str, Any]:
    """What `create` makes an equal codec of: JSON."""
    return {"type": codec.name, **asdict(codec)}  # type: ignore[call-overload]
