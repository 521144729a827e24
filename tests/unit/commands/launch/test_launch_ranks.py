"""How a job ended, from what its ranks and mpirun reported."""

from __future__ import annotations

from typing import Any

import pytest

from mpikv.commands.launch.ranks import (
    IDLE_SERVERS,
    NEEDS_NO_SERVERS,
    JobEnd,
    LaunchedRank,
    RankBlock,
    expected,
    judge,
    leaves_others,
)

ASKED = {"status": -15, "asked": True}
SERVER = {**ASKED, "role": "server"}
LOST = {"status": None, "lost": True}
MISSING = {"status": None, "host": ""}
GONE = {"status": -9, "gone": True}
ABORTED = {**ASKED, "aborted": 1, "abort_status": 6}
SIGKILLED = JobEnd(137, "worker 1 on h1 was killed by signal 9 (SIGKILL)")
WENT_AWAY = JobEnd(1, "worker 1 (1 of 2 ranks) on h1 went away without a report")
CALLED_ABORT = JobEnd(6, "worker 1 on h1 called MPI_Abort with status 6")
STOPPED, INTERRUPTED = JobEnd(143, "ended by SIGTERM"), JobEnd(130, "ended by SIGINT")
MPIRUN_KILLED = "mpirun was killed by signal 9 (SIGKILL)"
BY_MPIRUN = "mpirun ended the ranks, with status 1"


def ranks(*changes: dict[str, Any]) -> list[LaunchedRank]:
    """One for each: a worker that ended well, in their order, but for these changes."""
    usual = ({"role": "worker", "host": f"h{i}", "status": 0, "order": i + 1} for i in range(len(changes)))
    return [LaunchedRank(number=i, rank=i, **{**one, **changes[i]}) for i, one in enumerate(usual)]


@pytest.mark.parametrize(
    ("changes", "mpirun", "end"),
    [
        ([{}, {}], 0, JobEnd(0, "")),
        ([{}, {}], None, JobEnd(0, "")),
        # the first failure counts
        ([{"status": 3, "order": 2}, {"status": 4, "order": 1}], 1, JobEnd(4, "worker 1 on h1 ended with status 4")),
        ([{"status": 3}, {"status": -9, "asked": True}], 1, JobEnd(3, "worker 0 on h0 ended with status 3")),
        # but one that has lost its connection to another only where there is no other one
        ([{"status": 14}, {"status": 1}], 1, JobEnd(1, "worker 1 on h1 ended with status 1")),
        # and one that was killed before all: MPI's library may raise an error or break elsewhere because of it
        ([{"status": 14}, {"status": -9}, {"status": -11}], 1, SIGKILLED),
        ([{"status": 1, "aborted": 1, "abort_status": 1}, {"status": -9, "order": 3}], 1, SIGKILLED),
        ([{"status": 127, "error": "x: none"}], 127, JobEnd(127, "worker 0 on h0 did not start: x: none")),
        ([{"status": -40}], 1, JobEnd(168, "worker 0 on h0 was killed by signal 40")),
        # never 0 without every report
        ([{}, MISSING], 0, JobEnd(1, "mpirun ended, and worker 1 (1 of 2 ranks) never started")),
        ([{}, MISSING], 213, JobEnd(213, "mpirun ended with status 213, and worker 1 (1 of 2 ranks) never started")),
        ([{}, LOST], 0, WENT_AWAY),
        # what a loss brings about elsewhere may be reported after it
        ([{"status": -11, "order": 3}, LOST], 1, WENT_AWAY),
        ([{"status": 14, "order": 1}, LOST], 1, WENT_AWAY),
        ([{"status": 1, "aborted": 3, "order": 4}, LOST], 1, WENT_AWAY),
        ([{"status": 3, "order": 1}, LOST], 1, JobEnd(3, "worker 0 on h0 ended with status 3")),
        ([{"status": -9, "order": 3}, LOST], 1, JobEnd(137, "worker 0 on h0 was killed by signal 9 (SIGKILL)")),
        ([{}, {"status": 1, "asked": True}], 0, JobEnd(1, "worker 1 on h1 ended with status 1")),
        ([ASKED, ASKED], 7, JobEnd(7, "mpirun ended the ranks, with status 7")),
        ([ASKED, ASKED], -9, JobEnd(137, MPIRUN_KILLED)),
        ([{"status": 1, "aborted": 1}, ASKED], -9, JobEnd(137, MPIRUN_KILLED)),
        ([ASKED, {"status": 1, "aborted": 2, "order": 3}], 7, JobEnd(7, "mpirun ended the ranks, with status 7")),
        ([ASKED, MISSING], -9, JobEnd(137, f"{MPIRUN_KILLED}, and worker 1 (1 of 2 ranks) never started")),
        ([{}, {}], 9, JobEnd(9, "mpirun ended with status 9, though every rank ended with 0")),
        # MPICH kills the rank that calls MPI_Abort before it can end
        ([{"status": 15, "asked": True}, ABORTED], 6, CALLED_ABORT),
        ([{"status": 4, "order": 2}, ABORTED], 6, CALLED_ABORT),
        ([{"status": 4, "order": 2}, ABORTED], 4, CALLED_ABORT),  # mpirun's is another's
        ([{"status": 4, "order": 2}, ABORTED], None, CALLED_ABORT),
        ([{"status": 4, "order": 1}, {**ABORTED, "aborted": 2}], 6, JobEnd(4, "worker 0 on h0 ended with status 4")),
        # those that are gone count no more, whatever mpirun makes of them
        ([{}, GONE], 9, JobEnd(0, "")),
        ([GONE, {"status": 3}, ASKED], 3, JobEnd(3, "worker 1 on h1 ended with status 3")),
        ([GONE, LOST], 0, JobEnd(1, "worker 1 (1 of 2 ranks) on h1 went away without a report")),
        # Open MPI's mpirun ends the others with the first that has not been in MPI_Init, if a server has
        ([{}, SERVER], 1, JobEnd(0, IDLE_SERVERS)),
        ([ASKED, {}, SERVER], 1, JobEnd(1, f"{BY_MPIRUN}, when worker 1 had ended: {NEEDS_NO_SERVERS}")),
        ([ASKED, ASKED, SERVER], 1, JobEnd(1, BY_MPIRUN)),
        ([ASKED, {}, {**SERVER, "status": 0}], 1, JobEnd(1, BY_MPIRUN)),
    ],
)  # fmt: skip
def test_how_a_job_ended(changes: list[dict[str, Any]], mpirun: int | None, end: JobEnd) -> None:
    assert judge(ranks(*changes), mpirun) == end


