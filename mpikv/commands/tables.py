"""Tables as plain lines: columns under their titles.

A benchmark prints each row when it is known. So a column has a least width, a row is laid out by itself, and one whose
text is longer pushes the rest of its line to the right. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Column(NamedTuple):
    """A column. width: the least. left: its texts begin in line, else they end so. text: what it says of a row."""

    title: str
    width: int
    left: bool = False
    text: Callable[[Row], object] = str


class Table:
    def __init__(self, *columns: Column) -> None:
        self.columns = columns

    def head(self) -> str:
        return self.line(*(column.title for column in self.columns))

    def of(self, row: Row, end: str = "") -> str:
        """Return the line of a row, from which each column takes its text."""
        return self.line(*(column.text(row) for column in self.columns), end=end)

    def line(self, *cells: object, end: str = "") -> str:
        """Return one line. cells: one for each column. end: what stands behind the last one."""
        texts = (
            str(cell).ljust(column.width) if column.left else str(cell).rjust(column.width)
            for column, cell in zip(self.columns, cells, strict=True)
        )
        return (" ".join(texts) + end).rstrip()
