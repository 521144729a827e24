"""A mistake that all ranks make is one line of one rank and status 2, without tracebacks and the MPI's own words."""

from __future__ import annotations

import re

import pytest
from jobs import mpirun

PROGRAMS = {
    "before MPI_Init": (
        "import numpy as np\n"
        "from mpikv import Parameter, Trainer\n"
        "Trainer([Parameter(np.zeros(3))], 'sgd', {'lr': 0.1}, kvstore='dist_sync')\n",
        r"TypeError: sgd has no parameter lr; .* Did you mean 'learning_rate'\? \(<string>:3\)",
    ),
    "between calls": (
        "import numpy as np\n"
        "from mpikv import kv\n"
        "store = kv.create('dist_sync')\n"
        "store.init('w', np.zeros(3))\n"
        "store.push('w', np.zeros(4))\n",
        r"ShapeMismatch: push: key 'w' is float64 \(3,\), this array is float64 \(4,\) .* \(<string>:5\)",
    ),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_one_line(mpi, case: str) -> None:
    program, line = PROGRAMS[case]
    job = mpirun(2, ["python", "-c", program], timeout_s=40, mpi=mpi)
    job.check(2)
    (said,) = re.findall(r"^mpikv: error: .*$", job.output, re.MULTILINE)
    assert re.fullmatch(rf"mpikv: error: \[rank 0 of 2 on \S+\] {line}", said), job.output
    assert "Traceback" not in job.output
    assert "MPI_A" not in job.output, job.output
    if mpi.kind == "mpich":
        assert job.output == f"{said}\n"
