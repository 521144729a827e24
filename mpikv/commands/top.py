"""`mpikv top`: what every worker of a job does, seen from outside of the job, again and again.

Each process with an open store answers on a socket of its own (observe/endpoint.py), and asks the other workers by MPI.
So one process of a job on this host is enough to tell of all, on whatever hosts they are.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mpikv.commands.numbers import seconds
from mpikv.commands.tables import Column, Table
from mpikv.observe import endpoint, program
from mpikv.runtime import job_processes

HERE_S, WORKERS_S = 1.0, 8.0  # within which a process answers by itself, and has asked all workers
NOT_FOUND = 1
CLEAR = "\x1b[H\x1b[J"
ELSEWHERE = "a job on another host is asked there: `ssh HOST mpikv top`, `srun --jobid={} --overlap -n 1 mpikv top`"
EXAMPLES = """examples:
  mpikv top                    the job of this user on this host, or a list of several
  mpikv top 4711               the job of this process: of a rank, mpirun or mpikv launch; or the job 4711 of Slurm
  mpikv top 4711 --once        once, as into a file
  srun --jobid=4711 --overlap -n 1 mpikv top    on a host of the job

exit status: 0, also once the job has ended; 1 where there is none; 2 for wrong options."""

Documents = Mapping[int, Mapping[str, Any] | None]  # by pid; None: no answer


class NotFoundError(Exception):
    """There is no such job here."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="what each worker of a running job does, and where its program is",
        description="Ask a running job from outside what each of its workers does: in which call it waits, for how "
        "long, and at which line its program is. Jobs of this user, of which a process runs on this host and has an "
        "open store.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "a process of the job, or its id in Slurm, Grid Engine or PBS"
    parser.add_argument("job", nargs="?", default="", metavar="PID|JOB", help=text)
    text = "ask again after so long (default %(default)s)"
    parser.add_argument("--every", type=seconds, default=1.0, metavar="SECONDS", help=text)
    parser.add_argument("--once", action="store_true", help="ask once; so it is where stdout is no terminal")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table until the job ends; returns the status."""
    try:
        if not os.path.exists("/proc/net/unix"):
            raise NotFoundError("needs Linux, whose Unix sockets need no files and which has /proc")
        pids = _chosen(options.job)
    except NotFoundError as error:
        print(f"mpikv top: {error}", file=sys.stderr)
        return NOT_FOUND
    once = options.once or not sys.stdout.isatty()
    while pids and (documents := asked(pids, endpoint.HERE, HERE_S)):
        text = shown(documents, of_stores(documents))
        print(text if once else CLEAR + text, flush=True)
        if once:
            return 0
        time.sleep(options.every)
    if pids:
        print("mpikv top: the job has ended, or has closed its stores")
    return 0


# ---- which processes


def _chosen(word: str) -> list[int]:
    """The processes to ask. [] where there are several jobs and none was named, which are listed then."""
    table = job_processes.read()
    if word:
        return sorted(find(table, endpoint.endpoints(), word))
    own = sorted(pid for pid, uid in endpoint.endpoints().items() if endpoint.allowed(os.geteuid(), uid))
    jobs: dict[int, list[int]] = {}  # those of one job have the same mpirun, or are alone
    for pid in own:
        jobs.setdefault(job_processes.launcher_of(table, pid) or pid, []).append(pid)
    if not jobs:
        raise NotFoundError("no job of this user has an open store on this host; " + ELSEWHERE.format("JOB"))
    if len(jobs) > 1:
        for pids in jobs.values():
            print(listed(asked(pids, endpoint.HERE, HERE_S), pids[0]))
        print("mpikv top PID shows one of them")
        return []
    return next(iter(jobs.values()))


def find(table: job_processes.Table, askable: Mapping[int, int], word: str, uid: int | None = None) -> set[int]:
    """Return the processes that can be asked of the job that `word` names. Raises NotFoundError that says why none.

    askable: who can be asked, with its user. uid: of who asks, default this process's.
    """
    uid = os.geteuid() if uid is None else uid
    pid = int(word) if word.isdecimal() else 0
    own = {one for one, owner in askable.items() if endpoint.allowed(uid, owner)}
    in_job = job_processes.of_batch_job(table, word)
    found = job_processes.below(table, pid) & own if pid in table else set()
    if found or in_job & own:
        return found or in_job & own
    if in_job:
        raise NotFoundError(f"job {word} runs here, and no process of it has an open store on this host")
    if pid not in table:
        raise NotFoundError(f"there is no process and no job {word} on this host; {ELSEWHERE.format(word)}")
    if not endpoint.allowed(uid, table[pid].uid):
        raise NotFoundError(f"process {word} belongs to another user, whom alone its stores answer, and root")
    raise NotFoundError(
        f"neither process {word} ({table[pid].name}) nor one that it has started has an open store over several "
        "processes: name a rank, or its mpirun or mpikv launch; `mpikv top` finds what there is on this host"
    )


# ---- what they answer


def asked(pids: Sequence[int], question: str, limit_s: float) -> dict[int, dict[str, Any] | None]:
    """The answers of those that are still there."""
    documents: dict[int, dict[str, Any] | None] = {}
    askable = endpoint.endpoints()
    for pid in pids:
        try:
            documents[pid] = endpoint.ask(pid, askable[pid], question, limit_s)
        except KeyError:
            continue
        except OSError:
            documents[pid] = None
    return {pid: found for pid, found in documents.items() if found is not None or pid in endpoint.endpoints()}


def of_stores(documents: Documents) -> dict[str, list[dict[str, Any]]]:
    """All workers of each store, by its id: of the first process that can ask them."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for pid, document in documents.items():
        new = [one["store"] for one in offers(document, "store") if one["asks"] and one["store"] not in rows]
        if new:
            for one in offers(asked([pid], endpoint.WORKERS, WORKERS_S).get(pid), "store"):
                if one["rows"]:
                    rows[one["store"]] = one["rows"]
    return rows


