"""Makes a communicator of NCCL for the workers of a store. A failure returns its reason and is no error.

Every worker sends all others the version of its NCCL, or why it has none, and the first one the unique id by which the
ranks find each other. If no worker has a problem, each makes its rank of the communicator, in a thread that the worker
waits for (why: docs/adr/0021). Then all send each other whether it has succeeded. If one has failed, or was too slow,
no worker uses a communicator.

If every process still has a communicator of the same GPUs in the same order, that one is used again (nccl.py). So
communicators are cached here for the whole process, as they are in NCCL itself.

Cost: two messages from all to all, and NCCL's: from a tenth of a second to some seconds.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
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


def _in_thread(make: Callable[[], NcclComm]) -> Future[NcclComm]:
    future: Future[NcclComm] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except Exception as error:  # noqa: BLE001 - it is sent to all workers
            future.set_exception(error)

    threading.Thread(target=run, name="mpikv-nccl", daemon=True).start()
    return future


def _waited_for(future: Future[NcclComm], limit_s: float) -> str:
    """Return what went wrong; "" where the communicator is made."""
    if not futures.wait([future], limit_s).done:
        return f"NCCL has made no communicator of the workers within {limit_s:g} s"
    return "" if (error := future.exception()) is None else str(error)


def _give_up(future: Future[NcclComm]) -> None:
    if future.exception() is None:
        future.result().give_up()


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

        future = _in_thread(make)
        found = _waited_for(future, min(LONGEST_S, timeout_s / 2))
        problem = _first_problem(names, [text.decode() for text in gather(found.encode())])
        if problem:
            future.add_done_callback(_give_up)  # now, or once it is made
            return SetupResult(None, problem)
        known = cache[which] = future.result()
    known.users += 1
    return SetupResult(known, "")


def why_not(
    open_nccl: Callable[[], Nccl], names: Sequence[str], rank: int, gather: Callable[[bytes], list[bytes]]
) -> str:
    """Return why the workers cannot use NCCL, "" where nothing is known to be wrong. Makes no communicator."""
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
