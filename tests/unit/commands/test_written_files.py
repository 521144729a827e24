"""Files that commands write where their options say: not through another user's link, and whole or not at all."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mpikv.__main__ import main
from mpikv.commands.bench import plot, report

ROW = {"what": "raw MPI", "n_bytes": 8, "algbw": 1.0}


def trace(path: Path) -> None:
    """Write a trace of one timeline."""
    traces = path.parent / "traces"
    header = '{"format":1,"role":"worker","number":0,"workers":1,"host":"a","machine":"a","pid":1,"store":"s",'
    traces.mkdir(exist_ok=True)
    (traces / "a.jsonl").write_text(header + '"type":"dist_sync","date_s":1.0}\n')
    if main(["trace", str(traces), "-o", str(path)]) != 0:
        raise PermissionError("as printed")


def plan(path: Path) -> None:
    """Write a plan."""
    if main(["plan", "--bytes", "1M", "--workers", "2", "--json", str(path)]) != 0:
        raise PermissionError("as printed")


WRITERS = {
    "trace": trace,
    "plan": plan,
    "bench --json": lambda path: report.write_json(str(path), {"a": 1}),
    "bench --plot": lambda path: plot.bandwidths(f"{path}", "a title", [ROW, {**ROW, "n_bytes": 16}]),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a link of another user")
@pytest.mark.parametrize("what", WRITERS)
def test_another_users_link_is_not_written_through(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if what == "bench --plot" and importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    write: Callable[[Path], object] = WRITERS[what]
    mine, free, link = tmp_path / "mine", tmp_path / "free", tmp_path / "link"
    mine.write_text("dear to me")
    link.symlink_to(mine)
    os.lchown(link, 12345, -1)
    write(free)
    assert free.stat().st_size > 0
    capsys.readouterr()
    with pytest.raises(PermissionError) as caught:
        write(link)
    assert "a symbolic link that another user has made" in str(caught.value) + capsys.readouterr().err
    assert mine.read_text() == "dear to me"