def offers(document: Mapping[str, Any] | None, *kinds: str) -> list[dict[str, Any]]:
    return [] if document is None else [one for one in document["offers"] if one["kind"] in kinds]


def listed(documents: Documents, pid: int) -> str:
    for one, document in documents.items():
        if document is not None:
            offer = next(iter(offers(document, "store", "server")), None)
            what = "at its start" if offer is None else _sizes(offer)
            return f"pid {one} on {document['host']}: {document['program']}, {what}"
    return f"pid {pid}: no answer"


def shown(documents: Documents, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The table of each store, and what else the processes tell. rows: of the stores whose workers could be asked."""
    answered = next((one for one in documents.values() if one is not None), None)
    lines = [] if answered is None else [f"{answered['program']} on {answered['host']}, {time.strftime('%H:%M:%S')}"]
    stores: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for pid, document in documents.items():
        for offer in offers(document, "store"):
            stores.setdefault(offer["store"], []).append((pid, offer))
    for number, told in stores.items():
        lines += _store(told, rows.get(number))
    known = {row["pid"] for some in rows.values() for row in some}
    silent = {pid for pid, document in documents.items() if document is None} - known
    table = job_processes.read() if silent else {}
    for pid in silent:
        state = program.STATES.get(table[pid].state, "") if pid in table else program.GONE
        lines.append(f"pid {pid}: no answer for {HERE_S} s; {state}".removesuffix("; "))
    for pid, document in documents.items():
        lines += [f"pid {pid}: {offer['doing']}" for offer in offers(document, "server", "create", "error")]
    return "\n".join(lines)


def _sizes(offer: Mapping[str, Any]) -> str:
    return ", ".join(f"{offer[what]} {what[: len(what) - (offer[what] == 1)]}" for what in ("workers", "servers"))


def _store(told: Sequence[tuple[int, Mapping[str, Any]]], rows: Sequence[Mapping[str, Any]] | None) -> list[str]:
    """The lines of a store. told: by each process that has answered. rows: of all workers, where these were asked."""
    first = told[0][1]
    lines = [f"{first['type']}: {_sizes(first)}"]
    if rows is None:
        mine = sorted(((offer["worker"], pid, offer) for pid, offer in told), key=lambda one: one[:2])
        rows = [
            {"rank": worker, "host": offer["host"], "pid": pid, "seen_s": 0.0, "doing": offer["doing"]}
            for worker, pid, offer in mine
        ]
        lines[0] += f"; of {len(rows)} of them, on this host, what each knows by itself"
    columns = Table(
        Column("worker", 6),
        Column("host", max(4, *(len(row["host"]) for row in rows)), left=True),
        Column("pid", 8),
        Column("seen s", 6),
        Column("doing", 5, left=True),
    )
    lines.append(columns.head())
    for row in rows:
        seen = "never" if row["seen_s"] is None else f"{row['seen_s']:.1f}"
        lines.append(columns.line(row["rank"], row["host"], row["pid"], seen, row["doing"]))
    return lines
