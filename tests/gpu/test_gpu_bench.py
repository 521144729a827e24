"""`mpikv bench` with GPUs: what it compares, and that every result is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import ROOT, mpirun
from report import WHOLE_JOB

pytestmark = getattr(pytest.mark, WHOLE_JOB)
PROGRAM = str(ROOT / "tests/gpu/bench_program.py")
RAW = "raw MPI"


def bench(kind: str, n: int, tmp_path: Path, *words: str) -> dict[str, Any]:
    path = tmp_path / "run.json"
    line = ["python", PROGRAM, kind, *words, "--iterations", "2", "--json", str(path)]
    job = mpirun(n, line, timeout_s=200)
    assert (job.status, job.ranks_left) == (0, []), job.output
    found = json.loads(path.read_text())
    assert {row["wrong"] for row in found["rows"]} == {0}
    return found


def names(found: dict[str, Any]) -> list[str]:
    return [row["what"] for row in found["rows"]]


def test_sums_lists_and_servers(kind: str, tmp_path: Path) -> None:
    found = bench(kind, 2, tmp_path, "allreduce", "-b", "16K", "-e", "64K")
    assert names(found) == ["ordinary", "shared", "gpu", RAW] * 2
    assert any(note.startswith("gpu: arrays on ") for note in found["notes"])
    found = bench(kind, 2, tmp_path, "pushpull", "-b", "12K", "-e", "12K")
    assert names(found)[-4:] == ["gpu, in place", "gpu, out=", "gpu, sgd", RAW]
    found = bench(kind, 2, tmp_path, "model", "--model", "lenet")
    assert names(found) == ["ordinary", "shared", "gpu", RAW, f"{RAW}, packed"]
    found = bench(kind, 3, tmp_path, "ps", "-b", "4K", "-e", "4K")
    assert names(found) == ["sync", RAW, "sync-sgd", "async-sgd", "gpu, sync", "gpu, sync-sgd", "gpu, async-sgd"]


def test_training(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    found = bench(kind, 2, tmp_path, "train", "--model", "mlp", "--image-size", "8", "--batch", "4")
    assert {"alone", "DistributedModel", "DistributedOptimizer", "Trainer", "DDP, Gloo"} <= set(names(found))
