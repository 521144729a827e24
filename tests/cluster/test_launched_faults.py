"""`mpikv launch` over three hosts with a real sshd, when something goes wrong: what it says, its status, what is left.

Nothing may be left on any host 10 s after the launcher has ended. Where a host cannot be reached any more, its own
processes must notice that, which takes them 30 s (`mpikv/commands/launch/channel.py`).
"""

from __future__ import annotations

import re
import signal

import jobs
import pytest
from batch_jobs import HERE, looping, wait_for_snapshot
from launching import Command, host_file, launch, launched
from namespaces import Network

full = pytest.mark.cluster_full
LOST_S = 30
ONE_OF_TWO = [pytest.param("openmpi", marks=full), "mpich"]


@pytest.fixture
def options(ssh_hosts: Network) -> list[object]:
    return ["-n", 3, "-s", 0, "-H", host_file(ssh_hosts), "--launcher", "ssh"]


def ready(running: Command) -> dict[int, int]:
    found = [running.wait_for(rf"worker {i} of 3 is h{i + 1} (\d+)", 60) for i in range(3)]
    return {i: int(match[1]) for i, match in enumerate(found)}


# ---- a rank


@full
@pytest.mark.parametrize(
    ("case", "status", "said"),
    [
        ("raises", 1, r"^\[worker 1 @ h2\] .*RuntimeError: boom on one worker$"),
        ("exits", 3, r"^mpikv launch: .*worker 1.* h2.*3"),
    ],
)
def test_a_failing_rank(  # noqa: PLR0917
    ssh_hosts: Network, mpi: jobs.Mpi, options: list[object], case: str, status: int, said: str
) -> None:
    with ssh_hosts.nothing_left():
        job = launch(ssh_hosts, mpi, options, looping(case))
    job.check(status)
    assert re.search(said, job.output, re.M), job.output
    assert "no process of the job is left on h1, h2, h3" in job.stderr


