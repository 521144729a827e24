"""`mpikv launch --on-failure continue`: the job of a rank that dies is that of the others; Open MPI alone."""

from __future__ import annotations

import re
import signal
from collections import Counter
from pathlib import Path

import cifar_files
import frameworks
import pytest
from jobs import Mpi, Running, text
from test_launch import LIMIT_S, launch, launched, parent
from test_top_jobs import top

PROGRAM = str(Path(__file__).with_name("going_on.py"))
CONTINUE = ("--on-failure", "continue")


@pytest.fixture
def mpi(openmpi: Mpi) -> Mpi:
    return openmpi


def ready(running: Running, workers: int) -> list[int]:
    """The processes of the workers, which are in their rounds."""
    return [int(running.wait_for(rf"worker {i} of {workers} is \S+ (\d+)", 40)[1]) for i in range(workers)]


def server(running: Running) -> int:
    """The server's process, below the one above it, which has the same words."""
    (found,) = (
        pid
        for pid in running.processes()
        if text(Path(f"/proc/{pid}/cmdline")).endswith("-m\0mpikv.server\0")
        and "quick.py" not in text(Path(f"/proc/{pid}/cmdline"))
    )
    return found


@pytest.mark.parametrize(
    ("workers", "servers", "victims"),
    [(3, 1, ["worker 1"]), (3, 0, ["worker 0"]), (2, 1, ["server 0"]), (4, 0, ["worker 1", "worker 3"])],
)
def test_the_others_go_on(mpi: Mpi, tmp_path: Path, workers: int, servers: int, victims: list[str]) -> None:
    file = tmp_path / "enough"
    words = ("-n", str(workers), "-s", str(servers), "python", PROGRAM, str(file))
    with launched(mpi, *CONTINUE, *words, env={"MPIKV_METRICS": str(tmp_path)}) as running:
        pids = {f"worker {i}": pid for i, pid in enumerate(ready(running, workers))}
        if servers:
            pids["server 0"] = server(running)
        running.kill_all([pids[one] for one in victims])
        left = workers + servers - len(victims)
        for one in victims:
            running.wait_for(rf"mpikv launch: {one} on \S+ was killed by signal 9 \(SIGKILL\); \d ranks go on\n")
        running.wait_for(rf"gone: {left} go on")
        survivors = {f"worker {i}" for i in range(workers)} - set(victims)
        n_servers = left - len(survivors)
        sizes = f"{len(survivors)} workers, {n_servers} server{'s' * (n_servers != 1)}"
        _, output = top(str(running._process.pid), says=sizes)
        assert re.findall(r"^dist_sync: (.*)", output, re.MULTILINE) == [sizes]
        rows = re.findall(r"^ +\d+ \S+ +(\d+) +\d+\.\d ", output, re.MULTILINE)
        assert sorted(map(int, rows)) == sorted(pids[one] for one in survivors), output
        segments = list(running._backing.iterdir())
        assert segments
        file.touch()
        running._process.wait(LIMIT_S)
        assert not any(path.exists() for path in segments)
    job = running.result
    job.check()
    up = [re.findall(r'^mpikv_up{(\w+)="(\d)",store="0"} (\d)$', text(one), re.M) for one in tmp_path.glob("*.prom")]
    assert sorted(up) == sorted([(*one.split(), str(int(one in victims)))] for one in pids)
    assert set(re.findall(r"(worker \d) ends as one of (\d)", job.output)) == {
        (one, str(len(survivors))) for one in survivors
    }
    assert re.findall(r"(\d) ranks go on", job.output)[-1] == str(left), job.output


