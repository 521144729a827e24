"""`mpikv launch` with real jobs on this machine, both MPIs where both are installed.

Every test looks for what is left: a process of the job is known by a variable of its environment, wherever it hangs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Job, Mpi, Running, environment, text

from mpikv.commands.launch.processes import segments

PROGRAM = str(Path(__file__).with_name("launched.py"))
LIMIT_S = 60
# Between the event and the last process's end: 10 s are promised, and the machine is busy; ranks would run for minutes.
END_S = 40
GRACE_S = 2  # from SIGTERM to SIGKILL, instead of 4: ranks that do not listen are waited for in many of these tests


@contextlib.contextmanager
def launched(mpi: Mpi, *words: str, env: dict[str, str] | None = None, limit_s: float = LIMIT_S) -> Iterator[Running]:
    """`mpikv launch WORDS` under way; at the end of the block it is waited for."""
    folder = Path(tempfile.mkdtemp(prefix="mpikv-job-"))
    grace = [] if "--grace" in words else ["--grace", str(GRACE_S)]
    line = [mpi.python, "-m", "mpikv", "launch", *grace]
    line += [mpi.python if word == "python" else word for word in words]
    seen = environment(mpi, {"MPIKV_TIMEOUT_S": "20", **(env or {})}, folder)
    running = Running(line, seen, folder, limit_s)
    try:
        yield running
    except BaseException:
        running.end()
        raise
    running.finish()


def launch(mpi: Mpi, *words: str, env: dict[str, str] | None = None) -> Job:
    with launched(mpi, *words, env=env) as running:
        pass
    return running.result


def shell(mpi: Mpi, script: str) -> Job:
    """A script that ends well."""
    folder = Path(tempfile.mkdtemp(prefix="mpikv-job-"))
    job = Running(["sh", "-c", script], environment(mpi, {}, folder), folder, LIMIT_S).finish()
    job.check()
    return job


def tagged(job: Job, tag: str) -> list[str]:
    return [line.split("] ", 1)[1] for line in job.output.splitlines() if line.startswith(f"[{tag} @ ")]


@pytest.mark.thorough
def test_servers_that_nobody_uses(mpi: Mpi) -> None:
    """They have come to MPI_Init before the worker ends, which Open MPI's mpirun takes for an error.

    One worker: where there are several, it ends them with the first.
    """
    job = launch(mpi, "-n", "1", "-s", "2", "sh", "-c", "sleep 8; echo one")
    job.check()
    assert len(tagged(job, "worker 0")) == 1
    assert "servers that wait" in job.stderr


def test_servers_beside_a_process_group(mpi: Mpi) -> None:
    """There are some by default: one line says what to do. This is what `init_process_group("mpikv")` calls."""
    job = launch(mpi, "-n", "2", "python", "-c", "from mpikv.groups.world import opened; opened()")
    job.check(2)
    (said,) = re.findall(r"mpikv: error: (.*)", job.output)
    assert "process group, which has no servers (mpikv launch -s 0): rank 0 on " in said
    assert re.search(r": init_process_group; rank 2 on .*: kv.create", said)
    assert "Traceback" not in job.output, job.output


def test_lines_stay_whole(mpi: Mpi, tmp_path: Path) -> None:
    """In the terminal and in the file of each rank, which has what --env gives to it."""
    code = "import os\nfor i in range(3000): print(os.environ['LETTER'] * 100 + str(i))"
    script = f'LETTER=$LETTER${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} exec {mpi.python} -c "{code}"'
    logs = str(tmp_path / "logs")
    job = launch(mpi, "-n", "3", "-s", "0", "--env", "LETTER=x b'c", "--output-dir", logs, "sh", "-c", script)
    job.check()
    assert "mpikv launch" not in job.output  # nothing to say
    for rank in range(3):
        assert tagged(job, f"worker {rank}") == [f"x b'c{rank}" * 100 + str(i) for i in range(3000)]
        assert (tmp_path / "logs" / f"worker-{rank}.log").read_text().splitlines() == tagged(job, f"worker {rank}")


@pytest.mark.parametrize(
    ("case", "status", "phrase"),
    [
        ("exit", 7, "worker 1 on .* (ended with status 7|called MPI_Abort)"),
        ("kill", 137, r"worker 1 on .* was killed by signal 9 \(SIGKILL\)"),
        ("abort", 6, "worker 1 on .* (ended with status 6|called MPI_Abort)"),
    ],
)
def test_a_rank_that_fails(mpi: Mpi, case: str, status: int, phrase: str) -> None:
    job = launch(mpi, "-n", "2", "-s", "1", "python", PROGRAM, case)
    job.check(status)
    assert re.search(phrase, job.output), job.output
    assert "no process of the job is left" in job.stderr
    assert "survived" not in job.output


SAVES = """
import os, signal, sys, time
from mpi4py import MPI
def save(*_):
    time.sleep(2)
    os.write(1, b"saved\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, save)
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 1:
    MPI.COMM_WORLD.Abort(6) if sys.argv[1] == "abort" else os._exit(3)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(("case", "status"), [("abort", 6), ("exit", 3)])
def test_the_others_have_time_to_save_when_a_rank_fails(mpi: Mpi, case: str, status: int) -> None:
    """Though mpirun kills what it has started."""
    job = launch(mpi, "-n", "2", "-s", "0", "--grace", "30", "python", "-c", SAVES, case)
    job.check(status)
    assert tagged(job, "worker 0")[-1] == "saved"


@pytest.mark.parametrize("victim", ["the process above a rank", "the launcher", "mpirun", "Ctrl-C"])
def test_something_of_the_job_is_killed(mpi: Mpi, victim: str) -> None:
    """And nothing is left, though ranks have started what does not end by itself."""
    with launched(mpi, "-n", "2", "-s", "1", "python", PROGRAM, "stubborn") as running:
        pid, _ = (int(running.wait_for(rf"worker {i} is process (\d+)", 40)[1]) for i in range(2))
        (mpirun,) = (one for one in running.processes() if parent(one) == running._process.pid)
        assert (shared := segments([pid]))
        killed = {"the process above a rank": parent(pid), "mpirun": mpirun}.get(victim, running._process.pid)
        running.kill(killed, signal.SIGINT if victim == "Ctrl-C" else signal.SIGKILL)
        deadline = time.monotonic() + END_S
        while left := [one for one in running.processes() if one != running._process.pid]:
            assert time.monotonic() < deadline, f"{left} still run after {END_S} s"
            time.sleep(0.1)
        assert victim == "the launcher" or not any(map(os.path.exists, shared))
    job = running.result
    job.check({"the launcher": -signal.SIGKILL, "Ctrl-C": 130}.get(victim))
    if victim == "Ctrl-C":
        assert "no process of the job is left" in job.stderr
    if victim == "the process above a rank":
        assert "worker 0" in job.stderr


def test_the_reader_goes_away(mpi: Mpi, tmp_path: Path) -> None:
    """`mpikv launch ... | head -3` ends."""
    script = f"{mpi.python} -m mpikv launch -n 2 -s 0 yes | head -3; echo status $?"
    job = shell(mpi, script)
    assert job.stdout.count("] y\n") == 3
    assert job.stdout.endswith("status 0\n")


@pytest.mark.thorough
def test_a_reader_that_stops(mpi: Mpi, tmp_path: Path) -> None:
    """`mpikv launch ... | less`: the time limit counts all the same."""
    ended = tmp_path / "status"
    reader = f"until [ -e {ended} ]; do sleep 0.1; done"
    line = f"{mpi.python} -m mpikv launch -n 2 -s 0 --timeout 2 --grace {GRACE_S} yes"
    script = f"{{ {line}; echo $? >{ended}; }} | {{ {reader}; }}"
    shell(mpi, script)
    assert ended.read_text() == "124\n"


def test_dry_run_prints_a_line_that_works(mpi: Mpi) -> None:
    job = launch(mpi, "-n", "2", "-s", "1", "--dry-run", "--env", "COLOUR=x y", "python", PROGRAM, "none")
    assert (job.status, "x y" in job.output) == (0, False), job.output
    done = shell(mpi, job.stdout.replace("***", "x y"))
    assert re.findall("survived .*", done.output) == ["survived x y"] * 2


def parent(pid: int) -> int:
    """0 where the process has ended."""
    fields = text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[1]) if fields else 0
