"""The scripts: what `scripts/test` makes and counts, their help and wrong options, and what they install and leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, Job

sys.path.insert(0, str(ROOT / "scripts"))
import _oldest
import _stages

BASH = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
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
    for stage in (stage for mode in _stages.MODES for stage in _stages.stages(mode, THERE)):
        assert all((ROOT / path).exists() for path in stage.paths), stage


def test_programs_are_taken_away_from_one_command_alone(tmp_path: Path) -> None:
    bare = ROOT / "scripts/_bare"
    if subprocess.run([bare], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here")
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ("rsync", "own-gcc-12", "kept"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    env = {**BASH, "PATH": f"{folder}:{BASH['PATH']}", "TMPDIR": str(tmp_path)}
    code = "import shutil; print([shutil.which(name) for name in ('rsync', 'own-gcc-12', 'kept')])"
    ask = f'for name in rsync own-gcc-12 kept; do command -v $name; done; {sys.executable} -c "{code}"'
    for shell in ("sh", "bash"):
        command = [bare, shell, "-c", ask]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.splitlines() == [str(folder / "kept"), f"[None, None, '{folder / 'kept'}']"], done.stderr
    assert len(list(folder.iterdir())) == 3
    assert not any(str(tmp_path) in line for line in Path("/proc/self/mountinfo").read_text().splitlines())


def test_the_oldest_versions_are_those_of_the_project() -> None:
    extras = {"torch": ["torch>=2.2"], "jax": ["jax>=0.4"], "openmpi": ["mpi>=5"], "test": ["t>=9"]}
    project = {"dependencies": ["one>=1.2", "two>=3"], "optional-dependencies": extras}
    assert _oldest.constraints(project) == ["one==1.2", "two==3", "mpi==5", "torch==2.2"]


@pytest.mark.parametrize("script", ["demo", "test", "lint", "docs", "build_ompi_cuda"])
def test_help(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    done = subprocess.run([path, "--help"], env=BASH, cwd="/", capture_output=True, text=True, timeout=20, check=True)
    assert f"scripts/{script}" in done.stdout
    assert "set -euo" not in done.stdout  # the comment at the top, and no more


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("scripts/lint --nonsense", "unknown option --nonsense"),
        ("scripts/build_ompi_cuda", "say where to install it: scripts/build_ompi_cuda PREFIX"),
        ("scripts/build_ompi_cuda /a /b /c", "PREFIX and WORKDIR, and no more"),
        ("env CUDA_HOME=/nowhere scripts/build_ompi_cuda /nowhere", "There is no /nowhere/include/cuda.h"),
        ("scripts/test --mpich /nowhere", "--mpich needs the directory of a virtual environment"),
        ("scripts/test --quick --cluster", "--quick and --cluster each leave out"),
        ("scripts/test --gpu --wheels /tmp", "--wheels goes with --gpu --python DIR"),
        ("scripts/test --gpu --wheels /nowhere", "--wheels needs a folder"),
        ("python3 scripts/_stages.py --gpu --with gpu=/ --part 4/3", "--part K/N"),
        ("python3 scripts/_stages.py --oldest --quick", "not allowed with"),
    ],
)
def test_wrong_options(line: str, said: str) -> None:
    done = subprocess.run(line.split(), env=BASH, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode != 0
    assert said in done.stderr


def test_a_users_own_environment_is_kept(tmp_path: Path) -> None:
    """Nothing that these scripts did not make is removed."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "mine").touch()
    code = f". {ROOT}/scripts/_venv.sh; provide {tmp_path}/venv test"
    done = subprocess.run(["bash", "-c", code], env=BASH, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "is no virtual environment" in done.stderr
    assert (tmp_path / "venv" / "mine").exists()
