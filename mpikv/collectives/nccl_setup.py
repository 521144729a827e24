"""Makes a communicator of NCCL for the workers of a store. A failure returns its reason and is no error.

Every worker sends all others the version of its NCCL, or why it has none, and the first one the unique id by which the
ranks find each other. If no worker has a problem, each makes its rank of the communicator. That call blocks in NCCL
until all ranks have made it, without a time limit, so it runs in a thread that the worker waits for. Then all send each
other whether it has succeeded. If one has failed, or was too slow, no worker uses a communicator; a thread that NCCL
never returns to stays behind and does no harm.

If every process still has a communicator of the same GPUs in the same order, that one is used again (the reason is in
nccl.py). So communicators are cached here for the whole process, as they are in NCCL itself.

Cost: two messages from all to all, and NCCL's: from a tenth of a second to some seconds.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpikv.collectives.nccl import Nccl, NcclComm

LONGEST_S = 60.0  # the limit for making a communicator; thousands of GPUs take tens of seconds

CommCache = dict[tuple[str, ...], NcclComm]
"""A process's communicators, by the GPUs of their ranks."""

COMMUNICATORS: CommCache = {}


class SetupResult(NamedTuple):
    """This worker's rank of the communicator, or the reason why there is none. A single worker has neither."""

    comm: NcclComm | None
    problem: str


class _CommMaker:
    """Makes this worker's rank of a communicator in a thread."""

    def __init__(self, make: Callable[[], NcclComm]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._given_up = False
        self.comm: NcclComm | None = None
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name="mpikv-nccl", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            comm = self._make()
        except Exception as error:  # noqa: BLE001 - it is sent to all workers
            self.problem = str(error)
            return
        with self._lock:
            self.comm = comm
            if self._given_up:
                comm.give_up()

    def wait(self, limit_s: float) -> str:
        self._thread.join(limit_s)
        if self.comm is None and not self.problem:
            return f"NCCL has made no communicator of the workers within {limit_s:g} s"
        return self.problem

    def give_up(self) -> None:
        """Abort the communicator, also where the thread makes it only later."""
        with self._lock:
            self._given_up = True
            if self.comm is not None:
                self.comm.give_up()


def make_communicator(
    open_nccl: Callable[[], Nccl],
    names: Sequence[str],
    rank: int,
    gather: Callable[[bytes], list[bytes]],
    timeout_s: float,
    *,
    gpus: Sequence[str] = (),
    take: Callable[[], None] = lambda: None,
    cache: CommCache | None = None,
) -> SetupResult:
    """Make a communicator of all workers. Collective; blocks, at most half of `timeout_s` in NCCL.

    names: of all workers, for the reasons. rank: this worker's. gather: returns all workers' bytes, in their order, on
    every worker. gpus: of all workers. take: makes this worker's GPU the current one of a new thread. cache: the
    communicators of this process; None: `COMMUNICATORS`.
    """
    cache, which = COMMUNICATORS if cache is None else cache, tuple(gpus)
    known = cache.get(which)
    if known is not None and known.failure is not None:
        known = None
    answers, problem = _asked(open_nccl, names, rank, gather, known)
    if problem or len(names) == 1:
        return SetupResult(None, problem)
    if known is None or not all(one["known"] for one in answers):
        unique_id = bytes.fromhex(answers[0]["id"])

        def make() -> NcclComm:
            take()
            return open_nccl().init(len(names), unique_id, rank)

        maker = _CommMaker(make)
        found = maker.wait(min(LONGEST_S, timeout_s / 2))
        problem = _first_problem(names, [text.decode() for text in gather(found.encode())])
        if problem:
            maker.give_up()
            return SetupResult(None, problem)
        assert maker.comm is not None
        known = cache[which] = maker.comm
    known.users += 1
    return SetupResult(known, "")


def why_not(
    open_nccl: Callable[[], Nccl], names: Sequence[str], rank: int, gather: Callable[[bytes], list[bytes]]
) -> str:
    """Return why the workers cannot use NCCL; "" where no worker has a problem. Makes no communicator. Collective.

    The arguments are those of `make_communicator`.
    """
    return _asked(open_nccl, names, rank, gather, None)[1]


def _asked(
    open_nccl: Callable[[], Nccl],
    names: Sequence[str],
    rank: int,
    gather: Callable[[bytes], list[bytes]],
    known: NcclComm | None,
) -> tuple[list[dict[str, Any]], str]:
    """Return what each worker says of its NCCL, and the first problem. known: the communicator that is cached here."""
    mine = {"problem": "", "version": "", "id": "", "known": known is not None}
    try:
        nccl = open_nccl()
        mine |= {"version": nccl.version(), "id": "" if rank else nccl.unique_id().hex()}
    except Exception as error:  # noqa: BLE001 - whatever it is, the others wait for this answer
        mine["problem"] = " ".join(str(error).split()) or type(error).__name__
    answers = [json.loads(text) for text in gather(json.dumps(mine).encode())]
    if problem := _first_problem(names, [one["problem"] for one in answers]):
        return answers, problem
    first = answers[0]["version"]
    for name, one in zip(names, answers, strict=True):
        if one["version"] != first:
            return (
                answers,
                f"{names[0]} has NCCL {first}, and {name} has NCCL {one['version']}: install the same on all",
            )
    return answers, ""


def _first_problem(names: Sequence[str], problems: Sequence[str]) -> str:
    return next((f"{name}: {text}" for name, text in zip(names, problems, strict=True) if text), "")
