"""How the workers of a store come to a communicator of NCCL: a trial, whose failure is a reason and no error.

Every worker says which NCCL it has, and why it has none; the first one brings what the ranks find each other by. Where
nothing speaks against it, all make their rank of the communicator, which blocks in NCCL until all have, and NCCL has no
limit for it: so that is done in a thread, which is waited for. All hear how it went for the others. Where one has
failed, or was too slow, nobody has a communicator; a thread that NCCL never lets go stays behind and does no harm.

A communicator of the same GPUs in the same order that this process has already is used again, if all others have theirs
(collectives/nccl.py says why). So what a process has is kept here, as NCCL itself keeps it: for the whole process.

Cost: two messages by all to all, and NCCL's: from a tenth of a second to some seconds.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpikv.collectives.nccl import Nccl, NcclComm

LONGEST_S = 60.0  # for the trial; thousands of GPUs take tens of seconds

Kept = dict[tuple[str, ...], NcclComm]
"""A process's communicators, by the GPUs of their ranks."""

COMMUNICATORS: Kept = {}


class Introduced(NamedTuple):
    """This worker's rank of the communicator, and why there is none. A worker alone has neither."""

    comm: NcclComm | None
    problem: str


class _Making:
    """This worker's rank of a communicator, made in a thread."""

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
        except Exception as error:  # noqa: BLE001 - told to all workers
            self.problem = str(error)
            return
        with self._lock:
            self.comm = comm
            if self._given_up:
                comm.give_up()

    def wait(self, limit_s: float) -> str:
        """Say what went wrong, "" where nothing did."""
        self._thread.join(limit_s)
        if self.comm is None and not self.problem:
            return f"NCCL has not brought the workers together within {limit_s:g} s"
        return self.problem

    def give_up(self) -> None:
        """Nobody uses the communicator, also where it comes only later."""
        with self._lock:
            self._given_up = True
            if self.comm is not None:
                self.comm.give_up()


def introduce(
    open_nccl: Callable[[], Nccl],
    names: Sequence[str],
    rank: int,
    gather: Callable[[bytes], list[bytes]],
    timeout_s: float,
    *,
    gpus: Sequence[str] = (),
    take: Callable[[], None] = lambda: None,
    kept: Kept | None = None,
) -> Introduced:
    """Make a communicator of all workers. Collective; blocks, at most half of `timeout_s` in NCCL.

    names: of all workers, for what is said of them. rank: this worker's among them. gather: gives all workers what each
    brings, in their order. gpus: of all workers. take: makes this worker's GPU that of a new thread. kept: the
    communicators of this process; None: `COMMUNICATORS`.
    """
    kept, which = COMMUNICATORS if kept is None else kept, tuple(gpus)
    known = kept.get(which)
    if known is not None and known.failure is not None:
        known = None
    told = [json.loads(text) for text in gather(json.dumps(_own(open_nccl, rank, known)).encode())]
    problem = _first(names, [one["problem"] for one in told]) or _different(names, [one["version"] for one in told])
    if problem or len(names) == 1:
        return Introduced(None, problem)
    if known is None or not all(one["known"] for one in told):
        unique_id = bytes.fromhex(told[0]["id"])

        def make() -> NcclComm:
            take()
            return open_nccl().init(len(names), unique_id, rank)

        making = _Making(make)
        found = making.wait(min(LONGEST_S, timeout_s / 2))
        problem = _first(names, [text.decode() for text in gather(found.encode())])
        if problem:
            making.give_up()
            return Introduced(None, problem)
        assert making.comm is not None
        known = kept[which] = making.comm
    known.users += 1
    return Introduced(known, "")


def why_not(
    open_nccl: Callable[[], Nccl], names: Sequence[str], rank: int, gather: Callable[[bytes], list[bytes]]
) -> str:
    """Why some workers cannot use NCCL together, "" where nothing speaks against it. Makes no communicator. Collective.

    The arguments are those of `introduce`.
    """
    told = [json.loads(text) for text in gather(json.dumps(_own(open_nccl, rank, None)).encode())]
    return _first(names, [one["problem"] for one in told]) or _different(names, [one["version"] for one in told])


def _own(open_nccl: Callable[[], Nccl], rank: int, known: NcclComm | None) -> dict[str, str | bool]:
    """What a worker tells the others, as JSON has it."""
    try:
        nccl = open_nccl()
        unique_id = "" if rank else nccl.unique_id().hex()
        return {"problem": "", "version": nccl.version(), "id": unique_id, "known": known is not None}
    except Exception as error:  # noqa: BLE001 - whatever it is, the others wait to hear of it
        text = " ".join(str(error).split()) or type(error).__name__
        return {"problem": text, "version": "", "id": "", "known": False}


def _first(names: Sequence[str], problems: Sequence[str]) -> str:
    return next((f"{name}: {text}" for name, text in zip(names, problems, strict=True) if text), "")


def _different(names: Sequence[str], versions: Sequence[str]) -> str:
    for name, version in zip(names, versions, strict=True):
        if version != versions[0]:
            return f"{names[0]} has NCCL {versions[0]}, and {name} has NCCL {version}: install the same on all"
    return ""
