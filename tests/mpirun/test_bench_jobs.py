"""`mpikv bench` in real jobs: what it measures, counts and refuses. Never how long anything takes.

docs/performance.md has a job of each of its benchmarks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, find_mpi, mpirun

from mpikv.commands.models import shapes

SIZES = {"4": 4, "16": 16, "64": 64, "256": 256, "1K": 1024}
RAW, PACKED = "raw MPI", "raw MPI, packed"


@pytest.fixture(scope="module")
def mpi():
    """MPICH starts a job much faster; a selection runs under Open MPI."""
    return find_mpi("mpich") or find_mpi()


def bench(n: int, *words: str, **more: Any) -> Job:
    return mpirun(n, ["python", "-m", "mpikv", "bench", *words], **more)


def measured(n: int, folder: Path, line: str, **more: Any) -> tuple[dict[str, Any], Job]:
    """What a benchmark of some ranks writes by --json, and its job."""
    path = folder / "run.json"
    job = bench(n, *line.split(), "--json", str(path), **more)
    job.check()
    return json.loads(path.read_text()), job


def by(rows: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["what"] == what]


def check_rows(rows: list[dict[str, Any]], iterations: int, own_baseline: tuple[str, ...] = ()) -> None:
    """own_baseline: contenders that were compared with a run of raw MPI that is not shown."""
    for row in rows:
        assert row["wrong"] == 0
        assert row["iterations"] == iterations
        assert 0 < row["min_s"] <= row["median_s"] <= row["p95_s"] <= row["max_s"]
        assert row["algbw"] == row["n_bytes"] / row["median_s"] / 1e9
        raw = next(other for other in by(rows, RAW) if other["n_bytes"] == row["n_bytes"])
        assert row["ratio_to_raw"] > 0
        if row["what"] not in own_baseline:
            assert row["ratio_to_raw"] == row["median_s"] / raw["median_s"]


@pytest.mark.parametrize(("n", "kind"), [(2, "openmpi"), (3, "mpich")])
def test_allreduce(n: int, kind: str, tmp_path: Path) -> None:
    """The whole table, with bytes and messages of the ring as its formulas say."""
    found_mpi = find_mpi(kind)
    if found_mpi is None:
        pytest.skip(f"no {kind} wheel here: scripts/test installs both")
    sizes = list(SIZES)
    line = "allreduce -b 4 -e 1K --iterations 3 --algorithms owners,ring"
    found, job = measured(n, tmp_path, line, mpi=found_mpi)
    rows = found["rows"]
    names = list(dict.fromkeys(row["what"] for row in rows))
    assert [name for name in names if name != "shared"] == ["ordinary", "owners", "ring", RAW]
    assert [(row["n_bytes"], row["what"]) for row in rows] == [(SIZES[size], name) for size in sizes for name in names]
    check_rows(rows, 3)
    # Reduce-scatter and allgather, each p-1 messages of a p-th; shares that are empty are not sent, and the largest
    # share is rounded up to whole elements.
    for row in by(rows, "ring"):
        elems = row["n_bytes"] // 4
        if elems >= n:
            assert row["messages"] == 2 * (n - 1)
            assert 0 <= row["bytes_sent"] - 2 * (n - 1) / n * row["n_bytes"] < 2 * n * 4
        assert row["control_messages"] == 0
    for name in set(names) - {RAW}:
        assert {row["control_messages"] for row in by(rows, name)} == {0}
    assert {row["messages"] for row in by(rows, RAW)} == {None}
    assert found["machine"]["ranks"] == n
    assert list(found["machine"]["hosts"].values()) == [n]
    assert found["versions"]["mpi"].startswith({"openmpi": "Open MPI", "mpich": "MPICH"}[kind])
    assert all((row["held_bytes"] is None) == (row["what"] == RAW) for row in rows)
    # Printed once, by rank 0.
    lines = [line for line in job.stdout.splitlines() if line and not line.startswith("#")]
    shown = [size for size in sizes for _ in names]
    assert [line.split()[0] for line in lines] == ["bytes", *shown]
    assert job.stdout.count("# mpikv bench allreduce -b 4") == 1


LENET_BYTES = 4 * 431_080
SERVED = ["sync", RAW, "sync-sgd", "async-sgd"]


@pytest.mark.parametrize(
    ("n", "line", "whats", "sizes"),
    [
        (2, "pushpull -b 12 -e 12", ["in place", "out=", "sgd", RAW], [12]),
        (2, "model --model lenet", ["ordinary", RAW, PACKED], [LENET_BYTES]),
        # Two workers; every size and variant is a store of its own, served by the same rank.
        (3, "ps -b 4K -e 16K", SERVED, [4096, 16384]),
    ],
)
def test_sums_of_a_store(mpi, tmp_path: Path, n: int, line: str, whats: list[str], sizes: list[int]) -> None:  # noqa: PLR0917
    rows = measured(n, tmp_path, f"{line} --iterations 2", mpi=mpi)[0]["rows"]
    ours = [row for row in rows if not row["what"].startswith("shared")]
    assert [(row["n_bytes"], row["what"]) for row in ours] == [(size, what) for size in sizes for what in whats]
    assert {row["arrays"] for row in rows} == {len(shapes("lenet")) if "lenet" in line else 1}
    check_rows(rows, 2, ("sync-sgd", "async-sgd"))
    assert {row["control_messages"] for row in ours if not row["what"].startswith(RAW)} == {0}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ps", "--servers", "2"], "--servers 2 of 2 ranks leave no worker"),  # found when the ranks have met
        (["allreduce", "-n", "3"], "-n 3, but 2 ranks were started"),  # found before
    ],
)
def test_bad_options_are_told_once(words: list[str], text: str, mpi) -> None:
    job = bench(2, *words, mpi=mpi)
    job.check(2)
    assert job.output.count(text) == 1
    assert "Traceback" not in job.output


def test_a_wrong_sum_fails_the_run(mpi, tmp_path: Path) -> None:
    """A store whose results are off by one on one rank."""
    program = tmp_path / "wrong.py"
    program.write_text(
        "import sys\n"
        "from mpikv import kvstore\n"
        "from mpikv.__main__ import main\n"
        "pushpull = kvstore.KVStore.pushpull\n"
        "def wrong(store, key, value, *rest):\n"
        "    pushpull(store, key, value, *rest)\n"
        "    value[-1] += store.rank\n"
        "kvstore.KVStore.pushpull = wrong\n"
        "sys.exit(main(['bench', 'allreduce', '-b', '64', '-e', '64', '--iterations', '2']))\n"
    )
    job = mpirun(2, ["python", str(program)], mpi=mpi)
    job.check(1)
    assert "WRONG in 5 results" in job.stdout
    assert "results were wrong" in job.stderr
