"""What is declared of optimizers is what is seen of them. The tables of docs/reference/optimizers.md are written by

python tests/unit/optimizers/test_optimizers_docs.py
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from mpikv import optimizers
from mpikv.optimizers import Adam, Array, Optimizer, Scalar, number
from mpikv.optimizers.schedules import SCHEDULES, Scheduler

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "optimizers.md"
BEGIN, END = "<!-- from the declarations -->\n", "<!-- until here -->\n"


def tables() -> str:
    parts = [*fields(), "", "## Schedules", "", *schedules(), "", "## What is kept", "", *states()]
    return "\n".join(parts) + "\n"


def fields() -> Iterator[str]:
    yield "| optimizer | parameter | default | values | meaning |"
    yield "|---|---|---|---|---|"
    rows = [("all", name, field) for name, field in Optimizer.fields.items()]
    for name in optimizers.names():
        own = type(optimizers.create(name)).fields.items()
        rows += [(f"`{name}`", key, field) for key, field in own if field is not Optimizer.fields.get(key)]
    for name, key, field in rows:
        default = f"`{field.default!r}`" if field.init else "none"
        yield f"| {name} | `{key}` | {default} | {field.wanted} | {field.doc.replace('|', chr(92) + '|')} |"


def schedules() -> Iterator[str]:
    yield "| schedule | argument | default | values | meaning |"
    yield "|---|---|---|---|---|"
    common = dataclasses.fields(Scheduler)
    for cls in SCHEDULES.values():
        own = common if cls is Scheduler else [one for one in dataclasses.fields(cls) if one not in common]
        name = "all" if cls is Scheduler else f"`{cls.__name__}`"
        for one in own:
            default = "none" if one.default is dataclasses.MISSING else f"`{one.default!r}`"
            yield f"| {name} | `{one.name}` | {default} | {one.metadata['wanted']} | {one.metadata['doc']} |"


def states() -> Iterator[str]:
    yield "| optimizer | for each element of a key | for each key |"
    yield "|---|---|---|"
    for name in optimizers.names():
        found = type(optimizers.create(name)).states
        arrays = [
            f"`{one.name}`: {one.doc}{f' (with `{one.where}`)' * bool(one.where)}" for one in found if arrayed(one)
        ]
        scalars = ["`t`: the number of updates", *(f"`{one.name}`: {one.doc}" for one in found if not arrayed(one))]
        yield f"| `{name}` | {'; '.join(arrays) or 'nothing'} | {'; '.join(scalars)} |"


def arrayed(one: Array | Scalar) -> bool:
    return isinstance(one, Array)


def test_the_documents_tables_are_the_declarations() -> None:
    _, _, rest = DOCUMENT.read_text().partition(BEGIN)
    assert rest.partition(END)[0] == tables(), "python tests/unit/optimizers/test_optimizers_docs.py writes them anew"


@pytest.mark.parametrize("name", optimizers.names())
def test_what_is_declared_can_be_seen(name: str) -> None:
    """By people who ask for help, and by programs that look at signatures and annotations."""
    cls = type(optimizers.create(name))
    parameters = inspect.signature(cls).parameters
    hints = typing.get_type_hints(cls)
    for key, field in cls.fields.items():
        assert field.doc, key
        assert field.wanted, key
        assert hints[key] == field.type
        if field.init:
            assert parameters[key].default == field.default
            assert parameters[key].annotation == field.type
        if field is not Optimizer.fields.get(key):
            assert f"{key} = {field.default!r}: {field.doc} ({field.wanted})" in cls.__doc__
    for one in cls.states:
        assert f"{one.name}: {one.doc}" in cls.__doc__
        assert not arrayed(one) or not one.where or one.where in cls.fields


@pytest.mark.parametrize("cls", SCHEDULES.values())
def test_a_schedules_arguments_are_its_fields(cls: type[Scheduler]) -> None:
    """In MXNet's order, and each of them is checked and described."""
    found = [(one.name, one.default) for one in dataclasses.fields(cls)]
    missing = {inspect.Parameter.empty: dataclasses.MISSING}
    parameters = inspect.signature(cls).parameters.values()
    assert [(one.name, missing.get(one.default, one.default)) for one in parameters] == found
    assert all({"check", "wanted", "doc"} <= one.metadata.keys() for one in dataclasses.fields(cls))
    order = {"Factor": "step", "MultiFactor": "step", "Poly": "max_update", "Cosine": "max_update", "": "base_lr"}
    assert found[0][0] == order[cls.__name__.removesuffix("Scheduler")]


def test_subclasses() -> None:
    class Eager(Adam):
        """A new default, and a field and a state more."""

        learning_rate = 1
        late: float = number(default=None, doc="")
        states = (*Adam.states, Array("best", "", where="late", from_weight=True), Scalar("sum", "", 0.5))

    assert list(Eager.fields) == [*Adam.fields, "late"]
    assert Eager().learning_rate == 1.0
    assert Eager(0.5).learning_rate == 0.5
    assert Adam().learning_rate == 0.001
    assert not hasattr(Adam, "late")
    with pytest.raises(TypeError, match="eager: learning_rate is given twice"):
        Eager(0.5, learning_rate=0.5)
    with pytest.raises(ValueError, match="broken: beta1 must be less than 1"):
        type("Broken", (Adam,), {"beta1": 2})
    weight = np.ones(3)
    assert list(Eager().state_names()) == ["mean", "var"]
    assert set(Eager().init(weight)) == {"t", "sum", "mean", "var"}
    assert Eager(late=1).init(weight)["best"].tolist() == [1, 1, 1]


def test_a_class_of_a_users_program_travels_whole() -> None:
    """To a server, which does not have the program: by value. It imports neither PyTorch nor Numba for that."""

    class Eager(Adam):
        learning_rate = 1
        late: float = number(default=None, doc="")

    program = """
import inspect, sys, cloudpickle, mpikv.codecs
there = cloudpickle.loads(sys.stdin.buffer.read())
print(there.attributes() | {"signature": str(inspect.signature(type(there)))}, {"torch", "numba"} & sys.modules.keys())
there.beta1 = 3
"""
    Eager.__module__ = "__main__"
    sent = cloudpickle.dumps(Eager(late=2))
    found = subprocess.run([sys.executable, "-c", program], input=sent, capture_output=True, check=False)
    signature = str(inspect.signature(Eager))
    assert found.stdout.decode().strip() == f"{Eager(late=2).attributes() | {'signature': signature}} set()"
    assert "eager: beta1 must be less than 1, not 3" in found.stderr.decode()


if __name__ == "__main__":
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + tables() + END + rest.partition(END)[2])
