"""`mpikv bench --device`: what it compares, and that every result is exact. Never how long anything takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpus
import pytest
from jobs import ROOT, mpirun
from kinds import FULL
from report import WHOLE_JOB

from mpikv import optimizers

pytestmark = getattr(pytest.mark, WHOLE_JOB)
PROGRAM = str(ROOT / "tests/gpu/bench_program.py")
RAW = "raw MPI"
DOES = ("encode", "decode", "add")
RATES = {"n_bytes", "latency_s", "wait_s", "link_bytes_per_s"} | {
    f"{what}_bytes_per_s" for what in ("copy", "down", "up", "both")
}


def bench(kind: str, n: int, tmp_path: Path, *words: str) -> dict[str, Any]:
    """What a benchmark writes that ends well."""
    path = tmp_path / "run.json"
    line = ["python", PROGRAM, kind, *words, "--iterations", "2", "--warmup", "1", "--json", str(path)]
    job = mpirun(n, line, timeout_s=200)
    assert job.status == 0, job.output
    assert job.ranks_left == []
    found = json.loads(path.read_text())
    assert {row["wrong"] for row in found["rows"]} == {0}
    return found


def check(found: dict[str, Any], names: list[str], sizes: list[int]) -> None:
    """The contenders of each size, their limits, and the rates that these follow from."""
    assert [(row["n_bytes"], row["what"]) for row in found["rows"]] == [(n, name) for n in sizes for name in names]
    for row in found["rows"]:
        through_host = row["what"].startswith(("staged", "host", RAW))
        assert row["limit_by"] in ("latency", "pinned" if through_host else "device")
        assert row["limit_s"] > 0
        assert row["limit_percent"] == 100 * row["limit_s"] / row["median_s"]
    assert [rates["n_bytes"] for rates in found["device_rates"]] == sizes
    for rates in found["device_rates"]:
        assert set(rates) == RATES
        assert all(value > 0 for name, value in rates.items() if name != "link_bytes_per_s")


def test_allreduce(kind: str, tmp_path: Path) -> None:
    words = ["-b", "4", "-e", "64K", "-f", "16384", "--device-paths", "ipc,staged,nccl,host"]
    found = bench(kind, 2, tmp_path, "allreduce", "--device", *words)
    assert [note.partition(" (")[0] for note in found["notes"] if "left out" in note] == ["left out: nccl"]
    check(found, ["ipc", "ipc, zeros", "staged", "staged, zeros", "host", RAW], [4, 65536])
    assert [line.partition(":")[0] for line in found["goals"]] == ["ipc, 4"]


@FULL
def test_pushpull(kind: str, tmp_path: Path) -> None:
    words = ["-b", "12K", "-e", "12K", "--device-paths", "ipc"]
    found = bench(kind, 3, tmp_path, "pushpull", "--device", *words)
    names = ["ipc, in place", "ipc, zeros, in place", "ipc, out=", "ipc, sgd", "ipc, zeros, sgd", RAW]
    check(found, names, [12288])


@FULL
def test_model(kind: str, tmp_path: Path) -> None:
    found = bench(kind, 2, tmp_path, "model", "--model", "lenet", "--device", "--device-paths", "ipc,staged")
    check(found, ["ipc", "ipc, zeros", "staged", "staged, zeros", RAW], [431_080 * 4])
    assert {row["arrays"] for row in found["rows"]} == {8}
    assert [line.partition(":")[0] for line in found["goals"]] == ["ipc"]


@FULL
def test_servers(kind: str, tmp_path: Path) -> None:
    found = bench(kind, 3, tmp_path, "ps", "-b", "4K", "-e", "4K", "--device")
    assert [row["what"] for row in found["rows"]] == ["sync", RAW, "sync-sgd", "async-sgd"]


def test_optimizers(kind: str, tmp_path: Path) -> None:
    found = bench(kind, 1, tmp_path, "optimizers", "--bytes", "64K")
    assert [row["what"] for row in found["rows"]] == list(optimizers.names())
    moved = {row["what"]: row["moved_bytes"] for row in found["rows"]}
    assert moved["sgd"] == 3 * 65536  # the gradient and the weight are read, and the weight is written
    assert moved["adam"] == 7 * 65536  # and two states are read and written


def test_codecs(kind: str, tmp_path: Path) -> None:
    found = bench(kind, 1, tmp_path, "codec", "--device", "--codecs", "2bit,int8,topk,powersgd", "--bytes", "64K")
    names = ["2bit", "int8", "int8 alone", "topk", "topk alone", "powersgd", "powersgd alone"]
    assert [row["what"] for row in found["rows"]] == [f"{name}, {does}" for name in names for does in DOES]
    assert not any("on the host" in note for note in found["notes"])
    moved = {row["what"]: row["moved_bytes"] for row in found["rows"]}
    # Values are read; the residual is read and written, and a sixteenth of the bytes written.
    assert moved["2bit, encode"] == 3 * 65536 + 65536 // 16
    assert moved["2bit, add"] == 2 * 65536 + 65536 // 16
    assert moved["int8 alone, encode"] == 65536 + 16384 + 4 * 64
    assert len(found["goals"]) == max(1, sum(row["limit_percent"] < 60 for row in found["rows"]))


def test_without_a_gpu(tmp_path: Path) -> None:
    """Said once, by rank 0; before anything is measured."""
    if not gpus.missing():
        pytest.skip("there is a GPU")
    job = mpirun(2, ["python", "-m", "mpikv", "bench", "allreduce", "--device"])
    assert job.status == 2, job.output
    assert job.output.count("--device needs a GPU for each worker, and rank 0, 1 has none: ") == 1
    assert "Traceback" not in job.output


@pytest.mark.gpu
def test_training(tmp_path: Path) -> None:
    """All ways that work end with the weights of the reference."""
    pytest.importorskip("torch", reason="torch is not installed")
    words = ["--model", "mlp", "--image-size", "8", "--batch", "4", "--steps", "2"]
    found = bench("cuda", 2, tmp_path, "train", "--device", *words)
    ways = {row["what"] for row in found["rows"]}
    assert {"alone", "DistributedModel", "DistributedOptimizer", "Trainer", "DDP, Gloo"} <= ways
