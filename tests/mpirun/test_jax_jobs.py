"""mpikv.jax in whole jobs: processes with one core, programs that still run, errors that end the job."""

from __future__ import annotations

from pathlib import Path

import frameworks
import pytest
from jobs import Job, mpirun

frameworks.need("jax")
PROGRAM = str(Path(__file__).with_name("jax_program.py"))


def run(case: str) -> Job:
    return mpirun(2, ["python", PROGRAM, case], timeout_s=120)


def test_programs_that_still_run_when_the_next_call_is_made() -> None:
    """JAX returns before a program has ended; calls are made in order, and the store closes after the last one."""
    job = run("waits")
    job.check()
    assert sorted(job.stdout.splitlines()) == [f"worker {rank}: {value}" for rank in range(2) for value in (0.5, 2.0)]


@pytest.mark.thorough
def test_an_error_inside_of_a_compiled_program_ends_the_job() -> None:
    job = run("raise")
    job.check(None)
    assert "ShapeMismatch: a call of mpikv.jax: the workers differ" in job.stderr
    assert "worker 0: allreduce(sum) of ['x']: float32[400, 400]; worker 1: allreduce(sum) of ['x']: float32[3]" in (
        job.stderr
    )
