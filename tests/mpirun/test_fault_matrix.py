"""Every fault of one worker is named: by rank, host, key and the line of the program, soon, and the job ends.

Each row is a fault of fault_program.py, by the name of its function. Soon: what is found at once comes before any table
of a wait, and what has a limit before a longer one, which no test waits for. Two MPIs in one job are in
test_library_mix.py.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import BACKING, SHM, Job, Mpi, mpirun, start

PROGRAM = str(Path(__file__).with_name("fault_program.py"))
WAITS = str(Path(__file__).with_name("waits_program.py"))
LIMIT_S = 60
HOST = r"on [^\s:;,)]+"
ME, OTHER = rf"worker [02] {HOST}", rf"worker 1 {HOST}"


def at(name: str) -> str:
    return rf"at fault_program\.py:\d+ in {name}"


AT_END = at("<module>")
RAISED = rf"\[rank 1 of 3 {HOST}\]"


PID = r"( \(pid \d+\))?"  # where a process has several stores


class Fault(NamedTuple):
    """What is printed of a fault. warn_s, timeout_s: the limits, so long that what is printed cannot come from a later
    one. status: None: any but 0. of: the MPI under which some of it is said; the others end the job all the same.

    both: the launcher has a part in it, or the start and the end of MPI. Other faults are the store's alone, and made
    under both MPIs by --full only: MPICH starts a job in a third of the time.
    """

    said: tuple[str, ...]
    warn_s: float = 1000  # longer than any job here lasts
    timeout_s: float = 1000
    status: int | None = None
    of: str = ""
    servers: int = 0
    kind: str = "dist_sync"
    both: bool = False


def circle(one: str, other: str) -> Fault:
    """Workers 0 and 2 wait in one place and worker 1 in the other; whoever of the circle is named first."""
    one, other = rf"{ME}{PID} in {one}", rf"{OTHER}{PID} in {other}"
    return Fault((rf"StallError: .*Deadlock: ({one} waits for {other} waits|{other} waits for {one} waits)",), warn_s=2)


def away(doing: str) -> Fault:
    """Worker 1 does not come: first there is the table, then the error, at the limit. The table comes again, where a
    worker that waits, too, was slow to answer.
    """
    table = rf"mpikv: stalled for .*: worker 0, 2 {HOST} wait for {OTHER}\n(.*\n)*?.*  {OTHER} \(pid \d+\): {doing}"
    waiting = r"pushpull of key 'a', round 3"
    doing = doing.replace("no answer for 1\\.0 s; ", "")
    error = rf"StallError: {ME} \(rank [02] of 3\) waited 8 s in {waiting}\..*{OTHER} \(.*{doing}.*"
    return Fault((rf"  worker 0, 2 .*: in {waiting} for .*; {AT_END}", rf"{table}[^\0]*{error}"), warn_s=1, timeout_s=8)


UPDATE = r"ZeroDivisionError: in the user's optimizer", r"in the update of key 'a'"
AWAY = r"outside the store for \d+\.\d s, its last call was pushpull of key 'b'; "
SILENT = r"no answer for 1\.0 s; "
FAULTS = {
    "other_order_of_mixed_waits": circle(
        rf"pull of key 'a', round 3 {at('other_order_of_mixed_waits')}", f"barrier {at('other_order_of_mixed_waits')}"
    ),
    "shape": Fault(
        (rf"ShapeMismatch: init of key 'x'.* worker 0 {HOST}.*: float32 \(2,\); worker 1 {HOST}: float32 \(3,\)",)
    ),
    "exception": Fault(
        (rf"{RAISED} .*fault_program\.py\", line \d+, in exc", rf"{RAISED} RuntimeError: boom on one"), both=True
    ),
    "sys_exit": Fault(
        (rf"{RAISED} sys\.exit\(3\) while <KVStore dist_sync: worker 1 of 3> was open",), status=3, both=True
    ),
    "loop_in_python": away(f"{AWAY}{at('loop_in_python')}, computing"),
    "sleep_in_python": away(f"{AWAY}{at('sleep_in_python')}, not computing"),
    "loop_in_c": away(f"{SILENT}it computes without a break for other threads"),
    "sleep_in_c": away(f"{SILENT}it sleeps in a call that lets no other thread run"),
    "sigstop": away(f"{SILENT}it was stopped by a signal"),
    "sigkill": Fault((r"rank 1 with PID \d+ on node \S+ exited on\s+signal 9",), of="openmpi", both=True),
    "uneven_batches": Fault(
        (
            rf"PeerError: worker 0 .* pushpull of key 'a', round 12: worker [12] {HOST} closed its store after 11",
            r"fault_program\.py\", line \d+, in uneven_batches",
        )
    ),
    "out_of_memory": Fault(
        (
            rf"{RAISED} .*fault_program\.py\", line \d+, in out_of_memory",
            rf"{RAISED} MemoryError: init: the value of key 'large': Unable to allocate 64",
        )
    ),
    "two_stores": Fault(
        (*circle(rf"close {at('two_stores')}", rf"close {at('two_stores')}").said, "They wait in different stores"),
        warn_s=2,
    ),
    "create_alone": Fault(
        (rf"StallError: worker [02] .* Deadlock: .*rank 1 of 3 {HOST} in kv.create\('dist_sync'\) at .* waits for w",),
        warn_s=1,
    ),
    "version": Fault(
        (rf"ConfigError: kv\.create: the version of mpikv differs between ranks: rank 0 .*; rank 1 {HOST}: 0\.0\.1",),
        status=2,
        both=True,
    ),
    "os_exit": Fault((), both=True),
    "interrupted_at_exit": Fault((rf"{RAISED} KeyboardInterrupt",), status=130, both=True),
    "interrupted_at_exit with a server": Fault((rf"{RAISED} KeyboardInterrupt",), status=130, servers=1),
    "sleep_in_python with a server": Fault(
        (r"StallError: worker 0 .* pushpull of key 'a', round 3\. Not arrived: worker 1",), timeout_s=4, servers=1
    ),
    "other_call": Fault((rf"different calls.* worker 0 {HOST}: barrier\(\); worker 1 {HOST}: init\('x'\)",)),
    "other_type": Fault((rf"ConfigError: .* rank 0 {HOST}, rank 2 {HOST}: dist_sync; rank 1 {HOST}: dist_async",)),
    "too many servers": Fault((r"ConfigError: 3 servers among 3 ranks leave no worker: .*mpirun -n 4",), servers=3),
    "optimizer_raises": Fault(UPDATE),
    "optimizer_raises with a server": Fault((*UPDATE, rf"\[rank 2 of 3 {HOST}\] .*ZeroDiv"), servers=1),
    "optimizer_exits with a server": Fault(
        (rf"\[rank 2 of 3 {HOST}\] .*MpikvError: an optimizer has called sys\.exit\(3\) at this server",),
        servers=1,
        both=True,
    ),
    "second_store with a server": Fault(
        (r"ConfigError: .* another store is open and has its servers at rank 2; make one store for all",), servers=1
    ),
    "store_after_store with a server": Fault(
        (
            r"StallError: rank [01] of 3 waited 4 s in kv\.create\('dist_sync'\) for the other ranks .*: every one of "
            r"them must call it; an earlier store had its servers at rank 2, where the process ended with it: make one",
        ),
        timeout_s=4,
        servers=1,
        both=True,
    ),
}  # fmt: skip


def environment(folder: Path, fault: Fault) -> dict[str, str]:
    limits = {"MPIKV_STALL_WARN_S": str(fault.warn_s), "MPIKV_TIMEOUT_S": str(fault.timeout_s)}
    return {**limits, "MPIKV_NUM_SERVERS": str(fault.servers), "FOLDER": str(folder)}


def check_end(job: Job, fault: Fault) -> None:
    job.check(fault.status)
    assert "survived" not in job.stdout, job.output
    assert not [path.name for path in SHM.iterdir() if "mpikv" in path.name]


@pytest.mark.parametrize(
    ("mpi", "name"),
    [
        pytest.param(kind, name, marks=[] if kind == "mpich" or fault.both else pytest.mark.full)
        for name, fault in FAULTS.items()
        for kind in ("mpich", "openmpi")
    ],
    indirect=["mpi"],
)
def test_a_fault_is_named_and_ends_the_job(mpi: Mpi, name: str, tmp_path: Path) -> None:
    fault, function = FAULTS[name], re.split(r"\W", name)[0]
    words = ["python", PROGRAM, "none" if function == "too" else function, fault.kind]
    job = mpirun(3, words, env=environment(tmp_path, fault), timeout_s=LIMIT_S, mpi=mpi)
    check_end(job, fault)
    for text in fault.said if fault.of in ("", mpi.kind) else ():
        assert re.search(text, job.output), f"no {text!r} in:\n{job.output}"
    if name == "os_exit" and mpi.kind == "openmpi":
        assert job.status == 5


@pytest.mark.parametrize(
    ("kind", "servers", "victim"), [("dist_sync", 0, 1), ("dist_sync", 1, 2), ("dist_async", 0, 0)]
)
def test_killed(mpi: Mpi, kind: str, servers: int, victim: int, tmp_path: Path) -> None:
    """kill -9 of a worker, of a server: the others are gone at once; mpirun names the rank, they say what they lack."""
    fault = Fault((), servers=servers)
    words = ["python", PROGRAM, "killed", kind]
    with start(3, words, env=environment(tmp_path, fault), timeout_s=LIMIT_S, mpi=mpi) as running:
        running.wait_for("ready 0")
        ranks = {int(rank): pid for pid in running.processes() if (rank := rank_of(pid)) is not None}
        if kind == "dist_sync":  # the others say what they lack if they already wait for it when they are ended
            running.kill(ranks[victim], signal.SIGSTOP)
            (tmp_path / "stopped").touch()
            running.wait_for("it waits")
        running.kill(ranks[victim])
    job = running.result
    check_end(job, fault)
    if mpi.kind == "openmpi":
        # Open MPI lets the other ranks end by SIGTERM; MPICH kills them, and prints the exit code alone.
        assert re.search(rf"rank {victim} with PID \d+ on node \S+ exited on\s+signal 9", job.output), job.output
        if kind == "dist_sync":
            assert re.search(r"told to end \(SIGTERM\) while in pushpull of key 'a', round \d+", job.output), job.output
    else:
        assert re.search(r"RANK \d|EXIT CODE: 9", job.output), job.output


def rank_of(pid: int) -> int | None:
    """The rank of a process that runs the program; None for mpirun and its helpers."""
    words, name = (Path(f"/proc/{pid}/{file}").read_text() for file in ("cmdline", "comm"))
    if PROGRAM not in words.split("\0") or "mpirun" in name:
        return None
    environ = Path(f"/proc/{pid}/environ").read_text()
    rank = re.search(r"(?:^|\0)(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)\0", environ)
    return None if rank is None else int(rank[1])


def may_mount() -> bool:
    line = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(SHM)]
    return bool(shutil.which("unshare")) and subprocess.run(line, capture_output=True, check=False).returncode == 0


def with_dev_shm(mpi: Mpi, folder: Path, size_mib: int, fill_bytes: int = 0) -> Mpi:
    """The MPI, with a /dev/shm of its own for each job. folder: for a script."""
    if not may_mount():
        pytest.skip("needs root and unshare, for a /dev/shm that is small")
    script = folder / "mpirun"
    script.write_text(
        f"#!/bin/sh\nexec unshare --mount sh -c 'mount -t tmpfs -o size={size_mib}m tmpfs {SHM} && "
        f'mkdir -p "${BACKING}" && head -c {fill_bytes} /dev/zero 2> /dev/null > {SHM}/full; '
        f'exec {mpi.program("mpirun")} "$@"\' mpirun "$@"\n'
    )
    script.chmod(0o755)
    return Mpi(mpi.kind, mpi.prefix, programs=folder)


@pytest.mark.parametrize("size_mib", [4, 18])  # room for none of what UCX asks for, and for some of it
def test_a_small_dev_shm(mpi: Mpi, tmp_path: Path, size_mib: int) -> None:
    """MPICH has room for what it needs in the first of them; its UCX would crash in the second."""
    small = with_dev_shm(mpi, tmp_path, size_mib)
    env = {"MPIKV_SHARED_MEMORY": "off"}  # long messages
    job = mpirun(3, ["python", WAITS, "1", "2"], env=env, timeout_s=LIMIT_S, mpi=small)
    assert (job.status, job.stdout.count("right")) == (0, 3), job.output
    assert (
        size_mib < 18 or "MiB left" not in job.output
    )  # in the other case a rank may come when others have their part


def test_a_full_dev_shm(mpi: Mpi, tmp_path: Path) -> None:
    """Where nothing goes into it: Open MPI does without, MPICH dies, and then a line of ours is all that says why."""
    full = with_dev_shm(mpi, tmp_path, 1, 2_000_000)
    job = mpirun(3, ["python", PROGRAM, "none", "dist_sync"], timeout_s=LIMIT_S, mpi=full)
    assert not job.timed_out, job.output
    assert re.search(rf"mpikv: {SHM} has 0\.0 MiB left {HOST}, and MPI needs some", job.output), job.output
    if mpi.kind == "openmpi":
        assert (job.status, job.stdout.count("survived")) == (0, 3), job.output
    else:
        assert (job.status == 0) == (job.stdout.count("survived") == 3), job.output
