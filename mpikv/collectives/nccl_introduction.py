"""How the workers of a store come to a communicator of NCCL: a trial, whose failure is a reason and no error.

Every worker says which NCCL it has, and why it has none; the first one brings what the ranks find each other by. Where
nothing speaks against it, all make their rank of the communicator, which blocks in NCCL until all have, and NCCL has no
limit for it: so that is done in a thread, which is waited for. All hear how it went for the others. Where one has
failed, or was too slow, nobody has a communicator; a thread that NCCL never lets go stays behind and does no harm.

Cost: two messages by all to all, and NCCL's: from a tenth of a second to some seconds.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpikv.collectives.nccl import Nccl, NcclComm
from mpikv.errors import MpikvError

LONGEST_S = 60.0  # for the trial; thousands of GPUs take tens of seconds


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
                comm.abort()

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
                self.comm.abort()


def introduce(
    open_nccl: Callable[[], Nccl],
    names: Sequence[str],
    rank: int,
    gather: Callable[[bytes], list[bytes]],
    timeout_s: float,
) -> Introduced:
    """Make a communicator of all workers. Collective; blocks, at most half of `timeout_s` in NCCL.

    names: of all workers, for what is said of them. rank: this worker's among them. gather: gives all workers what each
    brings, in their order.
    """
    problem, unique_id = compare(open_nccl, names, rank, gather)
    if problem or len(names) == 1:
        return Introduced(None, problem)
    making = _Making(lambda: open_nccl().init(len(names), unique_id, rank))
    found = making.wait(min(LONGEST_S, timeout_s / 2))
    problem = _first(names, [text.decode() for text in gather(found.encode())])
    if problem:
        making.give_up()
        return Introduced(None, problem)
    return Introduced(making.comm, "")


def compare(
    open_nccl: Callable[[], Nccl], names: Sequence[str], rank: int, gather: Callable[[bytes], list[bytes]]
) -> tuple[str, bytes]:
    """Why some workers cannot use NCCL together, "" where nothing speaks against it; what they find each other by.

    Collective. The arguments are those of `introduce`.
    """
    told = [json.loads(text) for text in gather(json.dumps(_own(open_nccl, rank)).encode())]
    problem = _first(names, [one["problem"] for one in told]) or _different(names, [one["version"] for one in told])
    return problem, bytes.fromhex(told[0]["id"])


def _own(open_nccl: Callable[[], Nccl], rank: int) -> dict[str, str]:
    """What a worker tells the others, as JSON has it."""
    try:
        nccl = open_nccl()
        return {"problem": "", "version": nccl.version(), "id": "" if rank else nccl.unique_id().hex()}
    except MpikvError as error:
        return {"problem": str(error), "version": "", "id": ""}


def _first(names: Sequence[str], problems: Sequence[str]) -> str:
    return next((f"{name}: {text}" for name, text in zip(names, problems, strict=True) if text), "")


def _different(names: Sequence[str], versions: Sequence[str]) -> str:
    for name, version in zip(names, versions, strict=True):
        if version != versions[0]:
            return f"{names[0]} has NCCL {versions[0]}, and {name} has NCCL {version}: install the same on all"
    return ""
