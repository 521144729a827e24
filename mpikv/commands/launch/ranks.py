"""What the launcher knows of the ranks, and the verdict on the job that follows from it. Pure: no clock, no processes.

The verdict is never success where a rank failed, was killed, never started or never reported its end: `mpirun`'s own
status can be 0 after a host was lost.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpikv.commands.launch.placement import Block

FAILED = 1  # where nothing else says what status it is
LOST_PEER = 14  # MPI_ERR_UNKNOWN: with it Open MPI 5 ends a process whose connection to another one was closed
NEEDS_NO_SERVERS = "a program without a dist store needs -s 0"
IDLE_SERVERS = f"the workers ended and left servers that wait: {NEEDS_NO_SERVERS}"
STOPPED = 128 + signal.SIGTERM  # a program that saves its states and ends with 0 when it is told to has not failed


@dataclass
class Rank:
    """One rank. status: as subprocess has it, negative for a signal, None before its end."""

    role: str
    number: int
    rank: int
    host: str = ""  # "" before it has reported
    pid: int = 0
    status: int | None = None
    told: bool = False  # it ended after it had been told to
    error: str = ""  # why its command could not be started
    gone: bool = False  # and all that it left running
    aborted: int = 0  # as `order`: when it said that it calls MPI_Abort, for others may end before it does
    abort_status: int = 0
    lost: bool = False  # the connection ended before it reported its end
    order: int = 0  # of the reports of an end, from 1

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"

    @property
    def running(self) -> bool:
        """Whether it has started and may still run."""
        return bool(self.host) and self.status is None and not self.lost


class Verdict(NamedTuple):
    """How the job ended. text: "" where there is nothing to say."""

    status: int
    text: str


def expected(blocks: Sequence[Block]) -> dict[int, Rank]:
    """The ranks of a job that has not started. Key: the rank in COMM_WORLD."""
    found = {}
    for block in blocks:
        for i in range(block.ranks):
            rank = block.first_rank + i
            found[rank] = Rank(block.role, block.first_number + i, rank)
    return found


def exit_status(status: int) -> int:
    """A process's status as a shell has it."""
    return 128 - status if status < 0 else status


def how(rank: Rank) -> str:
    """How a rank ended, in words."""
    if rank.error:
        return f"did not start: {rank.error}"
    assert rank.status is not None
    if rank.status < 0:
        try:
            name = f" ({signal.Signals(-rank.status).name})"
        except ValueError:  # a real-time signal
            name = ""
        return f"was killed by signal {-rank.status}{name}"
    return f"ended with status {rank.status}"


def first_failure(ranks: Sequence[Rank]) -> Rank | None:
    """The first to end badly of its own accord, not because it was told to.

    With LOST_PEER only where nobody else has: who has lost its connection to another rank may be heard of sooner.
    """
    failed = [rank for rank in ranks if rank.status not in (None, 0) and not rank.told]
    return min(failed, key=lambda rank: (rank.status == LOST_PEER, rank.order), default=None)


def judge(ranks: Sequence[Rank], mpirun_status: int | None, *, asked: Verdict | None = None) -> Verdict:
    """The verdict on a job that has ended.

    mpirun_status: of the `mpirun` itself, None where it was killed by the launcher. asked: the verdict where the end
    was asked for (a signal, a time limit, servers that nobody used); its status 0 stands for that of the workers.
    """
    failed = first_failure(ranks)
    if asked is not None and asked.status:
        if asked.status == STOPPED and all(rank.status == 0 for rank in ranks):
            return Verdict(0, f"{asked.text}, and all ranks ended with status 0")
        return asked
    own = exit_status(mpirun_status) if mpirun_status else 0
    aborted = min((rank for rank in ranks if rank.aborted), key=lambda rank: rank.aborted, default=None)
    if aborted is not None and aborted is not failed and (own if failed is None else aborted.aborted < failed.order):
        status = aborted.abort_status & 0xFF
        return Verdict(
            status or own or FAILED, f"{aborted.name} on {aborted.host} called MPI_Abort with status {status}"
        )
    if failed is not None:
        return Verdict(exit_status(failed.status or 0) or FAILED, f"{failed.name} on {failed.host} {how(failed)}")
    missing = [rank for rank in ranks if not rank.host]
    lost = [rank for rank in ranks if rank.lost]
    bad = [rank for rank in ranks if rank.status not in (None, 0) and not (asked and rank.role == "server")]
    if missing:
        ended = f"mpirun ended with status {own}" if own else "mpirun ended"
        return Verdict(own or FAILED, f"{ended}, and {names(missing, len(ranks))} never started")
    if lost:
        hosts = sorted({rank.host for rank in lost})
        return Verdict(own or FAILED, f"{names(lost, len(ranks))} on {', '.join(hosts)} went away without a report")
    if bad and all(rank.role == "server" and rank.told for rank in bad):
        # Open MPI's mpirun may end them before the launcher does: a worker that ends without MPI_Init, as a shell does,
        # is an error for it once a server has been there.
        return Verdict(0, IDLE_SERVERS)
    if bad and own:
        text = f"mpirun ended the ranks, with status {own}"
        early = [rank for rank in ranks if rank.role == "worker" and rank.status == 0]
        if early and any(rank.role == "server" for rank in bad):
            text += f", when {early[0].name} had ended: {NEEDS_NO_SERVERS}"
        return Verdict(own, text)
    if bad:
        first = min(bad, key=lambda rank: rank.order)
        return Verdict(exit_status(first.status or 0) or FAILED, f"{first.name} on {first.host} {how(first)}")
    if own and asked is None:
        return Verdict(own, f"mpirun ended with status {own}, though every rank ended with 0")
    return Verdict(0, asked.text if asked is not None else "")


def names(ranks: Sequence[Rank], of: int) -> str:
    """`worker 0, worker 1 and 6 more (8 of 9 ranks)`."""
    shown = ", ".join(rank.name for rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"{shown}{more} ({len(ranks)} of {of} ranks)"
