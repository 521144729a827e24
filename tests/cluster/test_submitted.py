"""`mpikv submit`, and `mpikv launch` through a scheduler, on a real Slurm and a real Grid Engine."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from batch_jobs import looping
from grid_engine import GridEngine
from launching import started
from needs import find
from slurm import Slurm

pytestmark = pytest.mark.cluster_full

TWO_NODES = ["--option", "--nodes=2", "--option", "--ntasks-per-node=3"]
WORDS = {
    # what was asked for, workers
    "submit slurm": (["submit", "slurm", "-n", 4, "-s", 2, *TWO_NODES, "--wait", "--"], 4),
    "submit slurm --srun": (["submit", "slurm", "-n", 4, *TWO_NODES[:2], "--srun", "--wait", "--"], 4),
    "submit sge": (["submit", "sge", "-n", 4, "-s", 2, "--pe", "mpi_rr", "--wait", "--"], 4),
}


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Slurm | GridEngine:
    fixture = "slurm" if "slurm" in request.param else "grid_engine"
    found: Slurm | GridEngine = request.getfixturevalue(fixture)
    return found


@pytest.mark.parametrize("case", ["exits", "forever"])
@pytest.mark.parametrize(
    ("kind", "cluster", "words"),
    [
        (kind, words, words)
        for kind in ("openmpi", "mpich")
        for words in WORDS
        if (kind, words) != ("mpich", "submit slurm --srun")  # an error: srun starts Open MPI alone
    ],
    indirect=["cluster"],
)
def test_a_job_that_is_waited_for(
    cluster: Slurm | GridEngine, words: str, kind: str, case: str, tmp_path: Path
) -> None:
    """Its status is the command's; Ctrl-C cancels it."""
    command = [*WORDS[words][0], *looping(case)]
    with (
        cluster.hosts.nothing_left(20),
        started(cluster.hosts, find(kind), command, cwd=tmp_path, timeout_s=100, **cluster.env) as running,
    ):
        running.wait_for(rf"worker 0 of {WORDS[words][1]} is", 60)
        if case == "forever":
            running.kill(running.pid, signal.SIGINT)
    running.result.check(128 + signal.SIGINT if case == "forever" else None)
