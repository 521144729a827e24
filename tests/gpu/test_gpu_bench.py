"""`mpikv bench` with GPUs: what it compares, and that every result is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grids
import pytest
from jobs import ROOT, mpirun
from report import GPU, WHOLE_JOB

pytestmark = getattr(pytest.mark, WHOLE_JOB)
PROGRAM = str(ROOT / "tests/gpu/bench_program.py")
RAW = "raw MPI"


def bench(kind: str, n: int, tmp_path: Path, *words: str) -> dict[str, Any]:
    path = tmp_path / "run.json"
    line = ["python", PROGRAM, kind, *words, "--iterations", "2", "--json", str(path)]
    job = mpirun(n, line, timeout_s=200)
    job.check()
    found = json.loads(path.read_text())
    assert {row["wrong"] for row in found["rows"]} == {0}
    return found


def names(found: dict[str, Any]) -> list[str]:
    return [row["what"] for row in found["rows"]]


SUMS = [
    (2, "allreduce -b 16K -e 64K", ["ordinary", "shared", "gpu", RAW] * 2),
    (2, "pushpull -b 12K -e 12K", ["gpu, in place", "gpu, out=", "gpu, sgd", RAW]),
    (2, "model --model lenet", ["ordinary", "shared", "gpu", RAW, f"{RAW}, packed"]),
    (3, "ps -b 4K -e 4K", ["sync", RAW, "sync-sgd", "async-sgd", "gpu, sync", "gpu, sync-sgd", "gpu, async-sgd"]),
]


def test_sums_lists_and_servers(kind: str, tmp_path: Path) -> None:
    on_fake = SUMS[::3] if grids.is_thorough() else SUMS[3:]
    for n, line, last in SUMS if kind == "cuda" else on_fake:
        found = bench(kind, n, tmp_path, *line.split())
        assert names(found)[-len(last) :] == last
        assert any(note.startswith("gpu: arrays on ") for note in found["notes"])


@pytest.mark.parametrize(
    "kind", [pytest.param("fake", marks=pytest.mark.thorough), pytest.param("cuda", marks=getattr(pytest.mark, GPU))]
)
@pytest.mark.thorough
def test_training(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    ways = (
        {"DistributedModel", "DistributedOptimizer", "Trainer", "DDP, Gloo"} if kind == "cuda" else {"DistributedModel"}
    )
    chosen = [] if kind == "cuda" else ["--vs", "model"]
    found = bench(kind, 2, tmp_path, "train", "--model", "mlp", "--image-size", "8", "--batch", "4", *chosen)
    assert {"alone", *ways} <= set(names(found))
