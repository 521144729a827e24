"""`tests/jobs.py`: real jobs of two ranks, and what is left of them."""

from __future__ import annotations

import functools
import mmap
import os
import signal
from pathlib import Path

import jobs
import pytest
from jobs import find_mpi, have_ended, orphans, segments

MPI = find_mpi("mpich") or find_mpi()  # the one that starts faster
start, mpirun = functools.partial(jobs.start, mpi=MPI), functools.partial(jobs.mpirun, mpi=MPI)
pytestmark = pytest.mark.skipif(MPI is None, reason="no mpirun in this environment")

RANK = "import os; rank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']; "
SLEEP = RANK + "import signal; print(f'rank {rank} is {os.getpid()}', flush=True); signal.pause()"


def test_both_outputs_status_and_folder() -> None:
    code = RANK + "import sys, tempfile; print('out', rank, tempfile.gettempdir()); print('err', rank, file=sys.stderr)"
    job = mpirun(2, ["python", "-c", code])
    assert job.status == 0, job.output
    assert sorted(line.split()[:2] for line in job.stdout.splitlines()) == [["out", "0"], ["out", "1"]]
    assert {"err 0", "err 1"} <= set(job.stderr.splitlines())
    (folder,) = {line.split()[2] for line in job.stdout.splitlines()}
    assert not Path(folder).exists()
    assert not job.timed_out
    assert job.ranks_left == []


def test_status_of_a_failing_rank() -> None:
    job = mpirun(2, ["python", "-c", RANK + "os._exit(7 if rank == '1' else 0)"])
    assert job.status == 7


def test_settings_of_this_process_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIKV_NUM_SERVERS", "3")
    monkeypatch.setenv("PMI_SIZE", "17")
    code = "import os; print(os.environ.get('MPIKV_NUM_SERVERS'), os.environ.get('PMI_SIZE'), os.environ['GIVEN'])"
    job = mpirun(1, ["python", "-c", code], env={"GIVEN": "yes"})
    assert job.stdout.split() in (["None", "None", "yes"], ["None", "1", "yes"])


def test_a_hanging_job_is_ended() -> None:
    with start(2, ["python", "-c", SLEEP]) as running:
        ranks = [int(running.wait_for(rf"rank {i} is (\d+)", 50)[1]) for i in range(2)]
        job = running.end()  # as if its time were over
    assert job.timed_out
    assert job.status != 0
    assert have_ended(ranks)


def test_a_killed_rank_ends_the_job() -> None:
    with start(2, ["python", "-c", SLEEP], timeout_s=40) as running:
        pid = int(running.wait_for(r"rank 1 is (\d+)", 30)[1])
        assert pid in running.processes()
        running.kill(pid)
    assert running.result.status != 0
    assert not running.result.timed_out


def test_segments_of_a_killed_job_are_removed() -> None:
    before = segments()
    code = f"from mpi4py import MPI; MPI.COMM_WORLD.Barrier(); {SLEEP}"  # a rank may make its segment when it sends
    with start(2, ["python", "-c", code], timeout_s=40) as running:
        running.wait_for("rank 0 is")
        pid = int(running.wait_for(r"rank 1 is (\d+)")[1])
        ours = segments() - before
        lies_in = running._backing
        if MPI.kind == "openmpi":
            assert {path.name.partition(".")[0] for path in lies_in.iterdir()} == {"sm_segment"}
        running.kill(pid)  # after that the other rank may remove its own
    assert not lies_in.exists()
    assert not any(path.exists() for path in orphans(ours))


def test_a_segment_in_use_is_no_orphan(tmp_path: Path) -> None:
    path = tmp_path / "mpich_shm_x"
    path.write_bytes(b"x" * 4096)
    assert orphans({path}) == {path}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert orphans({path}) == set()


def test_a_process_that_outlives_mpirun_is_found_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SETTLE_S", 0.5)
    # It leaves the session, and closes the pipes, whose other end mpirun reads until they are closed.
    code = (
        "import os, subprocess; p = subprocess.Popen(['sleep', '60'], start_new_session=True, stdin=-3, stdout=-3,"
        " stderr=-3); print('left', p.pid)"
    )
    job = mpirun(1, ["python", "-c", code])
    pid = int(job.stdout.split()[1])
    assert job.ranks_left in ([pid], [])  # Open MPI ends a rank's children, MPICH does not
    assert have_ended([pid])


def test_only_own_processes_are_killed() -> None:
    with start(1, ["python", "-c", SLEEP], timeout_s=20) as running:
        pid = int(running.wait_for(r"rank 0 is (\d+)")[1])
        with pytest.raises(AssertionError, match="no live process of this job"):
            running.kill(os.getpid(), signal.SIGCONT)
        running.kill(pid)


def test_the_mpi_of_a_given_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own; else that of its package; else that on PATH."""
    (tmp_path / "given/bin").mkdir(parents=True)
    (tmp_path / "given/bin/python3").symlink_to("/bin/false")  # which knows no package
    for place, said in (("elsewhere", "HYDRA build details"), ("given/bin", "mpirun (Open MPI) 5.0")):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / "mpirun").write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / place / "mpirun").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'elsewhere'}:{os.environ['PATH']}")
        jobs.mpi_of.cache_clear()
        found = jobs.mpi_of(tmp_path / "given")
        kind = "mpich" if "HYDRA" in said else "openmpi"
        assert found == jobs.Mpi(kind, tmp_path / "given", programs=tmp_path / place)
        assert found.program("mpirun") == str(tmp_path / place / "mpirun")
        assert found.python == str(tmp_path / "given/bin/python3")
    jobs.mpi_of.cache_clear()
