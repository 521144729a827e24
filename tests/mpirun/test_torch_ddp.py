"""Training with mpikv.torch equals DistributedDataParallel over Gloo, in one job."""

from __future__ import annotations

from pathlib import Path

import frameworks
import pytest
from jobs import find_mpi, mpirun

PROGRAM = str(Path(__file__).with_name("torch_ddp_program.py"))
LIMIT_S = 220  # each rank imports PyTorch, on a busy machine half a minute; all of it takes 10 s on a quiet one


@pytest.mark.parametrize(
    ("ranks", "environment"),
    [(2, {}), pytest.param(3, {"MPIKV_TEST_HOSTS": "2"}, marks=pytest.mark.thorough)],
    ids=["one host", "two hosts"],
)
def test_equals_distributed_data_parallel(ranks: int, environment: dict[str, str], tmp_path: Path) -> None:
    frameworks.need("torch")
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    job = mpirun(ranks, ["python", PROGRAM, str(tmp_path / "gloo")], env=environment, timeout_s=LIMIT_S, mpi=find_mpi())
    assert job.status == 0, job.output
    assert job.stdout.count("DistributedModel: equal") == ranks, job.output
    assert job.stdout.count("DistributedOptimizer: equal") == ranks, job.output
    assert job.ranks_left == []
