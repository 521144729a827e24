"""`scripts/test`: what it makes, what it counts, and that a stage without tests, a crash and a hang are failures."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import frameworks
import grids
import jobs
import pytest
from jobs import ROOT, Job, Mpi

sys.path.insert(0, str(ROOT / "scripts"))
import _stages

THERE = ("openmpi", "mpich", "oldest", "newest", "contract12", "contract13")


@pytest.mark.parametrize(
    ("outcomes", "status", "more", "expected"),
    [
        ("a:passed b:skipped c:started c:failed", 1, {}, (["a"], ["c"], {"b": "why"})),
        ("a:started a:passed b:started", 86, {}, (["a"], ["b"], {})),  # it died in b
        ("a:passed a:failed", 1, {}, ([], ["a"], {})),  # the second one at the end of the test
        ("a:passed", 3, {}, (["a"], ["(it ended with status 3)"], {})),
        ("a:passed", 3, {"selected": True}, (["a"], ["(it ended with status 3)"], {})),
        ("a:passed", 0, {"timed_out": True}, (["a"], ["(it did not end in time)"], {})),
        ("a:passed", 0, {"ranks_left": [1, 2]}, (["a"], ["(it left 2 processes behind)"], {})),
        ("a:skipped", 0, {}, ([], ["(no test was executed)"], {"a": "why"})),
        ("", 5, {}, ([], ["(it ended with status 5)"], {})),
        ("", 5, {"selected": True}, ([], [], {})),  # -k selected others
        ("a:skipped", 0, {"may_skip": True}, ([], [], {"a": "why"})),
        ("", 5, {"may_skip": True}, ([], ["(it ended with status 5)"], {})),  # nothing was even collected
        ("a:skipped b:failed", 1, {"may_skip": True}, ([], ["b"], {"a": "why"})),
    ],
)
def test_what_is_counted(outcomes: str, status: int, more: dict, expected: tuple, tmp_path: Path) -> None:
    entries = [dict(zip(("test", "outcome"), one.split(":"), strict=True), reason="why") for one in outcomes.split()]
    (tmp_path / "report").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    result = _stages.count(tmp_path / "report")
    stage = _stages.Stage("unit", "title", "openmpi", [], may_skip=more.pop("may_skip", False))
    selected = more.pop("selected", False)
    _stages.judge(stage, Job(status, "", "", 1.0, **{"timed_out": False, **more}), result, selected=selected)
    assert (result.passed, result.failed, result.skipped) == expected


CONFTEST = """
import pytest, report

def pytest_configure(config):
    config.addinivalue_line("markers", report.WHOLE_JOB)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(report.Report())
"""
TESTS = """
from pathlib import Path
import os, time, pytest

def first_time(name):
    return not Path(__file__).with_name(name).exists() and Path(__file__).with_name(name).touch() is None

@pytest.mark.whole_job
def test_mended(): assert not first_time("mended"), "only the first time"

@pytest.mark.whole_job
def test_never(): assert False

def test_of_a_unit(): assert not first_time("unit"), "nobody tries again"

def test_good(): pass

@pytest.mark.skip(reason="no driver")
def test_of_a_gpu(): pass

def test_crash(): os.kill(os.getpid(), 9)
"""


def run(folder: Path, tests: str, monkeypatch: pytest.MonkeyPatch, *, until: float | None = None, **stage: int) -> int:
    for name, text in (("test_it.py", tests), ("conftest.py", CONFTEST)):
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\n")
    monkeypatch.setattr(jobs, "ROOT", folder)  # where tests are run
    options = argparse.Namespace(k="", pytest=[], before="", part="", mode="", as_it_is=False, until=until)
    options.environments = {"openmpi": Mpi("openmpi", Path(sys.prefix))}
    return _stages.run([_stages.Stage("jobs", "title", "openmpi", ["test_it.py"], marks="", **stage)], options)


def test_a_job_that_failed_is_run_once_more_and_nothing_else_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: a test that ends its process has failed, and the others are run."""
    pytest.importorskip("xdist")
    assert run(tmp_path, TESTS, monkeypatch, workers=2) == 1
    lines = capfd.readouterr().out.splitlines()
    assert "title: 1 passed, 4 failed, 1 skipped in" in "\n".join(lines)
    assert [line for line in lines if line.startswith("unsteady: ")] == ["unsteady: title: test_it.py::test_mended"]
    failed = {line.rpartition("_")[2] for line in lines if line.startswith("failed: title: test_it.py::test_")}
    assert failed == {"never", "unit", "crash"}
    assert "skipped: 1 x no driver" in lines
    assert lines[-1] == "2 passed, 3 failed, 1 skipped"


def test_a_stage_that_hangs_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = "print('before', flush=True)\nwhile True: pass\n"
    assert run(tmp_path, hangs, monkeypatch, until=time.monotonic() + 4, workers=0) == 1
    assert "failed: title: (it did not end in time)" in capfd.readouterr().out.splitlines()


def test_every_file_of_tests_belongs_to_one_stage_or_to_several_numbers_of_ranks() -> None:
    for mode, sizes in {"": [2, 3], "thorough": [2, 3, 4], "full": [1, 2, 3, 3, 4, 4, 5]}.items():
        found = _stages.stages(mode, ("openmpi", "mpich"))
        assert mode != "full" or {stage.marks for stage in found if stage.group != "cluster"} == {""}
        found = _stages.joined(found)
        for path in (ROOT / "tests").rglob("test_*.py"):
            name = str(path.relative_to(ROOT))
            own = [stage for stage in found if any(name.startswith(f"{one}/") for one in stage.paths)]
            expected = sizes if "/mpi/" in name else [] if "/contract/" in name else [0]
            assert sorted(stage.ranks for stage in own) == expected, name


@pytest.mark.parametrize("mode", _stages.MODES)
def test_each_mode_has_stages(mode: str) -> None:
    found = _stages.stages(mode, THERE)
    assert found
    for stage in found:
        assert all((ROOT / path).exists() for path in stage.paths), stage


def test_each_test_is_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for k in (1, 2, 3):
        monkeypatch.setenv(grids.PART_VARIABLE, f"{k}/3")
        parts += grids.part(range(10))
    assert sorted(parts) == list(range(10))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpu --with gpu=/ --part 4/3", "--part K/N"),
        ("--gpu --with gpu=/ --only unit", "--only knows gpu-arrays, gpu-jobs"),
        ("--oldest --quick", "not allowed with"),
        ("--newest --with openmpi=/ --with mpich=/", "an environment is missing"),
    ],
)
def test_wrong_options(words: str, said: str) -> None:
    line = [sys.executable, "scripts/_stages.py", *words.split()]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(frameworks.VARIABLE, "one,another")
    for name in ("one", "one.part"):
        with pytest.raises(ModuleNotFoundError):
            frameworks.need(name)
    with pytest.raises(pytest.skip.Exception, match="third is not installed"):
        frameworks.need("third")
