"""What a job prints under MPIKV_LOG, and the files of metrics that its ranks write. Real `mpirun`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import mpirun

TRAIN = """
import numpy as np
from mpikv import kv
with kv.create("dist_sync") as store:
    store.init("w", np.zeros(1000, np.float32))
    store.set_optimizer("sgd")
    store.pushpull("w", np.ones(1000, np.float32))
"""
GROUPS = """
import numpy as np
from mpi4py import MPI
from mpikv import kv
world = MPI.COMM_WORLD
with kv.create("dist_sync", comm=world.Split(world.rank // 2)) as store:
    store.init("w", np.zeros(3, np.float32))
    store.pushpull("w", np.ones(3, np.float32))
"""
SAMPLE = re.compile(r'mpikv_\w+\{((server|worker)="\d+",store="0")(,call="[\w ]+")?\} \d+(\.\d+)?(e-\d+)?')
OF_ALL = (
    r"Open MPI .*|MPICH .*",
    r"store 'dist_sync': 2 workers and (no servers|1 server) on 1 host",
    r"shared memory (not )?used.*",
    r"optimizer SGD updates all keys that have no other one: it goes to .*",
)


@pytest.mark.parametrize("servers", [0, 1])
def test_two_workers(mpi, servers: int, tmp_path: Path) -> None:
    """Worker 0 says what is so for all, and every rank what it is; keys are of level debug."""
    env = {"MPIKV_LOG": "info", "MPIKV_METRICS": str(tmp_path / "m"), "MPIKV_NUM_SERVERS": str(servers)}
    job = mpirun(2 + servers, ["python", "-c", TRAIN], env=env, mpi=mpi)
    job.check()
    lines = [line for line in job.stderr.splitlines() if line.startswith("mpikv ")]
    ranks = [line for line in lines if re.search(r": rank \d of \d, pid \d+, no GPU: ", line)]
    names = ["worker 0", "worker 1", "server 0"][: 2 + servers]
    assert sorted(re.sub(r"mpikv (\w+ \d) on .*", r"\1", line) for line in ranks) == sorted(names), job.output
    rest = [re.sub(r"^mpikv worker 0 on [^:]+: ", "", line) for line in lines if line not in ranks]
    assert len(rest) == len(OF_ALL), job.output
    for pattern, text in zip(OF_ALL, rest, strict=True):
        assert re.fullmatch(pattern, text), job.output
    files = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert files == sorted(f"mpikv-{name.replace(' ', '-')}.prom" for name in names)
    for name in names:
        text = (tmp_path / "m" / f"mpikv-{name.replace(' ', '-')}.prom").read_text()
        samples = [line for line in text.splitlines() if not line.startswith("#")]
        assert len(samples) >= 6
        for line in samples:
            found = SAMPLE.fullmatch(line)
            assert found is not None, line
            assert found[1] == '{}="{}",store="0"'.format(*name.split()), line


def test_stores_of_some_of_the_ranks(mpi, tmp_path: Path) -> None:
    """Two stores have a worker 0 each, whose files are two."""
    job = mpirun(4, ["python", "-c", GROUPS], env={"MPIKV_METRICS": str(tmp_path)}, mpi=mpi)
    job.check()
    files = {path.name: path.read_text() for path in sorted(tmp_path.iterdir())}
    assert list(files) == [f"mpikv-rank-{rank}.prom" for rank in range(4)]
    for rank, text in enumerate(files.values()):
        assert f'mpikv_rounds_total{{worker="{rank % 2}",store="0"}} 1\n' in text
