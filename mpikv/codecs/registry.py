"""Codecs by name, and the registry in which users add their own.

A program adds a codec of its own by `register`; an installed package lists its class as an entry point of the group
"mpikv.codecs". Every rank that encodes or decodes must know the codec, servers too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.metadata import entry_points
from typing import Any, TypeVar

from mpikv.arrays import compiled
from mpikv.codecs.base import Codec
from mpikv.codecs.cast import BFloat16, Float16
from mpikv.codecs.error_feedback import ErrorFeedback, takes_error_feedback
from mpikv.codecs.identity import Identity
from mpikv.codecs.int8 import Int8
from mpikv.codecs.onebit import OneBit
from mpikv.codecs.powersgd import PowerSGD
from mpikv.codecs.topk import TopK
from mpikv.codecs.twobit import TwoBit
from mpikv.common.checks import flag, meant, shown

ENTRY_POINTS = "mpikv.codecs"
_FEEDBACK = "error_feedback"
_GONE = {"randomk": "topk sends as few values, the largest ones, in twice the bytes"}

_registry: dict[str, type[Codec]] = {}

CodecClass = TypeVar("CodecClass", bound=type[Codec])


def register(cls: CodecClass) -> CodecClass:
    """Register a codec class by its `name`; a decorator. Local.

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


for _cls in (Identity, Float16, BFloat16, TwoBit, OneBit, Int8, TopK, PowerSGD):
    register(_cls)


def names() -> tuple[str, ...]:
    """Return all known names, sorted: those registered, and those of installed packages."""
    return tuple(sorted({*_registry, *(point.name for point in entry_points(group=ENTRY_POINTS))}))


def classes() -> tuple[type[Codec], ...]:
    """Return the classes that are registered."""
    return tuple(_registry.values())


def _class_of(name: str) -> type[Codec]:
    if name not in _registry:
        for point in entry_points(group=ENTRY_POINTS, name=name):
            register(point.load())
    if name not in _registry:
        known = f"known: {', '.join(names())}"
        instead = _GONE[name] if name in _GONE else meant(name, names()).strip()
        raise ValueError(f"unknown compression type {shown(name)}; {known}. {instead}".rstrip())
    return _registry[name]


def create(params: Mapping[str, Any] | str | Codec, *, feedback: bool = True) -> Codec:
    """Make a codec from its name, or from a dict with 'type' and its configuration. Local.

    feedback: the default of the parameter 'error_feedback'.

    A codec is returned unchanged. Raises ValueError for an unknown name (lists the names) or a value that the codec
    does not take, TypeError for anything else and for parameters that it does not have (lists those it has).
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
    lossy = takes_error_feedback(cls)
    takes = [*known, _FEEDBACK] if lossy else known
    if unknown := [name for name in given if name not in takes]:
        text = f"takes {', '.join(takes)}" if takes else "takes no parameters"
        raise TypeError(f"compression type {cls.name!r} {text}, not {', '.join(map(shown, unknown))}")
    feedback = lossy and flag(f"compression: {_FEEDBACK!r}", given.pop(_FEEDBACK, feedback))
    codec = cls(**given)
    compiled.prepare(cls.name)
    return ErrorFeedback(codec) if feedback else codec


def params_of(codec: Codec, *, feedback: bool = True) -> dict[str, Any]:
    """Return the parameters from which `create`, with the same `feedback`, makes an equal codec; they fit into JSON."""
    inner = codec.codec if isinstance(codec, ErrorFeedback) else codec
    params = {"type": codec.name, **asdict(inner)}  # type: ignore[call-overload]
    if takes_error_feedback(inner) and (inner is not codec) != feedback:
        params[_FEEDBACK] = not feedback
    return params
