"""Long jobs, many stores in one process, and deaths: memory, descriptors, threads, mappings and files do not become
more.

Memory may grow by `MOST_KIB`, of which each new key takes about 12, and each death about 50: Open MPI's communicator,
what was on its way to the dead, and what is scattered over the heap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from jobs import Mpi, mpirun

HERE = Path(__file__).parent
WORKERS, STEPS, WARM_UP = 3, 100_000, 20_000
STORES, FIRST_STORES = 200, 40
MOST_KIB = 1024
VICTIMS = 6, 3, 0, 5, 1  # those of these ranks that there are; 6 is a server


LONG = pytest.mark.full, pytest.mark.timeout(2400)


def check_holdings(folder: Path, ranks: Iterable[int]) -> None:
    """That none of these ranks holds more in the end than after the warm-up."""
    for rank in ranks:
        first, last = (json.loads((folder / f"{rank}-{time}").read_text()) for time in (0, 1))
        grown = {name: last[name] - first[name] for name in first}
        assert grown.pop("KiB") < MOST_KIB, (rank, first, last)
        assert max(grown.values()) <= 0, (rank, first, last)


@pytest.mark.full
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("mpi", "kind", "servers"),
    [("openmpi", "dist_sync", 1), ("mpich", "dist_sync", 0), ("openmpi", "dist_async", 1)],
    indirect=["mpi"],
)
def test_many_steps(mpi: Mpi, kind: str, servers: int, tmp_path: Path) -> None:
    snapshots = tmp_path / "snapshots"
    env = {"MPIKV_NUM_SERVERS": str(servers), "MPIKV_SNAPSHOT_DIR": str(snapshots), "MPIKV_SNAPSHOT_S": "0.5"}
    words = ["python", str(HERE / "soak_program.py"), kind, str(tmp_path), str(STEPS), str(WARM_UP)]
    job = mpirun(WORKERS + servers, words, env=env, timeout_s=2000, mpi=mpi)
    job.check()
    assert f"the trainer has made {STEPS // 5} steps" in job.stdout
    check_holdings(tmp_path, range(WORKERS + servers))
    per_snapshot = WORKERS if kind == "dist_sync" else 1
    assert per_snapshot <= len([*snapshots.iterdir()]) <= 2 * per_snapshot
    assert {path.name for path in tmp_path.iterdir() if "-" not in path.name} == {"snapshots", "states"}


@pytest.mark.parametrize(
    ("kind", "ranks", "steps"),
    [
        *(("dist_sync", (5, 0), 300), ("dist_sync", (4, 1), 300), ("dist_async", (5, 0), 300)),
        *(pytest.param(kind, (6, 1), STEPS, marks=LONG) for kind in ("dist_sync", "dist_async")),
    ],
)
def test_deaths(openmpi: Mpi, kind: str, ranks: tuple[int, int], steps: int, tmp_path: Path) -> None:
    """The first one is in the warm-up: so it is known what the others hold after a death. ranks: workers, servers."""
    workers, servers = ranks
    victims = [rank for rank in VICTIMS if rank < workers + servers]
    when = [steps * (1 + 2 * i) // (4 * len(victims)) for i in range(len(victims))]  # then two are left, and faster
    given = ",".join(f"{rank}@{step}" for rank, step in zip(victims, when, strict=True))
    words = ["python", str(HERE / "soak_program.py"), kind, str(tmp_path), str(steps), str(sum(when[:2]) // 2)]
    metrics = tmp_path / "metrics"
    env = {"MPIKV_ON_FAILURE": "continue", "MPIKV_NUM_SERVERS": str(servers), "MPIKV_METRICS": str(metrics)}
    job = mpirun(
        workers + servers, [*words, given], env=env, timeout_s=2000, mpi=openmpi, options=["--with-ft", "ulfm"]
    )
    job.check()
    check_holdings(tmp_path, set(range(workers + servers)) - set(victims))
    names = {*map("worker-{}".format, range(workers)), *map("server-{}".format, range(servers))}
    assert {path.name for path in metrics.iterdir()} == {f"mpikv-{name}.prom" for name in names}


@pytest.mark.thorough
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"], indirect=True)
def test_many_stores(mpi: Mpi, tmp_path: Path) -> None:
    """A communicator that stays would show in the handle of the next one."""
    words = ["python", str(HERE / "stores_program.py"), str(tmp_path), str(STORES), str(FIRST_STORES)]
    mpirun(2, words, timeout_s=200, mpi=mpi).check()
    check_holdings(tmp_path, range(2))
