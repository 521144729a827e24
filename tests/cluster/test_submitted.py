"""`mpikv submit`, and `mpikv launch` through a scheduler, on a real Slurm and a real Grid Engine."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest
import training
from batch_jobs import looping
from grid_engine import GridEngine
from launching import run, started
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
def test_training_that_is_waited_for(  # noqa: PLR0917
    kind: str,
    cluster: Slurm | GridEngine,
    words: str,
    images: Path,
    learned: Callable[..., training.Weights],
    tmp_path: Path,
) -> None:
    options, workers = WORDS[words]
    weights, variables = tmp_path / "weights.npz", {**training.SAME_BITS, **cluster.env}
    with cluster.hosts.nothing_left():
        command = [*options, *training.command(images, weights)]
        job = run(cluster.hosts, find(kind), command, cwd=tmp_path, timeout_s=100, **variables)
    assert (job.status, job.ranks_left) == (0, []), job.output
    assert re.search(r"^.*accuracy 0\.\d+ after 8 steps", job.stdout, re.M), job.output
    training.assert_same_bits(training.read(weights), learned(workers))


@pytest.mark.parametrize(("cluster", "words"), [(name, name) for name in WORDS], indirect=["cluster"])
def test_ctrl_c_cancels_the_job(cluster: Slurm | GridEngine, words: str, tmp_path: Path) -> None:
    mpi = jobs.find_mpi()
    assert mpi is not None
    with cluster.hosts.nothing_left(20):
        command = [*WORDS[words][0], *looping("forever")]
        with started(cluster.hosts, mpi, command, cwd=tmp_path, timeout_s=100, **cluster.env) as running:
            running.wait_for(rf"worker 0 of {WORDS[words][1]} is", 60)
            running.kill(running.pid, signal.SIGINT)
    assert (running.result.status, running.result.timed_out) == (128 + signal.SIGINT, False), running.result.output
