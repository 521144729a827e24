"""What the launcher knows of the ranks, and how the job has ended by that. Pure: no clock, no processes.

The end is never success where a rank failed, was killed, never started or never reported its end, unless others went
on without it: `mpirun`'s own status can be 0 after a host was lost.

Which host gets how many is MXNet's rule (dmlc_tracker/ssh.py), made to respect slots: servers first, then workers,
process i of both to host i mod H. A host whose slots are full is passed over; when all are full, the counting begins
anew, which is only allowed where some host has no slots of its own or where it was asked for. Ranks are then numbered
host by host, the workers of a host before its servers, and rank 0 is a worker: neighbours in rank sit on one host,
which is what a ring wants, and any `mpirun` does it when it fills hosts in turn.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpikv.commands.launch.hosts import Host
from mpikv.errors import ConfigError

FAILED = 1  # where nothing else gives a status
PYTHON_FAILED = 1  # after an exception that nobody caught
LOST_PEER = 14  # MPI_ERR_UNKNOWN: with it Open MPI 5 ends a process whose connection to another one was closed
NEEDS_NO_SERVERS = "a program without a dist store needs -s 0"
IDLE_SERVERS = f"the workers ended and left servers that wait: {NEEDS_NO_SERVERS}"
STOPPED = 128 + signal.SIGTERM  # a program that saves its states and ends with 0 at this signal has not failed


@dataclass
class LaunchedRank:
    """One rank. status: as subprocess has it, negative for a signal, None before its end."""

    role: str
    number: int
    rank: int
    host: str = ""  # "" before it has reported
    status: int | None = None
    asked: bool = False  # it ended after it had been asked to
    raised: bool = False  # it printed a traceback as Python does where it has no store, which would end the job
    early: bool = False  # it died where the others would go on, but before they had a store
    gone: bool = False  # it died, and the others go on without it
    error: str = ""  # why its command could not be started
    aborted: int = 0  # as `order`: when it printed that it calls MPI_Abort, for others may end before it does
    abort_status: int = 0
    lost: bool = False  # the connection ended before it reported its end
    order: int = 0  # of the reports of an end, or of the losses, from 1
    said: str = ""  # the last line that it printed, of its error where it ended the job by one
    step: int | None = None  # after which it ended the job, as far as it knew
    snapshots: Sequence[str] = ()  # names of those files on its host

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"

    @property
    def running(self) -> bool:
        return bool(self.host) and self.status is None and not self.lost


class RankBlock(NamedTuple):
    """Ranks of one role that follow each other on one host: one program of the `mpirun` line. host: "" for any."""

    role: str
    ranks: int
    first_number: int
    first_rank: int
    host: str


def place(hosts: Sequence[Host], workers: int, servers: int, *, oversubscribe: bool = False) -> list[RankBlock]:
    """The blocks, in the order of their ranks. No hosts: all where `mpirun` puts them.

    Raises ConfigError where slots do not suffice.
    """
    if not hosts:
        blocks = [RankBlock("worker", workers, 0, 0, "")]
        return blocks + ([RankBlock("server", servers, 0, workers, "")] if servers else [])
    slots = sum(host.slots or 0 for host in hosts)
    if not oversubscribe and all(host.slots is not None for host in hosts) and workers + servers > slots:
        raise ConfigError(
            f"{workers + servers} processes (workers and servers), but {len(hosts)} hosts with {slots} slots in all: "
            "give more hosts or slots, fewer processes (-s 0 starts no servers), or --oversubscribe"
        )
    on = [{"server": 0, "worker": 0} for _ in hosts]
    free = [host.slots or 1 for host in hosts]
    at = 0
    for role in ["server"] * servers + ["worker"] * workers:
        if not any(free):
            free = [host.slots or 1 for host in hosts]
        while not free[at % len(hosts)]:
            at += 1
        on[at % len(hosts)][role] += 1
        free[at % len(hosts)] -= 1
        at += 1
    first = next(i for i, counts in enumerate(on) if counts["worker"])
    blocks, next_number, rank = [], {"worker": 0, "server": 0}, 0
    for i in [first, *(i for i in range(len(hosts)) if i != first)]:
        for role in ("worker", "server"):
            if on[i][role]:
                blocks.append(RankBlock(role, on[i][role], next_number[role], rank, hosts[i].name))
                next_number[role] += on[i][role]
                rank += on[i][role]
    return blocks


def workers_that_fit(hosts: Sequence[Host], workers: int, servers: int, least: int) -> int:
    """How many workers, at most `workers`, have a slot on these hosts beside the servers. ConfigError under `least`."""
    slots = sum(host.slots or 0 for host in hosts)
    fit = workers if any(host.slots is None for host in hosts) else min(workers, slots - servers)
    if fit < least:
        raise ConfigError(f"{slots} slots are left: too few for {least} workers and {servers} servers (--min-workers)")
    return fit


def per_host(blocks: Sequence[RankBlock]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for block in blocks:
        if block.host:
            counts[block.host] = counts.get(block.host, 0) + block.ranks
    return list(counts.items())


class JobEnd(NamedTuple):
    """How the job ended. text: "" where there is nothing to say."""

    status: int
    text: str


def expected(blocks: Sequence[RankBlock]) -> dict[int, LaunchedRank]:
    """The ranks of a job that has not started. Key: the rank in COMM_WORLD."""
    return {
        block.first_rank + i: LaunchedRank(block.role, block.first_number + i, block.first_rank + i)
        for block in blocks
        for i in range(block.ranks)
    }


def exit_status(status: int) -> int:
    return 128 - status if status < 0 else status


def is_signal(status: int) -> bool:
    """Whether a status is one that shells and containers give where what they have started has died of a signal."""
    return status - 128 in signal.valid_signals()


def first_failure(ranks: Sequence[LaunchedRank]) -> LaunchedRank | None:
    """The first to end badly of its own accord, not because it was asked to.

    Who was killed by SIGKILL comes before all others, since nothing in a job does that, and who has lost its connection
    to another rank after them: each of the others may report its end sooner.
    """
    failed = [rank for rank in ranks if rank.status not in (None, 0) and not rank.asked and not rank.gone]
    return min(failed, key=lambda rank: (not _was_killed(rank), rank.status == LOST_PEER, rank.order), default=None)


def _was_killed(rank: LaunchedRank) -> bool:
    return rank.status is not None and exit_status(rank.status) == 128 + signal.SIGKILL


def culprit(ranks: Sequence[LaunchedRank], *, mpirun_failed: bool) -> LaunchedRank | None:
    """Whose end was the job's; None where it was no rank's that reported it.

    Nor is it that of a rank which has failed after another one was lost, or has raised an error after another one was
    told to end: MPI then has errors of its own. mpirun_failed: whether `mpirun` itself says so; without it a rank that
    called MPI_Abort and ended with 0 is none.
    """
    failed = first_failure(ranks)
    if failed is not None and _was_killed(failed):
        return failed
    aborted = min((rank for rank in ranks if rank.aborted), key=lambda rank: rank.aborted, default=None)
    lost = [rank.order for rank in ranks if rank.lost]
    if aborted is not None and (mpirun_failed if failed is None else aborted.aborted < failed.order):
        told = [rank.order for rank in ranks if rank.asked and rank.status]
        return aborted if aborted.aborted <= min(lost + told, default=aborted.aborted) else None
    if failed is not None and lost and (failed.status == LOST_PEER or min(lost) < failed.order):
        return None
    return failed


def leaves_others(rank: LaunchedRank, ranks: Sequence[LaunchedRank]) -> bool:
    """Whether the others can go on without a rank that has ended: it has died, and did not end the job by an error of
    its own, or because it was asked to; and there is another worker.
    """
    own_error = rank.aborted or rank.error or (rank.raised and rank.status == PYTHON_FAILED)
    return (
        rank.status not in (None, 0)
        and not (rank.asked or own_error)
        and any(one.role == "worker" and one is not rank and one.status in (None, 0) and not one.lost for one in ranks)
    )


def judge(ranks: Sequence[LaunchedRank], mpirun_status: int | None, *, asked: JobEnd | None = None) -> JobEnd:
    """The end of a job.

    mpirun_status: of the `mpirun` itself, None where it was killed by the launcher. asked: the end that was asked for
    (by a signal, a time limit, servers that nobody used); its status 0 stands for that of the workers.
    """
    if asked is not None and asked.status:
        if asked.status == STOPPED and all(rank.status == 0 for rank in ranks):
            return JobEnd(0, f"{asked.text}, and all ranks ended with status 0")
        return asked
    own = exit_status(mpirun_status) if mpirun_status else 0
    killed = _by_signal(-mpirun_status) if mpirun_status is not None and mpirun_status < 0 else ""
    failed, first = first_failure(ranks), None
    if mpirun_status != -signal.SIGKILL:  # which brings about all that ranks report
        first = culprit(ranks, mpirun_failed=bool(own))
    if first is not None and first is not failed:
        status = first.abort_status & 0xFF
        return JobEnd(status or own or FAILED, f"{first.name} on {first.host} called MPI_Abort with status {status}")
    if first is not None:
        return ended_badly(first)
    missing = [rank for rank in ranks if not rank.host]
    lost = [rank for rank in ranks if rank.lost]
    unwell = [rank for rank in ranks if rank.status not in (None, 0) and not rank.gone]
    bad = [rank for rank in unwell if not (asked and rank.role == "server")]
    if missing:
        ended = killed or (f"ended with status {own}" if own else "ended")
        return JobEnd(own or FAILED, f"mpirun {ended}, and {names(missing, len(ranks))} never started")
    if lost:
        hosts = sorted({rank.host for rank in lost})
        return JobEnd(own or FAILED, f"{names(lost, len(ranks))} on {', '.join(hosts)} went away without a report")
    if bad and all(rank.role == "server" and rank.asked for rank in bad):
        # Open MPI's mpirun may end them before the launcher does: a worker that ends without MPI_Init, as a shell does,
        # is an error for it once a server has been there.
        return JobEnd(0, IDLE_SERVERS)
    if bad and own:
        text = f"mpirun {killed}" if killed else f"mpirun ended the ranks, with status {own}"
        early = [rank for rank in ranks if rank.role == "worker" and rank.status == 0]
        if early and any(rank.role == "server" for rank in bad):
            text += f", when {early[0].name} had ended: {NEEDS_NO_SERVERS}"
        return JobEnd(own, text)
    if bad:
        return ended_badly(min(bad, key=lambda rank: rank.order))
    if own and asked is None and not any(rank.gone for rank in ranks):
        return JobEnd(own, f"mpirun ended with status {own}, though every rank ended with 0")
    return JobEnd(0, asked.text if asked is not None else "")


def ended_badly(rank: LaunchedRank) -> JobEnd:
    status = rank.status or 0
    how = f"ended with status {status}"
    if rank.error:
        how = f"did not start: {rank.error}"
    elif status < 0:
        how = _by_signal(-status)
    if rank.early:
        how += " before the ranks had a store: the others cannot go on"
    return JobEnd(exit_status(status) or FAILED, f"{rank.name} on {rank.host} {how}")


def _by_signal(signum: int) -> str:
    named = f" ({signal.Signals(signum).name})" if signum in list(signal.Signals) else ""  # no real-time signal
    return f"was killed by signal {signum}{named}"


def names(ranks: Sequence[LaunchedRank], of: int) -> str:
    """`worker 0, worker 1 and 6 more (8 of 9 ranks)`."""
    shown = ", ".join(rank.name for rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"{shown}{more} ({len(ranks)} of {of} ranks)"
