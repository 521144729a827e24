"""Tables as plain lines."""

from __future__ import annotations

import pytest

from mpikv.commands.tables import Column, Table

TABLE = Table(Column("bytes", 9), Column("what", 8, left=True), Column("ms", 5))


def test_columns_stand_under_their_titles() -> None:
    assert TABLE.head() == "    bytes what        ms"
    assert TABLE.line("64K", "ring", 1.5) == "      64K ring       1.5"
    assert TABLE.line("4", "[red]", 2, end="  WRONG") == "        4 [red]        2  WRONG"


def test_a_long_text_is_not_cut() -> None:
    assert TABLE.line("4", "raw MPI, packed", 1) == "        4 raw MPI, packed     1"
    assert TABLE.line("4", "x" * 300, 1).endswith("x     1")


def test_a_narrow_terminal_breaks_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert TABLE.head() == "    bytes what        ms"
