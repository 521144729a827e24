"""The verdict on a job, from what its ranks and mpirun reported."""

from __future__ import annotations

from dataclasses import replace

from mpikv.commands.launch.placement import Block
from mpikv.commands.launch.ranks import IDLE_SERVERS, Rank, Verdict, exit_status, expected, judge


def job(*changes: dict[str, object]) -> list[Rank]:
    """A worker for each: it ended well but for these changes."""
    ranks = []
    for i, change in enumerate(changes):
        rank = Rank("worker", i, i, host=f"h{i}", status=0, order=i + 1)
        for name, value in change.items():
            setattr(rank, name, value)
        ranks.append(rank)
    return ranks


def test_expected() -> None:
    ranks = expected([Block("worker", 2, 0, 0, "a"), Block("server", 1, 0, 2, "a"), Block("worker", 1, 2, 3, "b")])
    assert [(rank, one.name) for rank, one in ranks.items()] == [
        (0, "worker 0"), (1, "worker 1"), (2, "server 0"), (3, "worker 2"),
    ]  # fmt: skip


def test_success() -> None:
    assert judge(job({}, {}), 0) == Verdict(0, "")
    assert judge(job({}, {}), None) == Verdict(0, "")


def test_the_first_failure_counts() -> None:
    ranks = job({"status": 3, "order": 2}, {"status": -9, "order": 1}, {"status": 1, "order": 3})
    assert judge(ranks, 1) == Verdict(137, "worker 1 on h1 was killed by signal 9 (SIGKILL)")
    ranks[1] = replace(ranks[1], order=4)
    ranks[0] = replace(ranks[0], status=14)  # it has lost its connection to another one
    assert judge(ranks, 1) == Verdict(1, "worker 2 on h2 ended with status 1")
    ranks[2] = replace(ranks[2], status=14)
    assert judge(ranks, 1) == Verdict(137, "worker 1 on h1 was killed by signal 9 (SIGKILL)")
    ranks[0] = replace(ranks[0], status=3)
    ranks[1].told = True
    assert judge(ranks, 1) == Verdict(3, "worker 0 on h0 ended with status 3")
    assert judge(job({"status": 127, "error": "x: no such command on h0"}), 127).text == (
        "worker 0 on h0 did not start: x: no such command on h0"
    )
    assert judge(job({"status": -40}), 1).text == "worker 0 on h0 was killed by signal 40"


def test_never_0_without_every_report() -> None:
    assert judge(job({}, {"host": "", "status": None}), 0) == Verdict(
        1, "mpirun ended, and worker 1 (1 of 2 ranks) never started"
    )
    assert judge(job({}, {"host": "", "status": None}), 213).status == 213
    assert judge(job({}, {"status": None, "lost": True}), 0) == Verdict(
        1, "worker 1 (1 of 2 ranks) on h1 went away without a report"
    )
    assert judge(job({}, {"status": 1, "told": True}), 0).status == 1
    assert judge(job({"status": 15, "told": True}, {"status": -15, "told": True}), 7) == Verdict(
        7, "mpirun ended the ranks, with status 7"
    )
    assert judge(job({}, {}), 9) == Verdict(9, "mpirun ended with status 9, though every rank ended with 0")
    lost = [{"status": None, "lost": True}] * 7
    assert "worker 0, worker 1, worker 2, worker 3 and 3 more (7 of 7 ranks)" in judge(job(*lost), 0).text


def test_mpi_abort() -> None:
    """MPICH kills the rank that calls it before it can end."""
    aborted = {"status": -15, "told": True, "aborted": 1, "abort_status": 6, "order": 2}
    ranks = job({"status": 15, "told": True, "order": 3}, aborted)
    assert judge(ranks, 6) == Verdict(6, "worker 1 on h1 called MPI_Abort with status 6")
    ranks[0] = job({"status": 4, "order": 2})[0]
    assert judge(ranks, 6).text.startswith("worker 1")
    assert judge(ranks, 4) == Verdict(6, "worker 1 on h1 called MPI_Abort with status 6")  # mpirun's is another's
    assert judge(ranks, None).status == 6
    ranks[0].order, ranks[1].aborted = 1, 2
    assert judge(ranks, 6).status == 4


def test_an_end_that_was_asked_for() -> None:
    ended = job({"status": -15, "told": True}, {"status": 0})
    assert judge(ended, 1, asked=Verdict(143, "ended by SIGTERM")).status == 143
    assert judge(ended, None, asked=Verdict(124, "timed out")) == Verdict(124, "timed out")
    assert judge(job({}, {}), 0, asked=Verdict(143, "ended by SIGTERM")).status == 0
    assert judge(job({}, {}), 0, asked=Verdict(130, "ended by SIGINT")).status == 130
    servers = [*job({}), Rank("server", 0, 1, host="h1", status=-15, told=True, order=2)]
    assert judge(servers, 1, asked=Verdict(0, "unused servers")) == Verdict(0, "unused servers")
    assert judge(servers, 1) == Verdict(0, IDLE_SERVERS)  # mpirun was sooner


def test_workers_without_mpi_beside_servers() -> None:
    """Open MPI's mpirun ends the others with the first that has not been in MPI_Init, if a server has."""
    told = {"status": -15, "told": True}
    server = Rank("server", 0, 2, host="h2", status=-15, told=True, order=3)
    ranks = [*job(told, {"status": 0}), server]
    assert judge(ranks, 1) == Verdict(
        1, "mpirun ended the ranks, with status 1, when worker 1 had ended: a program without a dist store needs -s 0"
    )
    assert judge([*job(told, told), server], 1).text == "mpirun ended the ranks, with status 1"
    assert judge([*job(told, {"status": 0}), replace(server, status=0)], 1).text == (
        "mpirun ended the ranks, with status 1"
    )


def test_exit_status() -> None:
    assert [exit_status(one) for one in (0, 5, -9)] == [0, 5, 137]
