"""The accuracies that the documents name are reached: by README.md's first command, by the job in docs/clusters.md."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import clone
import jobs
import pytest

LIMIT_S = 1500  # of the demonstration: it installs, downloads and trains
TOLERANCE = 0.015  # the last digits depend on the processor, by way of NumPy's matrix products


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
    env = {name: value for name, value in os.environ.items() if not name.startswith((*jobs.FOREIGN, "PYTHON"))}

    def run(line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    output = run("scripts/demo")
    assert re.search(r"^Command: OMP_NUM_THREADS=1 .venv/bin/mpirun ", output, re.MULTILINE), output
    if "could not be fetched" in output:  # trained on other images
        pytest.skip("Fashion-MNIST could not be fetched")
    assert reached(output) == pytest.approx(promised("README.md", r"accuracy of (0\.\d+)"), abs=TOLERANCE)

    images = re.search(r"^data: .* from (\S+?);?$", output, re.MULTILINE)
    assert images, output
    program = "python examples/train_mnist.py --network mlp --num-epochs 2 --num-examples 12000"
    assert program in (clone.ROOT / "docs/clusters.md").read_text()
    output = run(f". .venv/bin/activate && mpikv launch -n 4 -s 2 {program} --data-dir {images[1]}")
    wanted = promised("docs/clusters.md", r"accuracy (0\.\d{4}) after 2 epochs")
    assert reached(output) == pytest.approx(wanted, abs=TOLERANCE)
