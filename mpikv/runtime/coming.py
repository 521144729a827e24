"""Who does not come to a call that all ranks make, before there is anything by which they could talk.

Ranks wait in MPI_Init, and then for the first call on a communicator of their own. What is known of each other until
then is what the operating system of their host knows: a rank that waits offers a socket (observe/endpoint.py), so who
has none has not come. After LATER times MPIKV_STALL_WARN_S the lowest rank that waits on a host prints a table.

Cost: a thread that sleeps while `kv.create` waits; nothing is looked at before a table is due.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpikv.common.clock import MACHINE_CLOCK
from mpikv.observe import endpoint, program
from mpikv.observe.stall import Row, say, several, table
from mpikv.runtime import job_processes, launcher

CREATE = "create"  # the kind of what a rank offers that waits
ANSWER_S = 1.0
LATER = 3  # times MPIKV_STALL_WARN_S: on a busy machine interpreters start, and import, at different times


class Coming:
    """A call that this thread waits in until all of `ranks` make it, by their numbers in COMM_WORLD."""

    def __init__(self, call: str, ranks: Sequence[int], say: Callable[[str], None] = say) -> None:
        self._call, self._ranks, self._say = call, ranks, say
        self._begun_s, self._thread = MACHINE_CLOCK.now_s(), threading.get_ident()
        self._printing = threading.Lock()
        self._printed = self._over = False

    def answer(self, *, whole: bool) -> dict[str, Any]:
        """What others of this host see of it."""
        waited_s, place = MACHINE_CLOCK.now_s() - self._begun_s, program.position(self._thread)
        doing = f"in {self._call} for {waited_s:.1f} s" + (f"; at {place}" if place else "")
        return {"kind": CREATE, "doing": doing}

    def tell(self) -> None:
        """Print the table, unless a lower rank of this host waits, which prints its own."""
        text = self._text()
        with self._printing:
            if text and not self._over:
                self._say(text)
                self._printed = True

    def end(self, *, well: bool) -> None:
        """The wait is over. well: all have come."""
        with self._printing:
            self._over = True
        if well and self._printed:
            self._say(f"mpikv: going on, after a stall of {MACHINE_CLOCK.now_s() - self._begun_s:.1f} s")

    def _text(self) -> str:
        me, askable, processes = os.getpid(), endpoint.endpoints(), job_processes.read()
        here = job_processes.ranks_beside(processes, me, askable)
        if not here and me in processes and processes[me].rank == 0:
            here = {0: me}  # under a launcher that nobody knows one rank speaks
        waiting: dict[int, Row] = {}
        missing: dict[int, Row] = {}
        for rank in self._ranks:
            pid = here.get(rank)
            if pid is None:
                continue
            waits, doing = (True, self.answer(whole=False)["doing"]) if pid == me else _seen(pid, askable, processes)
            if waits and pid != me and rank < launcher.said_rank(os.environ):
                return ""
            (waiting if waits else missing)[rank] = Row(rank, pid, doing)
        return self._table(waiting, missing)

    def _table(self, waiting: dict[int, Row], missing: dict[int, Row]) -> str:
        host = socket.gethostname()
        elsewhere = [rank for rank in self._ranks if rank not in waiting and rank not in missing]
        if not waiting or not (missing or elsewhere):
            return ""  # all have come meanwhile
        hosts = [host] * (max(self._ranks) + 1)
        for_whom = several([*missing], hosts, "rank") if missing else "the others"
        wait = "waits" if len(waiting) == 1 else "wait"
        waited_s = MACHINE_CLOCK.now_s() - self._begun_s
        title = f"{waited_s:.1f} s: {several([*waiting], hosts, 'rank')} {wait} in {self._call} for {for_whom}"
        more = [f"{len(elsewhere)} more ranks have no process on {host} that could be seen"] if elsewhere else []
        return table(title, [*waiting.values(), *missing.values()], hosts, more, what="rank")


def _seen(pid: int, askable: dict[int, int], processes: job_processes.Table) -> tuple[bool, str]:
    """Whether another process of this host waits, too, and what it does."""
    entry = processes[pid]
    if pid not in askable:
        return False, f"has not come to it; {program.UNASKED.get(entry.state, '')}".removesuffix("; ")
    try:
        offers = endpoint.ask(pid, askable[pid], endpoint.HERE, ANSWER_S)["offers"]
    except OSError:
        return False, f"no answer for {ANSWER_S} s; {program.STATES.get(entry.state, '')}".removesuffix("; ")
    waits = any(offer["kind"] == CREATE for offer in offers)
    return waits, "; ".join(offer["doing"] for offer in offers if (offer["kind"] == CREATE) == waits)


@contextlib.contextmanager
def awaited(call: str, warn_s: float, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """A block in which this rank waits for all others to make the same call. ranks: default all that were started."""
    coming = Coming(call, range(launcher.size(os.environ)) if ranks is None else ranks)
    timer = threading.Timer(LATER * warn_s, coming.tell)
    timer.daemon, timer.name = True, "mpikv-coming"
    well = False
    with endpoint.OWN.offered(coming):
        timer.start()
        try:
            yield
            well = True
        finally:
            timer.cancel()
            coming.end(well=well)