@pytest.mark.parametrize("mpi", ONE_OF_TWO, indirect=True)
@pytest.mark.parametrize(
    ("victim", "status", "said"),
    [
        ("a rank", 128 + signal.SIGKILL, r"worker 2.* h3.*(SIGKILL|killed)"),
        ("a host", None, r"\bh3\b"),
        *(pytest.param(one.name, 128 + one, one.name, marks=full) for one in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_the_job_ends_with(  # noqa: PLR0917
    ssh_hosts: Network, mpi: jobs.Mpi, options: list[object], victim: str, status: int | None, said: str
) -> None:
    """A rank that is killed, a host that crashes, or the launcher that is told to end."""
    with ssh_hosts.nothing_left(), launched(ssh_hosts, mpi, options, looping("forever")) as running:
        ranks = ready(running)
        if victim == "a rank":
            running.kill(ranks[2])
        elif victim == "a host":
            ssh_hosts.crash(ssh_hosts[2])
        else:
            running.kill(running.pid, signal.Signals[victim])
    job = running.result
    job.check(status)
    assert re.search(rf"^mpikv launch: .*{said}", job.stderr, re.M), job.output
    assert "SIG" not in victim or "no process of the job is left on h1, h2, h3" in job.stderr


@pytest.mark.parametrize("mpi", ONE_OF_TWO, indirect=True)
def test_a_killed_launcher(ssh_hosts: Network, mpi: jobs.Mpi, options: list[object]) -> None:
    """It can do nothing any more; the processes above the ranks notice."""
    before = ssh_hosts.snapshot()
    with launched(ssh_hosts, mpi, options, looping("forever")) as running:
        ready(running)
        running.kill(running.pid, signal.SIGKILL)
        ssh_hosts.assert_gone(before)


# ---- a host


@pytest.mark.parametrize("mpi", ONE_OF_TWO, indirect=True)
def test_an_unreachable_host(ssh_hosts: Network, mpi: jobs.Mpi, options: list[object]) -> None:
    ssh_hosts.cut(ssh_hosts[2])
    with ssh_hosts.nothing_left():
        job = launch(ssh_hosts, mpi, options, looping("forever"))
    job.check(None)
    assert re.search(r"1 of 3 hosts cannot be used:\s+h3: .*(timed out|No route)", job.stderr), job.output


@full
def test_a_host_whose_cable_is_cut(ssh_hosts: Network, mpi: jobs.Mpi, options: list[object]) -> None:
    before = ssh_hosts.snapshot()
    with launched(ssh_hosts, mpi, options, looping("forever"), timeout_s=150) as running:
        ready(running)
        ssh_hosts.cut(ssh_hosts[2])
        ssh_hosts.assert_gone(before, LOST_S + 30)
    running.result.check(None)
    assert re.search(r"^mpikv launch: .*\bh3\b", running.result.stderr, re.M), running.result.output


@pytest.mark.parametrize("mpi", ONE_OF_TWO, indirect=True)
def test_a_job_goes_on_without_a_host_that_has_crashed(ssh_hosts: Network, mpi: jobs.Mpi) -> None:
    """With as many workers as have slots on the others, from what the lost worker had given to the next host."""
    options = ["-n", 3, "-s", 0, "-H", host_file(ssh_hosts, "{name} slots=1"), "--restarts", 1, "--min-workers", 2]
    enough = ssh_hosts.folder / "enough"
    words, folder = ["python", str(HERE / "surviving.py"), str(enough)], ssh_hosts.local / "snapshots"
    local = {"MPIKV_SNAPSHOT_DIR": str(folder), "MPIKV_SNAPSHOT_S": "0.1"}
    with ssh_hosts.nothing_left(), launched(ssh_hosts, mpi, options, words, **local) as running:
        for i in range(3):
            running.wait_for(rf"worker {i} of 3 is h{i + 1} \d+ at step 0", 60)
        wait_for_snapshot(ssh_hosts, ssh_hosts.hosts[:2], folder)
        ssh_hosts.crash(ssh_hosts[2])
        step = running.wait_for(r"starting again, 1 of 1, from step (\d+)", 60)[1]
        for i in range(2):
            running.wait_for(rf"worker {i} of 2 is h{i + 1} \d+ at step {step}", 60)
        enough.touch()
    running.result.check(0)
    assert re.search(r"\bh3\b.*starting again", running.result.stderr), running.result.output


# ---- the others go on: Open MPI


GOING_ON = str(jobs.ROOT / "tests" / "mpirun" / "going_on.py")


def going_on(hosts: Network, *more: object) -> tuple[list[object], list[str]]:
    """Options, and a command whose ranks, two on each host, end when there is a file `enough`."""
    options = ["-n", 6, "-s", 0, "-H", host_file(hosts, "{name} slots=2"), "--on-failure", "continue", *more]
    return options, ["python", GOING_ON, str(hosts.folder / "enough")]


@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_the_others_go_on_without_a_rank(ssh_hosts: Network, mpi: jobs.Mpi) -> None:
    """Two on each host, where Open MPI's component han would add up."""
    with ssh_hosts.nothing_left(), launched(ssh_hosts, mpi, *going_on(ssh_hosts)) as running:
        pids = [int(running.wait_for(rf"worker {i} of 6 is h\d (\d+)", 60)[1]) for i in range(6)]
        running.kill(pids[3])
        running.wait_for(r"mpikv launch: worker 3 on h2 was killed by signal 9 \(SIGKILL\); 5 ranks go on")
        running.wait_for("mpikv: 1 rank is gone: 5 go on")
        (ssh_hosts.folder / "enough").touch()
    running.result.check()
    assert running.result.output.count("ends as one of 5") == 5


@full
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_a_job_that_goes_on_without_a_rank_is_started_again_without_a_host(ssh_hosts: Network, mpi: jobs.Mpi) -> None:
    """Whose loss Open MPI itself does not survive."""
    options, words = going_on(ssh_hosts, "--restarts", 1, "--min-workers", 4)
    with ssh_hosts.nothing_left(), launched(ssh_hosts, mpi, options, words) as running:
        pids = [int(running.wait_for(rf"worker {i} of 6 is h\d (\d+)", 60)[1]) for i in range(6)]
        running.kill(pids[1])
        running.wait_for("mpikv: 1 rank is gone: 5 go on")
        ssh_hosts.crash(ssh_hosts[2])
        running.wait_for(r"\bh3\b.*starting again, 1 of 1")
        (ssh_hosts.folder / "enough").touch()
    running.result.check()
    assert running.result.output.count("ends as one of 4") == 4


@full
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_nobody_goes_on_where_sums_may_be_wrong(ssh_hosts: Network, mpi: jobs.Mpi) -> None:
    options, words = going_on(ssh_hosts, "--env", "OMPI_MCA_coll=^tuned")
    with ssh_hosts.nothing_left():
        job = launch(ssh_hosts, mpi, options, words)
    job.check(2)
    assert "returns wrong sums after a death unless its component han is off" in job.output
