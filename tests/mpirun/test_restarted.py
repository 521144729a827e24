"""`mpikv launch --restarts`: a job whose worker is killed goes on with the same bits, a mistake of its own ends it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import Mpi
from test_launch import launch

PROGRAM = str(Path(__file__).with_name("restarts_program.py"))
EACH_STEP = {"MPIKV_SNAPSHOT_S": "0.000001"}


def weights(output: str) -> str:
    return re.search(r"weights (.*)", output)[1]  # type: ignore[index]


@pytest.mark.parametrize("servers", [0, 1])
def test_a_killed_worker_costs_some_steps(mpi: Mpi, servers: int, tmp_path: Path) -> None:
    words = ["-n", "3", "-s", str(servers), "python", PROGRAM]
    plain = launch(mpi, *words, "none")
    job = launch(mpi, "--restarts", "2", *words, "kill", env={**EACH_STEP, "TMPDIR": str(tmp_path)})
    plain.check()
    job.check()
    assert weights(job.output) == weights(plain.output)
    said = re.search(
        r"worker 2 on \S+ was killed by signal 9 .*; starting again, 1 of 2, from step ([1-6])$", job.output, re.M
    )
    assert said, job.output
    assert re.findall(r"begins with step (\d+)", job.output) == ["0", said[1]]
    assert list(tmp_path.glob("mpikv-*-snapshots")) == []


def test_the_same_error_at_the_same_step_ends_the_job(mpi: Mpi, tmp_path: Path) -> None:
    """With its status, and the folder from which a program that was mended goes on."""
    job = launch(mpi, "--restarts", "5", "-n", "2", "-s", "0", "python", PROGRAM, "raise",
        env={**EACH_STEP, "TMPDIR": str(tmp_path)})  # fmt: skip
    job.check(1)
    assert job.output.count("starting again, 1 of 5, from step") == 1, job.output
    assert "not started again: the same error after step 6 as in the run before" in job.output
    (folder,) = tmp_path.glob("mpikv-*-snapshots")
    assert re.search(
        rf"MPIKV_SNAPSHOT_DIR={folder} goes on from (step [1-6]|the beginning, as .*), on the same hosts",
        job.output,
    ), job.output


GONE = """
import os, pathlib, signal
folder = pathlib.Path(os.environ["MPIKV_SNAPSHOT_DIR"])
folder.mkdir()
(folder / f"step-00000005-{1:016x}-0-of-1.snapshot").touch()
os.unlink(__file__)
os.kill(os.getppid() if "above" in __file__ else os.getpid(), signal.SIGKILL)
signal.pause()
"""


@pytest.mark.parametrize("name", ["program.py", "killed-from-above.py"])
def test_a_job_that_cannot_be_started_again_says_where_its_state_is(mpi: Mpi, name: str, tmp_path: Path) -> None:
    """Also where the process that would report the files was killed, with the status of the run that there was."""
    program = tmp_path / name
    program.write_text(GONE)
    job = launch(mpi, "--restarts", "1", "-n", "1", "-s", "0", "python", str(program), env={"TMPDIR": str(tmp_path)})
    job.check(137)
    (folder,) = tmp_path.glob("mpikv-*-snapshots")
    assert "starting again, 1 of 1, from step 5" in job.output
    assert f"not started again: {program}: no such file" in job.output
    assert f"MPIKV_SNAPSHOT_DIR={folder} goes on from step 5, on the same hosts" in job.output