@pytest.mark.parametrize(
    ("changes", "mpirun", "asked", "status"),
    [
        ([ASKED, {}], 1, STOPPED, 143),
        ([ASKED, {}], None, JobEnd(124, "timed out"), 124),
        ([{}, {}], 0, STOPPED, 0),  # they have saved
        ([{}, {}], 0, INTERRUPTED, 130),
        ([{}, SERVER], 1, JobEnd(0, "unused servers"), 0),
    ],
)
def test_an_end_that_was_asked_for(
    changes: list[dict[str, Any]], mpirun: int | None, asked: JobEnd, status: int
) -> None:
    end = judge(ranks(*changes), mpirun, asked=asked)
    assert (end.status, end.text.startswith(asked.text)) == (status, True)


@pytest.mark.parametrize(
    ("changes", "leaves"),
    [
        ([{"status": -9}, {"status": None}], True),
        ([{"status": 3}, {}], True),
        ([{"status": -9, "role": "server"}, {"status": None}], True),
        ([{}, {"status": None}], False),
        ([{"status": -9}, GONE], False),
        ([{"status": -9}, LOST], False),
        ([{"status": -9}, {"status": None, "role": "server"}], False),
        ([ASKED, {"status": None}], False),
        ([{"status": 3, "aborted": 1}, {"status": None}], False),
        ([{"status": 127, "error": "x: none"}, {"status": None}], False),
        ([{"status": 1, "raised": True}, {"status": None}], False),
        ([{"status": -9, "raised": True}, {"status": None}], True),  # it had caught that
    ],
)
def test_whether_others_can_go_on(changes: list[dict[str, Any]], leaves: bool) -> None:
    first, *others = ranks(*changes)
    assert leaves_others(first, [first, *others]) == leaves


def test_many_are_not_all_named() -> None:
    text = judge(ranks(*[LOST] * 7), 0).text
    assert text.startswith("worker 0, worker 1, worker 2, worker 3 and 3 more (7 of 7 ranks)")


def test_expected() -> None:
    blocks = [("worker", 2, 0, 0, "a"), ("server", 1, 0, 2, "a"), ("worker", 1, 2, 3, "b")]
    found = expected([RankBlock(*block) for block in blocks])
    assert [one.name for one in found.values()] == ["worker 0", "worker 1", "server 0", "worker 2"]
    assert list(found) == [0, 1, 2, 3]
