"""How far it is: when a line is due, what it says, and that a bar is drawn where somebody looks."""

from __future__ import annotations

import io
import sys

import pytest

from mpikv.common.progress import Progress, shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch, term: str = "xterm") -> Terminal:
    """Standard error, from now on."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "200")
    return found


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_line_now_and_then_where_nobody_looks(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("epoch 1/3", 1000, "images", clock=clock) as progress:
        for _ in range(100):
            clock.now += 0.5
            progress.update(10, loss=0.25)
    told = capsys.readouterr()
    lines = told.err.splitlines()
    assert lines[0] == "epoch 1/3: 100 of 1000 images, loss 0.2500, 20 images/s, 45 s left"
    assert len(lines) == 10  # each 5 s
    assert told.out == ""


@pytest.mark.parametrize(("step_s", "expected"), [(0.3, 20), (200, 1000)])
def test_long_work_has_few_lines_and_is_never_silent_for_long(
    step_s: float, expected: int, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("epoch", 1000, "images", clock=clock) as progress:
        for _ in range(1000):
            clock.now += step_s
            progress.update(1)
    assert len(capsys.readouterr().err.splitlines()) == expected


def test_work_that_stands_still_says_what_it_is_at(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("mpikv plan", 100, "rows", clock=clock) as progress:
        progress.update(what="4 workers")
        for _ in range(70):
            clock.now += 1
            progress.update()
        progress.update(1)
        clock.now += 70
        progress.update()
    assert capsys.readouterr().err.splitlines() == [
        "mpikv plan: 0 of 100 rows, 4 workers",
        "mpikv plan: 1 of 100 rows, 4 workers, 0.0071 rows/s, 13860 s left",
    ]


@pytest.mark.parametrize("shown_here", [True, False])
def test_work_that_was_resumed_counts_its_own_speed_and_one_rank_shows_it(
    shown_here: bool, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("epoch", 1000, "images", done=500, shown=shown_here, clock=clock) as progress:
        clock.now += 10
        progress.update(100)
        progress.say("a result")
    told = capsys.readouterr()
    assert told.err == ("epoch: 600 of 1000 images, 10 images/s, 40 s left\n" if shown_here else "")
    assert told.out == ("a result\n" if shown_here else "")


def test_a_bar_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setattr(sys, "stdout", terminal)
    with Progress("read [a].rec", 1000, "images") as progress:  # brackets are no markup
        progress.update(1000, "the last", loss=0.5)
        progress.say("left out: [b]")
    drawn = terminal.getvalue()
    assert list(shown([3, 1, 2], "epoch 1", here=False)) == [3, 1, 2]
    assert "\r" in drawn
    assert "read [a].rec" in drawn
    assert "the last, loss 0.5000" in drawn
    assert "left out: [b]\n" in drawn
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")  # the cursor is there again


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_results_go_to_standard_output(
    term: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while a bar is drawn; and where none can be there is a line."""
    terminal = terminal_of(monkeypatch, term)
    with Progress("work", 2, "rows", clock=clock) as progress:
        progress.say("a row", "another")
        clock.now += 10
        progress.update(1)
    assert capsys.readouterr().out == "a row\nanother\n"
    assert "row\n" not in terminal.getvalue()
    assert term == "xterm" or terminal.getvalue() == "work: 1 of 2 rows, 0.1 rows/s, 10 s left\n"
