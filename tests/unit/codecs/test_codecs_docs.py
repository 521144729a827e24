"""The sizes of encoded values in docs/compression.md are those that the codecs say."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpikv.codecs import registry

DOCUMENT = Path(__file__).parents[3] / "docs" / "compression.md"
TITLES = "| values, bytes as they are |"


def test_sizes() -> None:
    lines = DOCUMENT.read_text().splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith(TITLES)) :]
    titles, _, *rows, smaller = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[: table.index("")]]
    columns = [[name.strip("` ") for name in title.split(",")] for title in titles[1:]]
    for row in rows:
        n_elems, n_bytes, *sizes = [int(text.replace(" ", "")) for cell in row for text in cell.split(",")]
        assert n_bytes == 4 * n_elems
        for column, size in zip(columns, sizes, strict=True):
            assert {registry.create(one).wire_bytes(n_elems, np.dtype(np.float32)) for one in column} == {size}
    times = [f"{n_bytes / size:.1f}".removesuffix(".0") for size in sizes]
    assert smaller[1:] == times
