"""Who takes the place of a worker that has died: what each rank of a job is. Pure.

A *spare* waits. When the number of a worker is free it gets that number, and begins its program; when it has come so
far that it needs the others' states it is *ready*, and when these have let it in, between two steps, it is a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mpikv.errors import ConfigError, MpikvError


class Seat(NamedTuple):
    """What a rank is, as it tells the others: a worker, unless it serves or is a spare.

    number: the worker's, counted at the start; of a spare the one that it is to have; -1: none. of: how many workers
    there were then; 0: as far as this rank knows they have not begun. ready: a spare can become a worker. admits: all
    workers have come to where they let spares in.
    """

    serves: bool = False
    spare: bool = False
    number: int = -1
    of: int = 0
    ready: bool = False
    admits: bool = False


def at_start(told: Mapping[int, Seat], num_servers: int, spares: int) -> dict[int, Seat]:
    """The seats before a store was made, by rank: the last of those that do not serve are spares.

    told: by rank. num_servers: how many more of them will serve. Raises ConfigError where no worker is left.
    """
    left = [rank for rank, seat in sorted(told.items()) if not seat.serves]
    if spares and spares >= len(left) - num_servers:
        raise ConfigError(
            f"{spares} spares among {len(left) - num_servers} ranks leave no worker: start more ranks, or ask for "
            "fewer spares (MPIKV_SPARES)"
        )
    return {rank: seat._replace(spare=rank in left[len(left) - spares :]) for rank, seat in told.items()}


def after(told: Mapping[int, Seat]) -> dict[int, Seat]:
    """The seats when ranks have died or come, by rank. told: what each was. Raises MpikvError where no worker is left.

    >>> after({0: Seat(number=0, of=2), 2: Seat(spare=True), 3: Seat(spare=True)})[2]
    Seat(serves=False, spare=True, number=1, of=2, ready=False, admits=False)
    """
    if all(seat.serves or seat.spare for seat in told.values()):
        raise MpikvError("no worker is left: the values that a spare would take over are lost")
    of, admits = max(seat.of for seat in told.values()), any(seat.admits for seat in told.values())
    taken = {seat.number for seat in told.values()}
    free = (number for number in range(of) if number not in taken)
    found = {}
    # Workers that have not learned before a death which number they have come before spares.
    for rank, seat in sorted(told.items(), key=lambda one: (one[1].spare, one[0])):
        comes_in = seat.spare and seat.ready and admits
        number = next(free, -1) if seat.number < 0 and not seat.serves else seat.number
        spare, ready = seat.spare and not comes_in, seat.ready and not comes_in
        found[rank] = Seat(seat.serves, spare, number, of, ready)
    return found
