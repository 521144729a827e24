"""Tables as plain lines: columns under their titles, laid out by rich.

A benchmark prints each row when it is known. So a column has a least width, a row is laid out by itself, and one whose
text is longer pushes the rest of its line to the right. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ENDLESS = 10_000  # characters: a line is never broken, whoever reads it


class Column(NamedTuple):
    """A column. width: the least. left: texts begin in line, otherwise they end in line."""

    title: str
    width: int
    left: bool = False


class Table:
    """A table with these columns."""

    def __init__(self, *columns: Column) -> None:
        self.columns = columns

    def head(self) -> str:
        """Return the titles, in one line."""
        return self.line(*(column.title for column in self.columns))

    def line(self, *cells: object, end: str = "") -> str:
        """Return one row. cells: one for each column. end: what stands behind the last one."""
        return (_laid_out(self.columns, cells) + end).rstrip()


def _laid_out(columns: Sequence[Column], cells: Sequence[object]) -> str:
    from rich.console import Console  # noqa: PLC0415 - only the rank that prints pays for the import
    from rich.table import Table as RichTable  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    grid = RichTable.grid(padding=0)  # versions of rich do not agree whether padding is part of a least width
    for i, column in enumerate(columns):
        if i:
            grid.add_column(width=1)
        grid.add_column(min_width=column.width, justify="left" if column.left else "right", no_wrap=True)
    texts = [Text(str(cell)) for cell in cells]
    grid.add_row(*[text for cell in texts for text in (Text(), cell)][1:])
    console = Console(width=ENDLESS, color_system=None)
    with console.capture() as captured:
        console.print(grid)
    return captured.get().rstrip("\n")
