"""Ranks that are threads: runs a function once per rank, in one process and in milliseconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mpikv.engine.operation import Steps
from mpikv.engine.running import run
from mpikv.errors import StallError
from mpikv.hostmemory.segment import HostMemory, private_memory
from mpikv.transports.base import Group, Transport
from mpikv.transports.threads import Fabric

T = TypeVar("T")

GRACE_S = 5.0  # how long the other ranks have after one failed
GATHER_S = 30.0  # for the others to come


class RankError(AssertionError):
    """Some ranks failed; `errors` maps each of them to its exception.

    >>> from mpikv.testing.ranks import RankError, spawn
    >>> try:
    ...     spawn(2, lambda transport: 1 // transport.rank)
    ... except RankError as error:
    ...     print(error)
    rank 0: ZeroDivisionError: integer division or modulo by zero
    """

    def __init__(self, errors: dict[int, BaseException]) -> None:
        super().__init__("; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, e in sorted(errors.items())))
        self.errors = errors


def spawn(
    size: int,
    body: Callable[[Transport], T],
    *,
    hosts: Sequence[str] | None = None,
    timeout_s: float = 30.0,
    fabric: Fabric | None = None,
) -> list[T]:
    """Run `body(transport)` on `size` thread ranks and return their results in rank order. Blocks.

    hosts: of each rank, by default all on one. fabric: what they talk over, in place of a new one.

    Raises RankError with every rank's exception, the first failed rank's as the cause; where none failed, a rank that
    has not ended after `timeout_s` counts as failed with StallError.

    >>> from mpikv.testing.ranks import spawn
    >>> spawn(3, lambda transport: transport.rank ** 2)
    [0, 1, 4]
    """
    fabric = Fabric(size, hosts) if fabric is None else fabric
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    ended = threading.Semaphore(0)

    def rank_body(rank: int) -> None:
        try:
            results[rank] = body(fabric.rank(rank))
        except BaseException as error:  # noqa: BLE001 - SystemExit of a server rank included
            errors[rank] = error
        ended.release()

    threads = [
        threading.Thread(target=rank_body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    failed = False
    for _ in threads:  # as many ends, in any order
        if not ended.acquire(timeout=max(0.0, deadline - time.monotonic())):
            break
        if errors and not failed:
            # The others may be about to fail too, or wait for this one until their own limit.
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
    else:
        for thread in threads:
            thread.join()
    if not failed:
        for rank, thread in enumerate(threads):
            if thread.is_alive():
                errors.setdefault(rank, StallError(f"rank {rank} has not ended within {timeout_s:g} s"))
    if errors:
        raise RankError(errors) from errors[min(errors)]
    return results


class Gathering:
    """Lets thread ranks give each other bytes, as `Processes.gather` does for processes.

    >>> from mpikv.testing.ranks import Gathering
    >>> Gathering(1).of(0)(b'a')
    [b'a']
    """

    def __init__(self, size: int) -> None:
        self._brought = [b""] * size
        self._all_here = threading.Barrier(size)

    def of(self, rank: int) -> Callable[[bytes], list[bytes]]:
        """Return the call of one rank: it returns what every rank brings. Collective, blocks."""

        def gather(data: bytes) -> list[bytes]:
            self._brought[rank] = data
            self._all_here.wait(GATHER_S)
            everybodys = list(self._brought)
            self._all_here.wait(GATHER_S)  # the next call may write only now
            return everybodys

        return gather


def run_collective(
    size: int,
    steps: Callable[[Group], Steps[T]],
    *,
    hosts: Sequence[str] | None = None,
    timeout_s: float = 30.0,
    fabric: Fabric | None = None,
) -> list[T]:
    """Run one generator of a collective on each of `size` thread ranks, and return their results in rank order. Blocks.

    hosts: of each rank, by default all on one. fabric: to look at its counts afterwards, by default a new one.

    >>> from mpikv.collectives import ring
    >>> from mpikv.testing.ranks import run_collective
    >>> arrays = [np.full(2, rank) for rank in range(2)]
    >>> results = run_collective(2, lambda group: ring.allgather(group, arrays[group.rank], [0, 1, 2], tag=1))
    >>> arrays[0].tolist()  # each rank had one element of its own
    [0, 1]
    """

    def body(transport: Transport) -> T:
        group = Group(transport, range(size))
        stalled = StallError(f"rank {transport.rank} of {size}: the collective has not ended within {timeout_s:g} s")
        return run(steps(group), timeout_s, lambda: stalled)

    return spawn(size, body, hosts=hosts, timeout_s=timeout_s + 5, fabric=fabric)


def memories_of(hosts: Sequence[str]) -> list[HostMemory | None]:
    """Make for each thread rank the memory that it shares with the others of its host. hosts: of each rank.

    >>> from mpikv.testing.ranks import memories_of
    >>> len(memories_of(['a', 'a', 'b']))
    3
    """
    of_host = {host: iter(private_memory(list(hosts).count(host))) for host in dict.fromkeys(hosts)}
    return [next(of_host[host]) for host in hosts]
