"""`mpikv bench --device` and the report: what they compare, and that every result is right. Never how long it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpus
import pytest
from jobs import ROOT, mpirun
from report import GPU, WHOLE_JOB

pytestmark = getattr(pytest.mark, WHOLE_JOB)
PROGRAM = str(ROOT / "tests/gpu/bench_program.py")
RAW = "raw MPI"


def bench(kind: str, n: int, tmp_path: Path, *words: str) -> dict[str, Any]:
    """What a benchmark writes that ends well."""
    path = tmp_path / "run.json"
    line = ["python", PROGRAM, kind, *words, "--iterations", "2", "--json", str(path)]
    job = mpirun(n, line, timeout_s=200)
    assert (job.status, job.ranks_left) == (0, []), job.output
    found = json.loads(path.read_text())
    assert {row["wrong"] for row in found["rows"]} == {0}
    return found


def names(found: dict[str, Any]) -> list[str]:
    return [row["what"] for row in found["rows"]]


def test_allreduce(kind: str, tmp_path: Path) -> None:
    words = ["-b", "4", "-e", "64K", "-f", "16384", "--device-paths", "ipc,staged,host"]
    found = bench(kind, 2, tmp_path, "allreduce", "--device", *words)
    ways = ["staged", "staged, zeros", "host", RAW]
    if kind == "cuda" and not any(note.startswith("left out: ipc") for note in found["notes"]):
        ways = ["ipc", "ipc, zeros", *ways]
    assert names(found) == ways * 2
    for row in found["rows"]:
        through_host = row["what"].startswith(("staged", "host", RAW))
        assert row["limit_by"] in ("latency", "pinned" if through_host else "device")
        assert row["limit_percent"] == 100 * row["limit_s"] / row["median_s"] > 0
    assert [rates["n_bytes"] for rates in found["device_rates"]] == [4, 65536]


def test_pushpull_lists_and_servers(kind: str, tmp_path: Path) -> None:
    staged = ["--device", "--device-paths", "staged"]
    found = bench(kind, 2, tmp_path, "pushpull", "-b", "12K", "-e", "12K", *staged)
    each = ["in place", "zeros, in place", "out=", "sgd", "zeros, sgd"]
    assert names(found) == [*(f"staged, {one}" for one in each), RAW]
    found = bench(kind, 2, tmp_path, "model", "--model", "lenet", *staged)
    assert names(found) == ["staged", "staged, zeros", RAW]
    found = bench(kind, 3, tmp_path, "ps", "-b", "4K", "-e", "4K", "--device")
    assert names(found) == ["sync", RAW, "sync-sgd", "async-sgd"]


def test_without_a_gpu() -> None:
    """Said once, by rank 0; before anything is measured."""
    if not gpus.missing():
        pytest.skip("there is a GPU")
    job = mpirun(2, ["python", "-m", "mpikv", "bench", "allreduce", "--device"])
    assert job.status == 2, job.output
    assert job.output.count("--device needs a GPU for each worker, and rank 0, 1 has none: ") == 1
    assert "Traceback" not in job.output


def test_training(kind: str, tmp_path: Path) -> None:
    """All ways that work end with the weights of the reference."""
    pytest.importorskip("torch", reason="torch is not installed")
    words = ["--model", "mlp", "--image-size", "8", "--batch", "4", "--steps", "2"]
    found = bench(kind, 2, tmp_path, "train", "--device", *words)
    assert {"alone", "DistributedModel", "DistributedOptimizer", "Trainer", "DDP, Gloo"} <= set(names(found))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "of"),
    [
        ("fake", "ipc,staged"),
        pytest.param("fake", "staged,nccl,mpi,torch", marks=pytest.mark.full),
        pytest.param("cuda", "staged,torch", marks=getattr(pytest.mark, GPU)),
    ],
)
def test_the_report(kind: str, of: str) -> None:
    """It comes to its end, and says of each thing what was found, or why not."""
    line = [sys.executable, "tests/gpu/report_program.py", "--kind", kind, "--of", of, "--sizes", "4K,64K"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("staged ")]
    assert [row[1:3] for row in rows] == [["2", "4K"], ["2", "64K"]], done.stdout
    assert all(float(number) > 0 for row in rows for number in row[3:])
    for what in {"ipc", "torch"} & set(of.split(",")) if kind == "fake" else ():
        assert f"not measured: {'a step of PyTorch, ' * (what == 'torch') or 'ipc: '}" in done.stdout
