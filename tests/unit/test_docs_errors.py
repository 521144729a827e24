"""docs/errors.md quotes messages: what is constant in each still stands in the code."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTED = re.compile(r"^\| (`.+?`[^|]*) \|", re.MULTILINE)
OTHERS = ("(Open MPI)", "(PyTorch)")  # behind a message of another program's


def messages() -> list[str]:
    """The parts of all quoted messages of mpikv's own, between the dots."""
    text = (ROOT / "docs" / "errors.md").read_text()
    text = text[text.index("## Messages") : text.index("## Which error")]
    cells = [cell for cell in QUOTED.findall(text) if not cell.endswith(OTHERS)]
    return [part.strip() for cell in cells for span in re.findall(r"`([^`]+)`", cell) for part in span.split("...")]


def texts() -> Iterator[str]:
    """Every text of the package, those with values in them with an ellipsis in their places."""
    for path in (ROOT / "mpikv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)


@functools.cache
def whole() -> str:
    """All of them; not read where the module is only collected."""
    return "\n".join(texts())


@pytest.mark.parametrize("part", [part for part in messages() if len(part) > 8])
def test_a_quoted_message_is_in_the_code(part: str) -> None:
    assert part in whole()


def test_enough_is_quoted() -> None:
    assert len(messages()) > 25