@pytest.mark.parametrize(
    ("case", "status", "goes_on"),
    [
        ("exit", 0, True),
        ("raise", 1, False),
        ("abort", 6, None),
        ("early exit", 3, False),
        ("early raise", 1, False),
        ("late", 5, None),
    ],
)
def test_a_rank_that_ends_by_itself(mpi: Mpi, tmp_path: Path, case: str, status: int, goes_on: bool | None) -> None:
    """Its death, which the others survive, its error, which is the job's, or its result. None: both may be said."""
    file = tmp_path / "enough"
    with launched(mpi, *CONTINUE, "-n", "3", "-s", "0", "python", PROGRAM, str(file), case) as running:
        if not case.startswith("early"):
            ready(running, 3)
        if case == "exit":
            running.wait_for("1 rank is gone: 2 go on")
        if case in ("exit", "late"):
            file.touch()
    job = running.result
    job.check(status)
    said = f"worker 2 on \\S+ ended with status {3 if case == 'exit' else status}"
    said += " before the ranks had a store: the others cannot go on\n" * (case == "early exit")
    assert re.search(f"mpikv launch: {said}", job.output), job.output
    if goes_on is not None:
        assert bool(re.search("; 2 ranks go on", job.output)) == goes_on, job.output
    assert ("boom" in job.output) == case.endswith("raise")


def test_a_job_that_ends_all_the_same_is_started_again(mpi: Mpi, tmp_path: Path) -> None:
    """Here with mpirun. A rank's death is no cause for that."""
    file = tmp_path / "enough"
    words = ("--restarts", "1", "-n", "3", "-s", "0", "python", PROGRAM, str(file))
    with launched(mpi, *CONTINUE, *words, env={"TMPDIR": str(tmp_path)}) as running:
        running.kill(ready(running, 3)[2])
        running.wait_for("1 rank is gone: 2 go on")
        (mpirun,) = (one for one in running.processes() if parent(one) == running._process.pid)
        running.kill(mpirun, signal.SIGKILL)
        running.wait_for("starting again, 1 of 1")
        file.touch()
    running.result.check()
    assert set(re.findall(r"ends as one of \d", running.result.output)) == {"ends as one of 3"}


USED = """
import os, sys, zlib
sys.path.insert(0, "examples")
import image_classification
gradients, folder = image_classification.Run.gradients, sys.argv.pop(1)
def noted(run, x, y):
    with open(f"{folder}/{os.getpid()}", "a") as file:
        file.writelines(f"{zlib.crc32(image.tobytes())}\\n" for image in x)
    return gradients(run, x, y)
image_classification.Run.gradients = noted
image_classification.main()
"""


def test_an_example_goes_on(mpi: Mpi, tmp_path: Path) -> None:
    """Each image is used once, but for those that the dead one would have used in the step that it dies before."""
    frameworks.need("torch")
    used, data = tmp_path / "used", cifar_files.write(tmp_path / "data")
    used.mkdir()
    words = ["-c", USED, str(used), "--data-dir", str(data), "--no-augment", "--model", "lenet", "--batch-size", "4"]
    words += ["--epochs", "1", "--lr-steps", "0.8", "--kill-at", "5"]
    env = {"MPIKV_TIMEOUT_S": "100", "OMP_NUM_THREADS": "1"}
    with launched(mpi, *CONTINUE, "-n", "3", "-s", "0", "python", *words, env=env, limit_s=300) as running:
        pass
    running.result.check()
    assert re.search(r"worker 2 on \S+ was killed by signal 9 \(SIGKILL\); 2 ranks go on\n", running.result.output)
    assert re.search(r"accuracy \S+ after 7 steps", running.result.output), running.result.output
    counts = Counter(line for file in used.iterdir() for line in file.read_text().splitlines())
    assert set(counts.values()) == {1}
    assert len(counts) == 5 * 3 * 4 + 2 * 2 * 4  # of 80


def test_all_die(mpi: Mpi, tmp_path: Path) -> None:
    with launched(mpi, *CONTINUE, "-n", "2", "-s", "0", "python", PROGRAM, str(tmp_path / "enough")) as running:
        running.kill_all(ready(running, 2))
    running.result.check(128 + signal.SIGKILL)
    assert running.result.output.count("was killed by signal 9 (SIGKILL)") == 2


def test_another_mpi_cannot(mpich: Mpi) -> None:
    """Which is said before anything has started."""
    job = launch(mpich, *CONTINUE, "-n", "2", "-s", "0", "echo", "begun")
    job.check(2)
    assert re.search(
        r"error: --on-failure continue needs Open MPI 5 .*, MPICH, ends with .* --restarts N starts it again",
        job.output,
    )
    assert "begun" not in job.output
