"""Every public name of the library says what it does and shows it: the examples in docstrings are run here.

Examples are in the form of `doctest`, and each is complete: it needs no other one. It runs in an empty directory of its
own, with the names that `mpikv`, `mpikv.torch` and `mpikv.jax` say at their top.

A public class or function has an example, or points to another one whose example uses it. A public method or property
has one of its own, or is used in one of its class, or points to another method whose example uses it. A method of a
public base class is shown there.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import frameworks
import numpy as np
import pytest

import mpikv
from mpikv import data, kv, optimizers

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NAMES = {"np": np, "mpikv": mpikv, "kv": kv, "data": data, "optimizers": optimizers}
MODULES = ["mpikv", *(f"mpikv.{name}" for name in ("kv", "data", "optimizers", "errors"))]
MODULES += [f"mpikv.testing.{name}" for name in ("continued", "groups", "ranks", "reference", "stores")]
MODULES += [f"mpikv.{library}" for library in ("torch", "jax") if importlib.util.find_spec(library) is not None]


class Public(NamedTuple):
    """What users see. holders: of a method or property, its class and the bases of that, whose examples may show it."""

    name: str
    value: Any
    holders: tuple[type, ...] = ()


def public() -> dict[str, Public]:
    """Everything by its full name, each thing once."""
    values: dict[str, Any] = {}
    for module in map(importlib.import_module, MODULES):
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", [name for name in own if not name.startswith("_")]):
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and value not in values.values():
                values[f"{module.__name__}.{name}"] = value
    found = {name: Public(name, value) for name, value in values.items()}
    for name, value in values.items():
        if inspect.isclass(value):
            for member in members(value, set(values.values()) - {value}):
                found[f"{name}.{member.name}"] = member
    return found


def members(cls: type, others: set[Any]) -> Iterator[Public]:
    """What the class defines, or has from a base that is not public; but not what a public base shows already."""
    bases = tuple(base for base in cls.__mro__ if base.__module__.startswith("mpikv"))
    inherited = {name for base in bases if base in others for name in dir(base)}
    for name in dict.fromkeys(name for base in bases for name in vars(base) if not name.startswith("_")):
        value = inspect.getattr_static(cls, name)
        function = getattr(value, "__func__", value)  # of a classmethod or staticmethod
        if name not in inherited and (inspect.isfunction(function) or isinstance(value, property)):
            yield Public(name, function, bases)


def examples(value: Any) -> list[doctest.Example]:
    text = getattr(value, "__doc__", None) or ""
    return doctest.DocTestParser().get_examples(text)


def is_shown(one: Public) -> bool:
    """Whether it has an example, or is used in one of its class, or of the method that its docstring points to."""
    if examples(one.value):
        return True
    pointed_to = re.findall(r"Example:\s+see\s+`(\w+)`", one.value.__doc__)
    if not one.holders:
        others = [vars(sys.modules[one.value.__module__])[name] for name in pointed_to]
        return any(re.search(rf"\b{one.value.__name__}\b", e.source) for other in others for e in examples(other))
    for holder in one.holders:
        pointed = [vars(holder).get(name) for name in pointed_to]
        for value in (holder, vars(holder).get(one.name), *pointed):
            text = "".join(example.source for example in examples(getattr(value, "__func__", value)))
            if re.search(rf"\b{one.name}\b", text):
                return True
    return False


FOUND = public()


@pytest.mark.parametrize("name", FOUND)
def test_what_is_public_is_described_and_shown(name: str) -> None:
    one = FOUND[name]
    assert (one.value.__doc__ or "").strip(), f"{name} has no docstring"
    assert is_shown(one), f"{name} has no example"


@pytest.mark.parametrize("name", [name for name, one in FOUND.items() if examples(one.value)])
def test_the_example_does_what_it_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(optimizers, "_registry", dict(optimizers._registry))  # that of `register` is for itself alone
    text, names = FOUND[name].value.__doc__, dict(NAMES)
    for library in re.findall(r">>> import (torch|PIL)", text):
        frameworks.need(library)
    for module, short in (("mpikv.torch", "mt"), ("mpikv.jax", "mj")):
        if name.startswith(f"{module}."):
            names[short] = importlib.import_module(module)
            names |= {"torch": sys.modules.get("torch"), "jnp": sys.modules.get("jax.numpy")}
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(test, out=report.append)
    assert not failed, "".join(report)
