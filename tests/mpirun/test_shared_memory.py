"""Jobs whose workers share memory: killed, late, more than there are cores. Real `mpirun`.

Each ends by itself with a status, and leaves no process and no file. MPIKV_TIMEOUT_S is 4, so a job
that still runs after `LIMIT_S` would have hung.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from jobs import SHM, Mpi, mpirun, start

PROGRAM = str(Path(__file__).with_name("shared_program.py"))
TIMEOUT_S = 4
LIMIT_S = 80  # starting a job, the time limit, the report and its end, on a busy machine; the default limit is 300
ENVIRONMENT = {"MPIKV_TIMEOUT_S": str(TIMEOUT_S)}
HOSTS, SERVER = {"MPIKV_TEST_HOSTS": "2"}, {"MPIKV_NUM_SERVERS": "1"}


@pytest.mark.parametrize(
    ("mpi", "ranks", "env", "case", "victims"),
    [
        ("openmpi", 3, {}, "for ever", [1]),
        ("openmpi", 3, {}, "create", [0]),
        ("mpich", 3, {}, "update for ever", [2]),
        ("mpich", 3, {}, "for ever", [0, 1, 2]),
        ("mpich", 3, {}, "create", [0, 1, 2]),
        ("openmpi", 4, HOSTS, "for ever", [1]),
        ("mpich", 4, HOSTS, "update for ever", [2, 3]),
        ("openmpi", 3, SERVER, "for ever", [2]),
        ("mpich", 3, SERVER, "update for ever", [0]),
    ],
    indirect=["mpi"],
)
def test_killed(mpi: Mpi, ranks: int, env: dict[str, str], case: str, victims: list[int]) -> None:
    """kill -9 in the middle of a direct call or of `kv.create`: nothing is left, neither a process nor a file."""
    with start(ranks, ["python", PROGRAM, case], env=ENVIRONMENT | env, timeout_s=LIMIT_S, mpi=mpi) as running:
        pids = [int(running.wait_for(rf"ready {rank} (\d+)")[1]) for rank in range(ranks)]
        if "for ever" in case:
            deadline = time.monotonic() + LIMIT_S / 2
            while not all(
                "memfd:mpikv" in Path(f"/proc/{pid}/maps").read_text() for pid in pids
            ):  # they do share memory
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert not [path.name for path in SHM.iterdir() if "mpikv" in path.name]  # without a name
        time.sleep(0.1)
        running.kill_all([pids[rank] for rank in victims])
    job = running.result
    job.check(None)
    assert "survived" not in job.stdout, job.output
    assert [path.name for path in SHM.iterdir() if "mpikv" in path.name] == []


@pytest.mark.parametrize(
    ("mpi", "ranks", "env"),
    [
        pytest.param("openmpi", 8, {}, marks=pytest.mark.thorough),
        ("mpich", 3, {}),
        ("openmpi", 4, HOSTS),
        ("openmpi", 3, SERVER),
        ("mpich", 4, SERVER),
    ],
    indirect=["mpi"],
)
def test_without_a_fault_the_program_survives(mpi: Mpi, ranks: int, env: dict[str, str]) -> None:
    """Else the test above could not fail. Also with more ranks than cores; no step sends a message (it counts them)."""
    job = mpirun(ranks, ["python", PROGRAM, "none"], env=env, timeout_s=60, mpi=mpi)
    job.check()
    assert job.stdout.count("survived") == ranks - (env == SERVER)


def test_who_waits_for_a_late_worker_leaves_the_processor_alone(mpi: Mpi, tmp_path: Path) -> None:
    """Under a tenth of a core, from a second on; it should be a twentieth, and a busy machine adds to it.

    Not to the number of wake-ups: naps of 2 ms, and looks of a parked thread.
    """
    sign = tmp_path / "sign"
    environment = {"SIGN": str(sign)}
    with start(2, ["python", PROGRAM, "late"], env=environment, timeout_s=LIMIT_S, mpi=mpi) as running:
        pid = int(running.wait_for(r"waiting (\d+)")[1])
        time.sleep(1.2)
        before, woken, began = processor_s(pid), wakeups(pid), time.monotonic()
        time.sleep(4)
        used, woken, passed = processor_s(pid) - before, wakeups(pid) - woken, time.monotonic() - began
        assert "survived" not in running._text["stdout"]  # it has waited all the time
        sign.touch()
    running.result.check()
    assert used / passed < 0.1, f"{used:.2f} s of processor time in {passed:.2f} s"
    assert woken / passed < 700


def processor_s(pid: int) -> float:
    """Processor time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wakeups(pid: int) -> int:
    """How often the threads of a process slept and woke up."""
    texts = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.M)[0]) for text in texts)
