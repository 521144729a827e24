"""Tables as plain lines."""

from __future__ import annotations

from mpikv.commands.tables import Column, Table


def test_columns_stand_under_their_titles_and_no_text_is_cut() -> None:
    table = Table(Column("bytes", 9), Column("what", 8, left=True), Column("ms", 5))
    assert table.head() == "    bytes what        ms"
    assert table.line("64K", "ring", 1.5) == "      64K ring       1.5"
    assert table.line("4", "[red]", 2, end="  WRONG") == "        4 [red]        2  WRONG"
    assert table.line("4", "raw MPI, packed", 1) == "        4 raw MPI, packed     1"
