"""Training for the tests on clusters: examples/train_mnist.py at small size, and the weights it has to find.

A store with servers, and one without whose keys all go to owners, add the workers' gradients in the order of the
workers wherever they run (docs/semantics.md, "Which results have the same bits"). So their weights on a cluster are
compared with those of the same number of workers on one machine bit by bit. Elsewhere the order of additions depends on
the hosts: then the weights differ by rounding, and `distance` is compared with ROUNDING.
"""

from __future__ import annotations

from pathlib import Path

import jobs
import numpy as np

EXAMPLES = jobs.ROOT / "examples"
STEPS = 8
SAME_BITS = {"MPIKV_ALGORITHM": "owners"}
# Float32 has 24 bits: a sum of 4 numbers in another order differs by up to 3 * 2^-24 of the largest partial sum, about
# 2e-7, in each of 8 steps; momentum and the network let it grow to some 1e-6.
ROUNDING = 1e-5

Weights = dict[str, np.ndarray]


def command(images: Path, weights: Path, *options: object, steps: int = STEPS, program: Path = EXAMPLES) -> list[str]:
    """The command of every rank. images: folder of the data; weights: where worker 0 writes what it has learned."""
    line = ["python", program / "train_mnist.py", "--data-dir", images, "--network", "mlp", "--batch-size", 10]
    line += ["--num-examples", 240, "--num-epochs", 999, "--max-steps", steps, "--lr-step-epochs", 900]
    return [str(word) for word in [*line, "--dump-weights", weights, *options]]


def read(file: Path) -> Weights:
    with np.load(file) as archive:
        return {name: archive[name] for name in archive.files}


def on_one_machine(workers: int, images: Path, folder: Path, steps: int = STEPS) -> Weights:
    """What so many workers learn without a cluster, with the MPI of this environment that starts fastest."""
    file = folder / f"{workers}-{steps}.npz"
    mpi = jobs.find_mpi("mpich") or jobs.find_mpi()
    job = jobs.mpirun(workers, command(images, file, steps=steps), mpi=mpi, env=SAME_BITS)
    job.check()
    return read(file)


def assert_same_bits(found: Weights, expected: Weights) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
        assert found[name].dtype == value.dtype


def distance(found: Weights, expected: Weights) -> float:
    assert set(found) == set(expected)
    return max(float(np.linalg.norm(found[n] - expected[n]) / np.linalg.norm(expected[n])) for n in expected)


def environment(mpi: jobs.Mpi, folder: Path, **variables: str) -> dict[str, str]:
    """What somebody has who has activated this environment; TMPDIR is `folder`."""
    return jobs.environment(mpi, {"VIRTUAL_ENV": str(mpi.prefix), **variables}, folder)
